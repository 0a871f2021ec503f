"""What a class behind a choice gives back, checked at the door: how many results, shapes, types, finite numbers.

    surrogate, clipped = contract.arrays(objective, contract.call(objective, tokens), *wanted)

Built-in classes and those of a user's own pass the same doors. What is wrong is a `ConfigError` of one sentence that
names the class, what came and what is wanted. Shapes and types are checked under jit too, numbers on the host. No JAX.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxagent.config.errors import ConfigError, failure_line

_KINDS = {"f": "float", "i": "int", "u": "int", "b": "bool"}  # by numpy.dtype.kind


class Array(NamedTuple):
    """One array that is wanted of a call."""

    name: str  # "a surrogate"
    axes: str  # "one number per target, [B, R]"
    shape: tuple[int, ...]
    kinds: str = "f"  # of `_KINDS`


def per_target(like: Any, name: str, kinds: str = "f") -> Array:
    """One number for each target of `like` [B, R]."""
    return Array(name, "one number per target, [B, R]", tuple(like.shape), kinds)


def name_of(chosen: Any) -> str:
    """ "package.module:Class", as a config names the class of an object; of a function its own name."""
    chosen = getattr(chosen, "func", chosen)  # of a functools.partial
    named = chosen if inspect.isfunction(chosen) else type(chosen)
    return f"{named.__module__}:{named.__qualname__}"


def is_own(chosen: Any) -> bool:
    """Whether the class of an object is a user's own, and not of this package."""
    return type(chosen).__module__.partition(".")[0] != "jaxagent"


def wrong(chosen: Any, came: str, expected: str, method: str = "__call__") -> ConfigError:
    """The error for a choice whose method returned something else than what was expected; both are in words."""
    who = name_of(chosen) + ("" if method == "__call__" else f".{method}")
    return ConfigError(f"{who} returned {came} where {expected} is wanted.")


def call(chosen: Any, *arguments: Any, method: str = "__call__") -> Any:
    """Calls a method of `chosen` with copies of the arrays, so that it may write to them, and returns its result.

    Raises:
      ConfigError: the user's own code raised an exception.
    """
    arguments = tuple(argument.copy() if type(argument) is np.ndarray else argument for argument in arguments)
    try:
        return getattr(chosen, method)(*arguments)
    except Exception as error:
        if not is_own(chosen) or isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{name_of(chosen)}.{method} raised {failure_line(error)}.") from error


def array(chosen: Any, answer: Any, expected: Array, method: str = "__call__") -> Any:
    """Returns an answer if it is the expected array, of NumPy or of JAX (also a traced one); else a ConfigError."""
    is_array = type(answer) is np.ndarray or hasattr(answer, "aval")  # no masked one, whose mask would be lost
    if not is_array or answer.shape != expected.shape or _kind(answer.dtype) not in expected.kinds:
        kinds = " or ".join(dict.fromkeys(_KINDS[kind] for kind in expected.kinds))
        like = f"{expected.axes} = {expected.shape} of type {kinds},"
        raise wrong(chosen, f"{expected.name} {described(answer)}", like, method)
    return answer


def arrays(chosen: Any, answer: Any, *expected: Array) -> tuple[Any, ...]:
    """Returns an answer if it is a tuple of the expected arrays; else a ConfigError."""
    if not isinstance(answer, tuple) or len(answer) != len(expected):
        came = f"a tuple of {len(answer)}" if isinstance(answer, tuple) else f"one result {described(answer)}"
        raise wrong(chosen, came, f"a tuple of {' and '.join(part.name for part in expected)}")
    return tuple(array(chosen, part, like) for part, like in zip(answer, expected, strict=True))


def loss_and_clipped(chosen: Any, *arguments: Any, like: Any) -> tuple[Any, ...]:
    """What an objective or a critic's loss gives: the loss of each target of `like`, and where it is clipped."""
    expected = per_target(like, "a loss"), per_target(like, "a clipped part", "fib")
    return arrays(chosen, call(chosen, *arguments), *expected)


def numbers(
    chosen: Any, answer: Any, expected: Array, read: Any = True, least: float = -math.inf, of: Sequence[Any] = ()
) -> np.ndarray:
    """`array` on the host, of finite numbers of `least` or more where bool `read`; if those it is made `of` are."""
    values = np.array(array(chosen, answer, expected))
    bad = (~np.isfinite(values) | (values < least)) & read
    if bad.any() and all(np.isfinite(argument).all() for argument in of):
        place = tuple(int(axis[0]) for axis in np.nonzero(bad))
        more = f" of {least:g} or more" if least > -math.inf else ""
        raise wrong(chosen, f"{expected.name} with {values[place]} at {list(place)}", f"a finite number{more}")
    return values


