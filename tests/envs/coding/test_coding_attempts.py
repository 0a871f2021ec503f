"""Attempts at software tasks in real sandboxes: how they are played, taken out, applied and judged."""

import pytest

from jaxagent.config import ConfigError
from jaxagent.envs.agent_attempt import Place
from jaxagent.envs.base import Opening
from jaxagent.envs.coding import patches
from jaxagent.envs.coding.environment import Coding
from jaxagent.envs.terminal.verify import VerifierError
from jaxagent.types import StopReason, Task
from tests.envs.coding import tiny


def test_a_fix_is_1_and_nothing_is_0(play):
    verdict, attempt = play(tiny.make_config(), tiny.unittest_task(), tiny.FIX)
    assert verdict.reward == 1.0 and verdict.components == {"resolved": 1.0}
    assert set(attempt.judgement.outcomes) == {"test_calc.Calc.test_add", "test_calc.Calc.test_zero"}
    verdict, attempt = play(tiny.make_config(), tiny.unittest_task())
    assert verdict.reward == 0.0 and attempt.counters["empty_changes"] == 1
    assert attempt.judgement.outcomes["test_calc.Calc.test_add"] == "FAILED"  # without a change the tests run, too
    assert "-1 != 5" in attempt.judgement.messages["test_calc.Calc.test_add"]
    _, attempt = play(tiny.make_config(verify_empty=False), tiny.unittest_task())
    assert attempt.judgement is None and attempt.counters["empty_changes"] == 1


def test_with_pytest(play, tools):
    verdict, _ = play(tiny.make_config(), tiny.pytest_task(tools), "python3 -m pytest -q tests", tiny.FIX)
    assert verdict.reward == 1.0
    verdict, attempt = play(tiny.make_config(), tiny.pytest_task(tools))
    assert verdict.reward == 0.0 and "assert -1 == 5" in attempt.judgement.messages["tests/test_calc.py::test_add"]


HONEST = {
    "a commit": f"{tiny.FIX}; git commit -qam x",
    "a branch": f"git checkout -qb y; {tiny.FIX}; git commit -qam x",
    "a new file": "mv calc.py sums.py; sed -i 's/a - b/a + b/' sums.py; echo 'from sums import *' > calc.py",
    "another name": f"{tiny.FIX}; mv calc.py 'ca lc.py'; cp 'ca lc.py' calc.py",
    "a repository inside": f"{tiny.FIX}; git init -q inside; touch inside/x",
    "a link": f"{tiny.FIX}; ln -s /etc/passwd here",
    "a binary file": f"{tiny.FIX}; head -c 1000 /dev/urandom > data.bin",
    "without permissions": f"{tiny.FIX}; touch secret; chmod 0 secret",
    "bad settings": f"{tiny.FIX}; git config diff.external false; git config core.fsmonitor false; git config "
    "core.hooksPath /tmp; echo '*.py -diff filter=x' > .git/info/attributes; git config filter.x.clean false",
    "a changed test as well": f"{tiny.FIX}; echo >> test_calc.py",
}


@pytest.mark.parametrize("how", HONEST)
def test_a_fix_is_found_however_it_was_left(play, how):
    verdict, attempt = play(tiny.make_config(), tiny.unittest_task(), HONEST[how])
    assert verdict.reward == 1.0, attempt.judgement


def test_what_is_not_the_agents_is_left_out(play):
    _, attempt = play(tiny.make_config(), tiny.unittest_task(), tiny.FIX, "touch conftest.py", "echo >> test_calc.py")
    assert attempt.counters["dropped_files"] == 2


def test_tests_beside_the_sources_are_guarded_too(play):
    files = {"src/calc.py": tiny.BAD, "src/test_calc.py": tiny.UNITTEST}
    wrong = "sed -i 's/, 5)/, -1)/' src/test_calc.py"
    verdict, attempt = play(tiny.make_config(), tiny.unittest_task(files=files), wrong)
    assert verdict.reward == 0.0 and attempt.counters["dropped_files"] == 1


def test_a_file_in_another_encoding_is_changed_and_applied(play):
    text = "# -*- coding: latin-1 -*-\\ndef add(a, b):\\n    return a - b  # caf\\351\\n"
    task = tiny.unittest_task(setup=[f"printf '{text}' > calc.py; git commit -qam x"])
    assert play(tiny.make_config(), task, tiny.FIX)[0].reward == 1.0


def test_what_cannot_be_read_by_python_is_a_test_that_failed(play):
    verdict, attempt = play(tiny.make_config(), tiny.unittest_task(), "echo 'def' >> calc.py")
    assert verdict.reward == 0.0 and attempt.counters["runs_without_results"] == 0
    assert attempt.judgement.messages["test_calc.Calc.test_add"].startswith("SyntaxError")


