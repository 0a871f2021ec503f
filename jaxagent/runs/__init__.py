"""One run: its workdir, its living parts, its stages, its evaluation, and what it refuses."""
