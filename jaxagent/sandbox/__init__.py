"""Sandboxes for terminal agents: isolated and limited, behind one small asynchronous interface. Imports no JAX.

`choose.choose_backend()` finds the best back end that works here; `backend.start(spec)` gives a `base.Sandbox`.
What each back end protects, and what it does not, is in docs/sandboxes.md.
"""
