"""Environments of the Gymnasium interface, acted on in text."""
