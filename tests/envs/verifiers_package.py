"""Plays environments of the installed package verifiers twice, by the adapter and by the package itself, and compares.

Started by test_verifiers_package.py in an environment of its own, which has the package and no JAX. The policy is a
list of messages. Prints one JSON object: {case: what differs, "" for nothing}.
"""

import asyncio
import json
import sys

from datasets import Dataset

try:
    import verifiers.legacy as vf  # in 0.2 and 0.3
except ImportError:
    import verifiers as vf

from jaxagent.config import ConfigError
from jaxagent.envs.base import Opening, Transcript
from jaxagent.envs.verifiers.environment import Verifiers
from jaxagent.types import StopReason, Task

NEW = hasattr(vf.MultiTurnEnv, "get_prompt_messages")  # since 0.1.8
ROWS = [{"question": f"Which number, {i}?", "answer": str(i)} for i in (4, 42, 7, 9)]
CUT, FULL = "cut", "context full"  # how an episode may end beside by itself


def right(completion, answer, **kwargs):
    """1 where the last message, whoever wrote it, has the answer."""
    return float(answer in text(completion[-1]))


def multiply(a: int, b: int) -> int:
    """Multiplies.

    Args:
        a: one
        b: two
    """
    return a * b


class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        told = [{"role": "user", "content": f"No. It is not far from {state['answer']}."}]
        return told if NEW else (told, state)

    if NEW:

        @vf.stop
        async def guessed(self, state):
            steps = state["trajectory"]
            return bool(steps) and state["answer"] in text(steps[-1]["completion"][-1])

    else:

        async def is_completed(self, messages, state, **kwargs):
            said = [text(one) for one in messages if one["role"] == "assistant"]
            return await super().is_completed(messages, state, **kwargs) or bool(said and state["answer"] in said[-1])


def settings(rows=ROWS):
    return {"dataset": Dataset.from_list(rows), "rubric": vf.Rubric(funcs=[right])}


def single():
    return vf.SingleTurnEnv(**settings())


def guess(max_turns=-1):
    return Guess(max_turns=max_turns, **settings())


def tools(max_turns=9):
    return vf.ToolEnv(tools=[multiply], max_turns=max_turns, **settings())


def overlapping(rows):
    made = [{"question": f"q{i}", "answer": "1"} for i in rows]
    return vf.SingleTurnEnv(eval_dataset=Dataset.from_list(made), **settings([{"question": "q1", "answer": "1"}] * 2))


def text(message):
    content = message["content"] if isinstance(message, dict) else message.content
    return content or ""


def calls(message):
    found = message.get("tool_calls") or []
    plain = [one if isinstance(one, dict) else one.model_dump() for one in found]
    inner = [one.get("function") or one for one in plain]
    return [(one["name"], json.loads(one["arguments"])) for one in inner]


def brief(completion):
    return [(one["role"], text(one), calls(one)) for one in completion]


# -------------------------------------------------------------------- by the adapter


async def ours(make, arguments, actions, end, max_turns):
    """(completion, reward) as the adapter has them."""
    config = Verifiers(make=f"{__name__}:{make}", arguments=json.dumps(arguments), max_turns=max_turns)
    with config.open(Opening(None, (), None, lambda line: None)) as attempt_at:
        attempt = attempt_at(Task("train-1", "", (), metadata={"split": "train", "row": 1}))
        prompt = await attempt.start()
        assert ("multiply" in prompt[0].content) == (make == "tools"), "the policy is told of the tools"
        turns = []
        for number, action in enumerate(actions):
            observation = ""
            if not (end == CUT and number == len(actions) - 1):
                step = await attempt.step(action)
                ended = number == len(actions) - 1 and end != FULL
                assert (step.stop_reason is not None) == ended, f"turn {number} ends with {step.stop_reason}"
                observation = "" if step.observation is None else step.observation.text
            turns.append((action, observation))
        reason = StopReason.TOKEN_LIMIT if end in (CUT, FULL) else step.stop_reason
        verdict = await attempt.verify(Transcript("", tuple(turns), ended=reason))
        await attempt.close()
        return brief(attempt._dialogue.state["completion"]), verdict.reward


# -------------------------------------------------------------------- by the package


def said(action):
    """(text, calls) of a message in Hermes's format."""
    content, *blocks = action.split("<tool_call>")
    try:
        return content.strip(), [json.loads(block.removesuffix("</tool_call>")) for block in blocks]
    except ValueError:
        return action, []


