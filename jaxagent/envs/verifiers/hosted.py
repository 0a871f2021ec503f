"""An attempt that the package verifiers plays by its own rollout, until 0.3, with the policy as its model.

The package gets a client of OpenAI's whose requests end here: a request is the policy's turn, its answer the policy's
message. So the environment's state, its stop conditions, timeouts and clean-up, the messages that it shows, and what
its rubric sees are the package's own, in every version. It runs on a loop of its own, since environments may block.

A message that was cut ends the rollout as a prompt that is too long does, so it is the completion's last message.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.envs.verifiers import plain

SEAT: contextvars.ContextVar[Any] = contextvars.ContextVar("seat")  # whose rollout or rubric runs
STOP_S = 10.0  # for an attempt that is given up to clean up
ROW_PARTS = ("prompt", "answer", "task", "info")
ASKED_IN_VAIN = 3  # requests that are refused before a rollout is given up
TOO_LONG = (
    "This model's maximum context length is less than this prompt has."  # as servers say it, and the package reads
)


def parts(environment: Any) -> Iterator[Any]:
    """The environment, and those of a group."""
    yield environment
    for part in getattr(environment, "envs", ()):
        yield from parts(part)


def sampling_of(environment: Any) -> list[str]:
    """The names of the environment's own sampling settings, but for those that the package sets itself."""
    settings = [item for part in parts(environment) for item in (getattr(part, "sampling_args", None) or {}).items()]
    return sorted({name for name, value in settings if (name, value) not in (("n", 1), ("extra_body", {}))})


def prepare(environment: Any, most_turns: int) -> None:
    """Makes an environment ready to be played here, with no more turns than the run's. Raises ConfigError: it asks for
    what there is not here, by its name."""
    for part in parts(environment):
        if getattr(part, "message_type", "chat") != "chat":
            raise ConfigError(f"config.env.make: message_type={part.message_type!r}; here an environment is a chat.")
        if getattr(part, "score_rollouts", True) is False:
            raise ConfigError("config.env.make: score_rollouts=False, so nothing is judged.")
        for name in ("max_total_completion_tokens", "max_seq_len"):
            if (getattr(part, name, None) or 0) > 0:
                raise ConfigError(
                    f"config.env.make: {name} counts tokens, which config.env.context_tokens bounds here."
                )
        if type(own := getattr(part, "max_turns", -1)) is int:
            part.max_turns = min(own, most_turns) if own > 0 else most_turns
        if _begins_with_a_row(part):
            part.init_state = _keeping(part.init_state)
        elif hasattr(part, "rollout") and hasattr(part, "is_completed"):
            part.is_completed = _ending(part.is_completed)


def note_failures(environment: Any) -> None:
    """Has what a reward function raises added to `SEAT.get().failures`: the package logs it and goes on with 0."""
    rubrics = [part.rubric for part in parts(environment)]
    while rubrics:
        rubric = rubrics.pop()
        rubrics += getattr(rubric, "rubrics", ())
        for name in ("funcs", "reward_funcs"):
            functions = vars(rubric).get(name)
            if functions is not None:
                functions[:] = [_noting(function) for function in functions]


