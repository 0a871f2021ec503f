"""Environments: what a policy acts on. They import no JAX and never the engine."""
