"""Tests run on 8 virtual CPU devices (unless JAX_PLATFORMS says otherwise) and keep compiled programs between runs.

Most of the slow ones' time is XLA's. So tests compile with few optimisations, which takes about half as long, but for
those of COMPILED_AS_USERS_DO. JAX_DISABLE_MOST_OPTIMIZATIONS=0 in the environment has all compile as users do. What
the quick tests of a file compile is counted (tests/compilations.py): a file that asks for more than its share fails.
Tests marked "nightly" are skipped unless `-m` names the marker. Tests of the whole run that `finished` makes are slow,
since they need what takes long.
"""

import collections
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator

import pytest

from tests import compilations
from tests.once import once

# Before anything imports jax: it reads these once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("NPROC", "32")  # threads for waiting collectives: see jaxagent/runs/devices.py
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(tempfile.gettempdir()) / "jaxagent-test-cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# Below this folder: golden numbers, what claims that two programs compute the same bits, and what measures memory.
COMPILED_AS_USERS_DO = (
    "engine/test_driver.py", "engine/test_exact.py", "engine/test_functions.py",
    "engine/test_int8.py::test_a_quarter_of_the_memory", "engine/test_sampling.py", "engine/test_scheduler.py",
    "engine/test_turns.py", "golden/", "gpu/",
    "learner/test_context_update.py::test_a_sequence_that_fits", "learner/test_context_update.py::test_exact",
    "learner/test_lora_update.py::test_values", "learner/test_prefixes.py::test_exact", "models/test_kernels.py",
    "models/test_lora.py::test_the_mesh_decides", "models/test_tpu_kernels.py",
)  # fmt: skip
OPTIMISATIONS = "JAX_DISABLE_MOST_OPTIMIZATIONS"
_said_by_user = OPTIMISATIONS in os.environ


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before fixtures are made: how this test's programs are compiled, in this process and in those that it starts."""
    inside = f"{item.path.relative_to(pathlib.Path(__file__).parent).as_posix()}::{item.name}"
    wanted = str(int(not inside.startswith(COMPILED_AS_USERS_DO)))
    compilations.begin(item)
    if _said_by_user or os.environ.get(OPTIMISATIONS) == wanted:
        return
    os.environ[OPTIMISATIONS] = wanted
    if "jax" in sys.modules:
        import jax

        jax.config.update(OPTIMISATIONS.lower(), wanted == "1")
        jax.clear_caches()  # what was compiled otherwise is not to be used again


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A report whose text is no UTF-8, such as what a hostile program printed, would end a worker and all its tests."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    if isinstance(words := report.longrepr, str) or (report.failed and words is not None):
        utf8 = str(words).encode("utf-8", "backslashreplace").decode()
        report.longrepr = words if utf8 == str(words) else utf8
    return report


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """After the test: whether its file still compiles no more than it may."""
    compilations.check(item)


# Files whose tests take longest, longest first: one that a worker began last would be waited for by all others.
LONGEST = ("fleet/test_fleet_runs.py", "test_loop.py", "replay/test_forged.py", "replay/test_replay_command.py")


@pytest.hookimpl(tryfirst=True)  # marks come before -m selects by them
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with slow tests first; those of the night are skipped, unless -m asks for them."""
    here = pathlib.Path(__file__).parent
    for item in items:
        if "finished" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
    slow = collections.Counter(item.path for item in items if item.get_closest_marker("slow"))
    slow |= {here / name: 1000 - i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: -slow[item.path])
    if "nightly" not in config.getoption("markexpr"):
        for item in items:
            if item.get_closest_marker("nightly"):
                item.add_marker(pytest.mark.skip(reason="takes long: `pytest -m nightly` runs it"))


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> pathlib.Path:
    """The workdir of an uninterrupted tiny run in a process of its own. Only to be read."""
    from tests import tiny_run

    def make(folder: pathlib.Path) -> None:
        assert tiny_run.start(folder / "run").wait(600) == 0, (folder / "run.log").read_text()

    return once(tmp_path_factory, "finished", make) / "run"


@pytest.fixture
def small_disk(tmp_path) -> Iterator[pathlib.Path]:
    """A disk of one megabyte; skips, with the reason, where none can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError as failure:
        pytest.skip(f"no mount: {failure}")
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=60)


@pytest.fixture
def sandbox() -> None:
    """Skips, with the reason, where no isolating back end works."""
    from configs import gsm8k_python
    from jaxagent import config as schema
    from jaxagent.envs.base import Opening
    from jaxagent.rollout.workers import Workers

    with Workers(1) as workers:
        try:
            with schema.parse(gsm8k_python.get_config()).env.open(Opening(None, [], workers.run, lambda line: None)):
                pass
        except schema.ConfigError as failure:
            pytest.skip(str(failure))
