"""Environments of the verifiers interface."""
