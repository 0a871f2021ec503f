"""A small world for tests of the gateway: a tokenizer with a chat template, sessions, and a server that listens."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import aiohttp
import numpy as np

from jaxagent.config import SamplingConfig
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.gateway.chat import Ask, Call, ChatMessage, Tool
from jaxagent.gateway.renderer import Renderer
from jaxagent.gateway.server import Gateway
from jaxagent.gateway.session import Session, SessionLimits
from jaxagent.types import TokenKind, Trajectory
from tests.gateway.scripted import Scripted, logprob

WAIT_S = 60.0
SAMPLING = SamplingConfig(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
LIMITS = SessionLimits(turn_tokens=400, context_tokens=4000, requests=100)
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\n' }}
{%- if messages and messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif %}
{{- '<tools>' }}{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '\n</tools>' }}
{{- 'Call: <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}
{%- elif not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
SHELL = Tool("shell", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}})
SHELL_JSON = {
    "type": "function",
    "function": {"name": SHELL.name, "description": SHELL.description, "parameters": SHELL.parameters},
}


@functools.cache
def tokenizer() -> Tokenizer:
    """Words of a tool-using conversation; <|im_end|> ends a turn."""
    text = "the quick brown fox runs a command and says what it saw, turn by turn, in the shell <tool_response> "
    made = Tokenizer.train([text] * 20, 420, ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"])
    end = made.id_of("<|im_end|>")
    files = dict(made._files) | {"generation_config.json": json.dumps({"eos_token_id": [end]})}
    config = json.loads(files["tokenizer_config.json"]) | {"eos_token": "<|im_end|>"}
    return Tokenizer(made._backend, files | {"tokenizer_config.json": json.dumps(config)})


@functools.cache
def renderer() -> Renderer:
    return Renderer(tokenizer(), TEMPLATE, datetime.datetime(2026, 1, 1))


def session(policy: Any, limits: SessionLimits = LIMITS, task: str = "task", sample: int = 0, **more: Any) -> Session:
    return Session(policy, renderer(), tokenizer(), limits, SAMPLING, task, sample, **more)


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def assistant(text: str, *calls: Call) -> ChatMessage:
    return ChatMessage("assistant", text, calls)


def tool(text: str, call_id: str = "c") -> ChatMessage:
    return ChatMessage("tool", text, call_id=call_id)


def ask(*messages: ChatMessage, tools: bool = False, **more: Any) -> Ask:
    return Ask(messages, (SHELL,) if tools else (), sampling=SAMPLING, **more)


def call(command: str) -> str:
    return f'<tool_call>\n{{"name": "shell", "arguments": {{"command": "{command}"}}}}\n</tool_call>'


def run(scene: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Runs a coroutine function within a bound."""

    async def bounded() -> Any:
        return await asyncio.wait_for(scene(), WAIT_S)

    return asyncio.run(bounded())


def played(
    policy: Scripted, program: Callable[[Session], Coroutine[Any, Any, Any]], *limits: SessionLimits, **more: Any
) -> tuple[Session, tuple[Trajectory, ...]]:
    """(session, its trajectories) of a program that asks in a session: each is what the policy saw; nothing is open."""

    async def scene() -> tuple[Session, tuple[Trajectory, ...]]:
        made = session(policy, *limits, **more)
        await program(made)
        return made, made.close()

    made, trajectories = run(scene)
    check(policy, trajectories)
    assert not policy.left_open
    return made, trajectories


@contextlib.asynccontextmanager
async def serving(*sessions: Session, **more: Any) -> AsyncIterator[tuple[Gateway, list[str], aiohttp.ClientSession]]:
    """(gateway, a token per session, a client)."""
    async with Gateway(**more) as gateway, aiohttp.ClientSession(gateway.url) as client:
        yield gateway, [gateway.add(one) for one in sessions], client


async def post(
    client: aiohttp.ClientSession, token: str, path: str = "/v1/chat/completions", headers: Any = None, **body: Any
) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"} | (headers or {})
    async with client.post(path, json=body, headers=headers) as response:
        return response.status, json.loads(await response.read())


def spans(trajectory: Trajectory, kind: TokenKind = TokenKind.ACTION) -> list[list[int]]:
    """The runs of tokens of one kind."""
    found: list[list[int]] = []
    before = None
    for token, of in zip(trajectory.tokens.tolist(), trajectory.kinds.tolist(), strict=True):
        if of == kind:
            found[-1].append(token) if before == kind else found.append([token])
        before = of
    return found


def check(
    policy: Scripted, trajectories: tuple[Trajectory, ...], task: str = "task", sample: int = 0, given_up: float = 0
) -> None:
    """Every trajectory is what the policy saw, token for token and number for number, and nothing is there twice.

    Turns that the policy sampled whole for this attempt appear exactly once among the ACTION tokens, but for those of
    the `given_up` ones that were whole just when the last client had been gone for too long.
    """
    turns = [t for t in policy.done if (t.task_id, t.sample) == (task, sample)]
    claimed = []
    for trajectory in trajectories:
        tokens = trajectory.tokens.tolist()
        actions = np.flatnonzero(trajectory.action_mask)
        assert len(actions) and actions[-1] == len(tokens) - 1, "it ends with sampled tokens"
        at = 0
        while at < len(tokens):
            if not trajectory.action_mask[at]:
                assert (trajectory.logprobs[at], trajectory.policy_versions[at]) == (0, -1)
                at += 1
                continue
            number = int(trajectory.turns[at])
            found = [
                t
                for t in turns
                if t.turn == number and t.context == tokens[:at] and tokens[at : at + len(t.sampled)] == t.sampled
            ]
            found = [t for t in found if all(t is not other for other in claimed)]
            assert found, f"the policy sampled nothing like turn {number} at {at}"
            turn = found[0]
            claimed.append(turn)
            for i, token in enumerate(turn.sampled):
                assert trajectory.action_mask[at + i] and trajectory.turns[at + i] == number
                assert trajectory.logprobs[at + i] == np.float32(logprob(at + i, token))
            at += len(turn.sampled)
    assert 0 <= len(turns) - len(claimed) <= given_up, f"{len(turns)} turns were sampled, {len(claimed)} are trained"


def letters(text: str) -> list[int]:
    """A text as the policy may sample it and the tokenizer would never encode it: byte by byte, then EOS."""
    table = tokenizer().token_bytes()
    one = {table[i]: i for i in range(len(table) - 1, -1, -1)}
    return [*(one[bytes([byte])] for byte in text.encode()), tokenizer().eos_ids[0]]


def scrambled(text: str) -> list[int]:
    """`letters` of a text that the tokenizer has longer tokens for."""
    assert tokenizer().encode(text) != letters(text)[:-1]
    return letters(text)


def contains(tokens: Any, part: list[int]) -> int:
    """How often a run of ids stands in others."""
    tokens = list(map(int, tokens))
    return sum(tokens[i : i + len(part)] == part for i in range(len(tokens) - len(part) + 1))
