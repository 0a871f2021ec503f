"""The Python environment: how turns are read, answered and judged, in real sandboxes where one is needed."""

import asyncio
import json

import pytest

from configs import code_agent, gsm8k_python
from jaxagent import config as schema
from jaxagent.config import ConfigError
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs.base import Opening, Transcript
from jaxagent.envs.python import formats, hidden_tests
from jaxagent.envs.python.environment import PythonAttempt
from jaxagent.rollout.multi_turn import MultiTurn
from jaxagent.rollout.templates import Plain
from jaxagent.sandbox.base import SandboxClosed
from jaxagent.types import StopReason, Task, TokenKind
from tests.envs.opened import opened_sandboxes
from tests.rollout.scripted import ScriptedPolicy

TIMEOUT_S = 120.0
PROBLEM = Task("p", "What is 347 times 52?", ("18044",))
LIBRARY = "def blot(x): return 3 * x + 5\ndef __getattr__(name): raise AttributeError('lib.tilt is now lib.blot')\n"
TESTS = {"t0": {"call": "f(3)", "value": 51}, "t1": {"call": "f(-7)", "value": 21}}  # 3 x + 5 + 37
CODE = Task(
    "c", "Write f(x) = lib.tilt(x) plus 37.", (), "revise/renamed",
    {"hidden_tests": TESTS, "fail_to_pass": ["t0", "t1"], "files": {"lib.py": LIBRARY}},
)  # fmt: skip
RIGHT = "import lib\ndef f(x): return lib.blot(x) + 37"
FENCED = "```python\n{}\n```"
XML = "<tool_call>\n<function=python>\n<parameter=code>\n{}\n</parameter>\n</function>\n</tool_call>"


def make_config(judge, **changes):
    raw = (gsm8k_python if judge == "answer" else code_agent).get_config()
    raw.env.max_turns = changes.pop("max_turns", 4)
    raw.env.sandbox.warm = 2
    raw.env.update(changes)
    return schema.parse(raw)


def py(code):
    return f"<py>{code}</py>"


# ---- what a turn says


@pytest.mark.parametrize(
    ("style", "text", "code"),
    [
        ("plain", "<py>x = 1\nprint(x)</py>", "x = 1\nprint(x)"),
        ("plain", "<py>a</py><py>b</py>", "a"),  # a generation ends there
        ("plain", "<py>print(1)", None),
        ("plain", "<py> \n</py>", None),
        ("fenced", "First:\n```python\nprint(1)\n```\nthen\n```py\nprint(2)\n```", "print(2)"),
        ("fenced", "```python\nprint(1)", None),
        ("fenced", "```\nprint(1)\n```", None),  # of no language
        ("fenced", "<think>```python\nprint(1)\n```</think>", None),
        ("fenced", "a </think>```python\n  x\n```", "  x"),  # the template wrote the opening tag; indentation stays
        ("qwen3_xml", f"<think>hm</think>\n{XML.format('print(1)')}", "print(1)"),
        ("qwen3_xml", XML.format("print(1)").replace("=python>", "=bash>"), None),
        ("qwen3_xml", XML.format("a") + XML.format("b"), "b"),
    ],
)
def test_programs(style, text, code):
    assert formats.find_program(style, text) == code
    if code and text.count("<py>") + text.count("```p") + text.count("<tool_call>") == 1 and "think" not in text:
        assert formats.program(style, code) == text  # what demonstrations write


@pytest.mark.parametrize(
    ("style", "text", "answer"),
    [
        ("plain", "<answer> 42 </answer>", "42"),
        ("plain", "<py>print('<answer>1</answer>')</py>", None),
        ("plain", "\\boxed{42}", None),
        ("fenced", "So \\boxed{1} or \\boxed{42}.", "42"),
        ("fenced", "```python\nprint('\\boxed{42}')\n```", None),
        ("fenced", "<think>\\boxed{42}</think> Let me see.", None),
        ("qwen3_xml", XML.format("'\\boxed{1}'") + "\\boxed{\\frac12}", "\\frac12"),
    ],
)
def test_answers_stand_outside_of_programs_and_thoughts(style, text, answer):
    assert formats.find_answer(style, text) == answer


