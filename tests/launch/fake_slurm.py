"""`srun`, `sbatch` and `scontrol` of one machine: tasks are local processes. What was asked is logged."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time


def srun(words: list[str]) -> int:
    options = {}
    while words and words[0].startswith("--"):
        name, _, value = words.pop(0)[2:].partition("=")
        options[name] = value
    known = {"nodes", "ntasks", "ntasks-per-node", "nodelist", "kill-on-bad-exit", "no-kill", "het-group", "cpu-bind"}
    assert set(options) <= known, set(options) - known
    tasks = []
    nodes = options["nodelist"].split(",")
    assert len(nodes) == int(options["nodes"])
    for rank in range(int(options["ntasks"])):
        node = nodes[rank * len(nodes) // int(options["ntasks"])]
        own = {"SLURM_PROCID": str(rank), "SLURMD_NODENAME": node}
        tasks.append(subprocess.Popen(words, env=os.environ | own, start_new_session=True))
    for signum in (signal.SIGTERM, signal.SIGUSR1):  # srun hands signals on to its tasks
        signal.signal(signum, lambda number, _: [os.killpg(t.pid, number) for t in tasks if t.poll() is None])
    bad = None
    while any(task.poll() is None for task in tasks):
        time.sleep(0.05)
        if bad is None and options["kill-on-bad-exit"] == "1" and any(task.poll() for task in tasks):
            bad = time.monotonic()
            for task in tasks:
                if task.poll() is None:
                    os.killpg(task.pid, signal.SIGTERM)
        if bad is not None and time.monotonic() > bad + 10:
            for task in tasks:
                if task.poll() is None:
                    os.killpg(task.pid, signal.SIGKILL)
    return max(code if code >= 0 else 128 - code for code in (task.returncode for task in tasks))


def sbatch(words: list[str]) -> int:
    """Runs the script as the batch step of a job; its node list is FAKE_NODES."""
    nodes = os.environ["FAKE_NODES"]
    options = {w.split("=")[0]: w.partition("=")[2] for w in words if w.startswith("--") and not w.startswith("--c")}
    script = next(word for word in words if word.endswith(".sh"))
    directives = re.findall(r"^#SBATCH (--\S+)", pathlib.Path(script).read_text(), re.MULTILINE)
    assert directives and not set(options) & {"--config"}
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": nodes}
    os.execvpe("bash", ["bash", *words[words.index(script) :]], os.environ | job)
    raise AssertionError


def scontrol(words: list[str]) -> int:
    if words[:2] == ["show", "hostnames"]:
        print(words[2].replace(",", "\n"))
    return 0


if __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    with open(os.environ["FAKE_SLURM_LOG"], "a") as log:
        log.write(f"{program} {' '.join(arguments)}\n")
    sys.exit({"srun": srun, "sbatch": sbatch, "scontrol": scontrol}[program](arguments))
