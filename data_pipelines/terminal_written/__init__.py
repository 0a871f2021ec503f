"""Terminal tasks written by a language model, as Endless Terminals made its own: see `__main__`."""
