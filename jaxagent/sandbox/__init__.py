"""Sandboxes for terminal agents: isolated and limited, behind one small asynchronous interface. Imports no JAX.

It could be a package of its own: of jaxagent it uses `config` (errors, command lines) and `io`. What it exports:

    `base`           the interface: `Spec`, `Limits`, `Sandbox`, `Backend`, `CommandResult`, and its errors
    `choose`         `choose_backend()` finds the best back end that works here; `backend.start(spec)` gives a `Sandbox`
    `owner.Owner`    a run's place on this host, and the sweep of what dead runs left
    `pool.Pool`      sandboxes that are started before they are wanted
    `remote.Remote`  sandboxes on other hosts, where `python -m jaxagent.sandbox.worker` runs
    `images.many.Images`, `images.bases`, `images.store.Store`    roots and layers of tasks, each built once

What each back end protects, and what it does not, is in docs/sandboxes.md.
"""
