"""THE loop. Read it top to bottom: stage after stage (by default a warm start, then RL), export, report.

    tasks -> rollout workers <-> engine -> groups -> streams -> packed batches -> update -> weights back to the engine

One process, one mesh. The engine's thread generates while this thread waits in `collect`; then this thread updates
while the engine idles, so every token is exactly on-policy at the start of its update. New weights are a pointer: the
engine takes the arrays that the update returned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

import jax

from jaxagent.algorithms import presets
from jaxagent.build import Parts, open_parts
from jaxagent.config import Config, ConfigError, Stage
from jaxagent.data.tasks import TaskIterator
from jaxagent.engine.driver import Driver
from jaxagent.evaluate import deadline_s, record_evaluation
from jaxagent.learner.batching import check_context
from jaxagent.learner.programs import Programs, make_programs
from jaxagent.learner.state import TrainState
from jaxagent.learner.teacher import check_teacher, open_teacher
from jaxagent.models.params import Params
from jaxagent.observe.progress import Progress
from jaxagent.rollout.statistics import action_tokens, episode_metrics
from jaxagent.run import Run, open_run
from jaxagent.stages import warm_start
from jaxagent.stages.stage import StageProgram
from jaxagent.types import Episode, Group, Task

EXACT_TILE_ROWS = 64
OPD, RL = "opd", "rl"


def run(cfg: Config) -> dict[str, Any]:
    """Trains from wherever the workdir stands to the end, and returns the summary.

    Raises:
      ConfigError: a mistake in the config or the data it names, before any training.
      SystemExit: 143 after SIGTERM, when everything is saved.
    """
    check(cfg)
    keep_compiled_programs(cfg)
    with Progress() as progress, open_parts(cfg, progress.note) as parts, open_run(cfg, progress) as saved:
        stages = left(saved)
        policy_folder = Path(cfg.workdir) / "policy"
        if not stages and (policy_folder / "config.json").exists():
            return saved.finish(summary(saved))  # the same command after the end; more steps would go on
        stages = stages or cfg.stages[-1:]  # killed while it was exporting
        for stage in stages:
            STAGES[stage].check(parts)
        with contextlib.ExitStack() as engine:
            with saved.compiles.warm_up():
                params = parts.init_params()
                driver = engine.enter_context(parts.engine(params, 0))
            for stage in stages:
                params = STAGES[stage].run(parts, saved, driver, params)
                saved.host = {}  # the next stage begins at its own step 0
        parts.export(params, policy_folder)
        return saved.finish(summary(saved))


def left(saved: Run) -> tuple[Stage, ...]:
    """The stages that are not done, the interrupted one first.

    Raises:
      ConfigError: the workdir stands in a stage that the config no longer has.
    """
    cfg = saved.cfg
    at = saved.host.get("stage", cfg.stages[0])
    if at not in cfg.stages:
        raise ConfigError(f"{cfg.workdir} was interrupted in stage '{at}', which config.stages does not have.")
    done = at == cfg.stages[-1] and saved.step_of(at) >= STAGES[at].steps(cfg)
    return () if done else cfg.stages[cfg.stages.index(at) :]


def check(cfg: Config) -> None:
    """Refuses what cannot work, before anything is opened.

    Raises:
      ConfigError: naming the fields.
    """
    if not cfg.stages:
        raise ConfigError("config.stages is empty: name at least one stage.")
    if twice := [stage for i, stage in enumerate(cfg.stages) if stage in cfg.stages[:i]]:
        raise ConfigError(f"config.stages names '{twice[0]}' twice: a stage is run once.")
    presets.check(cfg.rl)
    if OPD in cfg.stages:
        if cfg.opd.coefficient <= 0:
            raise ConfigError("The stage 'opd' trains on nothing else: opd.coefficient must be greater than 0.")
        presets.check(as_opd(cfg).rl)
    check_context(cfg.rl.batch, cfg.env.context_tokens)
    if cfg.numerics == "exact" and cfg.engine.tile_rows < EXACT_TILE_ROWS:
        raise ConfigError(
            f"numerics='exact' needs engine.tile_rows of {EXACT_TILE_ROWS} or more, got {cfg.engine.tile_rows}: "
            "below that XLA's reductions depend on what they are fused with."
        )
    sampling = cfg.rl.sampling
    if sampling.temperature <= 0 or (sampling.top_p, sampling.top_k, sampling.min_p) != (1.0, 0, 0.0):
        raise ConfigError(
            "rl.sampling must have temperature > 0, top_p=1, top_k=0 and min_p=0: the trainer scores the whole "
            "vocabulary, so a truncated behaviour distribution would be another one."
        )


def keep_compiled_programs(cfg: Config) -> None:
    """Compiled programs stay in the workdir, so that a resumed run starts in seconds; a user's own cache wins."""
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(Path(cfg.workdir).absolute() / "compilation_cache"))


