"""Gymnasium's spaces and text: what the policy writes -> an action of the space; what the environment shows -> text.

A number, a list or an object of JSON becomes what the space's `sample` would give, sub-space by sub-space: NumPy arrays
of the space's type and shape, NumPy integers, dicts, tuples, texts, graphs. What is shown is written in the same form.
Spaces are known by their names, so that those of gymnasium, of the older gym and of one's own are treated alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxagent.config import ConfigError

SHOWN_CHARACTERS = 128  # of those that a text may have


def check_writable(space: Any, at: str = "actions") -> None:
    """Raises ConfigError where a space, or one inside it, has actions that no text here expresses."""
    kind = kind_of(space)
    if not kind:
        problem = f"{at} are a {type(space).__name__}, and the policy can write {', '.join(_KINDS)}"
        raise ConfigError(f"config.env.make: {problem}; wrap the environment so that its actions are one of these.")
    inner = _inner(space, kind)
    if len({str(name) for name in inner}) < len(inner):
        names = ", ".join(map(repr, inner))
        raise ConfigError(f"config.env.make: {at} have names of which two are one and the same in JSON: {names}.")
    for name, inner_space in inner.items():
        check_writable(inner_space, f"{at}[{name!r}]")


def kind_of(space: Any) -> str:
    """The name of the kind of space, of a subclass too. "" for one that is not known here."""
    for cls in type(space).__mro__:
        if cls.__name__ in _KINDS and (cls.__name__ != "Graph" or cls.__module__.startswith("gymnasium.")):
            return cls.__name__
    return ""


def form(space: Any) -> str:
    """In words, what the policy writes as an action."""
    return _KINDS[kind_of(space)][1](space)


def read(space: Any, value: Any) -> Any:
    """The action that a JSON value stands for.

    Raises:
      ValueError, OverflowError: it can be none: another shape, a number that is not finite or not whole, a key too
        many. Whether the action is within the space's bounds, the space knows.
    """
    return _KINDS[kind_of(space)][0](space, value)


def as_text(observation: Any) -> str:
    """An observation as text: texts as they are, objects line by line, everything else as JSON, an action's form."""
    if isinstance(observation, Mapping):
        return "\n".join(f"{name}: {as_text(value)}" for name, value in observation.items())
    return observation if isinstance(observation, str) else as_json(observation)


def as_json(value: Any) -> str:
    """A value as JSON, in which no tag ends an action."""
    plain = _plain(value)
    return json.dumps(plain, ensure_ascii=False, default=str).replace("</", "<\\/")


def _plain(value: Any) -> Any:
    """The value in JSON's types; a float of 32 bits as short as it can be written."""
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind != "f" or value.dtype == np.float64:
            return value.tolist()
        return [_plain(element) for element in value] if value.ndim else float(str(value))
    if hasattr(value, "_asdict"):  # a graph
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(name): _plain(element) for name, element in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(element) for element in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _inner(space: Any, kind: str) -> Mapping[Any, Any]:
    """The spaces inside a space, by name."""
    if kind in ("Dict", "Tuple", "OneOf"):
        return space.spaces if isinstance(space.spaces, Mapping) else dict(enumerate(space.spaces))
    if kind == "Sequence":
        return {"element": space.feature_space}
    if kind == "Graph":
        return {"nodes": space.node_space} | ({} if space.edge_space is None else {"edges": space.edge_space})
    return {}


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
        numbers = [_whole(number) for number in numbers]
        if dtype.kind == "b" and not set(numbers) <= {0, 1}:
            raise ValueError("a number is neither 0 nor 1")
    with np.errstate(over="ignore"):
        array = np.asarray(numbers, dtype)
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError("a number is not finite")
    if np.shape(value) not in (space.shape, (len(numbers),)):  # raises where rows are not equally long
        raise ValueError("it has another shape")
    return array.reshape(space.shape)


def _whole(number: Any) -> int:
    if isinstance(number, bool) or not (isinstance(number, int) or (isinstance(number, float) and number.is_integer())):
        raise ValueError(f"{number!r} is no whole number")
    return int(number)


def _discrete(space: Any, value: Any) -> Any:
    return np.dtype(getattr(space, "dtype", None) or np.int64).type(_whole(value))


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


def _sequence(space: Any, value: Any) -> Any:
    if getattr(space, "stack", False):
        return _batch(space.feature_space, value)
    if not isinstance(value, list):
        raise ValueError("it is no list")
    return tuple(read(space.feature_space, element) for element in value)


def _one_of(space: Any, value: Any) -> tuple[Any, Any]:
    if not isinstance(value, list) or len(value) != 2 or not 0 <= _whole(value[0]) < len(space.spaces):
        raise ValueError("it is not the number of a space and an action of that space")
    return np.int64(int(value[0])), read(space.spaces[int(value[0])], value[1])


