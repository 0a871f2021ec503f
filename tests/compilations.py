"""What the quick tests of a file may have XLA compile, in programs, wherever compiled programs are kept.

Compiling is most of the quick tests' time, and unlike seconds it is the same on every machine. jax tells of every
program that it asks its back end for, also of one that it then finds among those kept between runs. What fixtures
compile counts for the file whose test asked first. Other versions of jax cut the same work into other programs, so the
shares hold under the one that they were counted with. Before raising a number: compile one function instead of its
operations one by one (`jax.jit`), share shapes and fixtures, or mark the test "slow".
"""

from __future__ import annotations

import collections
import pathlib
import sys

import pytest

JAX = "0.10."  # of the shares
EVENT = "/jax/core/compile/backend_compile_duration"
MOST = 400  # of a file of functions that are looked at operation by operation
MOST_MODELS = 150  # of a file in these folders, whose programs are models
MODELS = ("engine/", "learner/", "models/")
MORE = {  # of files there that look at operations, or compile in two ways
    "engine/test_int8.py": 200, "engine/test_sampling.py": 400, "learner/test_aggregations.py": 400,
    "learner/test_loss.py": 260, "models/test_paged_gpu.py": 200, "models/test_tpu_kernels.py": 300,
}  # fmt: skip

_counts: collections.Counter[str] = collections.Counter()
_now = ""  # the file whose quick test runs; "" while a slow one does
_listening = False


def begin(item: pytest.Item) -> None:
    """Before a test and its fixtures: from now on compilations are its file's."""
    global _now
    _listen()
    _now = "" if item.get_closest_marker("slow") else _name(item)


def check(item: pytest.Item) -> None:
    """After a test. Fails it if the quick tests of its file have by now compiled more than they may."""
    global _now
    _listen()  # from the next test on, where this one was the first to import jax
    name, _now = _now, ""
    most = MORE.get(name, MOST_MODELS if name.startswith(MODELS) else MOST)
    if name and _counts[name] > most and sys.modules["jax"].__version__.startswith(JAX):
        pytest.fail(f"The quick tests of tests/{name} have compiled {_counts[name]} programs by now; their share is "
                    f"{most}. See tests/compilations.py.", pytrace=False)  # fmt: skip


def _name(item: pytest.Item) -> str:
    return item.path.relative_to(pathlib.Path(__file__).parent).as_posix()


def _listen() -> None:
    """As soon as jax is there; most test files do without it."""
    global _listening
    if not _listening and "jax" in sys.modules:
        import jax.monitoring

        jax.monitoring.register_event_duration_secs_listener(_count)
        _listening = True


def _count(event: str, *_, **__) -> None:
    if event == EVENT and _now:
        _counts[_now] += 1
