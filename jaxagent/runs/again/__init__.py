"""Replay: steps of a finished run made again from its bundles and its record, and compared number by number."""
