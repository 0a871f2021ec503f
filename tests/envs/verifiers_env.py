"""Environments as they are written for the verifiers package's classic interface, without it."""

import json
from types import SimpleNamespace


class Guess:
    """Higher or lower, in messages."""

    system_prompt = "Guess a number."
    max_turns = 4

    def __init__(self, numbers):
        self.dataset = [{"question": f"number {i}", "answer": str(n), "info": {"n": n}} for i, n in enumerate(numbers)]

        def correct(completion, answer, **kwargs):
            return float(completion[-1]["content"] == answer)

        async def quick(state):
            return 1 / state["turn"]

        def shout(prompt, parser):
            return float(len(prompt)) if parser == "words" else -1.0

        self.rubric = SimpleNamespace(funcs=[correct, quick, shout], weights=[1.0, 0.5, 0.0], parser="words")

    async def setup_state(self, state):
        state["low"] = []
        return state

    async def is_completed(self, messages, state):
        return messages[-1]["role"] == "assistant" and messages[-1]["content"] == state["answer"]

    async def env_response(self, messages, state):
        if messages[-1]["content"] == "crash":
            raise RuntimeError("out of numbers")
        below = int(messages[-1]["content"]) < state["info"]["n"]
        state["low"].append(below)
        state["info"].setdefault("asked", []).append(below)  # which is the row's
        return [{"role": "user", "content": "higher" if below else "lower"}]


class Tools:
    """One tool; ends with the first message without a call. Older in style: synchronous, and it returns the state."""

    max_turns = -1

    def __init__(self):
        row = {"prompt": [{"role": "user", "content": "How much is 6 x 7?"}], "answer": "42"}
        other = {**row, "prompt": [{"role": "user", "content": "How much is 7 x 6?"}]}
        self._rows = {"train": [row] * 3, "eval": [other]}
        form = {"name": "multiply", "description": "Multiplies.", "parameters": {"type": "object", "properties": {}}}
        self.oai_tools = [{"type": "function", "function": form}]
        part = SimpleNamespace(get_reward_funcs=lambda: [self.right], get_reward_weights=lambda: [2.0])
        self.rubric = SimpleNamespace(rubrics=[part])

    def get_dataset(self):
        return self._rows["train"]

    def get_eval_dataset(self):
        return self._rows["eval"]

    def is_completed(self, state):
        return not state["responses"][-1].get("tool_calls")

    def env_response(self, messages, state, **kwargs):
        (call,) = messages[-1]["tool_calls"]
        assert call.function.name == call["function"]["name"] == "multiply"
        given = json.loads(call.function.arguments)
        content = str(given["a"] * given["b"])
        return [{"role": "tool", "tool_call_id": call.id, "content": content}], {**state, "used": True}

    def right(self, completion, answer, state):
        return float(answer in completion[-1]["content"] and state["used"])


def load_guess(numbers=(3, 5, 7)):
    return Guess(numbers)


def load_tools():
    return Tools()


def load_for_groups():
    found = Guess([1])
    found.rubric.funcs[0] = lambda completions: 0.0
    return found


def load_nothing():
    return object()
