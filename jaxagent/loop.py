"""THE loop. Read it top to bottom: stage after stage (by default a warm start, then RL), export, report.

    tasks -> rollout workers <-> engine -> groups -> streams -> packed batches -> update -> weights back to the engine

By default this is one process with one mesh. The engine's thread generates while this thread waits in `seams.batch`;
then this thread updates while the engine idles, so every token is exactly on-policy at the start of its update. New
weights are an argument: the engine takes the arrays that the update returned, and lays their layers out side by side
once. Where other processes play, the RL stage is given other seams (runs/seams.py), and is the same otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxagent.algorithms import compose, trial
from jaxagent.algorithms.compose import EntropyControl, as_opd, refresh_due
from jaxagent.algorithms.streams import sampled_trajectories
from jaxagent.config import Config, RLConfig, Stage
from jaxagent.engine.driver import Driver
from jaxagent.learner.loss import over_updates
from jaxagent.learner.programs import Programs, make_programs
from jaxagent.learner.state import TrainState
from jaxagent.learner.teacher import check_teacher, open_teacher
from jaxagent.models import peft
from jaxagent.models.params import Params
from jaxagent.observe.episode_store import Learnt
from jaxagent.observe.files import OUTDATED_FILE, POLICY_FOLDER
from jaxagent.observe.progress import Progress
from jaxagent.rollout.experience import Experience, check_tasks
from jaxagent.rollout.groups import largest
from jaxagent.runs import devices, lag, outcomes
from jaxagent.runs.attempts import temperature
from jaxagent.runs.checks import OPD, RL, check
from jaxagent.runs.evaluation.held_out import record_evaluation
from jaxagent.runs.logs import learnt_of
from jaxagent.runs.parts import Parts, open_parts
from jaxagent.runs.seams import Connect, one_process, publish_past
from jaxagent.runs.stages import StageProgram, logged, offline, outcome_model, sample, sft, stages_left, warm_start
from jaxagent.runs.stopping import Stopping
from jaxagent.runs.workdir import Workdir, open_workdir
from jaxagent.types import Group


def run(
    cfg: Config, connect: Connect = one_process, alive: Callable[[str], None] = lambda stage: None
) -> dict[str, Any]:
    """Trains from wherever the workdir stands to the end, and returns the summary.

    Args:
      cfg: the run's.
      connect: opens the seams of the stage "rl": who plays its groups and gets its weights.
      alive: called with the stage's name whenever the run gets somewhere, "" before the first: for whoever watches it.

    Raises:
      ConfigError: a mistake in the config or the data it names, before any training; nothing in the workdir is changed.
      Stopped: 143 after SIGTERM, 129 after SIGHUP, 130 after Ctrl-C, when everything is saved.
      OSError: the disk is full, or failed.
    """
    check(cfg)
    devices.keep_compiled_programs()
    with (
        Stopping() as stopping,
        Progress(alive=alive) as progress,
        open_workdir(cfg, progress, stopping) as workdir,
        contextlib.ExitStack() as stack,
    ):
        stages = stages_left(workdir, STAGES)
        if stages:
            workdir.check_rounding()
        with workdir.compiles.warm_up():
            parts = stack.enter_context(open_parts(cfg, progress.note))
        workdir.begin(parts.identity(), parts.mesh)
        policy_folder = workdir.path / POLICY_FOLDER
        outdated = policy_folder / OUTDATED_FILE
        if not stages and (policy_folder / "config.json").exists() and not outdated.exists():
            return workdir.finish(summary(workdir))  # the same command after the end; more steps would go on
        stages = stages or cfg.stages[-1:]  # killed while it was exporting
        with workdir.compiles.warm_up():  # of small programs that try out the choices
            for stage in stages:
                STAGES[stage].check(parts)
        # LoRA adapters that an earlier process began.
        adapting = cfg.model.lora is not None and (workdir.resumes(OPD) or workdir.resumes(RL))
        if cfg.model.lora and cfg.model.lora.path and not adapting:
            peft.load_adapters(cfg.model.lora.path, parts.spec, config=cfg.model.lora)  # mistakes are told early
        with contextlib.ExitStack() as engine:
            progress.note(
                f"compiling for {', '.join(stages)}: minutes for a large model, seconds from the second start on"
            )
            with workdir.compiles.warm_up():
                params = parts.base_params() if adapting else parts.init_params()
                driver = engine.enter_context(parts.engine(params, 0))
                parts.roles.start()
            policy = [params]  # taken out by a stage: nobody else keeps the weights that it replaces
            del params
            for stage in stages:
                program = functools.partial(rl_stage, connect=connect) if stage == RL else STAGES[stage].run
                policy.append(program(parts, workdir, driver, policy.pop()))
                gc.collect()  # its optimiser state, where a cycle still holds it
        parts.export(policy.pop(), policy_folder)
        outdated.unlink(missing_ok=True)
        return workdir.finish(summary(workdir))


def rl_stage(
    parts: Parts, workdir: Workdir, driver: Driver, params: Params, stage: Stage = RL, connect: Connect = one_process
) -> Params:
    """Reinforcement learning; returns the trained policy. Logs and bundles go under the name `stage`."""
    with workdir.compiles.warm_up():
        parts = outcomes.opened(parts)
    cfg, rl = parts.cfg, parts.cfg.rl
    experience = Experience(parts.train, cfg, parts.held_out)
    entropy = EntropyControl.start(rl, workdir.results if workdir.resumes(stage) else {})
    before = cfg.opd.steps if stage == RL and OPD in cfg.stages else 0  # steps of the other stage that samples so
    with workdir.compiles.warm_up():
        resumes = workdir.resumes(stage)
        programs, state = make_programs(cfg, parts.spec, parts.mesh, params, open_teacher(cfg, parts.mesh), not resumes)
        if resumes:
            state = programs.update.merged(workdir.restored(stage, state))
            experience.set_state(workdir.host["tasks"], workdir.step_of(stage))
        elif cfg.model.lora:
            parts.write_base(params)
        if stage == RL:  # in "opd" before it, roles without a path are still the policy
            begun_with = state.policy if cfg.model.lora and cfg.model.lora.path else params
            parts.roles.freeze(functools.partial(parts.export, begun_with))
        seams = connect(parts, workdir, driver, experience, before)
        sink, record = seams.sink, workdir.recorder(stage)
        publish_past(sink, workdir, stage, state, programs.update.merged)
        sink.publish(workdir.step_of(stage), state)
        record.published(workdir.step_of(stage), state.params)
    del params  # the state has them until its first update; later they would be in memory for nothing
    first = functools.partial(record_evaluation, parts, workdir, driver, stage, 0, {})

    def bundle() -> tuple[Any, ...]:
        return state, experience.get_state(), sink.past()

    for step in workdir.steps(stage, rl.steps, bundle, first=first):
        started = time.monotonic()
        rollouts = seams.batch(step)
        collected = time.monotonic()
        record.add_groups(rollouts.rounds)
        chosen, sampled = rollouts.chosen, rollouts.metrics | lag.ages(rollouts.chosen.groups, step, seams.bound)
        episodes = [episode for group in chosen.sampled for episode in group.episodes]
        if rl.staleness:  # else the first update says it
            sampled |= lag.gaps(programs, state, sink.weights_of, chosen.groups, step)
        state, metrics, learnt = learn(parts, programs, state, chosen.groups, experience, step, entropy.apply(rl))
        workdir.logs.keep(stage, step, episodes, learnt)
        values = functools.partial(outcomes.values_of, parts, programs, state) if programs.values else None
        sampled |= experience.record(chosen.sampled, step, values)
        metrics["policy/entropy_coefficient"] = entropy.applied
        entropy = entropy.after(metrics)
        entropy.save(workdir.results)
        if refresh_due(rl, step + 1):
            state = state.replace(reference=state.params)  # updates donate no parameters
        sink.publish(step + 1, state)
        record.published(step + 1, state.params)
        updated = time.monotonic()
        metrics |= sampled | {
            "time/rollout_s": collected - started,
            "time/learn_s": updated - collected,
            "tokens_per_s": sum(len(t) for e in episodes for t in e.trajectories) / (updated - started),
            "policy_version": float(step + 1),
        }
        gaps = workdir.results.get("logprob_gap_max"), metrics.get("logprob_gap/max")
        workdir.results["logprob_gap_max"] = largest(*gaps)
        workdir.failed.tell_step(stage, step + 1, rollouts.failures)
        if workdir.evaluates(step + 1, rl.steps):
            with sink.newest():
                record_evaluation(parts, workdir, driver, stage, step + 1, metrics)
        else:
            workdir.record(stage, step + 1, metrics | {"time/step_s": time.monotonic() - started})
        seams.commit(workdir.committed())
        record.commit(workdir.committed())
    if cfg.model.lora:
        parts.export_adapter(state.params, Path(cfg.workdir) / "adapter")
    return state.policy


def check_rl(cfg: Config, parts: Parts) -> None:
    """What a stage that samples and trains cannot work with, before any training. Raises ConfigError."""
    check_teacher(cfg, parts.tokenizer)
    check_tasks(parts.train, cfg.rl)
    trial.check_answers(cfg.rl)


def opd_stage(parts: Parts, workdir: Workdir, driver: Driver, params: Params) -> Params:
    """On-policy distillation: the RL stage with a teacher's judgement in place of the reward."""
    return rl_stage(dataclasses.replace(parts, cfg=as_opd(parts.cfg)), workdir, driver, params, OPD)


