"""The compile counter sees a new shape, and nothing when a program runs again."""

import threading

import jax
import jax.numpy as jnp

from jaxagent.observe.compiles import CompileCounter


def test_counts_new_programs_only():
    @jax.jit
    def triple(x):
        return x * 3

    small, large = jnp.ones(3), jnp.ones(4)
    with CompileCounter() as counter:
        with counter.warm_up():
            triple(small)
        assert (counter.total, counter.after_warm_up) == (1, 0)
        triple(small)
        assert counter.after_warm_up == 0
        # The engine compiles in a thread of its own: it is counted as well.
        thread = threading.Thread(target=triple, args=(large,))
        thread.start()
        thread.join(timeout=60)
        assert counter.after_warm_up == 1
        assert "triple" in counter.names_after_warm_up[0]
        assert counter.seconds > 0
    triple(jnp.ones(5))
    assert counter.after_warm_up == 1, "a closed counter must not count"
