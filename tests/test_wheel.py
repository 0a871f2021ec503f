"""What pip installs: one top-level package, everything it needs inside, and presets that are found from anywhere."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.tiny_run import ROOT

SOURCES = ("jaxagent", "configs", "launch", "data_pipelines", "setup.py", "pyproject.toml", "README.md", "LICENSE")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="setuptools builds the wheel"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> pathlib.Path:
    """A folder that holds what the wheel holds."""
    tmp = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:  # a copy: the build leaves files beside its sources
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp / "source" / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tmp / "source" / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp, "."]
    done = subprocess.run(command, cwd=tmp / "source", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp / "site")
    return tmp / "site"


def _run(site: pathlib.Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Python with nothing of ours but the wheel's content on its path, in a folder that is not the checkout."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(
        [sys.executable, *command], cwd=site.parent, env=environment, capture_output=True, text=True, timeout=300
    )


def test_everything_lies_in_one_package(site):
    assert [path.name for path in site.iterdir() if not path.name.endswith(".dist-info")] == ["jaxagent"]
    for folder, beside in (("", "jaxagent"), ("configs", "configs"), ("launch", "launch"), ("data_pipelines",) * 2):
        tracked = {path.relative_to(ROOT / beside) for path in (ROOT / beside).rglob("*") if path.is_file()}
        wanted = {path for path in tracked if "__pycache__" not in path.parts}
        assert not {path for path in wanted if not (site / "jaxagent" / folder / path).is_file()}, beside


def test_presets_and_their_data_are_found_by_name(site):
    code = (
        "import sys, jaxagent\n"
        "from jaxagent.config import flags\n"
        f"assert jaxagent.__file__.startswith({str(site)!r}), jaxagent.__file__\n"
        "names = 'search_r1 search_r1:laptop-ppo gsm8k_python echo endless_terminals code_agent'\n"
        "for name in names.split():\n"
        "    print(flags.parse_argv(['main', '--config=' + name, '--config.seed=3']).config.seed)\n"
        "from jaxagent.data_pipelines import arithmetic, geography, python_tasks, terminal\n"
    )
    done = _run(site, "-c", code)
    assert done.returncode == 0 and done.stdout.split() == ["3"] * 6, done.stderr[-2000:]


@pytest.mark.parametrize(
    "command",
    [
        "jaxagent.main --config=search_r1 --help",
        "jaxagent.launch.sweep --help",
        "jaxagent.data_pipelines.smollm2 --help",
        "jaxagent.data_pipelines.terminal_written --help",
    ],
)
def test_commands_start(site, command):
    done = _run(site, "-m", *command.split())
    assert (done.returncode == 0 and "usage" in done.stdout.lower()) or "--config.seed" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("config", "said"),
    [("search_r", "Did you mean 'search_r1'?"), ("configs/search_r1.py", "Did you mean 'search_r1'?")],
)
def test_a_wrong_name_is_one_line_with_the_nearest(site, config, said):
    done = _run(site, "-m", "jaxagent.main", f"--config={config}")
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
