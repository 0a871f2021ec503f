"""The stages a config can chain, each a function (parts, saved, driver, params) -> params; `rl` stands in loop.py."""