def test_prompts_name_what_the_parser_reads():
    for style in ("fenced", "qwen3_xml"):
        for judge in ("answer", "tests"):
            system, user = formats.messages(style, judge, "Do it.")
            assert (system.role, user.content) == ("system", "Do it.")
            assert ("\\boxed" in system.content) == (judge == "answer")
        assert ("```python" in formats.messages(style, "answer", "")[0].content) == (style == "fenced")
    assert formats.find_program("qwen3_xml", formats.messages("qwen3_xml", "answer", "")[0].content) == "print(6 * 7)"
    assert formats.messages("plain", "answer", "Do it.")[0].content == "Do it.\n"
    for style in ("plain", "fenced"):  # a system message of the config's own
        system, user = formats.messages(style, "answer", "Do it.", "Use Python.")
        assert (system.role, system.content, user.content.strip()) == ("system", "Use Python.", "Do it.")


def test_what_is_shown_of_an_output():
    trace = (
        b'1\nTraceback (most recent call last):\n  File "m", line 3, in <module>\n    f()\n    ^^\nKeyError: 4\nend\n'
    )
    assert formats.shortened_output(trace, False, 200, "whole") == trace.decode().rstrip()
    assert formats.shortened_output(trace, False, 200, "message") == "1\nKeyError: 4\nend"
    syntax = b'  File "main.py", line 1\n    a b\n    ^^^\nSyntaxError: invalid syntax\n'
    assert formats.shortened_output(syntax, False, 200, "message") == "SyntaxError: invalid syntax"
    assert formats.shortened_output(b"abcdefghij", False, 10, "whole") == "abcdefghij"
    assert formats.shortened_output(b"abcdefghijk", False, 9, "whole") == "abcd\n...\nghijk"
    assert formats.shortened_output(b"aaaabbbb", True, 4, "whole") == "aa\n...\nbb"  # the sandbox kept two halves
    assert formats.shortened_output(b"\xff\x1b[31mred\r\n", False, 9, "whole") == "\N{REPLACEMENT CHARACTER}red"


# ---- attempts


@pytest.fixture(scope="module")
def opened():
    """Sandboxes that are open, and the loop on which they are."""
    with opened_sandboxes(make_config("tests").env.sandbox, 4) as both:
        yield both


class Recorded:
    """A sandbox that remembers what was asked of it."""

    def __init__(self, sandbox):
        self.sandbox, self.asked, self.closed = sandbox, [], False

    async def execute(self, argv, *rest):
        self.asked.append(tuple(argv))
        return await self.sandbox.execute(argv, *rest)

    async def stop_processes(self):
        await self.sandbox.stop_processes()

    async def oom_kills(self):
        return await self.sandbox.oom_kills()

    async def close(self):
        self.closed = True
        await self.sandbox.close()


@pytest.fixture
def attempt(opened):
    """Plays actions to the end; returns (steps, verdict, environment, sandboxes)."""
    sandboxes, workers = opened

    def play(*actions, of=CODE, judge="tests", **changes):
        cfg, taken = make_config(judge, **changes), []

        async def take():
            taken.append(Recorded(await sandboxes.take()))
            return taken[-1]

        async def run():
            environment = PythonAttempt(of, cfg.env, take)
            try:
                await environment.start()
                steps = [await environment.step(action) for action in actions]
                return steps, await environment.verify(Transcript("", ())), environment
            finally:
                await environment.close()

        result = *workers.run(run(), TIMEOUT_S), taken
        assert all(sandbox.closed for sandbox in taken)
        return result

    return play


