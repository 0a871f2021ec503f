"""Gymnasium's spaces and text: what the policy writes -> an action of the space; what the environment shows -> text.

A number, a list or an object of JSON becomes what the space's `sample` would give, sub-space by sub-space: NumPy arrays
of the space's type and shape, NumPy integers, dicts, tuples, texts. Spaces are known by their names, so that those of
gymnasium, of the older gym and of one's own are treated alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxagent.config import ConfigError


def check_writable(space: Any, at: str = "actions") -> None:
    """Raises ConfigError where a space, or one inside it, has actions that no text here expresses."""
    kind = kind_of(space)
    if not kind:
        problem = f"{at} are a {type(space).__name__}, and the policy can write {', '.join(_READERS)}"
        raise ConfigError(f"config.env.make: {problem}; wrap the environment so that its actions are one of these.")
    inner = space.spaces if kind in ("Dict", "Tuple") else {}
    for name, inner_space in inner.items() if isinstance(inner, Mapping) else enumerate(inner):
        check_writable(inner_space, f"{at}[{name!r}]")


def kind_of(space: Any) -> str:
    """The name of the kind of space, of a subclass too. "" for one that is not known here."""
    return next((cls.__name__ for cls in type(space).__mro__ if cls.__name__ in _READERS), "")


def read(space: Any, value: Any) -> Any:
    """The action that a JSON value stands for.

    Raises:
      ValueError, OverflowError: it can be none: another shape, a number that is not finite or not whole, a key too
        many. Whether the action is within the space's bounds, the space knows.
    """
    return _READERS[kind_of(space)](space, value)


def as_text(observation: Any) -> str:
    """An observation as text: texts as they are, arrays as nested lists, everything else as Python writes it."""
    if isinstance(observation, Mapping):
        return "\n".join(f"{name}: {as_text(value)}" for name, value in observation.items())
    return str(_plain(observation))


def _plain(value: Any) -> Any:
    """The value without NumPy's types; a float of 32 bits as short as it can be written."""
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind != "f" or value.dtype == np.float64:
            return value.tolist()
        return _plain([*value]) if value.ndim else float(str(value))
    if isinstance(value, Mapping):
        return {name: _plain(element) for name, element in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(element) for element in value)
    return value.tolist() if hasattr(value, "tolist") else value


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for element in value:
            yield from _leaves(element)
    else:
        yield value


def _array(space: Any, value: Any) -> np.ndarray:
    """An array of the space's type and shape; as a flat list, too."""
    dtype, numbers = np.dtype(space.dtype), list(_leaves(value))
    if kind_of(space) == "MultiBinary" or dtype.kind == "b":
        numbers = [int(number) if isinstance(number, bool) else number for number in numbers]
    if not all(type(number) in (int, float) for number in numbers):
        raise ValueError("it has more than numbers in it")
    if dtype.kind in "iub":
        if not all(isinstance(number, int) or number.is_integer() for number in numbers):
            raise ValueError("a number is not whole")
        if dtype.kind == "b" and not set(numbers) <= {0, 1}:
            raise ValueError("a number is neither 0 nor 1")
        numbers = [int(number) for number in numbers]
    with np.errstate(over="ignore"):
        array = np.asarray(numbers, dtype)
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError("a number is not finite")
    if np.shape(value) not in (space.shape, (len(numbers),)):  # raises where rows are not equally long
        raise ValueError("it has another shape")
    return array.reshape(space.shape)


def _discrete(space: Any, value: Any) -> Any:
    if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
        raise ValueError("it is no whole number")
    return np.int64(int(value))


def _text(space: Any, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("it is no text")
    return value


def _dict(space: Any, value: Any) -> dict[Any, Any]:
    names = {str(name): name for name in space.spaces}
    if not isinstance(value, dict) or value.keys() != names.keys():
        raise ValueError(f"it must have the keys {', '.join(names)}")
    return {name: read(space.spaces[name], value[key]) for key, name in names.items()}


def _tuple(space: Any, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) != len(space.spaces):
        raise ValueError(f"it must have {len(space.spaces)} elements")
    return tuple(read(inner_space, part) for inner_space, part in zip(space.spaces, value, strict=True))


_READERS: dict[str, Callable[[Any, Any], Any]] = {
    "Discrete": _discrete,
    "Box": _array,
    "MultiDiscrete": _array,
    "MultiBinary": _array,
    "Text": _text,
    "Dict": _dict,
    "Tuple": _tuple,
}
