"""Plays environments of the installed package verifiers twice, by the adapter and by the package itself, and compares.

Started by test_verifiers_package.py in an environment of its own, which has the package and no JAX. The policy is a
list of messages: for the package a server of OpenAI's protocol sends them. Compared are the completion, the reward, the
value of each reward function, and every entry of the state. Prints one JSON object: {case: what differs, "" for
nothing}.
"""

import asyncio
import contextlib
import inspect
import json
import signal
import sys

import openai
from datasets import Dataset

try:
    import verifiers.legacy as vf  # in 0.2 and 0.3
except ImportError:
    import verifiers as vf

try:
    import httpx2 as httpx  # what openai is built on since 3
except ImportError:
    import httpx

from jaxagent.config import ConfigError
from jaxagent.envs.base import Opening, Transcript
from jaxagent.envs.verifiers.environment import Verifiers
from jaxagent.types import StopReason, Task

NEW = hasattr(vf.MultiTurnEnv, "get_prompt_messages")  # since 0.1.8
TYPED = hasattr(vf, "OverlongPromptError")  # messages are objects, failures of the environment are told in its state
TIMED = "timeout_seconds" in inspect.signature(vf.MultiTurnEnv.__init__).parameters
STATED = "state" in inspect.signature(vf.MultiTurnEnv.rollout).parameters
ROWS = [{"question": f"Which number, {i}?", "answer": str(i)} for i in (4, 42, 7, 9)]
CUT, FULL = "cut", "context full"  # how an episode may end beside by itself
# Of the state: the policy's place, clocks, random ids; tokens, which no environment of text is told.
OTHERS = {"client", "model", "sampling_args", "timing", "trajectory_id", "usage", "usage_tracker", "input", "id"}
CLEANED = []  # what clean-ups and stop conditions saw


def right(completion, answer, **kwargs):
    """1 where the last message, whoever wrote it, has the answer."""
    return float(answer in text(completion[-1]))


async def turns(state):
    """How many turns, by a coroutine that asks for the state alone."""
    return state["turn"] if "turn" in state else len(state["trajectory"])


def of_info(info, prompt, parser):
    """From a row's info, which may be JSON text."""
    return float(info["points"]) if isinstance(info, dict) and "points" in info else float(len(prompt))


def broken(completion):
    return 1 / 0


def multiply(a: int, b: int) -> int:
    """Multiplies.

    Args:
        a: one
        b: two
    """
    return a * b


def times(a: int, secret: int) -> str:
    """Multiplies by a number that only the environment knows.

    Args:
        a: one
        secret: the other
    """
    return str(a * secret)


class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        if "crash" in text(messages[-1]):
            raise vf.Error("out of numbers") if TYPED else RuntimeError("out of numbers")
        if "wait" in text(messages[-1]):
            await asyncio.sleep(5)
        told = [{"role": "user", "content": f"No. It is not far from {state['answer']}."}]
        state["told"] = state.get("told", 0) + 1
        return told if NEW else (told, state)

    async def setup_state(self, state, **kwargs):
        state["ready"] = True
        return state

    if NEW:

        @vf.stop
        async def guessed(self, state):
            steps = state["trajectory"]
            return bool(steps) and state["answer"] in text(steps[-1]["completion"][-1])

        @vf.cleanup
        async def gone(self, state):
            CLEANED.append(len(state["trajectory"]))

    else:

        async def is_completed(self, messages, state, **kwargs):
            said = [text(one) for one in messages if one["role"] == "assistant"]
            return await super().is_completed(messages, state, **kwargs) or bool(said and state["answer"] in said[-1])


class Secret(vf.StatefulToolEnv):
    """Its tool gets an argument that the policy is not told of."""

    def __init__(self, **kwargs):
        super().__init__(tools=[], **kwargs)
        self.add_tool(times, args_to_skip=["secret"])

    async def setup_state(self, state, **kwargs):
        state["secret"] = 7
        return state

    def update_tool_args(self, tool_name, tool_args, messages=None, state=None, **kwargs):
        return {**tool_args, "secret": (state or messages)["secret"]}


