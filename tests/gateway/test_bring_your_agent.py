"""docs/bring_your_agent.md, run as it stands; and how scripts on this machine end."""

import asyncio
import contextlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from jaxagent.config import ConfigError
from jaxagent.envs.script import Script
from jaxagent.envs.script.host import Host
from jaxagent.observe import jsonl
from jaxagent.types import StopReason, Task
from tests import tiny_run

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/bring_your_agent.md").read_text()
MODEL = [flag for flag in tiny_run.FLAGS.split() if flag.startswith("--config.model.")]
TINY = (
    "--config.rl.tasks_per_step=1 --config.rl.group_size=4 --config.data.num_eval=1 --config.engine.slots=4 "
    "--config.engine.pages=64 --config.engine.prefill_tokens=256 --config.rl.batch.row_tokens=256 "
    "--config.tokenizer.vocab_size=300 --config.rl.advantage.drop_zero_signal=false --config.checkpoint.every=0"
)


def write_agent(folder: pathlib.Path) -> None:
    """The page's two files and its tasks."""
    agent, env = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len([line for line in env.splitlines() if line.strip()]) <= 10
    (folder / "my_agent.py").write_text(agent)
    (folder / "my_env.py").write_text(env)
    (commands,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    subprocess.run(["bash", "-ec", commands.partition("python -m")[0]], cwd=folder, check=True, timeout=60)


@pytest.mark.slow
def test_the_pages_own_code_trains_a_policy_through_an_unchanged_script(tmp_path):
    pytest.importorskip("openai", reason="the openai package is not installed")
    write_agent(tmp_path)
    (commands,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT), "PATH": path}
    done = subprocess.run(
        ["bash", "-ec", f"{commands.rstrip()} {shlex.join([*TINY.split(), *MODEL])}"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=550,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    workdir = tmp_path / "runs/my_agent"
    assert json.loads((workdir / "config.json").read_text())["env"]["name"] == "my_env:MyAgent"
    steps = [record for record in jsonl.read(workdir / "metrics.jsonl") if record["stage"] == "rl"]
    assert [record["step"] for record in steps] == [0, 1, 2]
    for record in steps[1:]:
        assert record["stop/answer"] == 1.0, record
        assert record["episode/requests"] == 2.0 and record["episode/trajectories"] == 1.0
        assert record["logprob_gap/max"] == 0.0 and "reward/score" in record
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["failed_episodes"] == {} and "eval/score_after_rl" in summary
    assert summary["compiles_after_warmup"] == 0


def python(text, *words):
    return (sys.executable, "-c", text, *words)


def played(attempt, reason=StopReason.ANSWER, run_s=20.0):
    """The verdict on a script that has nobody to ask."""

    async def scene():
        place = await attempt.start()
        try:
            assert await place.sandbox.open_port(1, ("127.0.0.1", 4321)) == 4321
            where = type("Where", (), dict.fromkeys(("url", "token", "model", "instruction", "directory"), "x"))()
            where.instruction, where.home = place.instruction, place.home
            agent = attempt.agent
            result = await place.sandbox.execute(agent.argv(where), run_s, 1000, agent.env(where), place.directory)
            ended = StopReason.TIME_LIMIT if result.timed_out else reason
            return await attempt.verify(ended)
        finally:
            await attempt.close()

    return asyncio.run(asyncio.wait_for(scene(), 60))


TASK = Task("t", "how many?", ("3",), metadata={"level": 1})


def test_the_last_line_is_the_reward_and_the_task_is_told():
    code = "import json, os, sys; task = json.loads(os.environ['TASK']); print(sys.argv[1]); "
    code += (
        "assert task == {'id': 't', 'prompt': 'how many?', 'metadata': {'level': 1}}; print(task['metadata']['level'])"
    )
    verdict = played(Script(command=python(code, "{instruction}")).attempt(TASK))
    assert (verdict.reward, verdict.components) == (1.0, {"score": 1.0})


def test_a_script_is_told_no_answers_unless_somebody_says_so():
    """A policy that may run commands reads its environment: nothing that the judge alone may know is there."""
    task = Task("t", "?", ("SECRET-1",), metadata={"level": 1, "solution": "SECRET-2", "tests": ["SECRET-3"]})
    code = "import os, glob; print(sum(str(dict(os.environ)).count(f'SECRET-{i}') > 0 for i in (1, 2, 3)))"
    assert played(Script(command=python(code)).attempt(task)).reward == 0.0
    assert played(Script(command=python(code), task_answers=True).attempt(task)).reward == 3.0


@pytest.mark.parametrize("size", [131_000, 131_072, 10_000_000])
def test_a_task_of_any_size_reaches_the_script(size):
    """Linux takes 131,071 bytes for a variable: a larger task is in a file, which is gone afterwards."""
    task = Task("t", "how many?", (), metadata={"text": "x" * size})
    code = "import json, os; name = os.environ.get('TASK_FILE'); "
    code += "text = open(name).read() if name else os.environ['TASK']; print(len(json.loads(text)['metadata']['text']))"
    attempt = Script(command=python(code)).attempt(task)
    assert played(attempt).reward == size
    assert (attempt._file is None) == (size == 131_000) and not (attempt._file and os.path.exists(attempt._file))
    with pytest.raises(ConfigError, match=r"leave \{instruction\} out and read the file that TASK_FILE names"):
        played(Script(command=python("pass", "{instruction}")).attempt(Task("t", "y" * 131_072, ())))


def alive(word):
    """Processes of this machine whose command line has the word."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            found += [pid] if word.encode() in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes() else []
    return found


@pytest.mark.parametrize("ends", ["print(1)", "time.sleep(60)", "os.kill(os.getpid(), 9)", "os.killpg(0, 9)"])
def test_children_that_a_script_detaches_are_gone_when_it_has_ended(ends):
    """setsid, setsid -f, a double fork and nohup: looked for from outside, whatever the end of the script."""
    word = f"987.{os.getpid()}{len(ends)}"
    code = f"""import os, subprocess, time
def sleeping(pid):
    try:
        with open(f"/proc/{{pid}}/cmdline") as line, open(f"/proc/{{pid}}/comm") as name:
            return "{word}" in line.read() and "sleep" in name.read()
    except OSError:
        return False
for how in ("setsid sleep N &", "setsid -f sleep N", "nohup sleep N &", "(setsid setsid sleep N &)"):
    how = how.replace("N", "{word}")
    subprocess.Popen(["sh", "-c", how], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "{word}"])
    os._exit(0)
time.sleep(0.7)
print(sum(map(sleeping, filter(str.isdigit, os.listdir("/proc")))), flush=True)
{ends}"""
    host = Host()

    async def scene():
        result = await host.execute(python(code), 2.0, 1000)
        await host.close()
        return result

    result = asyncio.run(asyncio.wait_for(scene(), 60))
    assert int(result.output.split()[0]) >= 5 and alive(word) == []
    assert result.timed_out == ("60" in ends) and result.exit_code == (0 if "print" in ends else 137)


def test_a_crash_can_be_worth_nothing_instead_of_a_failure():
    assert played(Script(command=python("print(1); 1 / 0"), crashes="zero").attempt(TASK)).reward == 0.0


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("print('no number')", "is its reward, and no number: 'no number'"),
        ("print(1); 1 / 0", "exit status 1: 1\nTrace"),
    ],
)
def test_a_script_that_fails_has_no_reward(code, told):
    with pytest.raises((ValueError, RuntimeError)) as failure:
        played(Script(command=python(code)).attempt(TASK))
    assert told in str(failure.value)


def test_a_script_that_was_refused_and_gave_up_has_a_reward_of_zero():
    assert played(Script(command=python("raise SystemExit(1)")).attempt(TASK), StopReason.TURN_LIMIT).reward == 0.0


def test_a_script_and_its_children_are_killed_at_the_deadline(tmp_path):
    beat = tmp_path / "beat"
    child = f"import time\nwhile True:\n    open({str(beat)!r}, 'a').write('.')\n    time.sleep(0.01)"
    code = "import signal, subprocess, sys, time\nsignal.signal(15, signal.SIG_IGN)\n"
    code += "subprocess.Popen([sys.executable, '-c', sys.argv[1]])\nprint(5, flush=True)\ntime.sleep(60)"
    attempt = Script(command=python(code, child)).attempt(TASK)
    assert played(attempt, run_s=1.5).reward == 0.0
    size = beat.stat().st_size
    assert size > 0 and asyncio.run(asyncio.sleep(0.2, beat.stat().st_size)) == size


def test_a_command_that_is_not_there_is_status_127():
    result = asyncio.run(Host().execute(["/no/such/program"], 1.0, 100))
    assert result.exit_code == 127 and b"No such file" in result.output


def test_times_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match=r"env.run_s=700 must be less than env.episode_timeout_s=600"):
        Script(run_s=700.0)