def rl_stage(parts: Parts, saved: Run, driver: Driver, params: Params, stage: Stage = RL) -> Params:
    """Reinforcement learning; returns the trained policy. Logs and bundles go under the name `stage`."""
    cfg, rl = parts.cfg, parts.cfg.rl
    tasks = TaskIterator(parts.train, cfg.seed, shuffle=True)
    first = cfg.opd.steps if stage == RL and OPD in cfg.stages else 0  # attempts are numbered over both stages
    with saved.compiles.warm_up():
        programs, state = make_programs(cfg, parts.spec, parts.mesh, params, open_teacher(cfg, parts.mesh))
        step, resumed = saved.step_of(stage), saved.resumes(stage)
        if resumed:
            state, _ = saved.checkpoints.restore(state)
            tasks.set_state(saved.host["tasks"])
        driver.update_params(state.params, int(state.step))
    with saved.stage(stage, rl.steps, step):
        if not resumed:
            record_evaluation(parts, saved, driver, stage, 0, {})
            saved.save(state, stage, 0, tasks.get_state())
        while step < rl.steps:
            started = time.monotonic()
            groups, rollout = collect(parts, driver, tasks.take(rl.tasks_per_step), first + step)
            collected = time.monotonic()
            state, metrics = learn(parts, programs, state, groups, step)
            if presets.refresh_due(rl, step + 1):
                state = state.replace(reference=state.params)  # updates donate no parameters
            driver.update_params(state.params, int(state.step))
            ended = time.monotonic()
            step += 1
            metrics |= rollout | {
                "time/rollout_s": collected - started,
                "time/learn_s": ended - collected,
                "tokens_per_s": sum(len(t) for g in groups for e in g.episodes for t in e.trajectories)
                / (ended - started),
                "policy_version": float(state.step),
            }
            saved.results["logprob_gap_max"] = max(
                saved.results.get("logprob_gap_max", 0.0), metrics.get("logprob_gap/max", 0.0)
            )
            if step == rl.steps or (cfg.eval.every and step % cfg.eval.every == 0):
                record_evaluation(parts, saved, driver, stage, step, metrics)
            else:
                saved.record(stage, step, metrics | {"time/step_s": time.monotonic() - started})
            due = cfg.checkpoint.every and step % cfg.checkpoint.every == 0
            if due or step == rl.steps or saved.terminating:
                saved.save(state, stage, step, tasks.get_state())
                saved.stop_if_asked()
    return state.params


def opd_stage(parts: Parts, saved: Run, driver: Driver, params: Params) -> Params:
    """On-policy distillation: the RL stage with a teacher's judgement in place of the reward."""
    return rl_stage(dataclasses.replace(parts, cfg=as_opd(parts.cfg)), saved, driver, params, OPD)


def as_opd(cfg: Config) -> Config:
    """The config whose RL stage is this config's stage "opd"."""
    return dataclasses.replace(cfg, rl=presets.distillation_alone(cfg.rl, cfg.opd))


def collect(parts: Parts, driver: Driver, tasks: list[Task], step: int) -> tuple[list[Group], dict[str, float]]:
    """The groups of one step, and their metrics. Attempts are numbered over the whole run: no two share randomness."""
    rl = parts.cfg.rl
    play = parts.rollout(driver, rl.sampling, rl.group_size)

    async def attempt(task: Task, sample: int) -> Episode:
        return await play(task, step * rl.group_size + sample)

    before = driver.stats()
    groups = parts.workers.collect(tasks, rl.group_size, attempt, deadline_s(parts, len(tasks) * rl.group_size))
    metrics = episode_metrics(groups)
    metrics |= {f"engine/{k}": v - before.get(k, 0.0) for k, v in driver.stats().items()}
    metrics["rollout/action_tokens"] = float(action_tokens(groups))
    return groups, metrics


def learn(
    parts: Parts, programs: Programs, state: TrainState, groups: list[Group], step: int
) -> tuple[TrainState, dict[str, float]]:
    """Groups -> streams -> optimiser updates. The metrics of the first update are those of exactly on-policy data."""
    rl = parts.cfg.rl
    trajectories = presets.trajectories(groups)
    values = reference = old = teacher = students = None
    if programs.values is not None:
        (values,) = programs.values(state.critic, trajectories)
    if programs.reference is not None:
        reference, _ = programs.reference(state.reference, trajectories)
    if programs.old is not None:
        old, _ = programs.old(state.params, trajectories)
    if programs.distiller is not None:
        teacher, students = programs.distiller(state.params, trajectories)
    streams, metrics = presets.streams(groups, rl, step / rl.steps, reference, values, old, teacher, students)
    updates: list[dict[str, float]] = []
    for part in presets.mini_batches(streams, rl, (parts.cfg.seed, step)):
        train_policy = programs.values is None or step * rl.updates_per_step * rl.epochs >= rl.critic.warmup_updates
        state, of_update = programs.update(state, programs.pack(part), train_policy, programs.frozen)
        updates.append(of_update)
    return state, metrics | merge(updates)


def merge(updates: list[dict[str, float]]) -> dict[str, float]:
    """Means over a step's updates; the engine-versus-trainer gap is the first's, before any weight has moved."""
    if not updates:
        return {}
    metrics = {name: sum(u[name] for u in updates) / len(updates) for name in updates[0]}
    if "policy/logprob_gap_max" in metrics:
        del metrics["policy/logprob_gap_max"], metrics["policy/logprob_gap_mean"]
        metrics["logprob_gap/max"] = updates[0]["policy/logprob_gap_max"]
        metrics["logprob_gap/mean"] = updates[0]["policy/logprob_gap_mean"]
    return metrics


def summary(saved: Run) -> dict[str, Any]:
    """What summary.json says."""
    return {"seed": saved.cfg.seed, "steps": saved.cfg.rl.steps, **saved.results}


# What config.stages can name. A stage that is interrupted begins again from its newest bundle.
STAGES: dict[Stage, StageProgram] = {
    "warm_start": StageProgram(warm_start.run, lambda cfg: cfg.warm_start.max_steps, warm_start.check),
    "opd": StageProgram(
        opd_stage, lambda cfg: cfg.opd.steps, lambda parts: check_teacher(as_opd(parts.cfg), parts.tokenizer)
    ),
    "rl": StageProgram(rl_stage, lambda cfg: cfg.rl.steps, lambda parts: check_teacher(parts.cfg, parts.tokenizer)),
}