def settings(rows=ROWS, funcs=(right, turns, of_info), weights=(1.0, 0.0, 0.25)):
    return {"dataset": Dataset.from_list(rows), "rubric": vf.Rubric(funcs=list(funcs), weights=list(weights))}


def single():
    return vf.SingleTurnEnv(**settings())


def informed():
    """Its rows have info, as JSON text since that is read, a system prompt and an example."""
    info = json.dumps({"points": 3}) if NEW else {"points": 3}
    shots = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}]
    rows = [{**row, "info": info} for row in ROWS]
    return vf.SingleTurnEnv(system_prompt="Be short.", few_shot=shots, **settings(rows))


def guess(max_turns=-1, **named):
    return Guess(max_turns=max_turns, **settings(), **named)


def grouped(max_turns=-1):
    """A group of rubrics."""
    made = settings()
    made["rubric"] = vf.RubricGroup(rubrics=[made["rubric"], vf.Rubric(funcs=[turns], weights=[2.0])])
    return Guess(max_turns=max_turns, **made)


def several():
    """A group of environments."""
    return vf.EnvGroup([guess(), single()], env_names=["guess", "single"])


def failing():
    return vf.SingleTurnEnv(**settings(funcs=(right, broken), weights=(1.0, 1.0)))


def tools(max_turns=9):
    return vf.ToolEnv(tools=[multiply], max_turns=max_turns, **settings())


def secret():
    return Secret(max_turns=9, **settings())


def group_function():
    def spread(completions):
        return [0.0] * len(completions)

    return vf.SingleTurnEnv(**settings(funcs=(spread,), weights=(1.0,)))


def group_method():
    class Ranks(vf.Rubric):
        async def score_group(self, states, *args, **kwargs):
            return None

    return vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS), rubric=Ranks(funcs=[right]))


def of_completions():
    rows = [{"prompt": "1 + 1 =", "answer": "2", "example_id": 0, "task": "t"}]
    return vf.SingleTurnEnv(message_type="completion", **settings(rows))


def of_tokens():
    return vf.SingleTurnEnv(max_seq_len=8, **settings())


def unjudged():
    return vf.SingleTurnEnv(score_rollouts=False, **settings())


def overlapping(rows):
    made = [{"question": f"q{i}", "answer": "1"} for i in rows]
    return vf.SingleTurnEnv(eval_dataset=Dataset.from_list(made), **settings([{"question": "q1", "answer": "1"}] * 2))


def text(message):
    content = message["content"] if isinstance(message, dict) else message.content
    return content or ""


def plain(value):
    """A value without what differs from play to play, and without the difference of objects and their dicts."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, dict):
        kept = {
            str(k): plain(v)
            for k, v in value.items()
            if v is not None and k not in OTHERS | {"created", "tool_call_id"}
        }
        if "function" in kept:  # until 0.1.9 or so calls are OpenAI's
            kept |= kept.pop("function")
        return {k: json.loads(v) if k == "arguments" and isinstance(v, str) else v for k, v in kept.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return f"{type(value).__name__}: {value}" if isinstance(value, Exception) else value


def whole(state):
    """The state with its input, as plain values."""
    return plain({**(dict(state.get("input") or {}) if NEW else {}), **state})


# -------------------------------------------------------------------- by the adapter


async def ours(make, arguments, actions, end, max_turns):
    """(state, reward, scores, what was shown) as the adapter has them."""
    config = Verifiers(make=f"{__name__}:{make}", arguments=json.dumps(arguments), max_turns=max_turns)
    row = 5 if make == "several" else 1
    with config.open(Opening(None, (), None, lambda line: None)) as attempt_at:
        attempt = attempt_at(Task("train-1", "", (), metadata={"split": "train", "row": row}))
        try:
            prompt = await attempt.start()
            told = make in ("tools", "secret")
            assert ('"name"' in prompt[0].content) == told, "the policy is told of the tools"
            assert "secret" not in prompt[0].content, "the policy is told what it must not know"
            played = []
            for number, action in enumerate(actions):
                observation = ""
                if not (end == CUT and number == len(actions) - 1):
                    step = await attempt.step(action)
                    ended = number == len(actions) - 1 and end != FULL
                    assert (step.stop_reason is not None) == ended, f"turn {number} ends with {step.stop_reason}"
                    observation = "" if step.observation is None else step.observation.text
                played.append((action, observation))
            reason = StopReason.TOKEN_LIMIT if end in (CUT, FULL) else step.stop_reason
            verdict = await attempt.verify(Transcript("", tuple(played), ended=reason))
        finally:
            await attempt.close()
        return (
            whole(attempt._seat.state),
            verdict.reward,
            {k: v for k, v in verdict.components.items() if k != "solved"},
            reason,
        )


# -------------------------------------------------------------------- by the package


def said(action):
    """(text, calls) of a message in Hermes's format."""
    content, *blocks = action.split("<tool_call>")
    try:
        return content.strip(), [json.loads(block.removesuffix("</tool_call>")) for block in blocks]
    except ValueError:
        return action, []