class Seat:
    """One rollout of the package's, and the policy's place in it. Its coroutines run on the package's loop.

    Attributes:
      state: of the rollout.
      is_cut: whether the policy's last message was cut.
      failures: of reward functions.
    """

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._requests: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self._reply: asyncio.Future[Mapping[str, Any] | None] | None = None
        self._rollout: asyncio.Task[Any] | None = None
        self._http: Any = None  # the HTTP package of openai: httpx, or httpx2 since 3
        self.state: Any = {}
        self.is_cut = False
        self.failures: list[Exception] = []

    async def begin(self, row: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Begins the rollout. Returns its first request, in OpenAI's form; None: it is over before it has asked."""
        SEAT.set(self)
        self._rollout = asyncio.get_running_loop().create_task(self._play(row))
        return await self._next()

    async def say(self, message: Mapping[str, Any], cut: bool = False) -> Mapping[str, Any] | None:
        """Answers the request with the policy's message. Returns the next request; None: the rollout is over."""
        self.is_cut = cut
        if cut and _begins_with_a_row(self._environment):
            self.state |= {"prompt_too_long": True} | ({"is_truncated": True} if "is_truncated" in self.state else {})
        return await self._reply_with({"message": message, "finish_reason": "length" if cut else _reason(message)})

    async def fill(self) -> None:
        """Says that the context is full, again if it is asked again. Raises RuntimeError: the rollout goes on."""
        for _ in range(ASKED_IN_VAIN):
            if self.is_over or await self._reply_with(None) is None:
                return
        raise RuntimeError("the environment goes on asking when the context is full")

    @property
    def is_over(self) -> bool:
        """Whether the rollout has ended."""
        return self._rollout is not None and self._rollout.done()

    async def score(self) -> tuple[float, dict[str, float]]:
        """What the rubric says of the rollout, which is over: the reward, and each function's value.

        Raises what the environment has recorded as its own error, or what a reward function raised: such a value would
        be 0 in the package. Where the package refuses a message of the policy's, an empty one, it is 0 here, too.
        """
        SEAT.set(self)
        if not hasattr(self._environment, "rollout"):
            return await plain.score(self._environment, self.state)
        error = self.state.get("error")
        is_refused = isinstance(error, _imported(self._environment, "errors", "InvalidModelResponseError") or ())
        if isinstance(error, Exception) and not is_refused:
            raise error
        rubric = self._environment.rubric
        takes = inspect.signature(rubric.score_rollout).parameters
        if "completion" in takes:
            named = {name: self.state.get(name) for name in (*ROW_PARTS, "completion", "example_id") if name in takes}
            score = await rubric.score_rollout(**named, state=self.state)
            self.state |= {"reward": score.reward, "metrics": score.metrics}
        else:
            await rubric.score_rollout(self.state, *([asyncio.Semaphore(1)] if "score_sem" in takes else []))  # 0.1.8
        if hasattr(rubric, "cleanup"):
            await rubric.cleanup(self.state)
        if self.failures and not is_refused:
            raise self.failures[0]
        return float(self.state["reward"]), {name: float(value) for name, value in self.state["metrics"].items()}

    async def close(self) -> None:
        """Gives up a rollout that is not over; the environment cleans up."""
        if self._rollout is None or self.is_over:
            return
        self._rollout.cancel()
        await asyncio.wait({self._rollout}, timeout=STOP_S)
        if self.state and not hasattr(self._environment, "cleanup") and hasattr(self._environment, "_cleanup"):
            await self._environment._cleanup(self.state)  # 0.1.8 does so only where a stop condition holds

    async def _play(self, row: Mapping[str, Any]) -> Any:
        """The environment's rollout. Returns its state."""
        if not hasattr(self._environment, "rollout"):
            return await plain.play(self._environment, row, self._asked)
        import openai

        base = next(cls for cls in openai.DefaultAsyncHttpxClient.__mro__ if cls.__module__.startswith("httpx"))
        self._http = sys.modules[base.__module__.partition(".")[0]]
        http = base(transport=self._http.MockTransport(self._answer), trust_env=False)
        client: Any = openai.AsyncOpenAI(base_url="http://policy/v1", api_key="policy", http_client=http, max_retries=0)
        if (wrapped := _imported(self._environment, "clients", "OpenAIChatCompletionsClient")) is not None:
            client = wrapped(client)
        if _begins_with_a_row(self._environment):
            return await self._environment.rollout(dict(row), client, "policy", {})
        return await self._classic(row, client)

    async def _classic(self, row: Mapping[str, Any], client: Any) -> Any:
        """The rollout of a version until 0.1.7, begun as its `generate` begins it. Returns the state."""
        environment, info = self._environment, row.get("info") or {}
        info = dict(json.loads(info) if isinstance(info, str) else info)
        if getattr(environment, "oai_tools", None):
            info.setdefault("oai_tools", environment.oai_tools)
        named = {"prompt": row["prompt"], "answer": row.get("answer") or "", "task": row.get("task") or "default"}
        named["info"] = info
        if "state" in inspect.signature(environment.rollout).parameters:  # since 0.1.6 or so
            named |= {"completion": [], "example_id": row.get("example_id", 0)}
            named["state"] = await environment.init_state(**named)
        completion, state = await environment.rollout(client, "policy", **named)
        state["completion"] = completion  # 0.1.5 gives it beside the state
        return state

    async def _reply_with(self, reply: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        if self.is_over:  # in the meantime: its time is over
            return await self._next()
        assert self._reply is not None
        self._reply.set_result(reply)
        return await self._next()

    async def _next(self) -> Mapping[str, Any] | None:
        assert self._rollout is not None
        request = asyncio.ensure_future(self._requests.get())
        await asyncio.wait({request, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if request.done():
            return request.result()
        request.cancel()
        self.state = self._rollout.result()
        return None

    async def _asked(self, request: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """What the policy says to a request; None: its context is full."""
        self._reply = asyncio.get_running_loop().create_future()
        await self._requests.put(request)
        return await self._reply

    async def _answer(self, request: Any) -> Any:
        """Stands for the server: takes a request of the client's, returns the response."""
        if not request.url.path.endswith("/chat/completions"):
            return self._http.Response(
                404, json={"error": {"message": f"{request.url.path}: here is the policy's chat only"}}
            )
        reply = await self._asked(json.loads(await request.aread()))
        if reply is None:
            error = {"message": TOO_LONG, "type": "invalid_request_error", "code": "context_length_exceeded"}
            return self._http.Response(400, json={"error": error})
        choice = {"index": 0, "logprobs": None, **reply}
        return self._http.Response(
            200, json={"id": "turn", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        )


def _begins_with_a_row(environment: Any) -> bool:
    """Whether a rollout is of a row, and makes its state itself: since 0.1.8."""
    return hasattr(environment, "_stop_conditions")


def _reason(message: Mapping[str, Any]) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop"


def _imported(environment: Any, module: str, name: str) -> Any:
    """Something of the environment's package; None where this version has it not."""
    maker = next(cls for cls in reversed(type(environment).__mro__) if "rollout" in vars(cls))
    package = maker.__module__.partition(".envs")[0]
    try:
        return getattr(importlib.import_module(f"{package}.{module}"), name, None)
    except ImportError:
        return None


def _keeping(init_state: Callable[..., Any]) -> Callable[..., Any]:
    """The function; the state that it makes is known to the attempt from then on."""

    @functools.wraps(init_state)
    async def kept(*args: Any, **named: Any) -> Any:
        SEAT.get().state = state = await init_state(*args, **named)
        return state

    return kept


def _ending(is_completed: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which does not look behind a message that was cut."""

    @functools.wraps(is_completed)
    async def ended(*args: Any, **named: Any) -> bool:
        if SEAT.get().is_cut:
            return True
        value = is_completed(*args, **named)
        return bool(await value if inspect.isawaitable(value) else value)

    return ended


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function; what it raises the attempt knows, whatever the package makes of it."""

    async def awaited(value: Any) -> float:
        try:
            return float(await value)
        except Exception as failure:
            SEAT.get().failures.append(failure)
            raise

    @functools.wraps(function)
    def noted(*args: Any, **named: Any) -> Any:
        try:
            value = function(*args, **named)
            return awaited(value) if inspect.isawaitable(value) else float(value)
        except Exception as failure:
            SEAT.get().failures.append(failure)
            raise

    return noted
