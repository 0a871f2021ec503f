"""Agents that make a function faster: what they write is checked against a reference and measured beside it."""