def server(actions, end):
    """A client whose server sends these messages, and says then that the context is full."""
    left = list(actions)

    def answer(request):
        if not left:
            message = "This model's maximum context length is 8 tokens. However, your messages resulted in 9 tokens."
            return httpx.Response(400, json={"error": {"message": message, "type": "BadRequestError"}})
        content, made = said(left.pop(0))
        number = len(actions) - len(left)
        calls = [
            {"id": f"call_{number}_{i}", "type": "function", "function": {**m, "arguments": json.dumps(m["arguments"])}}
            for i, m in enumerate(made)
        ]
        reason = "length" if end == CUT and not left else "tool_calls" if calls else "stop"
        message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
        choices = [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}]
        body = {"id": "turn", "object": "chat.completion", "created": 0, "model": "policy", "choices": choices}
        return httpx.Response(200, json=body)

    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    client = openai.AsyncOpenAI(base_url="http://there/v1", api_key="none", http_client=http, max_retries=0)
    wrap = getattr(vf, "OpenAIChatCompletionsClient", lambda inner: inner)
    return wrap(client), left


async def theirs(environment, actions, end, row):
    """(state, reward, scores) as the package's own rollout and rubric have them."""
    client, left = server(actions, end)
    row, rubric = dict(environment.get_dataset()[row]), environment.rubric
    if NEW:
        state = await environment.rollout(row, client, "m", {})
        semaphore = "score_sem" in inspect.signature(rubric.score_rollout).parameters
        await rubric.score_rollout(state, *([asyncio.Semaphore(1)] if semaphore else []))
        reward, scores = state["reward"], state["metrics"]
    else:
        named = {"answer": row["answer"], "task": row.get("task", "default"), "info": row.get("info") or {}}
        if environment.oai_tools:
            named["info"] = {**named["info"], "oai_tools": environment.oai_tools}
        if STATED:  # as `generate` does
            named |= {"completion": [], "example_id": row["example_id"]}
            named["state"] = await environment.init_state(row["prompt"], **named)
        completion, state = await environment.rollout(client, "m", row["prompt"], **named)
        state["completion"] = completion  # 0.1.5 gives it beside the state
        named |= {"completion": completion, "state": state}
        score = await rubric.score_rollout(row["prompt"], **named)
        state |= {"reward": score.reward, "metrics": score.metrics}
        reward, scores = score.reward, score.metrics
    assert not left, f"{len(left)} messages were not asked for"
    return whole(state), reward, scores


