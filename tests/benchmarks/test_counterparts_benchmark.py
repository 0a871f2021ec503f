"""The benchmark of slow counterparts and of a second model runs, and ends with its line of JSON."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.nightly
def test_the_benchmark_ends_with_its_figures():
    words = ["-m", "benchmarks.counterparts", "--episodes=16", "--slots=8", "--repetitions=1"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["episodes"], told["slots"]) == (16, 8)
    assert told["speedup"] > 1.0 and told["step_ratio"] < told["step_ratio_before"]
    assert 0 < told["idle_frac_after"] < told["idle_frac_before"] < 1 and len(told["second_model_overheads"]) == 1
