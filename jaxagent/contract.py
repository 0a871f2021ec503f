"""What a class behind a choice gives back, checked at the door: how many results, shapes, types, finite numbers.

    answer = contract.call(objective, tokens)                                # whatever it is
    surrogate, clipped = contract.arrays(objective, answer, *wanted)         # two arrays of the wanted shape

Built-in classes and those of a user's own pass the same doors. What is wrong is one sentence that names the class, what
came and what is wanted. Shapes and types are checked under jit too, once per trace; numbers on the host. No JAX here.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxagent.config.errors import ConfigError, failure_line

_KINDS = {"f": "float", "i": "int", "u": "int", "b": "bool"}
_COUNTS = ("no", "one", "two", "three")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array that is wanted of a call."""

    name: str  # "a surrogate"
    axes: str  # "one number per target, [B, R]"
    shape: tuple[int, ...]
    kinds: str = "f"  # of its type, as `numpy.dtype.kind` says them

    def __str__(self) -> str:
        of = " or ".join(dict.fromkeys(_KINDS[kind] for kind in self.kinds))
        return f"{self.axes} = {self.shape} of type {of},"


def per_target(like: Any, name: str, kinds: str = "f") -> Array:
    """One number for each target that `like` [..., R] has one for."""
    return Array(name, "one number per target, [B, R]", tuple(like.shape), kinds)


def loss_and_clipped(chosen: Any, *arguments: Any, like: Any) -> tuple[Any, Any]:
    """What an objective or a critic's loss gives back: the loss of each target of `like`, and where it is clipped.

    Raises:
      ConfigError: it is something else.
    """
    wanted = per_target(like, "a loss"), per_target(like, "a clipped part", "fib")
    return arrays(chosen, call(chosen, *arguments), *wanted)


def name_of(chosen: Any) -> str:
    """ "package.module:Class", as a config names the class of an object; of a function its own name."""
    chosen = getattr(chosen, "func", chosen)  # of a functools.partial
    named = chosen if inspect.isfunction(chosen) else type(chosen)
    return f"{named.__module__}:{named.__qualname__}"


def is_own(chosen: Any) -> bool:
    """Whether the class of an object is a user's own, and not of this package."""
    return type(chosen).__module__.partition(".")[0] != "jaxagent"


def wrong(chosen: Any, came: str, wanted: str, method: str = "__call__") -> ConfigError:
    """The error that says so in one sentence."""
    who = name_of(chosen) + ("" if method == "__call__" else f".{method}")
    return ConfigError(f"{who} returned {came} where {wanted} is wanted.")


def call(chosen: Any, *arguments: Any, method: str = "__call__") -> Any:
    """What a method of `chosen` gives back.

    Raises:
      ConfigError: what code of a user's own raised, in one line; exceptions of this package's pass as they are.
    """
    try:
        return getattr(chosen, method)(*arguments)
    except Exception as error:
        if not is_own(chosen) or isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{name_of(chosen)}.{method} raised {failure_line(error)}.") from error


def arrays(chosen: Any, answer: Any, *wanted: Array, method: str = "__call__") -> tuple[Any, ...]:
    """An answer that is to be a tuple of such arrays.

    Raises:
      ConfigError: it is something else.
    """
    if not isinstance(answer, tuple) or len(answer) != len(wanted):
        came = f"a tuple of {len(answer)}" if isinstance(answer, tuple) else f"one result {described(answer)}"
        names = " and ".join(array.name for array in wanted)
        raise wrong(chosen, came, f"a tuple of {_COUNTS[len(wanted)]}, {names},", method)
    return tuple(array(chosen, part, one, method) for part, one in zip(answer, wanted, strict=True))


def array(chosen: Any, answer: Any, wanted: Array, method: str = "__call__") -> Any:
    """An answer that is to be such an array, of NumPy or of JAX, traced ones too.

    Raises:
      ConfigError: it is something else.
    """
    plain = type(answer) is np.ndarray or hasattr(answer, "aval")  # no masked array, whose mask would be lost
    # A number of no axes, as NumPy's sums give it, is an array whose shape is wrong.
    if not plain or answer.shape != wanted.shape or _kind(answer.dtype) not in wanted.kinds:
        raise wrong(chosen, f"{wanted.name} {described(answer)}", str(wanted), method)
    return answer