def factors(chosen: Any, *arguments: Any) -> np.ndarray:
    """Calls a choice that weighs: it returns a finite factor >= 0 for each place of the first argument, float[n]."""
    expected = Array("factors", "one number for each given, [n]", arguments[0].shape)
    return numbers(chosen, call(chosen, *arguments), expected, least=0.0, of=arguments[:1])


def check_arrays(*arrays: Any, types: Any, rank: int | None = None) -> None:
    """Refuses with an AssertionError arrays of several shapes, or of another rank or type: they would broadcast.

    `types`: float, bool or int, of all arrays or of each; None = any.
    """
    import chex  # loads JAX, which a config is read without

    if rank is not None:
        chex.assert_rank(arrays, rank)
    chex.assert_equal_shape(arrays)
    if types is not None:
        chex.assert_type(arrays, types)


def number(chosen: Any, answer: Any, name: str, method: str = "__call__", above: float = -math.inf) -> float:
    """An answer that is to be one finite real number, more than `above`, of Python's, NumPy's or JAX's."""
    shape, dtype = getattr(answer, "shape", ()), getattr(answer, "dtype", None)
    real = hasattr(answer, "__float__") and shape == () and (dtype is None or _kind(dtype) in (*_KINDS, "?"))
    value = None
    with contextlib.suppress(Exception):  # an int or a decimal that no float is
        value = float(answer) if real else None
    if value is None or not math.isfinite(value) or value <= above:
        more = f" of more than {above:g}" if above > -math.inf else ""
        came = f"{name} {described(answer)}" if value is None else f"{name} of {value}"
        raise wrong(chosen, came, f"one finite number{more}", method)
    return value


def by_name(chosen: Any, answer: Any, what: str, method: str = "__call__") -> dict[str, float]:
    """Returns an answer if it maps names to finite numbers; else a ConfigError."""
    if not isinstance(answer, Mapping) or not all(isinstance(name, str) for name in answer):
        raise wrong(chosen, f"{what} {described(answer)}", "a dict of numbers by name", method)
    return {name: number(chosen, value, f"'{name}'", method) for name, value in answer.items()}


def scores(reward: Any, view: Any, score: str = "") -> dict[str, float]:
    """What a reward says of a view, by name: "reward" is the number that counts; of one number `score` is it too."""
    answer = call(reward, view)
    if not isinstance(answer, Mapping):
        return dict.fromkeys(filter(None, ("reward", score)), number(reward, answer, "a reward"))
    if "reward" not in answer:
        raise wrong(reward, f"a mapping of {list(answer)}", "one with 'reward'")
    return by_name(reward, answer, "scores")


async def awaited(attempt: Any, method: str, *arguments: Any, expected: type = object) -> Any:
    """What an `async def` method gives back, which is to be of the type `expected`. Its own exceptions pass."""
    answer = getattr(attempt, method)(*arguments)
    if not inspect.isawaitable(answer):
        came = described(answer)
        raise ConfigError(f"{name_of(attempt)}.{method} must be `async def`: it returned a result {came}.")
    answer = await answer
    if not isinstance(answer, expected):
        raise wrong(attempt, f"a result {described(answer)}", f"a {expected.__name__}", method)
    return answer


def check_methods(chosen: Any, instance: Any, method: str, *names: str) -> list[str]:
    """Refuses what `method` has made if it lacks a method; returns those that are plain functions, and not async."""
    if missing := [name for name in names if not callable(getattr(instance, name, None))]:
        came = f"an object {described(instance)} without {missing[0]}"
        raise wrong(chosen, came, f"one with the methods {', '.join(names)}", method)
    own = ((name, getattr(instance, name)) for name in names)
    return [name for name, method in own if inspect.ismethod(method) and not inspect.iscoroutinefunction(method)]


def described(answer: Any) -> str:
    """What an answer is, to stand behind a name: "of shape (4,) and type int32", "that is a list"."""
    if answer is None:
        return "that is None (is a `return` missing?)"
    if inspect.iscoroutine(answer):
        answer.close()  # nobody awaits it
        return "that is a coroutine (write `def` in place of `async def`)"
    if inspect.isgenerator(answer) or inspect.isasyncgen(answer):
        return "that is a generator (its code says `yield` in place of `return`)"
    if type(answer) is int and answer.bit_length() > 1024:
        return "that is an int too large for a float"
    if type(answer) in (int, float, str, bool, complex):
        return f"that is the {type(answer).__name__} {answer!r:.40}"
    shape, dtype = getattr(answer, "shape", None), getattr(answer, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None or isinstance(answer, np.ma.MaskedArray):
        return f"that is a {type(answer).__name__}"
    return f"of shape {tuple(shape)} and type {dtype}"


def _kind(dtype: Any) -> str:
    return "f" if str(dtype) == "bfloat16" else getattr(dtype, "kind", "?")  # NumPy calls bfloat16 a void
