"""Rollout as a service: a server that keeps what was asked and answered, and nodes that play the episodes."""
