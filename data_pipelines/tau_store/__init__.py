"""A generated retail store for tau-bench's environment, its tasks, and demonstrations of an agent in it: `__main__`."""
