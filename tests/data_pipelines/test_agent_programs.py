"""Agent programs as a layer: whole or not at all, one after the other, and each of them starts in a sandbox."""

import asyncio
import json
import os
import time
from pathlib import Path

import pytest

from jaxagent.config import ConfigError
from jaxagent.data_pipelines import agent_programs
from jaxagent.data_pipelines.agent_programs import PROGRAMS
from jaxagent.sandbox import choose
from jaxagent.sandbox.base import Limits, Spec
from jaxagent.sandbox.owner import Owner

LAYER = "JAXAGENT_AGENT_LAYER"  # a layer that is there already
NPM = """#!/bin/sh
# Stands for npm: makes what the packages hold, notes that it was called, and fails as it is told to.
while [ $# -gt 0 ]; do
  case $1 in --prefix) prefix=$2; shift;; *) package=$1;; esac
  shift
done
echo "$package" >>"$CALLED"
case $package in
  $BROKEN) echo 'npm error code E404'; echo "npm error 404  '$package' is not in this registry."; exit 1;;
  $SLOW) sleep 1000;;
esac
m=$prefix/node_modules
mkdir -p $m
echo '{"packages": {"node_modules/it": {"version": "1", "integrity": "sha512-x"}}}' >$m/.package-lock.json
program() { mkdir -p "$(dirname "$m/$1")"; echo '#!/bin/sh' >"$m/$1"; chmod 700 "$m/$1"; }
program @openai/codex/vendor/some-triple/bin/codex
for machine in x64 arm64; do
  program @anthropic-ai/claude-code-linux-$machine/claude
  program opencode-linux-$machine/bin/opencode
  program node-linux-$machine/bin/node
done
program opencode-linux-x64-baseline/bin/opencode
program @qwen-code/qwen-code/cli.js
"""
PIP = """#!/bin/sh
while [ $# -gt 0 ]; do case $1 in --target) target=$2;; esac; shift; done
mkdir -p $target/minisweagent $target/mini_swe_agent-2.4.6.dist-info $target/bin
"""


@pytest.fixture
def installers(tmp_path, monkeypatch):
    """Stand for npm and pip; returns which packages npm was asked for."""
    bin = tmp_path / "bin"
    bin.mkdir()
    for name, text in (("npm", NPM), ("python", PIP)):
        (bin / name).write_text(text)
        (bin / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin}:/usr/bin:/bin")
    monkeypatch.setenv("CALLED", str(tmp_path / "called"))
    monkeypatch.setenv("BROKEN", "none")
    monkeypatch.setenv("SLOW", "none")
    monkeypatch.setattr(agent_programs.sys, "executable", str(bin / "python"))

    def called():
        said = (tmp_path / "called").read_text().split() if (tmp_path / "called").exists() else []
        (tmp_path / "called").unlink(missing_ok=True)
        return said

    return called


def test_a_layer_is_made_and_not_made_again(installers, tmp_path, capsys):
    out = tmp_path / "layer"
    assert agent_programs.main([f"--out={out}", "--python=3.11"]) == 0
    place = out / "opt/agents"
    manifest = json.loads((place / "manifest.json").read_text())
    assert set(manifest) == {*PROGRAMS, "node"} and not list(tmp_path.glob("layer.*"))
    for name, program in PROGRAMS.items():
        known = manifest[name]
        assert known["command"] == f"/opt/agents/bin/{program.command}" and len(known["sha256"]) == 64
        assert known["version"].startswith(program.version)
        script = (place / "bin" / program.command).read_text()
        for word in script.split():  # what it starts is in the layer, by its path inside
            assert not word.startswith("/opt") or (out / word[1:]).is_file(), script
    assert manifest["codex"]["packages"] == {"it": "1 sha512-x"}
    assert manifest["mini_swe_agent"]["packages"] == {"mini_swe_agent": "2.4.6"}
    assert "exec /opt/agents/bin/node /opt/agents/qwen_code/" in (place / "bin/qwen").read_text()
    for path in out.rglob("*"):
        assert path.stat().st_mode & 0o004 and bool(path.stat().st_mode & 0o100) == bool(path.stat().st_mode & 0o001)
    assert len(installers()) == 5
    assert agent_programs.main([f"--out={out}", "--python=3.11"]) == 0
    assert installers() == [] and capsys.readouterr().out.count("there already") == 5
    (place / "opencode/node_modules/more").write_text("x")  # another size than the manifest's
    (place / "bin/claude").unlink()
    assert agent_programs.main([f"--out={out}", "--python=3.12"]) == 0
    assert len(installers()) == 2 and not (place / "opencode/node_modules/more").exists()
    assert json.loads((place / "manifest.json").read_text())["mini_swe_agent"]["version"] == "2.4.6 for Python 3.12"


