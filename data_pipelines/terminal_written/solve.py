"""A model tries a task in the environment that policies are trained in; how often it succeeds decides what is kept."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from jaxagent.envs.base import Transcript
from jaxagent.envs.terminal import rows
from jaxagent.envs.terminal.environment import Terminal, TerminalAttempt
from jaxagent.envs.terminal.task import TerminalTask
from jaxagent.envs.terminal.verify import VerifierError
from jaxagent.rewards.chat_client import CallError, ChatClient
from jaxagent.rollout.pass_at_k import pass_at_k
from jaxagent.sandbox.base import Sandbox, SandboxError
from jaxagent.types import Task

SOLUTIONS = "solutions"
CLOSE_TIMEOUT_S = 30.0
Take = Callable[[TerminalTask], Awaitable[Sandbox]]


@dataclasses.dataclass(frozen=True)
class Attempt:
    """What came of one attempt."""

    success: bool | None  # None: it failed for reasons outside the model, and does not count
    turns: int
    ended: str  # a StopReason's value, or the error


async def attempt(
    chat: ChatClient, task: TerminalTask, env: Terminal, take: Take, seed: int, temperature: float, max_tokens: int
) -> Attempt:
    """Plays one attempt, within the environment's own deadline."""
    row = rows.folder_row(task)
    environment = TerminalAttempt(Task(row["id"], row["prompt"], (), metadata=row["metadata"]), env, take)
    turns: list[tuple[str, str]] = []
    try:
        async with asyncio.timeout(env.episode_timeout_s):
            messages = [{"role": m.role, "content": m.content} for m in await environment.start()]
            prompt = "".join(m["content"] for m in messages)
            while True:
                reply = await chat.complete(messages, temperature=temperature, max_tokens=max_tokens, seed=seed)
                step = await environment.step(reply)
                seen = step.observation.text if step.observation is not None else ""
                turns.append((reply, seen))
                if step.stop_reason is not None:
                    break
                messages.append({"role": "assistant", "content": reply})
                messages.append({"role": step.observation.role, "content": seen})
            verdict = await environment.verify(Transcript(prompt, tuple(turns), ended=step.stop_reason))
        return Attempt(verdict.reward >= env.solved_reward, len(turns), step.stop_reason.value)
    except (CallError, VerifierError, SandboxError, TimeoutError) as error:
        return Attempt(None, len(turns), f"{type(error).__name__}: {error}")
    finally:
        with contextlib.suppress(TimeoutError, SandboxError):  # what is left of it goes with the run's owner
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await environment.close()


def summary(attempts: list[Attempt]) -> dict[str, Any]:
    """As published: runs, successes, and pass@k without bias for k = 1, 2, 4, ...; failed attempts are no runs."""
    runs = [a for a in attempts if a.success is not None]
    successes = sum(bool(a.success) for a in runs)
    ks = [2**i for i in range(len(runs).bit_length())]
    return {
        "num_runs": len(runs),
        "num_success": successes,
        "pass_at_k": {str(k): pass_at_k(len(runs), successes, k) for k in ks},
        "failed": len(attempts) - len(runs),
        "results": [dataclasses.asdict(a) for a in attempts],
    }


def write_summary(folder: Path, model: str, found: dict[str, Any]) -> None:
    """`solutions/<model>_summary.json` in a task's folder."""
    (folder / SOLUTIONS).mkdir(exist_ok=True)
    name = model.replace("/", "_")
    (folder / SOLUTIONS / f"{name}_summary.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
