"""The real package verifiers, from its first versions to the last with this interface, beside the adapter.

Each case of verifiers_package.py plays an environment of the package twice, by the adapter and by the package's own
rollout, and compares completion and reward: at every end (by itself, at either turn limit, a message that was cut, no
room behind an observation), with tools, and with held-out rows.
"""

import json
import os
import pathlib
import subprocess

import pytest

from tests import environments

pytestmark = pytest.mark.slow  # installs packages

HERE = pathlib.Path(__file__).parent
LAST = ("verifiers<0.4", "datasets")  # since 0.4 the package plays against an endpoint: see docs/add_an_environment.md
CASES = 17
LIMIT_S = 200


@pytest.mark.parametrize("version", ["0.1.5", "0.1.7", "0.1.8.post2", "0.1.14", ""])
def test_the_adapter_sees_what_the_package_sees(version):
    python = environments.python_with("verifiers", *LAST)
    paths = [HERE.parents[1], HERE]
    if version:
        paths.append(environments.beside(python, f"verifiers-{version}", f"verifiers=={version}"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
    command = [str(python), str(HERE / "verifiers_package.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == CASES and {case: told for case, told in results.items() if told} == {}
