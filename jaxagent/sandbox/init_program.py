"""Where the program that serves a sandbox from inside lies on this machine: see `native/__init__.py`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from jaxagent.config import ConfigError
from jaxagent.io.files import cache_directory
from jaxagent.sandbox import native

WHEEL = "the wheel of jaxagent for this platform"
ONE_LIBRARY = (
    "the program that serves sandboxes from inside could only be linked to this machine's C library, and does not run "
    f"in an image with another one: install the C library for static programs (libc6-dev, glibc-static), or {WHEEL}"
)


def find(folder: Path) -> Path:
    """The program: as the installed package has it, as this user's cache has it, or compiled now.

    Where the package's own must not be run, since an installer has lost its x bit or its disk is mounted so, a copy of
    it is run.

    Args:
      folder: of this run; the program lies there where the cache cannot hold it, and where it needs this machine's C
        library: then its name begins with "dynamic".

    Raises:
      ConfigError: it is nowhere, and cannot be compiled.
    """
    name, places, why = native.file_name(), [folder], ""
    packaged = native.FOLDER / name
    with contextlib.suppress(RuntimeError):  # the user has no home
        places.insert(0, cache_directory())
    for path in (packaged, *(place / name for place in places), folder / f"dynamic-{name}"):
        if os.access(path, os.X_OK):
            return path
    for place in places:
        try:
            if packaged.is_file():
                native.copy_to(place / name, packaged)
                return place / name
            for path in (place / name, folder / f"dynamic-{name}"):
                if not (why := native.compile_to(path, static=path.name == name)):
                    return path
            break
        except OSError as failure:
            why = f"{failure.filename or place}: {failure.strerror}"
    if packaged.is_file():
        raise ConfigError(f"sandboxes need {packaged}, which must not be run (chmod +x), nor a copy of it ({why})")
    raise ConfigError(
        f"sandboxes need a small program in C, which this installation does not bring for {os.uname().machine} and "
        f"which cannot be compiled here ({why}): install a C compiler with its C library, such as gcc and libc6-dev, "
        f"or {WHEEL}"
    )


def is_dynamic(program: Path) -> bool:
    """Whether it needs this machine's C library."""
    return program.name.startswith("dynamic")
