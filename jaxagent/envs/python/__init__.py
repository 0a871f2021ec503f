"""Agents that write and run Python programs."""
