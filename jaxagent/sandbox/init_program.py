"""The program that serves a sandbox from inside, as its process 1: compiled from `native/`, or the same in Python.

The compiled one is made when it is first needed, kept by the hash of its source and shared by all runs of a user. The
one in Python is an archive of `init/`, for hosts and images where nothing can be compiled.
"""

from __future__ import annotations

import functools
import hashlib
import os
import py_compile
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

from jaxagent.io.files import cache_directory

SOURCE = Path(__file__).parent / "native"
PYTHON_SOURCE = Path(__file__).parent / "init"
PACKAGES = ("jaxagent", "jaxagent/sandbox", "jaxagent/sandbox/init")  # as in the source tree, so imports are the same
START = b"from jaxagent.sandbox.init.main import main\n\nmain()\n"
PYTHON_FLAGS = ("-I", "-S")  # neither the environment nor site-packages decide what is imported
COMPILE_TIMEOUT_S = 300.0


@functools.cache
def compiled() -> Path | None:
    """The compiled program, or None where it cannot be compiled (no compiler, no C library)."""
    sources = sorted(SOURCE.glob("*.c"))
    digest = hashlib.sha256()
    for path in [*sources, *sorted(SOURCE.glob("*.h"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(os.uname().machine.encode())
    try:
        directory = cache_directory()
        directory.mkdir(parents=True, exist_ok=True)
        target = directory / f"sandbox-{digest.hexdigest()[:20]}"
        if target.exists():
            return target
        compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
        if compiler is None:
            return None
        with tempfile.TemporaryDirectory(dir=directory) as work:
            made = Path(work) / "init"
            for static in (["-static"], []):  # a static one also runs in images that have another C library
                command = [compiler, "-O2", *static, "-o", str(made), *map(str, sources)]
                done = subprocess.run(command, capture_output=True, timeout=COMPILE_TIMEOUT_S)
                if done.returncode == 0:
                    made.chmod(0o755)
                    made.rename(target)  # atomic: other processes see all of it or nothing
                    return target
    except (OSError, RuntimeError, subprocess.SubprocessError):  # RuntimeError: no home directory
        return None
    return None


def write_archive(path: Path) -> None:
    """Writes the program in Python as one file, which `python -I -S` runs without anything else of jaxagent.

    It holds every module as source and as bytecode of this Python; another one compiles the source at each start.
    """
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH  # there is no file to compare its time with
    with zipfile.ZipFile(path, "w") as archive, tempfile.TemporaryDirectory() as work:  # nothing inside needs zlib
        archive.writestr("__main__.py", START)
        for package in PACKAGES[:-1]:
            archive.writestr(f"{package}/__init__.py", b"")
        for module in sorted(PYTHON_SOURCE.glob("*.py")):
            archive.writestr(f"{PACKAGES[-1]}/{module.name}", module.read_bytes())
            bytecode = Path(work) / f"{module.stem}.pyc"
            py_compile.compile(str(module), str(bytecode), doraise=True, invalidation_mode=unchecked)
            archive.writestr(f"{PACKAGES[-1]}/{bytecode.name}", bytecode.read_bytes())