def learn(
    parts: Parts,
    programs: Programs,
    state: TrainState,
    groups: list[Group],
    experience: Experience,
    step: int,
    rl: RLConfig,
) -> tuple[TrainState, dict[str, float | None], dict[int, Learnt]]:
    """Groups -> streams -> optimiser updates; also what was learnt of each trajectory, by its id.

    The metrics of the first update are those of exactly on-policy data.
    """
    sampled_at = temperature(rl, step)
    scores = programs.score(state, sampled_trajectories(groups), sampled_at)
    streams, metrics = compose.streams(groups, rl, step / rl.steps, scores)
    if experience.replay is not None:
        of_models = (programs.policy_logprobs, programs.reference_logprobs)
        policy, reference = (functools.partial(score, state, temperature=sampled_at) for score in of_models)
        replayed, counts = experience.replay.replayed(step, policy, rl.correction, streams, reference)
        streams, metrics = streams + replayed, metrics | counts
    updates: list[dict[str, float]] = []
    scored: dict[int, np.ndarray] = {}
    for part in compose.mini_batches(streams, rl, (parts.cfg.seed, step)):
        state, of_update = programs.train(state, part, sampled_at, step, scored)
        updates += [of_update] if of_update else []  # none: no signal, and no observation either
    return state, metrics | over_updates(updates, rl.staleness), learnt_of(streams, scored)


