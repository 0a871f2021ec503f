"""Software tasks out of real repositories: a bug is put in, or a fix taken back, and the repository's tests judge."""