def test_the_test_patch_comes_on_top(play):
    test_patch = (
        "diff --git a/test_calc.py b/test_calc.py\n--- a/test_calc.py\n+++ b/test_calc.py\n@@ -6,5 +6,8 @@\n"
        " class Calc(unittest.TestCase):\n     def test_add(self):\n         self.assertEqual(calc.add(2, 3), 5)\n"
        "+\n+    def test_twice(self):\n+        self.assertEqual(calc.twice(4), 8)\n"
        " \n     def test_zero(self):\n"
    )
    check = {"framework": "unittest", "fail_to_pass": ["test_calc.Calc.test_twice"]}
    task = tiny.unittest_task(test_patch=test_patch, check_tests=check)
    verdict, attempt = play(tiny.make_config(), task, f"{tiny.FIX}; echo > test_calc.py")
    assert verdict.reward == 1.0 and attempt.counters["dropped_files"] == 1
    assert play(tiny.make_config(), task)[0].reward == 0.0
    broken = tiny.unittest_task(test_patch=test_patch.replace("class Calc", "class Other"), check_tests=check)
    with pytest.raises(VerifierError, match="the test patch"):
        play(tiny.make_config(), broken, tiny.FIX)


@pytest.mark.parametrize(
    "check",
    [
        {"check_status": {"command": "python3 -m unittest -q"}},
        {"check_status": {"script": "import sys\nsys.path.append('.')\nimport calc\nsys.exit(calc.add(2, 3) != 5)"}},
        {"check_map": {"command": "sh print.sh", "expected": {"test_a": "PASSED", "C.test_b": "FAILED"}}},
        {
            "check_tests": {
                "framework": "unittest",
                "command": "python3 -m unittest -v",
                "fail_to_pass": ["test_add (test_calc.Calc)"],
            }
        },
    ],
    ids=["eval_cmd", "script", "r2e", "command"],
)
def test_published_checks(play, check):
    printed = (
        "echo '=== short test summary info ==='; echo 'FAILED t.py::C::test_b - x'\n"
        "python3 -c 'import calc, sys; sys.exit(calc.add(2, 3) != 5)' && echo 'PASSED t.py::test_a'; exit 3\n"
    )
    about = {**tiny.unittest_task().metadata["coding"], **check}
    if "check_tests" not in check:
        del about["check_tests"]
    about["files"] = {**about["files"], "print.sh": printed}
    task = Task("tiny", "x", (), "", {"coding": about})
    assert play(tiny.make_config(), task, tiny.FIX)[0].reward == 1.0
    assert play(tiny.make_config(), task)[0].reward == 0.0


def test_scripts_of_swe_bench_pro(play, tmp_path):
    (tmp_path / "run.sh").write_text('echo "files: $1"; python3 -m unittest -v "$1" 2>&1\n')
    (tmp_path / "parse.py").write_text(
        "import json, re, sys\n"
        "found = re.findall(r'^(test_\\w+) .* [.]{3} (\\w+)$', open(sys.argv[1]).read(), re.M)\n"
        "tests = [{'name': n, 'status': 'PASSED' if s == 'ok' else 'FAILED'} for n, s in found]\n"
        "json.dump({'tests': tests}, open(sys.argv[3], 'w'))\n"
    )
    pro = {
        "fail_to_pass": ["test_add"],
        "pass_to_pass": ["test_zero"],
        "selected": ["test_calc"],
        "run_script": str(tmp_path / "run.sh"),
        "parser_script": str(tmp_path / "parse.py"),
    }
    about = {k: v for k, v in tiny.unittest_task().metadata["coding"].items() if k != "check_tests"}
    task = Task("tiny", "x", (), "", {"coding": about | {"check_swepro": pro}})
    assert play(tiny.make_config(), task, tiny.FIX)[0].reward == 1.0
    assert play(tiny.make_config(), task)[0].reward == 0.0


def test_likeness_to_the_oracle(play):
    config = tiny.make_config(reward="patch_similarity")
    verdict, _ = play(config, tiny.unittest_task(), tiny.FIX)
    assert verdict.reward == 1.0 and verdict.components == {"resolved": 1.0, "patch_similarity": 1.0}
    verdict, _ = play(config, tiny.unittest_task(), "sed -i 's/a - b/b + a/' calc.py")
    assert 0.9 < verdict.reward < 1.0 and verdict.components["resolved"] == 1.0
    assert play(config, tiny.unittest_task())[0].reward == -1.0


