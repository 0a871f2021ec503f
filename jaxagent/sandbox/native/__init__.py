"""The program that serves a sandbox from inside, as its process 1: C without dependencies, and how it is compiled.

`setup.py` runs this file by itself, to put the program into the wheel: it needs nothing but the standard library.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
TIMEOUT_S = 300.0


def file_name() -> str:
    """Of the program that is made from these sources on a machine like this one."""
    digest = hashlib.sha256()
    for path in sorted([*FOLDER.glob("*.c"), *FOLDER.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"sandbox-{os.uname().machine}-{digest.hexdigest()[:20]}.bin"


def compile_to(path: Path, static: bool) -> str:
    """Makes the program, all of it or nothing; returns "", or why it cannot be made.

    Args:
      static: it brings its C library along, and so also runs where there is another one or none.

    Raises:
      OSError: nothing can be written there, or run from there.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return f"there is no C compiler ({', '.join(COMPILERS)})"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        program = Path(work, "made")
        command = [compiler, "-O2", *["-static"] * static, "-o", str(program), *map(str, sorted(FOLDER.glob("*.c")))]
        try:
            process = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S)
        except (OSError, subprocess.SubprocessError) as failure:
            return f"{compiler} does not run: {failure}"
        if process.returncode != 0:
            lines = process.stderr.decode("utf-8", "replace").splitlines()
            return f"{compiler} fails: {next((line for line in lines if 'error' in line), ' '.join(lines))[:300]}"
        _put(program, path)
    return ""


def copy_to(path: Path, source: Path) -> None:
    """Makes the program a copy of one that must not be run where it is. Raises OSError as `compile_to`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        _put(Path(shutil.copyfile(source, Path(work, "made"))), path)


def _put(program: Path, path: Path) -> None:
    program.chmod(0o755)
    program.rename(path)  # at once: other processes see all of it or nothing
    if not os.access(path, os.X_OK):
        raise PermissionError(errno.EACCES, "programs must not run from there", str(path))
