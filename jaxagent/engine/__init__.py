"""Generation: slots, prefill / insert / generate, sampling, the stop automaton, and the driver thread."""
