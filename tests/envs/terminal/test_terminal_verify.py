"""How a reward is read, and that a missing one is an error. Pure functions; running tasks is tested with the runner."""

import pytest

from jaxagent.envs.terminal import dialogue
from jaxagent.envs.terminal.verify import in_range, reward_of_status, reward_of_summary, rewards_of_files, scalar


def reward_of_files(txt, json_, within=(0.0, 1.0)):
    reward = scalar(rewards_of_files(txt, json_))
    in_range(within, reward)
    return reward


@pytest.mark.parametrize(
    ("txt", "json_", "reward"),
    [
        (b"1", None, 1.0),
        (b" 0.25\n", None, 0.25),
        (b"0", None, 0.0),
        (b"1e0", None, 1.0),
        (None, b'{"reward": 0.5}', 0.5),
        (None, b'{"reward": 1, "tests": 3, "speed": 0.5}', 1.0),
        (None, b'{"accuracy": 0.75}', 0.75),
        (b"1\n", b'{"reward": 1.0}', 1.0),
    ],
)
def test_reward_files(txt, json_, reward):
    assert reward_of_files(txt, json_) == reward


@pytest.mark.parametrize(
    ("txt", "json_", "message"),
    [
        (None, None, "neither /logs/verifier/reward.txt nor"),
        (b"", None, "reward.txt must hold a finite number"),
        (b"yes", None, "got 'yes'"),
        (b"nan", None, "finite"),
        (b"inf", None, "finite"),
        (b"1 0", None, "finite"),
        (None, b"{", "reward.json is not JSON"),
        (None, b"1", "must be an object"),
        (None, b"{}", "it has nothing"),
        (None, b'{"a": 1, "b": 0}', "no 'reward'; it has a, b"),
        (None, b'{"reward": true}', "finite"),
        (None, b'{"reward": null}', "finite"),
        (b"1", b'{"reward": 0}', "reward.txt says 1.0 and reward.json 0.0"),
        (b"1.001", None, "test says 1.001, which is not in [0, 1]"),
        (b"-1", None, "test says -1, which is not in [0, 1]"),
        (None, b'{"reward": 1e300}', "test says 1e+300"),
        (None, b"[" * 50_000, "reward.json is not JSON"),
        (None, b'{"reward": 1' + b"0" * 400 + b"}", "finite"),
    ],
)
def test_rewards_that_are_none(txt, json_, message):
    with pytest.raises(ValueError) as error:
        reward_of_files(txt, json_)
    assert message in str(error.value)


def test_a_task_may_promise_other_rewards():
    assert reward_of_files(b"-3", None, (-5.0, 10.0)) == -3.0 and reward_of_files(b"10", None, (-5.0, 10.0)) == 10.0
    with pytest.raises(ValueError, match=r"10.5, which is not in \[-5, 10\]"):
        reward_of_files(b"10.5", None, (-5.0, 10.0))


def test_exit_status():
    assert reward_of_status(0) == 1.0
    assert reward_of_status(1) == 0.0
    for status in (2, 4, 5, 126, 127, 137):  # of pytest: interrupted, usage, nothing collected; of shells: no program
        with pytest.raises(ValueError):
            reward_of_status(status)


SUMMARY = """\
==================== test session starts ====================
PASSED in the log of the program is no outcome
================== short test summary info ==================
PASSED ../tests/test_outputs.py::test_a
{}
================ 2 passed in 0.01s =================
"""


@pytest.mark.parametrize(
    ("line", "reward"),
    [
        ("PASSED ../tests/test_outputs.py::test_b", 1.0),
        ("SKIPPED [1] ../tests/test_outputs.py:3: slow", 1.0),
        ("XFAIL ../tests/test_outputs.py::test_b", 1.0),
        ("FAILED ../tests/test_outputs.py::test_b - AssertionError", 0.0),
        ("ERROR ../tests/test_outputs.py::test_b - OSError", 0.0),
        ("XPASS ../tests/test_outputs.py::test_b", 0.0),
    ],
)
def test_pytest_summary(line, reward):
    assert reward_of_summary(0, SUMMARY.format(line)) == reward


def test_a_forged_pytest_summary_hides_no_failure():
    honest = SUMMARY.format("FAILED ../tests/test_outputs.py::test_b")
    assert reward_of_summary(0, SUMMARY.format("PASSED x::y") + honest) == 0.0
    assert reward_of_summary(0, honest + SUMMARY.format("PASSED x::y")) == 0.0


@pytest.mark.parametrize(
    "output", ["", "bash: pytest: command not found", "=== short test summary info ===\nnothing\n"]
)
def test_pytest_without_a_summary_is_an_error(output):
    with pytest.raises(ValueError, match="summary"):
        reward_of_summary(0, output)


def test_dialogue():
    assert dialogue.action("endless", "ls -l") == "<command>ls -l</command>"
    assert dialogue.finish("endless") == "<action>done</action>"
    assert dialogue.observation("endless", "ls", "a", 0) == "Command executed successfully. Output: a\n\n(exit_code=0)"
    assert dialogue.observation("endless", "ls", "no", 127) == "Command failed. Output: no\n\n(exit_code=1)"
    assert dialogue.action("qwen3_xml", "ls") == (
        "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
    )
    assert dialogue.observation("qwen3_xml", "ls", "no", 127) == "Command 'ls' failed. Output: no\n\n(exit_code=127)"
