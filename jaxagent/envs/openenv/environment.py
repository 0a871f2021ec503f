"""Any environment of OpenEnv, behind its own server: reset and steps over a web socket, rewards as it pays them.

    --config.env=openenv --config.env.server=echo_env.server.app:app --config.data.source=seeds
    --config.env=openenv --config.env.server=http://127.0.0.1:8000 --config.data.source=openenv

A server is an application in a package that `python` has, or an environment's folder with openenv.yaml: then it is a
process of ours, which the run starts and kills. Or it is the URL of one that runs. The package openenv is needed there
only. Each attempt has a session, and with it an environment, of its own.

A task says how the environment is reset: `metadata["seed"]`, `["episode_id"]`, and any other parameter of the server's
reset in `["reset"]` (what `data.source=openenv` writes of a server's own task list is a split and an index). The policy
writes actions between <action> and </action> (see `actions`), or calls tools where actions are such calls. The reward
is the sum of what the steps have paid: in OpenEnv's protocol a reward belongs to the last action, as in Gymnasium's.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxagent.config import ConfigError
from jaxagent.config.errors import as_config_error, failure_line
from jaxagent.config.ranges import FiniteFloat, PositiveInt, Seconds
from jaxagent.envs import tags
from jaxagent.envs.base import Environment, Message, Observation, Opening, Step, Transcript, Verdict
from jaxagent.envs.openenv import actions, manifest
from jaxagent.envs.openenv.servers import Place, Servers
from jaxagent.envs.openenv.wire import INVALID, OpenEnvSession, Result, ServerError, finite
from jaxagent.envs.server_process import STOP_S, ServerProgram, variables_of
from jaxagent.io.http import HttpError, HttpStatus
from jaxagent.tools.calls import Tool, tools_text
from jaxagent.tools.hermes import CLOSE, OPEN, read_answer
from jaxagent.types import StopReason, Task, TokenKind

SOLVED, RETURN = "solved", "return"
CLOSE_S = STOP_S + 10.0
LIST_TOOLS = {"type": "list_tools"}
RESET = ("seed", "episode_id")  # of a task's metadata, sent as they are
TRAINING = "train"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenEnv(Environment):
    """One of OpenEnv's environments."""

    server: str = ""  # "package.module:app", a folder with openenv.yaml, or a URL
    python: str = ""  # the interpreter whose packages have the server; "" = this one
    variables: tuple[str, ...] = ()  # "KEY=value" of the server's process: ("MAX_CONCURRENT_ENVS=64",) for many
    processes: PositiveInt = 8  # at most, where one takes few sessions at once; further attempts wait
    instructions: str = ""  # the beginning of every prompt
    action: Literal["tagged", "message"] = "tagged"  # between <action> and </action>, or all that the policy writes
    show: tuple[str, ...] = ()  # fields of observations that the policy sees; () = all
    pay: Literal["sum", "last"] = "sum"  # of the rewards; "last" where they are a running score
    solved_return: FiniteFloat | None = None  # counts as solved, in reports; None: as openenv.yaml says, else 1
    report: tuple[str, ...] = ()  # numbers of the server's final state that reports have: ("step_count",)
    start_timeout_s: Seconds = 60.0  # until a server answers
    step_timeout_s: Seconds = 60.0  # for one answer

    score = SOLVED
    calls = "actions"
    observation_role = "user"
    stop_strings = ("</action>", CLOSE)
    tokens = ("<action>", "</action>", OPEN, CLOSE)
    repeatable = False  # a server may answer as it likes

    def __post_init__(self) -> None:
        """Raises ConfigError where no server is named, or a variable is none."""
        if not self.server:
            raise ConfigError("config.env.server is empty: name an application, such as echo_env.server.app:app.")
        variables_of(self.variables, "config.env.variables")
        if not self._is_url and not self._is_folder and ":" not in self.server:
            raise ConfigError(
                f"config.env.server='{self.server}' is no folder with {manifest.FILE}, module:app or URL."
            )

    @property
    def _is_url(self) -> bool:
        return self.server.startswith(("http://", "https://"))

    @property
    def _is_folder(self) -> bool:
        return not self._is_url and (Path(self.server) / manifest.FILE).is_file()

    def _servers(self) -> tuple[Servers, manifest.Manifest | None]:
        declared = manifest.read(Path(self.server).resolve()) if self._is_folder else None
        variables = variables_of(self.variables, "config.env.variables")
        program = ServerProgram(self.server, self.python, variables=variables)
        if declared is not None:
            program = ServerProgram(
                declared.target, self.python, str(declared.folder), {**declared.variables, **variables}
            )
        url = self.server.rstrip("/") if self._is_url else ""
        return Servers(url, program, self.processes, self.start_timeout_s, self.step_timeout_s), declared

    @contextlib.contextmanager
    def open(self, opening: Opening) -> Iterator[Callable[[Task], OpenEnvAttempt]]:
        """Starts a server, looks at what its actions are, and at the tasks."""
        servers, declared = self._servers()
        try:
            with as_config_error(f"config.env.server='{self.server}'"):
                protocol = opening.run(self._look(servers), self.start_timeout_s + 3 * self.step_timeout_s)
            if declared is not None:
                solved = 1.0 if declared.solved_reward is None else declared.solved_reward
                protocol = dataclasses.replace(protocol, solved=solved, limit_s=declared.time_limit_s)
                if declared.tools and declared.tools != {tool.name for tool in protocol.tools}:
                    names = ", ".join(sorted(tool.name for tool in protocol.tools)) or "none"
                    raise ConfigError(f"{manifest.FILE}: declared_tools are not the server's tools: {names}.")
                opening.note(f"{manifest.FILE}: not used here: {', '.join(declared.unused)}")
            if self.solved_return is not None:
                protocol = dataclasses.replace(protocol, solved=self.solved_return)
            opening.note(f"OpenEnv actions: {', '.join(t.name for t in protocol.tools) or protocol.words()}")
            opening.check(reset_of)
            yield lambda task: OpenEnvAttempt(task, self, servers, protocol)
        finally:
            opening.run(servers.close(), CLOSE_S)

    async def _look(self, servers: Servers) -> Protocol:
        schemas = await servers.get("/schema")
        schema = schemas.get("action") if isinstance(schemas, dict) else None
        where = f"config.env.server='{self.server}'"
        if not isinstance(schema, dict):
            raise ConfigError(f"{where}: its /schema says nothing of actions.")
        if not actions.is_tool_call(schema):
            return Protocol(actions.form_of(schema, where))
        session, place, result = await servers.begin("step", LIST_TOOLS)
        await servers.end(session, place)
        listed = result.observation.get("tools")
        if not listed:
            raise ConfigError(f"{where}: its actions call tools, and it lists none: {result.observation!r:.200}.")
        tools = [Tool(one["name"], one.get("description") or "", one.get("input_schema") or {}) for one in listed]
        return Protocol(None, tuple(tools))

    def tasks(self, num_heldout: int) -> dict[str, list[dict[str, Any]]]:
        """The server's own list of tasks, by its splits; other splits than "train" are held out.

        Args:
          num_heldout: how many of the last training tasks are held out where there is no other split.

        Raises:
          ConfigError: the server does not start, or has no list.
        """

        async def listed() -> tuple[str, dict[str, list[Any]]]:
            servers, _ = self._servers()
            try:
                (name, *_) = await servers.get("/list_environments")
                splits = [one["name"] for one in await servers.get(f"/{name}/splits")]
                tasks = {}
                for split in splits:
                    specs = (await servers.get(f"/{name}/tasks", {"split": split}))["tasks"]
                    count = (await servers.get(f"/{name}/num_tasks", {"split": split}))["num_tasks"]
                    tasks[split] = [*specs, *({} for _ in range(count - len(specs)))]  # the list may be a preview
                return name, tasks
            finally:
                await servers.close()

        try:
            name, splits = asyncio.run(listed())
        except HttpStatus as error:
            why = "it lists no tasks: take data.source=seeds, or rows of yours" if error.status == 501 else str(error)
            raise ConfigError(f"config.env.server='{self.server}': {why}.") from None
        except (HttpError, OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"config.env.server='{self.server}': {failure_line(error)}.") from None
        rows = {split: [_row(name, split, i, spec) for i, spec in enumerate(specs)] for split, specs in splits.items()}
        train = rows.pop(TRAINING, [])
        heldout = list(itertools.chain(*rows.values()))
        if not heldout and train:
            if num_heldout >= len(train):
                raise ConfigError(
                    f"config.env.server='{self.server}' lists {len(train)} tasks in all, and data.source.num_heldout="
                    f"{num_heldout} leaves none to train on."
                )
            train, heldout = train[:-num_heldout], train[-num_heldout:]
        if not train:
            raise ConfigError(
                f"config.env.server='{self.server}' lists no training tasks (splits: {', '.join(splits)})."
            )
        return {"train": train, "heldout": heldout}