def test_time_that_is_over_is_0_unless_the_config_says_so(play):
    verdict, attempt = play(tiny.make_config(), tiny.unittest_task(), tiny.FIX, ended=StopReason.TIME_LIMIT)
    assert verdict.reward == 0.0 and attempt.counters["unverified"] == 1
    config = tiny.make_config(verify_timeouts=True)
    assert play(config, tiny.unittest_task(), tiny.FIX, ended=StopReason.TIME_LIMIT)[0].reward == 1.0


def test_by_an_agent_program(play):
    """As a run opens it."""

    async def episode(attempt):
        try:
            place = await attempt.start()
            assert isinstance(place, Place) and place.directory == "/home/user/repo"

            async def sh(command):
                return await place.sandbox.execute(("sh", "-c", command), 10.0, 1000, None, place.directory)

            assert (await sh("cat PROBLEM_STATEMENT.md")).output == b"add(2, 3) gives -1."
            assert place.instruction == "Solve: add(2, 3) gives -1."
            await sh(f"{tiny.FIX}; mkdir .harness; touch .harness/x")
            await place.sandbox.stop_processes()
            return await attempt.verify(StopReason.ANSWER)
        finally:
            await attempt.close()

    config = tiny.make_config(play="agent", instruction="Solve: {statement}")
    assert config.rollout.endswith(":HarnessRollout") and Coding(play="built_in").rollout.endswith(":MultiTurn")
    with config.open(Opening(None, [tiny.unittest_task()], play.run, lambda line: None)) as begin:
        attempt = begin(tiny.unittest_task())
        assert (attempt.init_s, attempt.run_s, attempt.verify_s) == (600.0, 1800.0, 300.0)
        assert play.run(episode(attempt), tiny.TIMEOUT_S).reward == 1.0
    assert attempt.counters["dropped_files"] == 0 and attempt.judgement.resolved
    for tasks, settings, told in (
        ([tiny.unittest_task(files={})], {}, r"env\.image_name"),
        ([tiny.unittest_task(patch="")], {"reward": "patch_similarity"}, "no oracle's patch"),
    ):
        opened = tiny.make_config(**settings).open(Opening(None, tasks, play.run, lambda line: None))
        with pytest.raises(ConfigError, match=told), opened:
            pass


def test_a_change_in_the_way_of_the_test_patch_is_worth_0(play, monkeypatch):
    """It is the agent's doing, and no failure of the task's."""
    add = "diff --git a/test_new.py b/test_new.py\nnew file mode 100644\n"
    add += "--- /dev/null\n+++ b/test_new.py\n@@ -0,0 +1 @@\n"
    check = {"framework": "unittest", "fail_to_pass": ["test_new.New.test_x"]}
    task = tiny.unittest_task(test_patch=f"{add}+x = 1\n", check_tests=check)
    monkeypatch.setattr(patches, "keep", lambda patch, protected, patterns: (patch, ()))
    verdict, attempt = play(tiny.make_config(), task, "mkdir test_new.py; touch test_new.py/x")
    assert verdict.reward == 0.0 and attempt.judgement.why == "not_applied"


def test_hidden_paths_are_not_shown_and_come_back(play):
    task = tiny.unittest_task(hidden=["test_calc.py", "/nowhere"])
    seek = "[ ! -e test_calc.py ] && ! git log --all -p | grep -q TestCase && ! git show HEAD:test_calc.py && "
    seek += '[ -z "$(git fsck --unreachable --no-reflogs)" ] && '
    verdict, attempt = play(tiny.make_config(), task, seek + tiny.FIX)
    assert verdict.reward == 1.0 and attempt.counters["failed_commands"] == 0


@pytest.mark.parametrize("ladder", ["slime", "swebench"])
def test_ladders(play, ladder):
    verdict, _ = play(tiny.make_config(ladder=ladder), tiny.unittest_task(), tiny.FIX)
    assert verdict.reward == 1.0


def test_a_broken_task_is_a_failure(play):
    with pytest.raises(VerifierError, match="setup failed"):
        play(tiny.make_config(), tiny.unittest_task(setup=["exit 3"]))
    with pytest.raises(ConfigError, match=r"tiny.*coding\.archive: there is no file"):
        play(tiny.make_config(), tiny.unittest_task(archive="nowhere.tar"))


def test_settings_that_cannot_work():
    with pytest.raises(ConfigError, match=r"env\.episode_timeout_s"):
        Coding(episode_timeout_s=600.0)
    with pytest.raises(ConfigError, match=r"env\.instruction"):
        Coding(instruction="{what}")
