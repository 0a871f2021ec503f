"""launch/Dockerfile: what it names is there, its steps run, and its command answers.

Its steps run twice: quickly, with a `pip` that only unpacks, over this machine's /usr; and for real where there is a
Docker daemon, or where JAXAGENT_PYTHON_ROOT names a root folder of a Linux with `pip` (and the network is reachable).
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

import pytest

from jaxagent.sandbox.images import __main__ as images
from jaxagent.sandbox.images import dockerfile
from tests.tiny_run import ROOT

TEXT = (ROOT / "launch/Dockerfile").read_text(encoding="utf-8")
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")
EXTRAS = ("", "cuda", "tpu")  # the values that the file's comment names for EXTRA, of which cuda is the default
UNPACK = """\
#!/usr/bin/python3
import sys, zipfile
assert sys.argv[1:3] == ["install", "--no-cache-dir"], sys.argv
path, bracket, extra = sys.argv[3].partition("[")
zipfile.ZipFile(path).extractall("/opt/site")
open("/opt/extra", "w").write(bracket + extra)
"""


def test_what_the_recipe_names_is_there():
    steps = dockerfile.parse(TEXT)
    assert [step.name for step in steps] == ["FROM", "ARG", "COPY", "RUN", "WORKDIR", "COPY", "ENV", "USER", "NOTE"]
    sources = [word for step in steps if step.name == "COPY" for word in step.rest.split()[:-1]]
    assert sources == ["dist/*.whl", "configs"] and (ROOT / "configs").is_dir()
    ignored = (ROOT / "launch/Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    assert ignored == ["*", *(f"!{source.partition('/')[0]}" for source in sources)]
    major, minor = map(int, re.search(r"^FROM python:(\d+)\.(\d+)-slim$", TEXT, re.MULTILINE).groups())
    oldest = re.search(r'python_requires=">=(\d+)\.(\d+)"', SETUP).groups()
    assert (major, minor) >= tuple(map(int, oldest)) and minor in eval(re.search(r"for minor in (\(.*?\))", SETUP)[1])
    for extra in filter(None, EXTRAS):
        assert re.search(rf'^ +"{extra}": ', SETUP, re.MULTILINE), extra
    assert re.findall(r"EXTRA=(\w*)", TEXT) == ["", "tpu", "cuda"]


def test_its_command_answers_with_the_list():
    (command,) = re.findall(r'^CMD \["(\w+)"\]$', TEXT, re.MULTILINE)
    module, function = re.search(rf'"{command}=([\w.]+):(\w+)"', SETUP).groups()
    code = f"import sys; from {module} import {function}; sys.exit({function}())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "jaxagent train" in done.stdout, done.stderr


@pytest.fixture
def context():
    """An empty folder that the sandboxes' user can reach, which pytest's own is not."""
    with tempfile.TemporaryDirectory(prefix="jaxagent-test-dockerfile-") as folder:
        pathlib.Path(folder).chmod(0o711)
        (pathlib.Path(folder) / "context").mkdir()
        yield pathlib.Path(folder) / "context"


def built(context, text: str, base: str, *words: str) -> int:
    """Exit code of our own builder."""
    (context / "Dockerfile").write_text(text)
    store = context.parent / "images"
    command = ["build", f"{context}/Dockerfile", f"--context={context}", f"--base={base}", f"--store={store}", *words]
    return images.main(command)


@pytest.mark.skipif(shutil.which("dash") is None, reason="the image's sh is dash")
@pytest.mark.parametrize("extra", EXTRAS)
def test_its_steps_run(extra, context, capfd):
    shutil.copytree(ROOT / "configs", context / "configs", ignore=shutil.ignore_patterns("__pycache__"))
    (context / "dist").mkdir()
    with zipfile.ZipFile(context / "dist/jaxagent-9.9-py3-none-any.whl", "w") as wheel:
        wheel.writestr("jaxagent.py", "")
    (context / "pip").write_text(UNPACK)
    (context / "pip").chmod(0o755)
    start, first, rest = TEXT.partition("FROM python:3.12-slim\n")
    assert first
    bracket = f"[{extra}]" if extra else ""
    checks = f"""RUN test "$(cat /opt/extra)" = "{bracket}" && test -f /opt/site/jaxagent.py && ! ls /tmp/*.whl
RUN test "$(pwd)" = /jaxagent && test -f configs/search_r1.py && test "$XDG_CACHE_HOME" = /tmp/cache
"""
    text = f"{start}FROM debian:12\nENV PATH=/opt/bin:/usr/bin:/bin\nCOPY pip /opt/bin/\n{rest}{checks}"
    if built(context, text, "debian:12=host", f"--arg=EXTRA={extra}"):
        why = capfd.readouterr()
        if "no sandbox back end" in why.err or "user namespaces" in why.err:
            pytest.skip("no sandbox back end works here")
        raise AssertionError(why)


def docker() -> bool:
    """Whether a daemon answers."""
    return (
        shutil.which("docker") is not None and subprocess.run(["docker", "info"], capture_output=True).returncode == 0
    )


@pytest.mark.nightly
def test_the_image_for_cpus_is_built_and_finds_its_devices(context):
    """The real wheel and the real packages: minutes, and gigabytes from the package index."""
    root = os.environ.get("JAXAGENT_PYTHON_ROOT", "")
    if not (root or docker()):
        pytest.skip("no Docker daemon, and JAXAGENT_PYTHON_ROOT names no root folder of a Linux with pip")
    subprocess.run(["git", "clone", "-q", ROOT, context], check=True)
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", "dist", "."]
    subprocess.run(wheel, cwd=context, check=True, timeout=300)
    text = f"{TEXT}RUN jaxagent doctor --workdir=/tmp/runs\n"
    if root:
        assert built(context, text, f"python:3.12-slim={root}", "--arg=EXTRA=", "--network") == 0
        return
    (context / "Dockerfile").write_text(text)
    command = ["docker", "build", "-f", "Dockerfile", "--build-arg", "EXTRA=", "."]
    subprocess.run(command, cwd=context, check=True, timeout=1800)