def test_the_others_are_installed(installers, tmp_path, capsys, monkeypatch):
    """One fails, its reason is said, and the next call makes only that one."""
    monkeypatch.setenv("BROKEN", "@openai*")
    out = tmp_path / "layer"
    assert agent_programs.main([f"--out={out}", "--python=3.11"]) == 1
    said = capsys.readouterr()
    assert said.err == (
        "codex: not installed: npm failed: npm error code E404 | npm error 404  "
        f"'@openai/codex@{PROGRAMS['codex'].version}-linux-{agent_programs.machine()}' is not in this registry.\n"
    )
    assert said.out.endswith(f"layer: {out}; missing: codex\n")
    assert not (out / "opt/agents/codex").exists() and not (out / "opt/agents/bin/codex").exists()
    monkeypatch.setenv("BROKEN", "none")
    installers()
    assert agent_programs.main([f"--out={out}", "--python=3.11"]) == 0
    assert [package.split("@")[1] for package in installers()] == ["openai/codex"]


def test_an_installer_that_hangs_is_ended_with_its_children(installers, tmp_path, monkeypatch):
    monkeypatch.setenv("SLOW", "@openai*")
    begin = time.monotonic()
    failures = agent_programs.install(tmp_path / "layer", ["codex", "claude_code"], "3.11", timeout_s=1.0)
    assert failures == {"codex": "npm was not done within 1 s: try again"} and time.monotonic() - begin < 100
    assert (tmp_path / "layer/opt/agents/claude_code").is_dir()


def test_mistakes(installers, tmp_path, capsys, monkeypatch):
    out = f"--out={tmp_path / 'layer'}"
    for arguments, said in (
        (["--programs=codex,claud"], "error: --programs: 'claud' is not one of codex, claude_code, opencode,"),
        (["--programs=,"], "error: --programs names none of codex,"),
        (["--python=2.7"], "error: --python must be a version such as 3.11, not '2.7'."),
    ):
        assert agent_programs.main([out, *arguments]) == 2
        assert capsys.readouterr().err.startswith(said)
    (tmp_path / "bin/npm").unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert agent_programs.main([out, "--programs=codex"]) == 1
    assert "codex: not installed: npm is not on the PATH: install Node.js" in capsys.readouterr().err
    monkeypatch.setattr(agent_programs.platform, "machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match="not on riscv64"):
        agent_programs.install(tmp_path / "layer", ["codex"], "3.11")


@pytest.fixture(scope="module")
def layer():
    """The layer that the environment variable names: 1.7 GB, which no test downloads by itself."""
    if not os.environ.get(LAYER):
        pytest.skip(f"{LAYER} names no folder of `python -m data_pipelines.agent_programs`")
    return Path(os.environ[LAYER])


@pytest.mark.slow
def test_each_program_starts_in_a_sandbox(layer):
    """Without a network, as a user who may write nothing of it, with 128 processes and 1 GiB."""
    manifest = json.loads((layer / "opt/agents/manifest.json").read_text())

    async def main(owner):
        try:
            backend = await choose.choose_backend(owner, ("namespaces",))
        except ConfigError as failure:
            pytest.skip(str(failure))
        try:
            limits = Limits(processes=128)
            async with await backend.start(Spec(layers=(str(layer),), limits=limits)) as sandbox:
                for name, program in PROGRAMS.items():
                    command = f"/opt/agents/bin/{program.command}"
                    # mini says its version, then does the work of an empty command line: --help ends it.
                    argv = [command, "--help"] if name == "mini_swe_agent" else [command, "--version"]
                    done = await sandbox.execute(argv, 120, 20_000)
                    assert done.exit_code == 0, (name, done)
                    if name == "mini_swe_agent":
                        assert b"mini" in done.output and b"--exit-immediately" in done.output
                    else:
                        assert manifest[name]["version"].split()[0] in done.output.decode(), (name, done)
                said = await sandbox.run("touch /opt/agents/x /opt/agents/bin/codex", 10, 1000)
                assert said.exit_code != 0 and said.output.count(b"Read-only file system") == 2
                assert not (await sandbox.run("env | grep -c PYTHON", 10, 100)).output.strip(b"0\n")
        finally:
            await backend.close()

    owner = Owner()
    try:
        asyncio.run(main(owner))
    finally:
        owner.close()


@pytest.mark.slow
def test_the_manifest_is_that_of_the_files(layer):
    manifest = json.loads((layer / "opt/agents/manifest.json").read_text())
    assert set(manifest) >= set(PROGRAMS)
    for name, known in manifest.items():
        folder = layer / "opt/agents" / name
        assert agent_programs._size(folder) == known["bytes"] and agent_programs._digest(folder) == known["sha256"]