def summary(workdir: Workdir) -> dict[str, Any]:
    """What summary.json says."""
    return {"seed": workdir.cfg.seed, "steps": workdir.cfg.rl.steps, "failed_episodes": {}, **workdir.results}


# What config.stages can name. A stage that is interrupted begins again from its newest bundle.
STAGES: dict[Stage, StageProgram] = {
    "warm_start": StageProgram(warm_start.run, lambda cfg: cfg.warm_start.max_steps, warm_start.check),
    "sample": StageProgram(sample.run, lambda cfg: cfg.sample.steps),
    "sft": StageProgram(sft.run, lambda cfg: cfg.sft.updates, sft.check),
    "rft": StageProgram(logged.rft, lambda cfg: cfg.rft.updates, lambda parts: offline.check(parts, "rft")),
    "dpo": StageProgram(logged.dpo, lambda cfg: cfg.dpo.updates, lambda parts: offline.check(parts, "dpo")),
    "outcome_model": StageProgram(
        outcome_model.run,
        lambda cfg: cfg.outcome_model.updates,
        lambda parts: offline.check(parts, "outcome_model"),
    ),
    "opd": StageProgram(opd_stage, lambda cfg: cfg.opd.steps, lambda parts: check_rl(as_opd(parts.cfg), parts)),
    "rl": StageProgram(rl_stage, lambda cfg: cfg.rl.steps, lambda parts: check_rl(parts.cfg, parts)),
}
