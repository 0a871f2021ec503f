"""`jaxagent doctor` on machines that are broken in one way each, and on the one that runs the tests."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from launch import doctor
from tests.tiny_run import ROOT

METADATA = """\
Metadata-Version: 2.1
Name: {name}
Version: {version}
Requires-Python: >=3.11
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Makes Python find a package's metadata, before those of the packages that are there."""
    monkeypatch.syspath_prepend(tmp_path / "site")

    def write(name: str, version: str, *lines: str) -> None:
        folder = tmp_path / "site" / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(METADATA.format(name=name, version=version) + "".join(f"{x}\n" for x in lines))

    return write


def package(folder: pathlib.Path, monkeypatch, code: str, name: str = "jax") -> None:
    """A package in the place of a real one, for child processes."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")


def by_name(findings) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in findings}


def test_packages_that_are_missing_or_too_old_are_named_with_the_command(install):
    of_extras = [
        "one; extra == 'test'", "absent-package>=2; extra == 'test'", "one[fast]; extra == 'cuda'",
        "two; python_version < '3' and extra == 'cuda'",
    ]  # fmt: skip
    extras = ["Provides-Extra: test", "Provides-Extra: cuda"]
    wanted = ["one>=1.5", "two<3", "three", "never; sys_platform == 'win32'", *of_extras]
    install("jaxagent", "9.9", *extras, *(f"Requires-Dist: {line}" for line in wanted))
    install("one", "1.10.0", "Requires-Dist: accelerated-one; extra == 'fast'")
    install("two", "3.0")
    lines = by_name(doctor.packages())
    pip = f"{sys.executable} -m pip install"
    assert lines["Python"].state == "ok" and lines["packages"].text == "jaxagent 9.9, 1 of 3: one 1.10.0"
    assert lines["two<3"] == doctor.Finding("two<3", "fault", "two is 3.0, wanted <3", f"{pip} 'two<3'")
    assert lines["three"] == doctor.Finding("three", "fault", "three is not installed", f"{pip} three")
    test, cuda = lines["[test]"], lines["[cuda]"]
    assert (test.state, test.do) == ("note", f"{pip} 'absent-package>=2'") and "for tests" in test.text
    assert "accelerated-one is not installed" in cuda.text and cuda.do == f"{pip} 'one[fast]'"
    assert not any("never" in name for name in lines)


def test_a_python_of_another_age_is_a_fault(install, monkeypatch):
    install("jaxagent", "9.9")
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.10.4")
    assert by_name(doctor.packages())["Python"].state == "fault"


def test_a_checkout_that_nobody_installed_is_said_to_be_one(monkeypatch):
    def missing(name):
        raise doctor.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.importlib.metadata, "distribution", missing)
    assert by_name(doctor.packages())["packages"].state == "note"


def test_every_extra_is_explained():
    names = re.findall(r'^        "([\w-]+)": ', (ROOT / "setup.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert list(doctor.EXTRAS) == [name for name in names if not name.startswith("jaxagent")]


def test_a_disk_that_is_full_or_cannot_be_written_is_a_fault(tmp_path, monkeypatch):
    there = doctor.disk("workdir", tmp_path / "to/be/made", "fault", "another")
    assert there.state in ("ok", "note") and not (tmp_path / "to").exists()
    (tmp_path / "file").touch()
    refused = doctor.disk("workdir", tmp_path / "file" / "runs", "fault", "another")
    assert refused.state == "fault" and "Not a directory" in refused.text and refused.do == "another"
    real = os.statvfs(tmp_path)

    def of_size(free_bytes: int, files: int = 1000):
        values = list(real)
        values[1], values[4], values[5], values[7] = 1, free_bytes, 1_000_000, files
        monkeypatch.setattr(doctor.os, "statvfs", lambda path: os.statvfs_result(values))
        return doctor.disk("workdir", tmp_path, "fault", "another")

    assert [of_size(size).state for size in (10**8, 10**9, 10**10)] == ["fault", "note", "ok"]
    assert of_size(10**10, files=0).state == "fault" and "0.1 GB free" in of_size(10**8).text


def test_a_user_without_a_home_is_told_that_nothing_compiled_is_kept(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(doctor.files, "cache_directory", lambda: (_ for _ in ()).throw(RuntimeError))
    for name in ("packages", "devices"):
        monkeypatch.setattr(doctor, name, lambda *wait: [])
    monkeypatch.setattr(doctor, "sandboxes", lambda wait_s: None)
    *findings, _ = doctor.look(tmp_path, 1.0)
    assert "XDG_CACHE_HOME" in by_name(findings)["compile cache"].do


def test_memory_is_the_least_of_machine_and_container(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  9000000 kB\nMemAvailable:   4000000 kB\n")
    assert doctor.free_memory(tmp_path) == 4.096
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("500000000\n")
    for most, free in (("max", 4.096), ("2000000000", 1.5)):
        (group / "memory.max").write_text(f"{most}\n")
        assert doctor.free_memory(tmp_path) == free


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import time, os\nos.fork()\ntime.sleep(600)", "nothing came in 1 s, and the process was killed"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("raise RuntimeError('the plug-in of\\nanother version')", "another version"),
    ],
)
def test_a_plug_in_that_hangs_or_dies_neither_hangs_nor_ends_the_doctor(code, why, tmp_path, monkeypatch):
    package(tmp_path, monkeypatch, code)
    (finding,) = doctor.devices(1.0)
    assert (finding.name, finding.state) == ("devices", "fault") and why in finding.text
    assert "--force-reinstall jax jaxlib" in finding.do


WORKS = """
import os, time, types
if os.environ.get("JAX_PLATFORMS") != "cpu": time.sleep(600)
def devices(): return [types.SimpleNamespace(platform="cpu", device_kind="cpu")] * 2
"""


def test_where_only_the_cpu_works_the_variable_that_chooses_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    package(tmp_path, monkeypatch, WORKS)
    (tmp_path / "jaxagent").mkdir()
    (tmp_path / "jaxagent" / "__init__.py").touch()
    (tmp_path / "jaxagent" / "loop.py").touch()
    monkeypatch.chdir(tmp_path)  # where a child of -c looks first
    (finding,) = doctor.devices(1.0)
    assert finding.state == "fault" and finding.do.startswith("export JAX_PLATFORMS=cpu")


def test_a_package_that_is_broken_is_named_by_the_import_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    package(tmp_path, monkeypatch, WORKS)
    package(tmp_path, monkeypatch, "raise ModuleNotFoundError(\"No module named 'ml_dtypes'\")", "numpy")
    devices, imports = doctor.devices(60.0)
    assert (devices.state, devices.text) == ("ok", "2 x cpu (cpu)")
    assert imports.state == "fault" and imports.do.endswith("pip install ml-dtypes")


def test_an_accelerator_that_jax_does_not_use_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    package(tmp_path, monkeypatch, WORKS)
    monkeypatch.setitem(doctor.ACCELERATORS, "cuda12", "/dev/null")
    finding = next(iter(doctor.devices(60.0)))
    assert finding.state == "note" and "'jax[cuda12]'" in finding.do


def test_a_machine_without_programs_has_no_sandbox_and_says_what_brings_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    finding = doctor.sandboxes(60.0)
    if finding.state == "ok":
        pytest.skip("this installation brings the program of sandboxes")
    assert finding.state == "note" and "no C compiler" in finding.text and "gcc" in finding.do


def test_exit_codes_and_json(tmp_path, monkeypatch, capsys):
    fine, bad = doctor.Finding("a", "note", "b", "c"), doctor.Finding("d", "fault", "e")
    monkeypatch.setattr(doctor, "look", lambda workdir, wait_s: [fine])
    assert doctor.main([]) == 0
    assert capsys.readouterr().out == "note   a: b\n       -> c\n\na laptop's run works here\n"
    monkeypatch.setattr(doctor, "look", lambda workdir, wait_s: [fine, bad])
    assert doctor.main(["--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["works"] is False and shown["findings"][1] == {"name": "d", "state": "fault", "text": "e", "do": ""}
    assert doctor.main(["--wait_s=0"]) == 2 and "--wait_s" in capsys.readouterr().err


@pytest.mark.slow
def test_the_machine_that_runs_the_tests_is_well(tmp_path):
    command = [sys.executable, "-m", "jaxagent", "doctor", "--json", f"--workdir={tmp_path}", "--wait_s=120"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert by_name(doctor.Finding(**one) for one in json.loads(done.stdout)["findings"])["devices"].state == "ok"
