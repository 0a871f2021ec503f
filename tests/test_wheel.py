"""What pip installs: one top-level package, everything it needs inside, and presets that are found from anywhere."""

import importlib.util
import os
import pathlib
import shutil
import struct
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
def source(tmp_path_factory) -> pathlib.Path:
    """A copy of the sources, since a build leaves files beside them."""
    tmp = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp / "source" / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tmp / "source" / name)
    return tmp / "source"


def _built(source: pathlib.Path, name: str, **environment: str) -> pathlib.Path:
    """The wheel, in a folder of this name; what the build said is in the file "said" beside it."""
    folder = source.parent / name
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation", "-w", folder, "."]
    env = {**os.environ, **environment}
    done = subprocess.run(command, cwd=source, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (folder / "said").write_text(done.stdout + done.stderr)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(source) -> pathlib.Path:
    """The wheel's file."""
    return _built(source, "wheels")


@pytest.fixture(scope="module")
def site(wheel) -> pathlib.Path:
    """A folder into which pip has installed the wheel."""
    site = wheel.parents[1] / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", site, wheel]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return site


def _run(site: pathlib.Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python with nothing of ours but the wheel's content on its path, in a folder that is not the checkout."""
    environment = {**os.environ, "PYTHONPATH": str(site), **environment}
    return subprocess.run(
        [sys.executable, *command], cwd=site.parent, env=environment, capture_output=True, text=True, timeout=300
    )


def test_everything_lies_in_one_package(site):
    assert {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} <= {"jaxagent", "bin"}
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


SANDBOX = """
import asyncio
from jaxagent.runs import provenance
from jaxagent.sandbox import choose, owner
from jaxagent.sandbox.base import Spec
mine = owner.Owner()
async def main():
    backend = await choose.choose_backend(mine, [], unsafe=True)
    async with await backend.start(Spec()) as sandbox:
        done = await sandbox.run("echo served by", 10, 100)
    print(done.output.decode().strip(), backend.program)
print("digest", provenance.code_digest())
try:
    asyncio.run(main())
finally:
    mine.close()
"""


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")
def test_the_wheel_brings_the_program_of_sandboxes_and_needs_no_compiler(wheel, site, tmp_path):
    assert wheel.name.endswith(f"-py3-none-linux_{os.uname().machine}.whl")
    metadata = next(site.glob("*.dist-info/WHEEL")).read_text()
    assert "Root-Is-Purelib: false" in metadata and f"Tag: py3-none-linux_{os.uname().machine}" in metadata
    (program,) = (site / "jaxagent/sandbox/native").glob("*.bin")
    elf = program.read_bytes()
    first, size, count = struct.unpack_from("<Q", elf, 32)[0], *struct.unpack_from("<HH", elf, 54)
    assert 3 not in {
        struct.unpack_from("<I", elf, first + i * size)[0] for i in range(count)
    }  # no loader: it is static
    machine = {
        "PATH": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }  # no compiler, and nothing compiled yet
    served = _run(site, "-c", SANDBOX, **machine)
    assert served.returncode == 0, served.stderr
    digest, line = served.stdout.splitlines()
    assert line == f"served by {program}"
    away = program.rename(tmp_path / "away")
    refused = _run(site, "-c", SANDBOX, **machine)
    away.rename(program)
    assert refused.stdout.strip() == digest  # the package is the same with the program and without
    assert "ConfigError: sandboxes need a small program in C" in refused.stderr.splitlines()[-1]


def test_a_wheel_without_a_compiler_is_for_every_machine_and_says_so(source, wheel, tmp_path):
    wheel = _built(source, "without", PATH=str(tmp_path))
    said = (wheel.parent / "said").read_text()
    assert said.count("The wheel brings no program for sandboxes") == 1 and wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert not [name for name in names if name.endswith(".bin")] and "jaxagent/sandbox/native/serve.c" in names


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
