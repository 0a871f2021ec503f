"""The C helper: compiled when first needed, kept by the hash of its source, shared by all runs of a user."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parent / "native"
COMPILE_TIMEOUT_S = 300.0


def cache_directory() -> Path:
    """Where compiled helpers are kept: under $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxagent"


@functools.cache
def helper() -> Path | None:
    """The compiled helper, or None where it cannot be compiled (no compiler, no C library)."""
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
            made = Path(work) / "helper"
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