def test_write_run_read_the_error_revise(attempt):
    first = RIGHT.replace("blot", "tilt") + "\nprint(f(2))"
    steps, verdict, environment, _ = attempt(py(first), py(RIGHT + "\nprint(f(2))"), "<done>")
    assert steps[0].observation.parts == (
        ("<out>AttributeError: lib.tilt is now lib.blot</out>\n", TokenKind.OBSERVATION),
    )
    assert steps[1].observation.text == "<out>48</out>\n" and steps[2].stop_reason == StopReason.ANSWER
    assert verdict.reward == 1.0 and verdict.components == {"solved": 1.0, "passed_frac": 1.0}
    assert environment.counters["programs"] == 2 and environment.counters["failed_programs"] == 1
    _, verdict, _, _ = attempt(py(first), "<done>")
    assert verdict.reward == 0.0


def test_an_answer_is_compared_as_a_number_and_needs_no_sandbox(attempt):
    (end,), verdict, _, taken = attempt("<answer>18,044</answer>", of=PROBLEM, judge="answer")
    assert end.stop_reason == StopReason.ANSWER and verdict.reward == 1.0 and not taken
    for said in ("<answer>18000</answer>", "<answer></answer>", "<answer>347 * 52</answer>"):
        assert attempt(said, of=PROBLEM, judge="answer")[1].reward == 0.0
    steps, verdict, _, taken = attempt(
        py("n = 347 * 52\nprint(n)"), "<answer>18044</answer>", of=PROBLEM, judge="answer"
    )
    assert steps[0].observation.text == "<out>18044</out>\n" and verdict.reward == 1.0 and len(taken) == 1
    assert attempt(py("print(18044)"), of=PROBLEM, judge="answer")[1].reward == 0.0  # printed, not answered


def test_ending_beats_a_program_in_the_same_turn(attempt):
    (end,), verdict, environment, taken = attempt(f"{FENCED.format(RIGHT)}\n<done>", format="fenced")
    assert end.stop_reason == StopReason.ANSWER and environment.counters["programs"] == 0
    assert verdict.reward == 1.0 and len(taken) == 1  # it is the submission all the same; only the judge ran it
    both = f"{FENCED.format('print(1)')}\nIt is \\boxed{{18044}}."
    (end,), verdict, environment, _ = attempt(both, of=PROBLEM, judge="answer", format="fenced")
    assert (end.stop_reason, verdict.reward, environment.counters["programs"]) == (StopReason.ANSWER, 1.0, 0)
    said = FENCED.format("print('<done>')")  # inside a program it ends nothing
    (step,), _, _, _ = attempt(said, format="fenced")
    assert step.observation.text == "Output:\n<done>" and step.observation.role == "user"


def test_each_program_is_a_fresh_process_in_one_directory(attempt):
    steps, *_ = attempt(py("x = 5; open('kept', 'w').write('7')"), py("print(open('kept').read()); print(x)"), py("1"))
    assert steps[1].observation.text == "<out>7\nNameError: name 'x' is not defined</out>\n"


def test_what_a_program_leaves_running_ends_before_the_next_one(attempt):
    daemon = "import os, time\nif os.fork() == 0:\n  os.setsid(); [os.close(d) for d in (0, 1, 2)]\n  time.sleep(600)"
    count = "import os\nprint(sum(n.isdigit() and b'main.py' in open(f'/proc/{n}/cmdline', 'rb').read() for n in "
    count += "os.listdir('/proc')))"
    steps, *_ = attempt(py(daemon), py(count))
    assert steps[1].observation.text == "<out>1</out>\n"  # itself


def test_deadline_and_output_cap(attempt):
    steps, verdict, environment, _ = attempt(
        py("print(1)\nwhile True: pass"), py("print('a' * 50 + 'b' * 10**6)"), run_timeout_s=1.0, output_chars=40
    )
    assert steps[0].observation.text == "<out>1\n(timed out)</out>\n"
    assert steps[1].observation.text == f"<out>{'a' * 20}\n...\n{'b' * 20}</out>\n"
    assert environment.counters["timed_out_programs"] == 1 and verdict.reward == 0.0


