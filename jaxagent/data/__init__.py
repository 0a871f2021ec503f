"""Task sources and the tokenizer. Imports no JAX."""
