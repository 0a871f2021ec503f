"""A naive harness, for tests: the candidate in the harness's own process, the same inputs in every call, wall time.

    python naive.py < attacks.json       {name: [language, code, how outputs are compared]}; prints {name: its verdict}

Each attack runs in a child of its own, which prints what the harness found. What the parent reads is believed.
"""

import ctypes
import json
import os
import subprocess
import sys
import time

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
import numpy as np

N = 30_000


def reference(x, y):  # the-mark-of-the-reference
    """What is to be made faster."""
    s = 0.0
    for a, b in zip(x, y, strict=True):
        s += a * b
    return s


def measure(function, inputs):
    """(seconds of the fastest call, the last output)."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        output = function(*inputs)
        times.append(time.perf_counter() - start)
    return min(times), output


def loaded(language, code):
    """The candidate."""
    if language == "numpy":
        space = {"__name__": "submission"}
        exec(code, space)
        return space["f"]
    library = os.path.abspath(f"candidate-{os.getpid()}.so")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=code.encode(), check=True)
    function, output = ctypes.CDLL(library).f, np.zeros(())

    def call(*inputs):
        function(*(ctypes.c_void_p(array.ctypes.data) for array in (*inputs, output)))
        return output.copy()

    return call


def harness(language, code, comparison):
    """Prints whether a candidate is correct, and its speed-up."""
    rng = np.random.default_rng(0)
    inputs = [rng.random(N) + 0.5, rng.random(N) + 0.5]
    with open("expected.json", "w") as file:
        json.dump(reference(*inputs), file)
    candidate_s, output = measure(loaded(language, code), inputs)
    reference_s, right = measure(reference, inputs)
    for _ in range(100):  # another process may still be at it
        correct = bool(eval(comparison, {"np": np, "output": output, "right": right}))
        if correct:
            break
        time.sleep(0.02)
    print(json.dumps({"correct": correct, "speedup": reference_s / max(candidate_s, 1e-9)}), flush=True)


def attempt(attack):
    """What the harness says of an attack, which runs in a process of its own."""
    sight, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(report, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.closerange(3, 20)
        try:
            harness(*attack)
        finally:
            os._exit(0)
    os.close(report)
    with os.fdopen(sight) as file:
        lines = file.read().splitlines()
    os.waitpid(pid, 0)
    return json.loads(lines[0]) if lines else {"correct": False, "speedup": 0.0}


def main():
    """Runs every attack, and again where it was not paid: wall time hangs on what else the machine does."""
    findings = {}
    for name, attack in json.load(sys.stdin).items():
        for _ in range(5):
            findings[name] = attempt(attack)
            if findings[name]["correct"] and findings[name]["speedup"] > 1.5:
                break
    print(json.dumps(findings))


if __name__ == "__main__":
    main()
