"""The warm start: supervised learning on demonstrations until every kind of task is learnt, not for a fixed count.

First a curriculum of short sequences with one passage, on observation tokens too: the circuit that copies a name from
the context appears there, suddenly. Then whole episodes, action tokens only. Every `gate_every` steps the engine
attempts *training* tasks of the kinds in `gate_family`; the stage ends when the worst kind reaches `gate_accuracy`.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxagent.algorithms.supervised import sft
from jaxagent.config import ConfigError, nearest
from jaxagent.config.model import completed
from jaxagent.engine.driver import Driver
from jaxagent.learner import forward
from jaxagent.learner.batching import Packer
from jaxagent.learner.programs import action_tokens
from jaxagent.learner.state import Batch, TrainState, init_state
from jaxagent.learner.update import make_optimizer, make_update
from jaxagent.models.params import Params
from jaxagent.rollout import demonstrations
from jaxagent.rollout.groups import Failures, by_kind
from jaxagent.runs.evaluation.held_out import GREEDY, play
from jaxagent.runs.parts import Parts
from jaxagent.runs.stages.offline import packer_of
from jaxagent.runs.workdir import Workdir
from jaxagent.types import Task, Trajectory

WARM_START = "warm_start"


def run(parts: Parts, workdir: Workdir, driver: Driver, params: Params) -> Params:
    """Supervised learning on demonstrations until the gate opens; returns the trained policy."""
    cfg = parts.cfg.warm_start
    # The curriculum is trained on every token of a row, whole episodes on the few that are sampled.
    batch = completed(cfg.batch, parts.cfg.rl.batch)
    curriculum = packer_of(parts, batch, batch.row_tokens)
    full = packer_of(parts, batch, action_tokens(parts.cfg))
    optimizer = make_optimizer(completed(cfg.optimizer, parts.cfg.rl.optimizer), cfg.max_steps)
    with workdir.compiles.warm_up(), jax.set_mesh(parts.mesh):
        update = make_update(forward.policy_forward(parts.spec), optimizer, parts.mesh)
        state = init_state(params, optimizer)
        for packer in (curriculum, full) if cfg.curriculum_steps else (full,):
            state = update.warm_up(state, packer.empty())
    state = workdir.restored(WARM_START, state)
    tasks, batches_of_steps = gate_tasks(parts), batches_from(workdir.step_of(WARM_START), parts, curriculum, full)

    def bundle() -> tuple[TrainState, dict]:
        return state, {}

    def is_gate(steps_done: int) -> bool:
        return steps_done % cfg.gate_every == 0 and steps_done > cfg.curriculum_steps

    for step in workdir.steps(
        WARM_START,
        cfg.max_steps,
        bundle,
        save_after=lambda steps_done: is_gate(steps_done) and parts.cfg.checkpoint.every > 0,
        over=lambda: workdir.results.get("warm_start/gate_open", False),
    ):
        batches, steps_done = next(batches_of_steps), step + 1
        started = time.monotonic()
        state, metrics = update(state, batches)
        metrics = {"loss": metrics["ce/nll"], "policy/grad_norm": metrics["policy/grad_norm"]}
        metrics["time/step_s"] = time.monotonic() - started
        if is_gate(steps_done):
            driver.update_params(state.params, steps_done)
            scores, failures = gate(parts, driver, tasks)
            metrics |= scores
            worst = scores["gate/worst_accuracy"]
            workdir.results["warm_start/gate_open"] = worst is not None and worst >= cfg.gate_accuracy
            workdir.failed.tell_step("warm_start.gate", steps_done, failures)
            workdir.results["warm_start/steps"] = steps_done
            if (is_open := workdir.results["warm_start/gate_open"]) or steps_done + cfg.gate_every > cfg.max_steps:
                gate_is = f"the gate {'opened' if is_open else 'stayed closed'} at step {steps_done} of {cfg.max_steps}"
                workdir.progress.note(f"{WARM_START}: {gate_is}: worst kind {worst}, wanted {cfg.gate_accuracy}")
        workdir.record(WARM_START, steps_done, metrics)
    return state.params


def batches_from(step: int, parts: Parts, curriculum: Packer, full: Packer) -> Iterator[list[Batch]]:
    """The micro-batches of step, step + 1, ...: `curriculum_steps` batches of one file, then all of the other."""
    cfg = parts.cfg.warm_start

    def trajectory(row: dict[str, Any]) -> Trajectory:
        return demonstrations.trajectory(row, parts.conversation(), parts.environment)

    for name, packer, size, first, last in (
        ("curriculum", curriculum, cfg.curriculum.sequences if cfg.curriculum else 0, 0, cfg.curriculum_steps),
        ("full", full, cfg.batch_sequences, cfg.curriculum_steps, cfg.max_steps),
    ):
        if step >= last or first == last:
            continue
        rows = demonstrations.load(demonstrations_file(parts, name))
        stream = demonstrations.stream(rows, trajectory, size, functools.partial(_pack, packer, name == "curriculum"))
        stream.set_state({"next_index": max(step - first, 0)})
        yield from itertools.islice(stream, last - max(step, first))


def _pack(packer: Packer, observations: bool, trajectories: list[Trajectory]) -> list[Batch]:
    return packer.pack(sft(trajectories, observations=observations))


def check(parts: Parts) -> None:
    """Raises ConfigError for demonstrations or gate tasks that are missing or malformed, before any device work."""
    for name in ("curriculum", "full") if parts.cfg.warm_start.curriculum_steps else ("full",):
        demonstrations.load(demonstrations_file(parts, name))
    if not gate_tasks(parts):
        families = sorted({task.kind.partition("/")[0] for task in parts.train})
        family = parts.cfg.warm_start.gate_family
        raise ConfigError(f"warm_start.gate_family: no training task is of '{family}'. {nearest(family, families)}")


def demonstrations_file(parts: Parts, name: str) -> Path:
    """`name`.jsonl of the config's demonstrations, or of the dataset. One file holds whole episodes and no curriculum.

    Raises:
      ConfigError: one file, and a curriculum is wanted; or the config names none and the dataset has none.
    """
    if not parts.cfg.warm_start.demonstrations:
        own = parts.dataset / f"{name}.jsonl"
        if not own.is_file():
            others = ",".join(stage for stage in parts.cfg.stages if stage != "warm_start") or "rl"
            raise ConfigError(
                f"The stage warm_start needs demonstrations and this data has none: no file '{own}'. Leave the stage "
                f"out (--config.stages={others}), or name demonstrations (--config.warm_start.demonstrations)."
            )
        return own
    path = Path(parts.cfg.warm_start.demonstrations)
    if path.suffix != ".jsonl":
        return path / f"{name}.jsonl"
    if name == "curriculum":
        raise ConfigError(
            f"warm_start.demonstrations is one file, '{path}', of whole episodes: set warm_start.curriculum=none, "
            "or name a folder with curriculum.jsonl and full.jsonl."
        )
    return path


def gate_tasks(parts: Parts) -> list[Task]:
    """`gate_questions` training tasks of every kind of the gate's family."""
    cfg = parts.cfg.warm_start
    chosen: dict[str, list[Task]] = {}
    for task in parts.train:
        kind = chosen.setdefault(task.kind, [])
        if task.kind.partition("/")[0] == cfg.gate_family and len(kind) < cfg.gate_questions:
            kind.append(task)
    return [task for kind in sorted(chosen) for task in chosen[kind]]


def gate(parts: Parts, driver: Driver, tasks: list[Task]) -> tuple[dict[str, float | None], Failures]:
    """Greedy score on the gate's tasks: the mean, the worst kind, and every kind; and what failed.

    The worst is None where all episodes of some kind failed: the gate stays shut for what was not measured.
    """
    score, prefix = parts.environment.score, f"{parts.environment.score}/{parts.cfg.warm_start.gate_family}/"
    episodes = play(parts, driver, tasks, GREEDY)
    scores = by_kind(episodes, score)
    kinds = {name.removeprefix(prefix): value for name, value in scores.items() if name.startswith(prefix)}
    worst = None if None in kinds.values() else min(kinds.values(), default=scores[score])
    metrics = {"gate/mean_accuracy": scores[score], "gate/worst_accuracy": worst}
    return metrics | {f"gate/{kind}": value for kind, value in kinds.items()}, Failures.of(episodes)
