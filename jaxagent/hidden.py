"""`hidden`: imports a library without what it would load only because it is installed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def hidden(*names: str) -> Iterator[None]:
    """While it is open, modules of these names cannot be imported; what has been imported already comes back after it.

    For libraries that go on without them when such an import fails. A module's own parts are named, too: "jax.lax".
    """
    loaded = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(dict.fromkeys(names))  # None makes an import fail
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(loaded)
