"""Any environment of the package verifiers until 0.3: rows, rollouts of its own, and a rubric of reward functions.

    --config.env=verifiers --config.env.make=my_package.my_module:load_environment --config.data.source=verifiers

The package plays (`hosted.py`); the policy has the model's seat: the messages that it is asked with are its prompt and
its observations, tools are described to it in the system message, and its calls go back as `tool_calls` in OpenAI's
form. An object that does without the package is played likewise (`plain.py`).

One environment object serves all attempts, as there; what belongs to one is in its `state`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.ranges import FiniteFloat, Seconds
from jaxagent.envs.base import Attempt, Environment, Message, Observation, Opening, Step, Transcript, Verdict
from jaxagent.envs.own_thread import OwnLoop
from jaxagent.envs.verifiers import rows
from jaxagent.envs.verifiers.hosted import Seat, note_failures, prepare, sampling_of
from jaxagent.envs.verifiers.rows import SOLVED
from jaxagent.tools.calls import Tool
from jaxagent.tools.hermes import CLOSE, OPEN, read_answer
from jaxagent.types import StopReason, Task, TokenKind

STOPS = {"max_turns_reached": StopReason.TURN_LIMIT, "timeout_reached": StopReason.TIME_LIMIT}


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
        if own := sampling_of(environment):
            opening.note(f"the environment's sampling_args are not used, the run's sampling is: {', '.join(own)}")
        prepare(environment, self.max_turns)
        note_failures(environment)
        with OwnLoop() as loop:
            yield lambda task: VerifiersAttempt(task, self, environment, loop)


class VerifiersAttempt(Attempt):
    """One attempt: one rollout of the environment, on `loop`, in which the policy has a seat."""

    def __init__(self, task: Task, config: Verifiers, environment: Any, loop: OwnLoop) -> None:
        self._config, self._environment, self._loop = config, environment, loop
        self._row = copy.deepcopy(row_of(environment, task))  # an environment may write into its state, which has it
        self._seat = Seat(environment)
        self._request: Mapping[str, Any] = {}
        self._tools: Sequence[Tool] = ()
        self._turns = 0
        self.stop_strings: Sequence[str] = ()
        self.counters: dict[str, float] = {"calls": 0.0, "invalid_actions": 0.0}

    async def start(self) -> Sequence[Message]:
        """The row's prompt, and the tools. Raises ValueError: the rollout is over before it has asked."""
        row = {**self._row, "prompt": rows.prompt_of(self._environment, self._row)}
        request = await self._do(self._seat.begin(row))
        if request is None:
            raise ValueError(f"the rollout is over before the policy was asked: {self._seat.state.get('error')!r}")
        self._request, self._tools = request, rows.tools_of(request.get("tools") or ())
        self.stop_strings = (CLOSE,) if self._tools else ()
        return rows.policy_messages(request["messages"], self._tools)

    async def step(self, action: str) -> Step:
        """Gives the policy's message to the environment, and its messages to the policy. A call that cannot be read is
        text to the environment, as servers leave it. Raises ValueError: it shows another conversation than took place.
        """
        self._turns += 1
        message = self._message(action)
        request = await self._do(self._seat.say(message))
        if request is None:
            stop = STOPS.get(self._seat.state.get("stop_condition"), StopReason.ANSWER)
            return Step(stop_reason=StopReason.ANSWER if getattr(self._environment, "max_turns", 0) == 1 else stop)
        if self._turns >= self._config.max_turns:
            return Step(stop_reason=StopReason.TURN_LIMIT)
        before, self._request = self._request["messages"], request
        own, *new = request["messages"][len(before) :] or [{}]
        if request["messages"][: len(before)] != before or rows.text_of(own) != message["content"]:
            raise ValueError("get_prompt_messages rewrites the conversation; here a conversation only grows")
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
        functions = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in reply.calls]
        calls = [{"id": f"call_{self._turns}_{i}", "type": "function", "function": f} for i, f in enumerate(functions)]
        return {"role": "assistant", "content": reply.text, "tool_calls": calls}

    async def verify(self, transcript: Transcript) -> Verdict:
        """The rubric: the weighted sum of its functions; each one's value is a component.

        A message that was cut, and that `step` never got, is the last of the completion all the same. A rollout that is
        not over ends as with a full context.
        """
        if len(transcript.turns) > self._turns:
            await self._do(self._seat.say({"role": "assistant", "content": transcript.turns[-1][0]}, cut=True))
        await self._do(self._seat.fill())
        reward, scores = await self._do(self._seat.score())
        return Verdict(reward, {**scores, SOLVED: float(reward >= self._config.solved_reward)})

    async def close(self) -> None:
        """Gives up a rollout that is not over; the environment is shared."""
        await self._do(self._seat.close())

    async def _do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        async with asyncio.timeout(self._config.step_timeout_s):
            return await asyncio.wrap_future(self._loop.begin(coroutine))


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