def test_what_is_no_program_is_a_warning_and_costs_a_turn(attempt):
    steps, verdict, environment, taken = attempt("f(x) is", "hm", max_turns=2)
    assert steps[0].observation.parts == (("<out>no program</out>\n", TokenKind.WARNING),)
    assert steps[1].stop_reason == StopReason.TURN_LIMIT and environment.counters["invalid_actions"] == 2
    assert verdict.reward == 0.0 and not taken


def test_the_last_turns_program_is_judged_but_not_shown(attempt):
    (end,), verdict, environment, _ = attempt(py(RIGHT), max_turns=1)
    assert end.stop_reason == StopReason.TURN_LIMIT and verdict.reward == 1.0
    assert environment.counters["programs"] == 0 and environment.counters["invalid_actions"] == 0


# ---- hidden tests


def test_partial_credit_is_reported_and_not_paid(attempt):
    _, verdict, _, _ = attempt(py("def f(x): return 51"), "<done>")
    assert verdict.reward == 0.0 and verdict.components == {"solved": 0.0, "passed_frac": 0.5}


def test_values_never_enter_a_sandbox_and_calls_not_the_agents(attempt):
    """Nothing to read: no value in what any sandbox is given, no call in what the agent's sandbox is given."""
    secret = {"t0": {"call": "f(31337)", "value": 271828}, "t1": {"call": "f(40004)", "value": 314159}}
    of = Task("c", CODE.prompt, (), "", {**CODE.metadata, "hidden_tests": secret})
    look = "import os\nfor top, _, files in os.walk('.'):\n for n in files: print(n, open(n).read())"
    steps, _, _, (agents, judges) = attempt(py(look), "<done>", of=of, output_chars=5000)
    assert "lib.py" in steps[0].observation.text and "hidden" not in steps[0].observation.text
    everything = [" ".join(argv) for sandbox in (agents, judges) for argv in sandbox.asked]
    assert not any(value in said for said in everything for value in ("271828", "314159"))
    assert not any("31337" in " ".join(argv) for argv in agents.asked)
    assert any("31337" in " ".join(argv) for argv in judges.asked)
    assert agents.sandbox is not judges.sandbox


FORGED = json.dumps([{"value": 1}, {"value": 1}])


@pytest.mark.parametrize(
    "code",
    [
        f"print('''{FORGED}''')",
        "raise SystemExit(0)",
        "import os\nos._exit(0)",
        f"import os\nfor d in range(3, 9):\n try: os.write(d, b'''{FORGED}''')\n except OSError: pass\nos._exit(0)",
        "import os\nfor d in range(3, 9):\n try: os.write(d, b'[' * 9000)\n except OSError: pass\nos._exit(0)",
        "import json\njson.dumps = lambda value: '[{\"value\": true}]'\ndef f(x): return 1",
        "class Any:\n  def __eq__(self, other): return True\ndef f(x): return Any()",
        "def f(x): raise SystemExit(0)",
        "def f(x): return float('nan')",
        "import sys\nprint(''.join(sys.argv))\nf = lambda x: [t for t in sys.argv]",
        "def f(x):\n  while True: pass",
        "def f(x): return 'x' * 2_000_000",
        "def f(x",
    ],
)
def test_forged_results_are_rejected(attempt, code):
    _, verdict, _, _ = attempt(py(code), max_turns=1, judge_timeout_s=1.0)
    assert verdict.reward == 0.0 and verdict.components["passed_frac"] == 0.0


def test_what_the_agent_planted_is_not_there_when_its_program_is_judged(attempt):
    plant = "for name in ('json.py', 'lib.py', 'sitecustomize.py'):\n  open(name, 'w').write('def blot(x): return 0')"
    _, verdict, _, _ = attempt(py(plant), py(RIGHT), "<done>")
    assert verdict.reward == 1.0


