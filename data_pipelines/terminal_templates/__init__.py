"""Templates of generated terminal tasks: `table` lists them, `draft` is what one makes, `checks` what tests look at."""
