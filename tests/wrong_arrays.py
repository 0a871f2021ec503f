"""Every way in which one array among a function's arguments can be wrong: rank, shape or type. For tests of shapes."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

F, I, B = np.float32, np.int32, bool  # noqa: E741


def array(dtype: type, *shape: int) -> np.ndarray:
    """Ones: log-probs, masks and ids alike that every function takes."""
    return np.ones(shape, dtype)


def wrong(arguments: tuple) -> Iterator[tuple[str, tuple]]:
    """(what is wrong, the arguments with it), for every array among them."""
    for i, right in enumerate(arguments):
        if isinstance(right, np.ndarray):
            other = np.int32 if np.issubdtype(right.dtype, np.floating) else np.float32
            kinds = {"rank": right[None], "shape": right[..., :1], "dtype": right.astype(other)}
            for kind, bad in kinds.items():
                yield f"{kind} of argument {i}", (*arguments[:i], bad, *arguments[i + 1 :])


def refuses(function: Callable, arguments: tuple, taken: tuple[str, ...] = ()) -> None:
    """The arguments are taken, and refused with any one array of them wrong; but for what `taken` names."""
    function(*arguments)
    for what, bad in wrong(arguments):
        if what in taken:
            continue
        with pytest.raises(AssertionError):
            function(*bad)
            pytest.fail(f"the wrong {what} was taken")
