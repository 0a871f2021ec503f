"""The engine's functions as programs: what is static, and which state a call overwrites in place.

Nothing compiles here. `Executor` runs them, and a dry run lowers them from abstract arrays.
"""

from __future__ import annotations

import jax

from jaxagent.engine import functions

init_state = jax.jit(functions.init_state, static_argnames=("model", "slots", "pages", "page_tokens", "memories"))
prefill = jax.jit(functions.prefill, static_argnames="model", donate_argnames="state")
copy_pages = jax.jit(functions.copy_pages, static_argnames=("model", "memories"), donate_argnames="state")
read_choices = jax.jit(functions.read_choices, static_argnames="model")
begin = jax.jit(functions.begin, donate_argnames="state")
free = jax.jit(functions.free, donate_argnames="state")
generate = jax.jit(functions.generate, static_argnames=("model", "steps", "truncated"), donate_argnames="state")
