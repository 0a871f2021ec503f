"""NeMo-Gym's resources servers: their tools over HTTP, and their verdict on the whole response.

    --config.env=nemo_gym --config.env.server=resources_servers.example_multi_step.app:ExampleMultiStepResourcesServer
    --config.env=nemo_gym --config.env.server=http://127.0.0.1:8000 --config.data.source.train=rows.jsonl

A server is the class of one, in a package that `python` has: then it is a process of ours. Or it is the URL of one that
runs. The package nemo-gym is needed there only. An attempt is what its simple agent does: POST /seed_session with the
row, POST /TOOL with a call's arguments, whose answer the policy is shown whatever its status, POST /verify with the row
and the response, all with the cookies of its session. A message without a call ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.errors import as_config_error
from jaxagent.config.ranges import FiniteFloat, Seconds
from jaxagent.data.fields import RowError
from jaxagent.envs import forms, tags
from jaxagent.envs.base import Environment, Message, Observation, Opening, Step, Transcript, Verdict
from jaxagent.envs.nemo_gym import rows
from jaxagent.envs.server_process import REPLY_BYTES, STOP_S, ServerProcess, ServerProgram, variables_of
from jaxagent.io.http import HttpClient, HttpStatus, HttpTimeout
from jaxagent.tools.calls import Call, with_tools
from jaxagent.tools.hermes import CLOSE, OPEN, read_answer
from jaxagent.types import StopReason, Task, TokenKind

SOLVED = "solved"
APP = Path(__file__).with_name("resources_app.py")
OWN = ("seed_session", "verify", "aggregate_metrics", "close_session", "mcp")  # routes that are no tools
STEPS = ("/reset", "/step")  # of servers that play in steps, with an agent of their own
UNKNOWN_ROUTE = '{"detail":"Not Found"}'  # what a server answers where it has no such tool
NO_COMPONENTS = ("reward", "mask_sample")  # of the numbers of a verdict
THOUGHT = tags.pair("think")
CUT = {"reason": "max_output_tokens"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NemoGym(Environment):
    """One resources server."""

    server: str = ""  # "package.module:Class", or a URL
    python: str = ""  # the interpreter whose packages have the server; "" = this one
    arguments: str = "{}"  # settings of its class, a JSON object
    variables: tuple[str, ...] = ()  # "KEY=value" of the server's process
    solved_reward: FiniteFloat = 1.0  # from which reward an attempt counts as solved, in reports
    start_timeout_s: Seconds = 60.0  # until a server answers
    call_timeout_s: Seconds = 60.0  # for a session or a tool
    verify_timeout_s: Seconds = 120.0

    score = SOLVED
    calls = "calls"
    stop_strings = (CLOSE,)
    tokens = (OPEN, CLOSE)
    repeatable = False  # a server may answer as it likes

    def __post_init__(self) -> None:
        """Raises ConfigError where no server is named, or its settings cannot be read."""
        if ":" not in self.server:
            raise ConfigError(f"config.env.server='{self.server}' is neither 'package.module:Class' nor a URL.")
        variables_of(self.variables, "config.env.variables")
        forms.json_object(self.arguments, "config.env.arguments")

    @contextlib.contextmanager
    def open(self, opening: Opening) -> Iterator[Callable[[Task], NemoGymAttempt]]:
        """Starts the server, and looks at its routes and at the tasks."""
        server = ResourceServer(self, opening.note)
        try:
            with as_config_error(f"config.env.server='{self.server}'"):
                url = opening.run(server.url(), self.start_timeout_s + STOP_S)
                routes = opening.run(_routes(url, self.call_timeout_s), self.call_timeout_s + STOP_S)
            opening.note(f"NeMo-Gym routes: {', '.join(routes)}")
            for route in ("/seed_session", "/verify"):
                if route not in routes:
                    raise ConfigError(f"config.env.server='{self.server}' is no resources server: it has no {route}.")
            if all(route in routes for route in STEPS):
                raise ConfigError(f"config.env.server='{self.server}' plays by {' and '.join(STEPS)}, not by tools.")

            def look(task: Task) -> None:
                for tool in tools_of(task)[0]:
                    if f"/{tool.name}" not in routes and not any(route.startswith("/{") for route in routes):
                        raise ConfigError(f"the server has no route /{tool.name} for the tool of task {task.id!r}.")

            opening.check(look)
            yield lambda task: NemoGymAttempt(task, self, server)
        finally:
            opening.run(server.close(), STOP_S + 10.0)


class ResourceServer:
    """The one that all attempts of a run have: somebody's, or a process of ours, which is started again if it dies."""

    def __init__(self, config: NemoGym, note: Callable[[str], None]) -> None:
        self._config, self._note = config, note
        self._process: ServerProcess | None = None
        self._starting = asyncio.Lock()

    async def url(self) -> str:
        """Where it answers now. Raises ConnectionError, TimeoutError: a process does not start."""
        config = self._config
        if config.server.startswith(("http://", "https://")):
            return config.server.rstrip("/")
        async with self._starting:
            if self._process is None or not self._process.alive:
                if self._process is not None:
                    self._note(f"{config.server} has ended, and is started again{self._process.last_words}")
                    await self._process.close()
                variables = variables_of(config.variables, "config.env.variables")
                variables |= {"RESOURCES_SERVER": config.server, "RESOURCES_CONFIG": config.arguments}
                self._process = ServerProcess(ServerProgram(f"{APP}:application()", config.python, variables=variables))
                await self._process.start("/openapi.json", config.start_timeout_s)
            return self._process.url

    async def close(self) -> None:
        """Kills the process."""
        if self._process is not None:
            await self._process.close()