def response(action, number):
    """A message of the model's, in the form that the package has it from its client."""
    content, made = said(action)
    made = [
        {"id": f"c{number}{i}", "name": m["name"], "arguments": json.dumps(m["arguments"])} for i, m in enumerate(made)
    ]
    if hasattr(vf.types, "ResponseMessage"):
        message = {"content": content, "tool_calls": made or None, "finish_reason": "stop", "is_truncated": False}
        return vf.types.Response.model_validate({"id": "r", "created": 0, "model": "m", "message": message})
    from openai.types.chat import ChatCompletion

    nested = [{"id": m["id"], "type": "function", "function": {k: m[k] for k in ("name", "arguments")}} for m in made]
    choice = {"index": 0, "finish_reason": "stop"}
    choice["message"] = {"role": "assistant", "content": content, "tool_calls": nested or None}
    return ChatCompletion.model_validate(
        {"id": "r", "created": 0, "model": "m", "object": "chat.completion", "choices": [choice]}
    )


def too_long():
    """What the package makes of a prompt that its client finds too long."""
    if hasattr(vf, "OverlongPromptError"):
        raise vf.OverlongPromptError("too long")
    made = response("Prompt too long.", 9)
    made.id = "overlong-prompt"
    return made


async def theirs(environment, actions, end):
    """(completion, reward) as the package's own rollout has them."""
    left = list(actions)

    async def model(*args, **named):
        return response(left.pop(0), len(left)) if left else too_long()

    environment.get_model_response = model
    row = dict(environment.get_dataset()[1])
    if NEW:
        from jaxagent.envs.verifiers import dialogue

        client = dialogue._no_client(getattr(getattr(vf, "clients", None), "Client", None))
        state = await environment.rollout(row, client, "m", {})
        completion = state["completion"]
    else:
        completion, _ = await environment.rollout(None, "m", row["prompt"], answer=row["answer"], task="", info={})
    assert not left, f"{len(left)} messages were not asked for"
    return brief(completion), right(completion, row["answer"])


MULTIPLY = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
CASES = {  # name -> (environment, its arguments, the same for the package's own play, messages, end, the run's turns)
    "single": ("single", {}, {}, ["It is 42."], "", 9),
    "single, cut": ("single", {}, {}, ["It might be 4"], CUT, 9),
    "guessed": ("guess", {}, {}, ["1", "42"], "", 9),
    "its own turn limit": ("guess", {"max_turns": 2}, {"max_turns": 2}, ["1", "2"], "", 9),
    "the run's turn limit": ("guess", {}, {"max_turns": 2}, ["1", "2"], "", 2),
    "a later message cut": ("guess", {}, {"max_turns": 2}, ["1", "perhaps 4"], CUT, 9),
    "no room behind an observation": ("guess", {}, {}, ["1"], FULL, 9),
    "no room behind two": ("guess", {}, {}, ["1", "2"], FULL, 9),
    "tool": ("tools", {}, {}, [MULTIPLY, "It is 42"], "", 9),
    "text and two calls": ("tools", {}, {}, ["Both: " + MULTIPLY + MULTIPLY, "41"], "", 9),
    "a wrong tool": ("tools", {}, {}, [MULTIPLY.replace("multiply", "divide"), "42"], "", 9),
    "tools, its own turn limit": ("tools", {"max_turns": 1}, {"max_turns": 1}, [MULTIPLY], "", 9),
    "tools, the run's turn limit": ("tools", {}, {"max_turns": 1}, [MULTIPLY], "", 1),
    "tools, a malformed last call": ("tools", {}, {}, [MULTIPLY, "<tool_call>multiply</tool_call>"], "", 2),
    "tools, no room": ("tools", {}, {}, [MULTIPLY], FULL, 9),
    "tools, cut": ("tools", {}, {}, [MULTIPLY, "It is forty-"], CUT, 9),
}


def differs(case):
    make, arguments, theirs_too, actions, end, max_turns = CASES[case]
    mine, reward = asyncio.run(ours(make, arguments, actions, end, max_turns))
    want, wanted = asyncio.run(theirs(globals()[make](**theirs_too), actions, end))
    return "" if (mine, reward) == (want, wanted) else f"{mine} {reward} instead of {want} {wanted}"


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
    except ConfigError as refused:
        return "" if "1 of its 2 held-out rows" in str(refused) else str(refused)
    return "a held-out row that is a training row is not refused"


def result(case):
    try:
        return held_out() if case == "held-out" else differs(case)
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"


if __name__ == "__main__":
    sys.modules["verifiers_package"] = sys.modules["__main__"]
    __name__ = "verifiers_package"
    print(json.dumps({case: result(case) for case in [*CASES, "held-out"]}))