@dataclasses.dataclass(frozen=True)
class Protocol:
    """What a server's actions are: a form, or calls of its tools; and when an episode is solved, or over."""

    form: actions.ActionForm | None
    tools: tuple[Tool, ...] = ()
    solved: float = 1.0
    limit_s: float = float("inf")

    def words(self) -> str:
        """What the policy writes."""
        return tools_text(self.tools, several=False) if self.form is None else self.form.words()


class OpenEnvAttempt:
    """One attempt: one session, reset once."""

    def __init__(self, task: Task, config: OpenEnv, servers: Servers, protocol: Protocol) -> None:
        self._task, self._config, self._servers, self._protocol = task, config, servers, protocol
        self._session: tuple[OpenEnvSession, Place] | None = None
        self._rewards: list[float] = []
        self._turns = 0
        self._suspect = False
        self._ends = float("inf")
        tagged = () if config.action == "message" else ("</action>",)
        self.stop_strings: Sequence[str] = (CLOSE,) if protocol.tools else tagged
        self.counters: dict[str, float] = {"actions": 0.0, "invalid_actions": 0.0, "failed_calls": 0.0, "unpaid": 1.0}

    async def start(self) -> Sequence[Message]:
        """Resets the environment; its first observation ends the prompt."""
        session, place, result = await self._servers.begin("reset", reset_of(self._task))
        self._session = session, place
        self._ends = time.monotonic() + self._protocol.limit_s
        if result.done:
            raise ValueError("the environment was done before the first action")
        how = "Write your action" + (" as <action>...</action>" if self._config.action == "tagged" else "")
        words = self._protocol.words() if self._protocol.tools else f"{how}: {self._protocol.words()}"
        texts = (self._config.instructions, words, self._task.prompt, self._text(result))
        return (Message("user", "\n\n".join(text for text in texts if text.strip()) + "\n"),)

    async def step(self, action: str) -> Step:
        """Takes the actions written, one after the other; the last turn's as well."""
        self._turns += 1
        texts: list[str] = []
        moves, mistake = self._calls(action) if self._protocol.tools else self._action(action)
        if not moves and not mistake:
            return Step(stop_reason=StopReason.ANSWER)
        for move in moves:
            try:
                result = await self._play(move)
            except ServerError as error:
                if not (mistake := self._policys(error)):
                    raise
                break
            self.counters["actions"] += 1
            texts.append(self._text(result))
            if result.done:
                return Step(stop_reason=StopReason.ANSWER)
        self.counters["invalid_actions"] += bool(mistake)
        if time.monotonic() >= self._ends:
            return Step(stop_reason=StopReason.TIME_LIMIT)
        if self._turns >= self._config.max_turns:
            return Step(stop_reason=StopReason.TURN_LIMIT)
        parts = [(f"\n{text}\n", TokenKind.OBSERVATION) for text in texts]
        parts += [(f"\n{mistake}\n", TokenKind.WARNING)] if mistake else []
        return Step(Observation(tuple(parts), "tool" if self._protocol.tools else "user"))

    async def verify(self, transcript: Transcript) -> Verdict:
        """What the environment has paid. An action that was cut has never reached it."""
        total = sum(self._rewards) if self._config.pay == "sum" else next(iter(self._rewards[-1:]), 0.0)
        components = {SOLVED: float(total >= self._protocol.solved), RETURN: total}
        assert self._session is not None
        state: Mapping[str, Any] = {}
        # Asked for in any case: a second answer to some step would stand here, and rewards would be of other steps.
        with contextlib.suppress(*(() if self._config.report else (ServerError, ConnectionError))):
            state = await self._ask(self._session[0].ask("state", None, self._config.step_timeout_s))
        components |= {name: finite(state.get(name)) for name in self._config.report}
        return Verdict(total, components)

    async def close(self) -> None:
        """Ends the session."""
        if self._session is not None:
            await self._servers.end(*self._session, suspect=self._suspect)

    def _calls(self, text: str) -> tuple[list[dict[str, Any]], str]:
        reply = read_answer(text, self._protocol.tools)
        if reply.malformed:
            return [], f'Write {OPEN}{{"name": ..., "arguments": {{...}}}}{CLOSE}.'
        names, moves = {tool.name for tool in self._protocol.tools}, []
        for call in reply.calls:
            if call.name not in names or not isinstance(call.arguments, Mapping):
                return [], f"There is no function {call.name!r:.100} with such arguments."
            moves.append({"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)})
        return moves, ""

    def _action(self, text: str) -> tuple[list[dict[str, Any]], str]:
        form = self._protocol.form
        assert form is not None
        if self._config.action == "tagged":
            texts = tags.inside(actions.OPENING, actions.CLOSING, text)
            if not texts:
                return [], "Write <action>...</action>."
            text = texts[-1]
        move, mistake = form.read(text.strip())
        return ([], f"No action: {mistake}.") if move is None else ([move], "")

    async def _play(self, move: Mapping[str, Any]) -> Result:
        assert self._session is not None
        result = await self._ask(self._session[0].play("step", move, self._config.step_timeout_s))
        if result.reward is not None:
            self._rewards.append(result.reward)
            self.counters["unpaid"] = 0.0
        return result

    async def _ask(self, answer: Any) -> Any:
        try:
            return await answer
        except (TimeoutError, asyncio.CancelledError):
            self._suspect = True
            raise
        except ConnectionError as failure:
            process = None if self._session is None else self._session[1].process
            raise ConnectionError(f"{failure}{process.last_words if process is not None else ''}") from failure

    def _policys(self, error: ServerError) -> str:
        """What the server says of an action that is none; "" where it is the server's own mistake."""
        form, errors = self._protocol.form, error.data.get("errors")
        if error.code != INVALID or form is None or not isinstance(errors, list) or not errors:
            return ""
        for one in errors:
            place = one.get("loc") if isinstance(one, dict) else None
            if not (isinstance(place, list) and place and str(place[0]) in form.schemas):
                return ""
        return f"No action: {errors[0]['loc'][0]}: {str(errors[0].get('msg', ''))[:200]}."

    def _text(self, result: Result) -> str:
        if self._protocol.tools and "tool_name" in result.observation:
            text, failed = actions.result_text(result.observation)
            self.counters["failed_calls"] += failed
            return text
        return actions.observation_text(result.observation, self._config.show)


def reset_of(task: Task) -> dict[str, Any]:
    """The parameters of a task's reset. Raises ConfigError: they are of a wrong type."""
    metadata = task.metadata
    more = metadata.get("reset", {})
    if not isinstance(more, Mapping):
        raise ConfigError(f"metadata['reset'] of task {task.id!r} must be an object of the reset's parameters.")
    data = {name: metadata[name] for name in RESET if name in metadata} | dict(more)
    seed, name = data.get("seed", 0), data.get("episode_id", "")
    if type(seed) is not int or seed < 0 or not isinstance(name, str) or len(name) > 255:
        raise ConfigError(f"task {task.id!r}: a seed is a whole number from 0 on, an episode_id at most 255 letters.")
    return data


def _row(name: str, split: str, index: int, spec: Any) -> dict[str, Any]:
    """A task of the server's list; its reset finds it again."""
    named = spec if isinstance(spec, dict) else {"prompt": str(spec)}
    text = next((named[key] for key in ("prompt", "question", "description", "instruction") if named.get(key)), "")
    return {
        "id": f"{split}-{index}",
        "prompt": text if isinstance(text, str) and text.strip() else "Begin.",
        "answers": [],
        "kind": name,
        "metadata": {"reset": {"split": split, "index": index}, "task": json.dumps(spec, sort_keys=True)},
    }
