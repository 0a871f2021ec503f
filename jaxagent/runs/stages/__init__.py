"""The stages a config can chain, each a function (parts, workdir, driver, params) -> params; `rl` stands in loop.py."""
