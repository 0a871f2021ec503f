"""Software tasks: an agent changes a repository, and the repository's tests judge the change in a fresh sandbox."""
