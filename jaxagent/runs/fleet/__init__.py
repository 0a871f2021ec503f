"""A run of many processes: what its trainer and its engines do with the parts of a run."""
