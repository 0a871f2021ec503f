"""The one script of a GPU: every part is a process that may fail, hang or say nothing, and the others go on."""

import json
import sys

import pytest

from benchmarks import gpu


def part(code, **changes):
    return gpu.Part(**{"name": "part", "limit_s": 20.0, "command": ("-c", code)} | changes)


@pytest.mark.parametrize(
    "code, figures",
    [
        ("print('warm'); print('{\"rate\": 2.5}')", {"rate": 2.5}),
        ("print('3 passed')", {"said": "3 passed"}),
        ("print('first'); raise SystemExit('no such card')", {"error": "exit status 1: no such card"}),
        ("", {"said": "no output"}),
    ],
)
def test_a_part_says_its_figures_or_why_there_are_none(code, figures, tmp_path):
    said = gpu.run_part(part(code), 20.0, tmp_path, [])
    assert said.pop("seconds") >= 0 and said == figures


def test_a_part_that_hangs_ends_at_its_limit(tmp_path):
    said = gpu.run_part(part("import time; print('compiling', flush=True); time.sleep(60)"), 2.0, tmp_path, [])
    assert "not done after 2 s; its last line: compiling" in said["error"] and said["seconds"] < 20


def test_ceilings_are_measured_once_and_given_to_the_others():
    measured = {"copy_gb_per_s": 4242.0, "product_tflops": 700.0, "device": "a card"}
    assert gpu.flags_of(part("", ceilings=("copy_gb_per_s",)), measured, dry=False) == ["--copy_gb_per_s=4242.0"]
    assert gpu.flags_of(part("", ceilings=("copy_gb_per_s",)), {}, dry=False) == []


def test_the_command_goes_on_after_a_failure_and_writes_what_it_knows(tmp_path, monkeypatch, capsys):
    parts = (
        part("raise SystemExit(3)", name="breaks"),
        part("print('{\"rate\": 1}')", name="works"),
        part("", name="absent", needs=("no_such_package",)),
        part("", name="long", limit_s=6000.0),
    )
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["gpu", f"--out={tmp_path}", "--minutes=1"])
    assert gpu.main() == 1
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert results == json.loads((tmp_path / "result.json").read_text())
    assert results["breaks"]["error"].startswith("exit status 3") and results["works"]["rate"] == 1
    assert results["absent"] == {"skipped": "needs no_such_package"} and "were left" in results["long"]["skipped"]


@pytest.mark.nightly
def test_every_part_runs_at_tiny_sizes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu", "--dry", f"--out={tmp_path}", "--minutes=20"])
    assert gpu.main() == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(results) == {part.name for part in gpu.PARTS}
    assert results["step-0.5b"]["compiles"] == 0 and results["exactness"]["equal"] == 1.0
