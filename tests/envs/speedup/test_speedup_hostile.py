"""Programs that want to be paid without being faster earn nothing; each of them is paid by a naive harness."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxagent.config import SandboxConfig
from jaxagent.envs.base import Opening
from jaxagent.envs.speedup import station
from jaxagent.envs.speedup.environment import Speedup, gain
from jaxagent.rollout.workers import Workers
from tests.envs.speedup import naive
from tests.envs.speedup.hostile import ALLCLOSE, ATTACKS, C_ATTACKS, LOOP, SPINS, TRIES

HERE = Path(__file__).parent
ATTACK_OF = {
    f"{language}_{name}": (language, *(attack if isinstance(attack, tuple) else (attack, ALLCLOSE)))
    for language, attacks in (("numpy", ATTACKS), ("c", C_ATTACKS))
    for name, attack in attacks.items()
}
VECTOR = {"dtype": "float64", "shape": [naive.N], "draw": f"rng.random({naive.N}) + 0.5"}
DOT = {
    "language": "numpy",
    "reference": LOOP.replace("slow", "f"),
    "inputs": [VECTOR, VECTOR],
    "output": {"dtype": "float64", "shape": []},
    "tolerance": 1e-9,
    "full_speedup": 5.0,
}
C_DOT = DOT | {
    "language": "c",
    "reference": "void f(const double *x, const double *y, double *out) { double s = 0; "
    "for (int i = 0; i < 30000; i++) s += x[i] * y[i]; *out = s; }",
}
MARGIN = Speedup().margin


@pytest.fixture(scope="module")
def measured():
    """A function of (code, problem): what a station says."""
    with Workers(1) as workers:
        opening = Opening(None, [], workers.run, lambda line: None)
        with station.open_stations(opening, SandboxConfig(), 1, True) as stations:
            yield lambda code, problem=DOT, s=20.0: workers.run(stations.measure(problem, code, 4, 4, s), 120.0)


@pytest.fixture(scope="module")
def naively(tmp_path_factory):
    """What the naive harness says of each attack."""
    done = subprocess.run(
        [sys.executable, str(HERE / "naive.py")],
        input=json.dumps(ATTACK_OF), cwd=tmp_path_factory.mktemp("naive"), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ATTACK_OF)
def test_an_attack_that_a_naive_harness_pays_earns_nothing(name, naively, measured):
    assert naively[name]["correct"] and naively[name]["speedup"] > 1.5, naively[name]
    language, code, _ = ATTACK_OF[name]
    found = measured(code, DOT if language == "numpy" else C_DOT)
    assert found.error or gain(found.sure, DOT["full_speedup"], MARGIN) == 0.0, found


def test_who_ends_its_process_between_two_calls_has_failed(measured):
    """And not the measurement: an episode whose environment fails is left out."""
    code = "import signal, time\ndef f(x, y):\n    signal.setitimer(signal.ITIMER_REAL, 1e-4)\n    return x @ y\n"
    assert [bool(measured(code).error) for _ in range(3)] == [True] * 3
    assert "takes too long" in measured("def f(x, y):\n    while True: pass\n", DOT, 1.0).error
    assert "Segmentation fault" in measured("import ctypes\ndef f(x, y):\n    ctypes.string_at(0)\n").error
    assert "MemoryError" in measured("def f(x, y):\n    return x @ y + len(bytearray(1 << 30))\n").error


def test_a_clock_that_stands_still_while_a_process_runs_is_not_believed(measured, monkeypatch, tmp_path):
    """A judge that does not stop a runner before it reads its clock pays a program that never waits."""
    fast = DOT | {"reference": "def f(x, y):\n    return x @ y\n"}  # there is nothing to gain
    text = station.BENCH.read_text()
    begin, end = text.index("        os.kill(self.pid, signal.SIGSTOP)"), text.index("    def kill(self)")
    (tmp_path / "bench.py").write_text(text[:begin] + "\n" + text[end:])
    with monkeypatch.context() as patch, Workers(1) as workers:
        patch.setattr(station, "BENCH", tmp_path / "bench.py")
        with station.open_stations(Opening(None, [], workers.run, print), SandboxConfig(), 1, False) as stations:
            tries = [workers.run(stations.measure(fast, SPINS, 1, 2, 20.0), 60.0) for _ in range(20)]
    assert max(one.speedup for one in tries) > 2, tries
    for _ in range(5):
        assert gain(measured(SPINS, fast).sure, 5.0, MARGIN) == 0.0


def test_no_program_uses_up_its_station(measured):
    """Of the disk, by its descriptors or a library; nor does a text that is none in UTF-8 fail the measurement."""
    assert measured("import os\nwhile True: os.write(1, bytes(1 << 20)); os.write(2, bytes(1 << 20))", DOT, 3.0).error
    assert measured("char all[1 << 26] = {1};\nvoid f() {}", C_DOT).error
    assert measured("\ud800", C_DOT).error and measured("\ud800").error
    for problem in (DOT, C_DOT):
        assert measured(problem["reference"], problem).error == ""


@pytest.mark.slow
def test_who_uses_up_the_time_of_the_measurement_has_failed(measured):
    """And not the task, whose reference comes next."""
    sleeps = "import time\nbegun = time.monotonic()\ncalls = []\ndef f(x, y):\n    calls.append(1)\n"
    sleeps += "    if len(calls) == 5:\n        time.sleep(max(0, {} - (time.monotonic() - begun)))\n    return x @ y\n"
    found = [measured(sleeps.format(seconds), DOT, 1.5).error for seconds in (1.3, 1.4, 1.45, 1.5) * 2]
    assert found == ["it takes too long"] * len(found)


@pytest.mark.slow
def test_a_compiler_reads_nothing_of_the_measurement(measured):
    for name in ("job", "result", "public.json", "/tmp/bench/result", "/proc/self/environ"):
        assert "No such file" in (error := measured(f'#include "{name}"\n', C_DOT).error) or "ermission" in error, name
        found = measured(f'__asm__(".incbin \\"{name}\\"");\nvoid f(const double *x) {{}}', C_DOT)
        assert "error" in found.error.lower() or found.error == "cc fails", found


def test_what_is_faster_is_paid(measured):
    """So that the attacks above do not fail because everything does."""
    found = measured("def f(x, y):\n    return x @ y\n")
    assert not found.error and gain(found.sure, DOT["full_speedup"], MARGIN) == 1.0, found


def test_a_candidate_has_no_rights_that_the_same_program_has_outside(measured):
    outside = subprocess.run([sys.executable, "-c", TRIES + "print(*able)"], capture_output=True, text=True, timeout=60)
    assert len(outside.stdout.split()) >= 10, outside
    assert measured(TRIES + "raise KeyError(*able)\n").error.endswith("KeyError")


def test_nothing_in_its_memory_tells_the_reference(measured):
    """Of this job or an earlier one: all that the collector knows."""
    mark = "# the-mark-of-the-reference"
    search = (
        "import gc\n"
        "def seen():\n"
        "    mark = '-'.join(['the', 'mark', 'of', 'the', 'reference'])\n"
        "    all_of = [o.values() if isinstance(o, dict) else o for o in gc.get_objects()"
        " if isinstance(o, (dict, list, tuple))]\n"
        "    return sum(isinstance(v, (str, bytes)) and mark in str(v) for values in all_of for v in values)\n"
        "raise KeyError(seen())\n"
    )
    code = f"reference = {mark!r}\n{search}"
    outside = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "KeyError: 0" not in outside.stderr and "KeyError: " in outside.stderr
    problem = DOT | {"reference": DOT["reference"] + mark}
    assert not measured(LOOP.replace("slow", "f"), problem).error
    assert measured(search, problem).error.endswith("KeyError: 0")


def test_the_reference_itself_is_not_paid(measured):
    """In both languages, however often it is tried."""
    for problem in (DOT, C_DOT):
        found = [measured(problem["reference"], problem) for _ in range(8)]
        assert not any(one.error for one in found)
        assert [gain(one.sure, problem["full_speedup"], MARGIN) for one in found] == [0.0] * 8, found
        assert 0.6 < sorted(one.speedup for one in found)[4] < 1.6
