"""Environments behind OpenEnv's servers."""