def numbers(
    chosen: Any,
    answer: Any,
    wanted: Array,
    method: str = "__call__",
    *,
    where: np.ndarray | None = None,
    least: float = -math.inf,
    of: Iterable[Any] = (),
) -> np.ndarray:
    """`array` on the host: also finite, and `least` or more.

    Args:
      chosen, answer, wanted, method: as of `array`.
      where: bool of the wanted shape: the places that are read; None = all.
      least: the smallest number allowed.
      of: what the call was given. If that is not finite itself, the answer need not be.

    Raises:
      ConfigError: it is something else.
    """
    values = np.asarray(array(chosen, answer, wanted, method))
    bad = ~np.isfinite(values) | (values < least)
    bad = bad if where is None else bad & where
    if bad.any() and all(np.isfinite(given).all() for given in of):
        place = tuple(int(axis[0]) for axis in np.nonzero(bad))
        came = f"{wanted.name} with {values[place]} at {list(place)}, one of {bad.sum()} such places,"
        raise wrong(chosen, came, "a finite number" + (f" of {least:g} or more" if least > -math.inf else ""), method)
    return values


def number(chosen: Any, answer: Any, name: str, method: str = "__call__", above: float = -math.inf) -> float:
    """An answer that is to be one finite real number, more than `above`, of Python's, NumPy's or JAX's.

    Raises:
      ConfigError: it is something else.
    """
    shape, dtype = getattr(answer, "shape", ()), getattr(answer, "dtype", None)
    real = hasattr(answer, "__float__") and shape == () and (dtype is None or _kind(dtype) in (*_KINDS, "?"))
    if not real or not math.isfinite(value := float(answer)) or value <= above:
        came = f"{name} {described(answer)}" if not real else f"{name} of {value}"
        more = f" of more than {above:g}" if above > -math.inf else ""
        raise wrong(chosen, came, f"one finite number{more}", method)
    return value


def described(answer: Any) -> str:
    """What an answer is, to stand behind a name: "of shape (4,) and type int32", "that is a list"."""
    if answer is None:
        return "that is None (is a `return` missing?)"
    if inspect.iscoroutine(answer):
        answer.close()  # nobody awaits it
        return "that is a coroutine (write `def` in place of `async def`)"
    if inspect.isgenerator(answer) or inspect.isasyncgen(answer):
        return "that is a generator (its code says `yield` in place of `return`)"
    if type(answer) in (int, float, str, bool, complex):
        return f"that is the {type(answer).__name__} {answer!r:.40}"
    shape, dtype = getattr(answer, "shape", None), getattr(answer, "dtype", None)
    if shape is None or dtype is None or isinstance(answer, np.ma.MaskedArray):
        return f"that is a {type(answer).__name__}"
    return f"of shape {tuple(shape)} and type {dtype}"


def scores(reward: Any, view: Any, score: str = "") -> dict[str, float]:
    """What a reward says of a view, by name: "reward" is the number that counts; of one number `score` is it too.

    Raises:
      ConfigError: neither a finite number nor a mapping of such numbers with "reward".
    """
    answer = call(reward, view)
    if not isinstance(answer, Mapping):
        return dict.fromkeys(filter(None, ("reward", score)), number(reward, answer, "a reward"))
    if "reward" not in answer or not all(isinstance(name, str) for name in answer):
        raise wrong(reward, f"a mapping with the names {list(answer)}", "one with 'reward' among its texts")
    return {name: number(reward, value, f"'{name}'") for name, value in answer.items()}


async def awaited(attempt: Any, method: str, *arguments: Any, wanted: type = object) -> Any:
    """What an `async def` method gives back. Its own exceptions pass.

    Raises:
      ConfigError: it is no such method, or its result is not of the type `wanted`.
    """
    answer = getattr(attempt, method)(*arguments)
    if not inspect.isawaitable(answer):
        came = described(answer)
        raise ConfigError(
            f"{name_of(attempt)}.{method} must be `async def`: it returned a result {came}, and nothing to await."
        )
    answer = await answer
    if not isinstance(answer, wanted):
        raise wrong(attempt, f"a result {described(answer)}", f"a {wanted.__name__}", method)
    return answer


def not_async(attempt: Any, *methods: str) -> list[str]:
    """Those of the methods that are plain functions: `await` of them fails, unless they return something to await."""
    own = ((name, getattr(attempt, name, None)) for name in methods)
    return [name for name, method in own if inspect.ismethod(method) and not inspect.iscoroutinefunction(method)]


def _kind(dtype: Any) -> str:
    return "f" if str(dtype) == "bfloat16" else getattr(dtype, "kind", "?")  # NumPy calls bfloat16 a void