MULTIPLY = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
TIMES = '<tool_call>{"name": "times", "arguments": {"a": 6}}</tool_call>'
CASES = {  # name -> (environment, its arguments, the same for the package's own play, messages, end, the run's turns)
    "single": ("single", {}, {}, ["It is 42."], "", 9),
    "single, cut": ("single", {}, {}, ["It might be 4"], CUT, 9),
    "information": ("informed", {}, {}, ["It is 42."], "", 9),
    "guessed": ("guess", {}, {}, ["1", "42"], "", 9),
    "a group of rubrics": ("grouped", {}, {}, ["1", "42"], "", 9),
    "its own turn limit": ("guess", {"max_turns": 2}, {"max_turns": 2}, ["1", "2"], "", 9),
    "the run's turn limit": ("guess", {}, {"max_turns": 2}, ["1", "2"], "", 2),
    "a later message cut": ("guess", {}, {"max_turns": 2}, ["1", "perhaps 4"], CUT, 9),
    "no room behind an observation": ("guess", {}, {}, ["1"], FULL, 9),
    "no room behind two": ("guess", {}, {}, ["1", "2"], FULL, 9),
    "tool": ("tools", {}, {}, [MULTIPLY, "It is 42"], "", 9),
    "text and two calls": ("tools", {}, {}, ["Both: " + MULTIPLY + MULTIPLY, "41"], "", 9),
    "a wrong tool": ("tools", {}, {}, [MULTIPLY.replace("multiply", "divide"), "42"], "", 9),
    "a malformed call": ("tools", {}, {}, [MULTIPLY, "<tool_call>multiply</tool_call>"], "", 9),
    "tools, its own turn limit": ("tools", {"max_turns": 1}, {"max_turns": 1}, [MULTIPLY], "", 9),
    "tools, the run's turn limit": ("tools", {}, {"max_turns": 1}, [MULTIPLY], "", 1),
    "tools, no room": ("tools", {}, {}, [MULTIPLY], FULL, 9),
    "tools, cut": ("tools", {}, {}, [MULTIPLY, "It is forty-"], CUT, 9),
    "a tool with a secret": ("secret", {}, {}, [TIMES, "It is 42"], "", 9),
}
CASES |= {"a group of environments": ("several", {}, {}, ["It is 42."], "", 9)} if NEW or STATED else {}
CASES |= {"time": ("guess", {"timeout_seconds": 0.4}, {"timeout_seconds": 0.4}, ["1", "wait"], "", 9)} if TIMED else {}


def differs(case):
    make, arguments, theirs_too, actions, end, max_turns = CASES[case]
    CLEANED.clear()
    mine, reward, scores, reason = asyncio.run(ours(make, arguments, actions, end, max_turns))
    cleaned = CLEANED.copy()
    CLEANED.clear()
    want = asyncio.run(theirs(globals()[make](**theirs_too), actions, end, 5 if make == "several" else 1))
    if cleaned != CLEANED:
        return f"clean-up saw {cleaned} instead of {CLEANED}"
    if (reward, scores) != want[1:]:
        return f"{reward} {scores} instead of {want[1:]}"
    # A message that was cut is the last one: the package is told that there is no more room, and its own play here has
    # no more turns.
    but = {"stop_condition", "prompt_too_long"} if end == CUT else set() if NEW else {"prompt_too_long"}
    keys = [key for key in sorted(mine.keys() | want[0].keys()) if mine.get(key) != want[0].get(key) and key not in but]
    if keys:
        return f"the state differs: {[(key, mine.get(key), want[0].get(key)) for key in keys]}"
    limits = {"its own turn limit", "the run's turn limit", "tools, its own turn limit", "tools, the run's turn limit"}
    kind = StopReason.TURN_LIMIT if case in limits and "own" not in case and NEW else None
    kind = StopReason.TIME_LIMIT if case == "time" else kind
    return "" if kind in (None, reason) or case in limits else f"it ends with {reason}, not {kind}"


def failures():
    """Failures of the environment and of a reward function, which are none of the policy's."""
    for make, actions, told in (("guess", ["1", "crash"], "out of numbers"), ("failing", ["42"], "division by zero")):
        try:
            asyncio.run(ours(make, {}, actions, "", 9))
        except (RuntimeError, ZeroDivisionError, getattr(vf, "Error", RuntimeError)) as failure:
            if told not in str(failure):
                return f"{make}: {failure}"
        else:
            return f"{make}: no failure"
    return ""


