"""Any environment of the verifiers interface: rows, `env_response`, `is_completed`, and a rubric of reward functions.

    --config.env=verifiers --config.env.make=my_package.my_module:load_environment --config.data.source=verifiers

Such an environment is written against an API that answers in messages. Here the policy itself plays it: the messages of
`env_response` are its observations, its tools (`oai_tools`) are described to it in the system message, and its calls
reach the environment as `tool_calls` in OpenAI's form. The package verifiers is not needed; see `rows` for what an
environment must have.

One environment object serves all attempts, as there; what belongs to one is in its `state`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.ranges import FiniteFloat, Seconds
from jaxagent.envs.base import Attempt, Environment, Message, Observation, Opening, Step, Transcript, Verdict
from jaxagent.envs.verifiers import rows
from jaxagent.envs.verifiers.dialogue import Classic, Hosted
from jaxagent.envs.verifiers.hosted import Loop, is_hosted, note_failures, prepare
from jaxagent.envs.verifiers.rows import SOLVED
from jaxagent.tools.calls import Tool
from jaxagent.tools.hermes import CLOSE, OPEN, read_answer
from jaxagent.types import StopReason, Task, TokenKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verifiers(Environment):
    """One environment of the verifiers interface."""

    make: str = ""  # "module:function" that returns an environment
    arguments: str = "{}"  # of the function, a JSON object
    solved_reward: FiniteFloat = 1.0  # from which reward an attempt counts as solved, in reports
    step_timeout_s: Seconds = 60.0  # for each call of the environment or of a reward function

    score = SOLVED
    calls = "calls"
    tokens = (OPEN, CLOSE)

    def __post_init__(self) -> None:
        """Raises ConfigError where no environment is named."""
        if not self.make:
            raise ConfigError("config.env.make is empty: name a function, such as my_package:load_environment.")

    @property
    def made_of(self) -> Mapping[str, Any]:
        """What the rows depend on."""
        return dict(make=self.make, arguments=self.arguments)

    def tasks(self, num_heldout: int) -> dict[str, list[dict[str, Any]]]:
        """The environment's rows as tasks, training and held-out.

        Args:
          num_heldout: how many of the last training rows are held out where there are no held-out rows.

        Raises:
          ConfigError: the environment cannot be made, or has too few rows.
        """
        environment = rows.load(self.make, self.arguments)
        of = {split: rows.rows_of(environment, split) for split in ("train", "heldout")}
        keys = {split: [rows.prompt_key(environment, row) for row in of[split]] for split in of}
        if sorted(keys["heldout"]) == sorted(keys["train"]):
            keys["heldout"] = []  # the package hands out the training rows where it has no others
        places = rows.split_rows(keys["train"], keys["heldout"], num_heldout, f"config.env.make='{self.make}'")
        return {
            name: [_task_row(environment, split, number, of[split][number]) for split, number in chosen]
            for name, chosen in places.items()
        }

    @contextlib.contextmanager
    def open(self, opening: Opening) -> Iterator[Callable[[Task], VerifiersAttempt]]:
        """Makes the environment, and looks at its rubric and at the held-out tasks."""
        environment = rows.load(self.make, self.arguments)
        functions = rows.reward_functions(environment)
        opening.note(f"reward functions: {', '.join(f'{weight:g} x {rows.name_of(f)}' for f, weight, _ in functions)}")
        for task in opening.tasks:
            try:
                rows.prompt_of(environment, row_of(environment, task))
            except ValueError as error:
                raise ConfigError(f"config.env.make='{self.make}': {error}.") from error
        if not is_hosted(environment):
            yield lambda task: VerifiersAttempt(task, self, environment, lambda call: Classic(environment, call))
            return
        prepare(environment, self.max_turns)
        note_failures(environment)
        with Loop() as loop:
            yield lambda task: VerifiersAttempt(task, self, environment, lambda call: Hosted(environment, call, loop))


class VerifiersAttempt(Attempt):
    """One attempt: one state of the environment."""

    def __init__(
        self, task: Task, config: Verifiers, environment: Any, dialogue: Callable[..., Classic | Hosted]
    ) -> None:
        self._task, self._config = task, config
        self._row = row_of(environment, task)
        self._dialogue = dialogue(self._call)
        self._tools: Sequence[Tool] = ()
        self._turns = 0
        most = getattr(environment, "max_turns", -1)
        self._most_turns = min(config.max_turns, most) if type(most) is int and most > 0 else config.max_turns
        self.stop_strings: Sequence[str] = ()
        self.counters: dict[str, float] = {"calls": 0.0, "invalid_actions": 0.0}

    async def start(self) -> Sequence[Message]:
        """The row's prompt, and the tools."""
        prompt, self._tools = await self._dialogue.begin(dict(self._row), self._task.id)
        self.stop_strings = (CLOSE,) if self._tools else ()
        return rows.policy_messages(prompt, self._tools)

    async def step(self, action: str) -> Step:
        """Gives the policy's message to the environment, and its messages to the policy. A call that cannot be read is
        text to the environment, as servers leave it."""
        self._turns += 1
        reason, new = await self._dialogue.say(self._message(action), self._turns >= self._most_turns)
        if reason is not None:
            return Step(stop_reason=reason)
        texts = [rows.text_of(m) for m in new]
        if not any(texts):
            raise ValueError("env_response gave nothing to show, and the environment is not completed")
        parts = tuple((f"\n{text}\n", TokenKind.OBSERVATION) for text in texts if text)
        return Step(Observation(parts, "tool" if all(m.get("role") == "tool" for m in new) else "user"))

    def _message(self, action: str) -> dict[str, Any]:
        reply = read_answer(action, self._tools)
        if self._tools and reply.malformed:
            self.counters["invalid_actions"] += 1
        if reply.malformed or not reply.calls:
            return {"role": "assistant", "content": action}
        self.counters["calls"] += len(reply.calls)
        calls = [
            _Open(
                id=f"call_{self._turns}_{i}",
                type="function",
                function=_Open(name=call.name, arguments=json.dumps(call.arguments)),
            )
            for i, call in enumerate(reply.calls)
        ]
        return {"role": "assistant", "content": reply.text, "tool_calls": calls}

    async def verify(self, transcript: Transcript) -> Verdict:
        """The rubric: the weighted sum of its functions; each one's value is a component.

        A message that was cut, and that `step` never got, is the last of the completion all the same.
        """
        if len(transcript.turns) > self._turns:
            self._turns += 1
            await self._dialogue.end({"role": "assistant", "content": transcript.turns[-1][0]})
        elif transcript.ended is StopReason.TOKEN_LIMIT:
            await self._dialogue.fill()
        reward, scores = await self._dialogue.score()
        return Verdict(reward, {**scores, SOLVED: float(reward >= self._config.solved_reward)})

    async def close(self) -> None:
        """The environment is shared; an attempt has nothing but its state."""
        await self._dialogue.close()

    async def _call(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Calls what may be a coroutine function, or one that blocks and gets a thread."""
        async with asyncio.timeout(self._config.step_timeout_s):
            if inspect.iscoroutinefunction(function):
                return await function(*args, **named)
            result = await asyncio.to_thread(function, *args, **named)
            return await result if inspect.isawaitable(result) else result


class _Open(dict[str, Any]):
    """A dict whose entries are attributes too: environments read tool calls in either way."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _task_row(environment: Any, split: str, number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    answer = row.get("answer")
    return {
        "id": f"{split}-{number}",
        "prompt": rows.text_of(rows.prompt_of(environment, row)[-1]),
        "answers": [] if answer is None else [str(answer)],
        "kind": str(row.get("task", "")),
        "metadata": {"split": split, "row": number},
    }


def row_of(environment: Any, task: Task) -> Mapping[str, Any]:
    """The row that a task stands for. Raises ConfigError: the task names none; such tasks come from
    --config.data.source=verifiers."""
    split, number = rows.place_of(task)
    dataset = rows.rows_of(environment, split)
    if not 0 <= number < len(dataset):
        raise ConfigError(f"task {task.id!r} names row {number} of {len(dataset)} rows.")
    return dataset[number]
