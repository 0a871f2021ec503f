"""What rooms share on the way out of the process: files and HTTP. No JAX."""