def test_values_are_compared_as_json():
    same = hidden_tests.same
    assert same(1, 1.0) and same([1, {"a": None}], [1, {"a": None}]) and same("a", "a") and same(10**30, 10**30)
    for a, b in ((True, 1), (0, False), ("1", 1), ([1], [1, 1]), ({"a": 1}, {"b": 1}), (None, 0), (float("nan"),) * 2):
        assert not same(a, b), (a, b)
    assert hidden_tests.read(b"[" * 100_000) == [] == hidden_tests.read(b"[1]") == hidden_tests.read(b"\xff")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "metadata.hidden_tests': must be an object"),
        ({"hidden_tests": {"t0": {"call": "f(1)"}}}, "metadata.hidden_tests.t0.value': missing"),
        ({"hidden_tests": TESTS}, "names no tests"),
        ({"hidden_tests": TESTS, "fail_to_pass": ["t7"]}, "has no 't7'"),
        ({**CODE.metadata, "files": {"../x": ""}}, "'../x' must be a plain name"),
        ({**CODE.metadata, "files": {"main.py": ""}}, "other than main.py"),
        ({**CODE.metadata, "files": {"a": 1}}, "metadata.files.a must be text"),
    ],
)
def test_malformed_tasks_are_named(metadata, message):
    here = Opening(None, [Task("c7", "x", (), "", metadata)], None, print)
    with pytest.raises(ConfigError) as error, make_config("tests").env.open(here):
        pass
    assert "task 'c7'" in str(error.value) and message in str(error.value)


def test_slow_programs_must_not_look_like_failures():
    with pytest.raises(ConfigError, match=r"env.episode_timeout_s=120 must be more than .* = 135"):
        make_config("tests", run_timeout_s=30.0)  # 4 x 30 + 15


# ---- whole episodes


class Dying:
    async def execute(self, *arguments):
        raise SandboxClosed("the sandbox is gone")

    async def oom_kills(self):
        return None

    async def close(self):
        pass


def rollout(cfg, moves, take):
    texts = [CODE.prompt, RIGHT, PROBLEM.prompt, "n = 347 * 52"] * 20
    tokenizer = Tokenizer.train(texts, 400, formats.TAGS["plain"])
    return tokenizer, MultiTurn(
        begin=lambda t: PythonAttempt(t, cfg.env, take),
        policy=ScriptedPolicy(tokenizer, lambda task_id, sample: moves),
        tokenizer=tokenizer,
        template=Plain(),
        config=cfg.env,
        sampling=cfg.rl.sampling,
        request_timeout_s=10.0,
    )


def test_outputs_are_masked(opened):
    sandboxes, workers = opened
    moves = (py("n = 347 * 52\nprint(n)"), "<answer>18044</answer>")
    tokenizer, play = rollout(make_config("answer", max_turns=3), moves, sandboxes.take)
    episode = workers.collect([PROBLEM], 1, play, TIMEOUT_S)[0].episodes[0]
    assert (episode.stop_reason, episode.reward, episode.rewards) == (StopReason.ANSWER, 1.0, {"solved": 1.0})
    (t,) = episode.trajectories
    assert tokenizer.decode(t.tokens[t.kinds == TokenKind.OBSERVATION]) == "<out>18044</out>\n"
    assert tokenizer.decode(t.tokens[t.action_mask]).replace("<eos>", "") == "".join(moves)


@pytest.mark.parametrize("moves", [(py("print(1)"), "<done>"), (f"{py(RIGHT)}<done>",)])
def test_a_sandbox_that_fails_is_a_failure_and_no_0(moves):
    """In the agent's own run, and in the judge's."""

    async def take():
        return Dying()

    _, play = rollout(make_config("tests"), moves, take)
    episode = asyncio.run(play(CODE, 0))
    assert episode.stop_reason == StopReason.ENV_ERROR and episode.rewards == {}
    assert episode.error == "SandboxClosed: the sandbox is gone"