def _graph(space: Any, value: Any) -> Any:
    from gymnasium.spaces import GraphInstance

    if not isinstance(value, dict) or not {"nodes"} <= value.keys() <= {"nodes", "edges", "edge_links"}:
        raise ValueError("it must have nodes, and may have edges and edge_links")
    nodes, edges, links = _batch(space.node_space, value["nodes"]), value.get("edges"), value.get("edge_links")
    if not edges and not links:
        return GraphInstance(nodes, None, None)
    if space.edge_space is None or not isinstance(links, list) or not all(isinstance(pair, list) for pair in links):
        raise ValueError("its edges are none of this graph's")
    pairs = np.asarray([[_whole(number) for number in pair] for pair in links], np.int32)
    return GraphInstance(nodes, _batch(space.edge_space, edges), pairs)


def _batch(space: Any, value: Any) -> Any:
    """Elements of a space, stacked as the package stacks them."""
    from gymnasium.vector.utils import concatenate, create_empty_array

    if not isinstance(value, list):
        raise ValueError("it is no list")
    elements = tuple(read(space, element) for element in value)
    empty = create_empty_array(space, len(elements))
    return concatenate(space, elements, empty) if elements else empty


def _form_of_text(space: Any) -> str:
    characters = "".join(sorted(space.character_set))
    which = as_json(characters) if len(characters) <= SHOWN_CHARACTERS else f"a set of {len(characters)}"
    return f"a text of {space.min_length} to {space.max_length} characters from {which}"


def _form_of_discrete(space: Any) -> str:
    start = int(getattr(space, "start", 0))
    return f"a whole number from {start} to {start + int(space.n) - 1}"


def _form_of_numbers(space: Any) -> str:
    kind, shape = kind_of(space), tuple(space.shape)
    if kind == "MultiBinary" or np.dtype(space.dtype).kind == "b":
        noun, low, high = "number", np.zeros(shape), np.ones(shape)
    elif kind == "MultiDiscrete":
        low = np.broadcast_to(getattr(space, "start", 0), shape)
        noun, high = "whole number", low + space.nvec - 1
    else:
        noun, low, high = "number" if np.dtype(space.dtype).kind == "f" else "whole number", space.low, space.high
    bounds = " and ".join(
        f"{word} {number}"
        for word, ends, number in (("at least", low, _ends(low)), ("at most", high, _ends(high)))
        if np.isfinite(ends).any()
    )
    bounds = f", {'each ' if shape else ''}{bounds}" if bounds else ""
    if len(shape) < 2:
        return f"a list of {shape[0]} {noun}s{bounds}" if shape else f"a {noun}{bounds}"
    return f"lists within lists, of the shape {' x '.join(map(str, shape))}, of {noun}s{bounds}"


def _ends(ends: Any) -> str:
    """Equal bounds as one number, few as a list, many from the least to the greatest."""
    ends = np.asarray(ends)
    if ends.size and (ends == ends.flat[0]).all():
        return as_text(ends.flat[0])
    return as_text(ends) if ends.size <= 16 else f"{as_text(ends.min())} to {as_text(ends.max())} (they differ)"


def _form_of_graph(space: Any) -> str:
    nodes = f'"nodes": a list whose elements are each {form(space.node_space)}'
    if space.edge_space is None:
        return f"an object {{{nodes}}}"
    edges = f'"edges": a list whose elements are each {form(space.edge_space)}'
    links = '"edge_links": a list with [from, to] of each edge, two numbers of nodes from 0'
    return f"an object {{{nodes}; {edges}; {links}}}"


# Name of a kind of space -> how an action is read, and its form in words.
_KINDS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], str]]] = {
    "Discrete": (_discrete, _form_of_discrete),
    "Box": (_array, _form_of_numbers),
    "MultiDiscrete": (_array, _form_of_numbers),
    "MultiBinary": (_array, _form_of_numbers),
    "Text": (_text, _form_of_text),
    "Dict": (
        _dict,
        lambda s: f"an object {{{'; '.join(f'{json.dumps(str(k))}: {form(v)}' for k, v in s.spaces.items())}}}",
    ),
    "Tuple": (_tuple, lambda s: f"a list [{'; '.join(map(form, s.spaces))}]"),
    "Sequence": (_sequence, lambda s: f"a list whose elements are each {form(s.feature_space)}"),
    "OneOf": (_one_of, lambda s: f"one of {'; '.join(f'[{i}, {form(v)}]' for i, v in enumerate(s.spaces))}"),
    "Graph": (_graph, _form_of_graph),
}
