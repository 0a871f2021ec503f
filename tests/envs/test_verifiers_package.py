"""The real package verifiers, from its first versions to the last with this interface, beside the adapter.

Each case of verifiers_package.py plays an environment of the package twice, by the adapter and by the package's own
rollout, and compares state and reward: at every end (by itself, at either turn limit, at the package's time limit, a
message that was cut, no room behind an observation, failures), with tools, groups, and held-out rows.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.envs.verifiers_versions import interpreter, site_packages

pytestmark = pytest.mark.slow  # installs packages

HERE = pathlib.Path(__file__).parent
CASES = 23  # or more
LIMIT_S = 300
# What each version's environments are trained by: one of each kind, over its versions.
TRAINED = {"0.1.7": ["single"], "0.1.14": ["guess", "secret"], "0.3.1": ["tools", "several"]}


def run(python, *argv, **variables):
    path = os.pathsep.join(map(str, [HERE.parents[1], HERE]))
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **variables}
    done = subprocess.run([str(python), *argv], env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("version", ["0.1.5", "0.1.7", "0.1.8.post2", "0.1.14", "0.3.1"])
def test_the_adapter_sees_what_the_package_sees(version):
    results = run(interpreter(version), HERE / "verifiers_package.py")
    assert len(results) >= CASES and {case: told for case, told in results.items() if told} == {}


@pytest.mark.parametrize("version", TRAINED)
def test_its_environments_train(version, tmp_path):
    """Two steps each by one flag, in the trainer's own process; no attempt fails, and log-probs are the engine's."""
    site = site_packages(version)
    if site.parent.name != f"python3.{sys.version_info.minor}":
        pytest.skip(f"verifiers {version} is there for {site.parent.name} only")
    trained = run(
        sys.executable, HERE / "verifiers_training.py", str(tmp_path), *TRAINED[version], VERIFIERS_SITE=str(site)
    )
    assert trained == {name: [2, 0.0] for name in TRAINED[version]}
