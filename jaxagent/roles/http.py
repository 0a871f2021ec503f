"""A role behind HTTP: any server that speaks OpenAI's chat completions.

The run asks it one question at start, so that a wrong address, token or model is told before anything is trained. In
an episode a reply that does not come is a failure of that episode, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxagent.config import ConfigError
from jaxagent.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt
from jaxagent.envs.base import Message
from jaxagent.envs.cast import NoRoom
from jaxagent.io.http import HttpStatus, HttpTimeout, HttpUnreachable
from jaxagent.rewards.chat_client import REMEDIES, CallError, ChatClient, Completion, Endpoint
from jaxagent.rewards.judge import LimitField
from jaxagent.roles.base import Reply, Run, TextRole
from jaxagent.types import Task

CLOSE_S = 5.0
TOO_LONG = re.compile(  # how servers say that a conversation is longer than their model's context
    r"context_length_exceeded|context[ _](?:length|window|size)|(?:prompt|input|request)[^.]{0,80} too (?:long|large)"
    r"|input token count[^.]{0,80} exceeds",
    re.IGNORECASE,
)
GREETING = (Message("user", "Answer with one word: are you there?"),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Http(TextRole):
    """A chat model behind HTTP. `timeout_s` is for a reply with all its attempts, and with its wait for `calls`.

    Stop strings are not sent, since servers swallow the one that ends a reply: the reply is cut behind the first one
    here (`rollout/cast.py`), and what the server counted still holds.
    """

    repeatable = False
    url: str  # up to and without /chat/completions, e.g. "http://127.0.0.1:8000/v1"
    model: str
    token_file: str = ""  # a file with what is sent as a bearer token; "" = none
    temperature: NonNegativeFloat = 0.7
    retries: NonNegativeInt = 2  # further attempts after a broken connection, 429 or 5xx, within timeout_s
    calls: PositiveInt = 256  # in flight at once; further ones wait
    seed: NonNegativeInt = 0  # of what is sent as each request's seed
    send_seed: bool = True  # False for endpoints that refuse a seed, such as Gemini's
    send_temperature: bool = True  # False for models that have one temperature, such as gpt-5
    limit_field: LimitField = "max_tokens"  # max_completion_tokens for OpenAI's models that reason

    def __post_init__(self) -> None:
        """Raises ValueError for what is no URL, or no model."""
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url='{self.url}' is no URL: write http://{self.url or '127.0.0.1:8000/v1'}.")
        if not self.model:
            raise ValueError("model is empty: write the name that the server knows the model by.")

    @contextlib.contextmanager
    def open(self, name: str, run: Run, note: Callable[[str], None]) -> Iterator[Callable[[Task, int, int], HttpTalk]]:
        """Asks the endpoint one question and yields the function that begins a conversation. Raises ConfigError: the
        endpoint does not answer as it must; names config.roles.<name> and what to do."""
        client = ChatClient(Endpoint.of(self, self._token(name)), self.calls)
        try:
            run(HttpTalk(name, self, client, "").check(), self.timeout_s + CLOSE_S)
            note(f"role {name}: {self.model} at {self.url}")
            yield lambda task, sample, number: HttpTalk(
                name, self, client, f"{self.seed}\0{task.id}\0{sample}\0{number}"
            )
        finally:
            run(client.close(), CLOSE_S)

    def _token(self, name: str) -> str:
        if not self.token_file:
            return ""
        try:
            token = Path(self.token_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reply = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ConfigError(f"config.roles.{name}.token_file='{self.token_file}' cannot be read: {reply}.") from error
        if not token or not token.isascii() or not token.isprintable():
            raise ConfigError(
                f"config.roles.{name}.token_file='{self.token_file}' must hold one line with the token, of ASCII."
            )
        return token


class HttpTalk:
    """One conversation with a role behind HTTP; `client` is the role's, `key` the conversation's own."""

    def __init__(self, name: str, role: Http, client: ChatClient, key: str):
        self._name, self._role, self._client, self._key = name, role, client, key

    async def reply(self, messages: Sequence[Message], stop_strings: Sequence[str], max_tokens: int) -> Reply:
        """Answers the conversation so far.

        Raises:
          CallError: the endpoint gave no reply that can be used.
          NoRoom: it says that the conversation is too long.
          TimeoutError: it gave none in time.
        """
        turn = sum(message.role == "assistant" for message in messages)
        try:
            reply = await self._ask(messages, max_tokens, _seed(f"{self._key}\0{turn}"))
        except CallError as failure:
            if _is_too_long(failure):
                raise NoRoom(str(failure)) from failure
            raise
        finish = "length" if reply.finish == "length" else "eos"
        return Reply(reply.text, finish, reply.prompt_tokens, reply.reply_tokens)

    async def _ask(self, messages: Sequence[Message], max_tokens: int, seed: int) -> Completion:
        """The role's reply to a conversation.

        Raises:
          CallError: there is none that can be used.
          TimeoutError: there is none in time.
        """
        chat_messages = [{"role": message.role, "content": message.content} for message in messages]
        sampling = {"temperature": self._role.temperature, "max_tokens": max_tokens, "seed": seed}
        try:
            reply = await self._client.ask(chat_messages, **sampling)
        except CallError as failure:
            if isinstance(failure.__cause__, HttpTimeout):
                raise TimeoutError(str(failure)) from failure
            if _status(failure) == 429:
                raise CallError(
                    f"{failure}. The endpoint limits how often it is asked: lower config.roles.{self._name}.calls, or "
                    "raise its retries and timeout_s, so that it is waited for."
                ) from failure.__cause__
            raise
        if not reply.text.strip() and reply.finish != "length":
            raise CallError(f"{self._role.url} gave a reply without text")
        return reply

    async def check(self) -> None:
        """Asks one question. Raises ConfigError: no answer with text, and what to do about it."""
        where = f"config.roles.{self._name}"
        try:
            async with asyncio.timeout(self._role.timeout_s):
                reply = await self._ask(GREETING, self._role.reply_tokens, 0)
        except TimeoutError as failure:
            raise ConfigError(
                f"{where}.url: {self._role.url} gave no reply in {self._role.timeout_s:g} s. Start a server there, or "
                f"set {where}.timeout_s."
            ) from failure
        except CallError as failure:
            advice = "" if _status(failure) == 429 else f". {_advice(where, failure)}"  # a 429 has its own already
            raise ConfigError(f"{where}: {failure}{advice}") from failure
        if not reply.text.strip():
            raise ConfigError(
                f"{where}.reply_tokens={self._role.reply_tokens} are over before {self._role.url} has said "
                "a word. Raise them."
            )


def _status(failure: CallError) -> int | None:
    """Of the answer that a call failed with, if it was one."""
    return failure.__cause__.status if isinstance(failure.__cause__, HttpStatus) else None


def _is_too_long(failure: CallError) -> bool:
    if _status(failure) not in (400, 413, 422):
        return False
    return bool(TOO_LONG.search(failure.__cause__.body.decode("utf-8", "replace")))  # type: ignore[union-attr]


def _advice(where: str, failure: CallError) -> str:
    """What to do about a call that failed at start."""
    status = _status(failure)
    if status in (401, 403):
        return f"Write the server's token into a file, and its path into {where}.token_file."
    if status == 404:
        return f"{where}.url must end before /chat/completions, and {where}.model be a model that the server has."
    if failure.refused:
        return _other_field(where, failure.refused)
    if status is not None:
        return f"Ask the server, at {where}.url, why it refuses {where}.model."
    if isinstance(failure.__cause__, HttpUnreachable):
        return f"Start a server there, or set {where}.url."
    return f"{where}.url must be a server of OpenAI's chat completions."


def _other_field(where: str, field: str) -> str:
    """What to do about an endpoint that refuses a field, or only its value, which refusals do not tell apart."""
    advice = f"It refuses the field '{field}': set {where}.{REMEDIES[field]}"
    if field == "seed":
        return f"{advice}."
    value = "temperature" if field == "temperature" else "reply_tokens"
    return f"{advice}, or, if only its value is refused, {where}.{value}."


def _seed(key: str) -> int:
    """31 bits, which every server takes."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little") >> 1