async def _routes(url: str, timeout_s: float) -> list[str]:
    async with HttpClient(timeout_s, REPLY_BYTES) as client:
        paths = (await client.request_object("GET", f"{url}/openapi.json")).get("paths")
    if not isinstance(paths, dict):
        raise ValueError("its /openapi.json has no paths")
    return list(paths)


def tools_of(task: Task) -> tuple[list[Any], bool]:
    """The tools of a task's row, and whether one message may call several. Raises ConfigError: it has no row."""
    try:
        return rows.tools_of(task.metadata[rows.ROW])
    except (KeyError, RowError) as error:
        why = "it is no row of NeMo-Gym" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"task {task.id!r}: {why}.") from None


class NemoGymAttempt:
    """One attempt: one session of the server, and the response as it grows."""

    def __init__(self, task: Task, config: NemoGym, server: ResourceServer) -> None:
        self._row, self._config, self._server, self._url = task.metadata[rows.ROW], config, server, ""
        self._tools, self._several = tools_of(task)
        self._client = HttpClient(config.call_timeout_s, REPLY_BYTES, keeps_cookies=True)
        self._output: list[dict[str, Any]] = []
        self._turns = 0
        self.stop_strings: Sequence[str] = (CLOSE,) if self._tools and not self._several else ()
        self.counters: dict[str, float] = {"calls": 0.0, "failed_calls": 0.0, "invalid_actions": 0.0}

    async def start(self) -> Sequence[Message]:
        """Seeds the session. The prompt is the row's, its tools in a system message."""
        self._url = await self._server.url()
        await self._ask("/seed_session", self._row, self._config.call_timeout_s)
        return [Message(*pair) for pair in with_tools(rows.messages_of(self._row), self._tools, self._several)]

    async def step(self, action: str) -> Step:
        """Makes the calls, the last turn's as well; ends with a message without one."""
        self._turns += 1
        calls = self._say(action)
        if not calls:
            return Step(stop_reason=StopReason.ANSWER)
        outputs = [(call_id, await self._call(call)) for call_id, call in calls]
        self._output += [{"type": "function_call_output", "call_id": name, "output": text} for name, text in outputs]
        if self._turns >= self._config.max_turns:
            return Step(stop_reason=StopReason.TURN_LIMIT)
        parts = tuple((f"\n{text}\n", TokenKind.OBSERVATION) for _, text in outputs)
        return Step(Observation(parts, "tool"))

    async def verify(self, transcript: Transcript) -> Verdict:
        """The server's verdict on the response; a message that was cut is its last, and incomplete."""
        cut = transcript.ended is StopReason.TOKEN_LIMIT
        if len(transcript.turns) > self._turns:
            self._say(transcript.turns[-1][0])
        elif cut:  # no room behind an observation: an empty message
            self._say("")
        params = self._row[rows.PARAMS]
        response = {
            "id": "resp_0",
            "created_at": 0.0,
            "model": params.get("model") or "policy",
            "object": "response",
            "status": "incomplete" if cut else "completed",
            "incomplete_details": CUT if cut else None,
            "output": self._output,
            "parallel_tool_calls": self._several,
            "tool_choice": params.get("tool_choice") or "auto",
            "tools": params.get("tools") or [],
        }
        body = {**self._row, "response": response}
        text = await self._ask("/verify", body, self._config.verify_timeout_s)
        try:
            verdict = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError(f"{self._url}/verify sent no JSON: {text[:100]!r}") from None
        reward = _number(verdict.get("reward")) if isinstance(verdict, dict) else None
        if reward is None:
            raise ValueError(f"{self._url}/verify gave no finite reward: {verdict!r:.200}")
        if verdict.get("mask_sample"):
            why = verdict.get("failure_reason") or verdict.get("failure_kind")
            raise RuntimeError(f"{self._url}/verify says that the reward measures nothing: {why}")
        parts = verdict.get("reward_components") or {}
        if not isinstance(parts, dict):
            raise ValueError(f"{self._url}/verify gave no mapping as reward_components: {parts!r:.200}")
        more = {**parts, **verdict}
        numbers = {name: _number(value) for name, value in more.items() if name not in (*body, *NO_COMPONENTS)}
        components = {name: value for name, value in numbers.items() if value is not None}
        return Verdict(reward, {**components, SOLVED: float(reward >= self._config.solved_reward)})

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()

    def _say(self, text: str) -> list[tuple[str, Call]]:
        """Adds the policy's message to the response. Returns its calls, with their ids."""
        text = f"<think>{text}" if "</think>" in text and "<think>" not in text.partition("</think>")[0] else text
        thoughts, content = tags.inside(*THOUGHT, text), tags.outside(*THOUGHT, text)
        made: list[Call] = []
        if self._tools:
            reply = read_answer(content, self._tools)
            self.counters["invalid_actions"] += reply.malformed
            made = list(reply.calls)
            content = reply.text.strip() if made else content
        items: list[dict[str, Any]] = []
        if thoughts:
            summary = [{"type": "summary_text", "text": thought} for thought in thoughts]
            items.append({"type": "reasoning", "summary": summary})
        if content or not (made or thoughts):
            part = {"type": "output_text", "text": content, "annotations": []}
            items.append({"type": "message", "role": "assistant", "status": "completed", "content": [part]})
        for call in made:
            arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)
            items.append({"type": "function_call", "name": call.name, "arguments": arguments, "status": "completed"})
        for number, item in enumerate(items, start=len(self._output)):
            item["id"] = f"{'call' if 'name' in item else 'msg'}_{number}"
            if "name" in item:
                item["call_id"] = item["id"]
        self._output += items
        return list(zip([item["id"] for item in items if "name" in item], made, strict=True))

    async def _call(self, call: Call) -> str:
        """What the policy is shown of a call."""
        self.counters["calls"] += 1
        if isinstance(call.arguments, str):
            status, text = 0, json.dumps({"error": f"Invalid tool call arguments: {call.arguments:.200}"})
        elif call.name in OWN or call.name not in {tool.name for tool in self._tools}:
            status, text = 404, UNKNOWN_ROUTE
        else:
            status, text = await self._post(f"/{call.name}", call.arguments, self._config.call_timeout_s)
        self.counters["failed_calls"] += not 200 <= status < 400
        return text

    async def _ask(self, path: str, body: Mapping[str, Any], timeout_s: float) -> str:
        status, text = await self._post(path, body, timeout_s)
        if status != 200:
            raise RuntimeError(f"{self._url}{path} answered {status}: {' '.join(text.split())[:300]}")
        return text

    async def _post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> tuple[int, str]:
        """Status and text of an answer, within a deadline and a bound."""
        try:
            answer = await self._client.request("POST", f"{self._url}{path}", json=dict(body), timeout_s=timeout_s)
        except HttpStatus as failure:
            return failure.status, failure.body.decode("utf-8", "replace")
        except HttpTimeout as failure:
            raise TimeoutError(str(failure)) from None
        return 200, answer.decode("utf-8", "replace")


def _number(value: Any) -> float | None:
    """A JSON number, or a truth, as a finite float; None for all else."""
    with contextlib.suppress(OverflowError):
        if isinstance(value, (bool, int, float)) and math.isfinite(value):
            return float(value)
    return None
