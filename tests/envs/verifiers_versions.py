"""Interpreters that have the package verifiers, for tests that need the real one.

JAXAGENT_VERIFIERS_VENVS names folders of virtual environments, separated as in PATH; a version that none of them has is
installed for the tests, or they skip.
"""

from __future__ import annotations

import os
import pathlib

from tests import environments


def interpreter(version: str) -> pathlib.Path:
    """The Python that has this version."""
    for folder in filter(None, os.environ.get("JAXAGENT_VERIFIERS_VENVS", "").split(os.pathsep)):
        if list(pathlib.Path(folder).glob(f"lib/*/site-packages/verifiers-{version}.dist-info")):
            return pathlib.Path(folder) / "bin/python"
    return environments.python_with(f"verifiers-{version}", f"verifiers=={version}", "datasets")


def site_packages(version: str) -> pathlib.Path:
    """Where it has its packages."""
    (folder,) = interpreter(version).parents[1].glob("lib/*/site-packages")
    return folder
