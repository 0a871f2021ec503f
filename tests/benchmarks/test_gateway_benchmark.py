"""The gateway's benchmark runs, finds nothing wrong, and ends with its line of JSON."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_benchmark_ends_with_its_figures():
    words = ["-m", "benchmarks.gateway", "--seconds=6", "--sessions=16", "--fuzzed=100"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["errors"] == 0, done.stdout[-2000:]
    assert (told["sessions"], told["fuzzed"]) == (16, 100) and told["played"] > 16
    assert 0 < told["overhead_p50_ms"] <= told["overhead_p99_ms"]