def refused():
    """What has no meaning here is refused by its name, at the start."""
    wanted = {"group_function": "whole groups", "group_method": "whole groups"}
    wanted |= {"of_completions": "message_type"} if NEW and not TYPED else {}
    wanted |= {"of_tokens": "max_seq_len", "unjudged": "score_rollouts"} if TYPED else {}
    for make, told in wanted.items():
        try:
            with Verifiers(make=f"{__name__}:{make}").open(Opening(None, (), None, lambda line: None)):
                return f"{make} is not refused"
        except ConfigError as error:
            if told not in str(error):
                return f"{make}: {error}"
    return ""


def handlers():
    """The package takes over signals; a run's own handlers stay."""
    kept = []
    signal.signal(signal.SIGTERM, lambda *_: kept.append(1))
    asyncio.run(ours("single", {}, ["42"], "", 9))
    with contextlib.suppress(SystemExit):
        signal.raise_signal(signal.SIGTERM)
    return "" if kept else "SIGTERM is the package's"


def held_out():
    """What of the held-out rows is wrong."""
    made = Verifiers(make=f"{__name__}:single").tasks(1)
    names = [[row["id"] for row in made[split]] for split in ("train", "heldout")]
    if names != [["train-0", "train-1", "train-2"], ["train-3"]]:
        return f"the package's own fallback, the training rows, is held out: {names}"
    own = Verifiers(make=f"{__name__}:overlapping", arguments='{"rows": [5]}').tasks(1)
    if [row["id"] for row in own["heldout"]] != ["heldout-0"]:
        return f"its own held-out rows are not taken: {own}"
    try:
        Verifiers(make=f"{__name__}:overlapping", arguments='{"rows": [1, 5]}').tasks(1)
    except ConfigError as refusal:
        return "" if "1 of its 2 held-out rows" in str(refusal) else str(refusal)
    return "a held-out row that is a training row is not refused"


# Parameters of constructors, and what becomes of them here; other names, of later versions, fail until they are known.
PLAYED = {"dataset", "eval_dataset", "system_prompt", "few_shot", "parser", "rubric", "rubrics", "funcs", "weights"}
PLAYED |= {"oai_tools", "tool_defs", "tools", "max_turns", "timeout_seconds", "error_formatter", "stop_errors"}
PLAYED |= {"envs", "env_names"}
REFUSED = {"message_type", "max_seq_len", "score_rollouts"}  # where they ask for what there is not: `refused`
NOTED = {"sampling_args"}
OF_THE_PACKAGE = {"max_workers", "parallelize_scoring", "map_kwargs"}  # how it computes
OF_THE_PACKAGE |= {"env_id", "env_args", "pass_threshold"}  # for its own reports
KINDS = ("Environment", "SingleTurnEnv", "MultiTurnEnv", "ToolEnv", "StatefulToolEnv", "EnvGroup", "Rubric")


def constructors():
    """A parameter that is neither played nor refused nor said to be of no effect."""
    known = PLAYED | REFUSED | NOTED | OF_THE_PACKAGE | {"self", "args", "kwargs"}
    for kind in (*KINDS, "RubricGroup"):
        names = set(inspect.signature(getattr(vf, kind).__init__).parameters) if hasattr(vf, kind) else set()
        if names - known:
            return f"{kind}: {sorted(names - known)}"
    notes = []
    with Verifiers(make=f"{__name__}:warm").open(Opening(None, (), None, notes.append)):
        pass
    told = [note for note in notes if "sampling_args" in note]
    return "" if told and told[0].endswith(": max_tokens, temperature") else f"sampling_args are not noted: {notes}"


def warm():
    return vf.SingleTurnEnv(**settings(), sampling_args={"temperature": 0.7, "max_tokens": 9})


OTHER_CASES = {
    "constructors": constructors,
    "held-out": held_out,
    "failures": failures,
    "refused": refused,
    "handlers": handlers,
}


def result(case):
    try:
        return OTHER_CASES[case]() if case in OTHER_CASES else differs(case)
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"


if __name__ == "__main__":
    sys.modules["verifiers_package"] = sys.modules["__main__"]
    __name__ = "verifiers_package"
    chosen = sys.argv[1:] or [*CASES, *OTHER_CASES]
    print(json.dumps({case: result(case) for case in chosen}))
