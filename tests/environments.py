"""Environments with other people's packages, for tests that need the real ones: made once per user, or the test skips.

JAXAGENT_TEST_ENVIRONMENTS names the folder that keeps them; by default it is in the user's cache.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

MAKE_S = 400  # for pip or npm, all packages together


def python_with(name: str, *requirements: str) -> pathlib.Path:
    """The interpreter of a virtual environment with these packages, and without this project and JAX."""
    folder = _folder() / name
    pip = [str(folder / "bin/pip"), "install", "--quiet", "--retries=1", "--disable-pip-version-check", *requirements]
    _make(folder, requirements, [[sys.executable, "-m", "venv", "--clear", str(folder)], pip])
    return folder / "bin/python"


@contextlib.contextmanager
def importable(module: str, name: str, *requirements: str) -> Iterator[None]:
    """While it is open, this process can import a module: its own, or else that of `python_with(name, ...)`."""
    if importlib.util.find_spec(module) is not None:
        yield
        return
    (packages,) = python_with(name, *requirements).parents[1].glob("lib/python*/site-packages")
    sys.path.append(str(packages))  # behind all that this process has itself
    try:
        yield
    finally:
        sys.path.remove(str(packages))


def beside(python: pathlib.Path, name: str, requirement: str) -> pathlib.Path:
    """A folder for PYTHONPATH with one package in another version than the environment's, which has what it needs."""
    folder = _folder() / name
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", f"--target={folder}", requirement]
    _make(folder, (requirement,), [pip])
    return folder


def node_with(name: str, *packages: str) -> pathlib.Path:
    """A folder in which node finds these packages."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    folder = _folder() / name
    install = ["npm", "install", "--silent", "--no-audit", "--no-fund", f"--prefix={folder}", *packages]
    _make(folder, packages, [install])
    return folder


def _folder() -> pathlib.Path:
    base = os.environ.get("JAXAGENT_TEST_ENVIRONMENTS") or pathlib.Path.home() / ".cache/jaxagent/test_environments"
    return pathlib.Path(base)


def _make(folder: pathlib.Path, packages: tuple[str, ...], commands: list[list[str]]) -> None:
    """Runs the commands unless they were run before. A last line says so, so that a half environment is made again."""
    stamp = folder / "complete.txt"
    if stamp.is_file() and stamp.read_text().split() == list(packages):
        return
    if folder.is_symlink():  # what it leads to is somebody's own, and would be emptied
        pytest.skip(f"no environment with {', '.join(packages)}: {folder} is a link, and has other packages")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for command in commands:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=MAKE_S)
    except (OSError, subprocess.SubprocessError) as failure:
        told = (getattr(failure, "stderr", "") or str(failure)).strip().splitlines()[-1:]
        pytest.skip(f"no environment with {', '.join(packages)}: {' '.join(told)[:300]}")
    stamp.write_text("\n".join(packages))
