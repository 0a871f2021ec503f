"""THE loop. Read it top to bottom: warm start, evaluate, reinforcement learning, evaluate, report.

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

from jaxagent import warm_start
from jaxagent.algorithms import presets
from jaxagent.build import Parts, open_parts
from jaxagent.config import Config, ConfigError, RLConfig
from jaxagent.engine.driver import Driver
from jaxagent.evaluate import deadline_s, evaluate
from jaxagent.experience import Experience
from jaxagent.learner import forward, loss
from jaxagent.learner.batching import Packer, check_context
from jaxagent.learner.optimizer import make_optimizer
from jaxagent.learner.programs import Programs, make_programs
from jaxagent.learner.state import TrainState, init_state
from jaxagent.learner.update import make_update
from jaxagent.observe.progress import Progress
from jaxagent.rollout import early_stop, hindsight, replay, schedule, selection, strategies
from jaxagent.rollout.statistics import action_tokens, episode_metrics
from jaxagent.rollout.workers import STOP_TIMEOUT_S
from jaxagent.run import Run, open_run
from jaxagent.types import Episode, Group, Task

EXACT_TILE_ROWS = 64
WARM_START, RL = "warm_start", "rl"


def run(cfg: Config) -> dict[str, Any]:
    """Trains from wherever the workdir stands to the end, and returns the summary.

    Raises:
      ConfigError: a mistake in the config or the data it names, before any training.
      SystemExit: 143 after SIGTERM, when everything is saved.
    """
    check(cfg)
    keep_compiled_programs(cfg)
    with Progress() as progress, open_parts(cfg, progress.note) as parts, open_run(cfg, progress) as saved:
        stage = saved.host.get("stage", WARM_START if cfg.warm_start.enabled else RL)
        policy_folder = Path(cfg.workdir) / "policy"
        if stage == RL and saved.host.get("step", 0) >= cfg.rl.steps and (policy_folder / "config.json").exists():
            return saved.finish(summary(saved))  # the same command after the end; more rl.steps would go on
        if stage == WARM_START:
            warm_start.check(parts)
        with contextlib.ExitStack() as engine:
            with saved.compiles.warm_up():
                params = parts.init_params()
                driver = engine.enter_context(parts.engine(params, 0))
            if stage == WARM_START:
                params = warm_start_stage(parts, saved, driver, params)
            state = rl_stage(parts, saved, driver, params)
        parts.export(state.params, policy_folder)
        return saved.finish(summary(saved))


def check(cfg: Config) -> None:
    """Refuses what cannot work, before anything is opened.

    Raises:
      ConfigError: naming the fields.
    """
    presets.check(cfg.rl)
    strategies.check(cfg.rl)
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


def warm_start_stage(parts: Parts, saved: Run, driver: Driver, params: Any) -> Any:
    """Supervised learning on demonstrations until the gate opens; returns the trained policy."""
    cfg = parts.cfg.warm_start
    # The curriculum is trained on every token of a row, whole episodes on the few that are sampled.
    curriculum = Packer(cfg.batch, cfg.batch.row_tokens, row_shards(parts))
    full = Packer(cfg.batch, parts.cfg.env.max_turns * parts.cfg.env.turn_tokens, row_shards(parts))
    optimizer = make_optimizer(cfg.optimizer, cfg.max_steps)
    with saved.compiles.warm_up(), jax.set_mesh(parts.mesh):
        update = make_update(forward.policy_forward(parts.spec), loss.SUPERVISED, optimizer, parts.mesh)
        state = init_state(params, optimizer)
        for packer in (curriculum, full):
            state = update.warm_up(state, packer.empty())
    step = saved.host.get("step", 0)
    if step:
        with saved.compiles.warm_up():
            state, _ = saved.checkpoints.restore(state)
    tasks = warm_start.gate_tasks(parts)
    with saved.stage(WARM_START, cfg.max_steps, step):
        for batches in warm_start.Demonstrations(parts, curriculum, full).batches(step):
            if saved.results.get("warm_start/gate_open"):  # found out just before the run was interrupted
                break
            started = time.monotonic()
            state, metrics = update(state, batches)
            step += 1
            metrics = {"loss": metrics["ce/nll"], "policy/grad_norm": metrics["policy/grad_norm"]}
            metrics["time/step_s"] = time.monotonic() - started
            is_gate = step % cfg.gate_every == 0 and step > cfg.curriculum_steps
            if is_gate:
                driver.update_params(state.params, step)
                metrics |= warm_start.gate(parts, driver, tasks)
                saved.results["warm_start/gate_open"] = metrics["gate/worst_accuracy"] >= cfg.gate_accuracy
                saved.results["warm_start/steps"] = step
            saved.record(WARM_START, step, metrics)
            if is_gate or saved.terminating:
                saved.save(bundle_number(parts.cfg, WARM_START, step), state, WARM_START, step, {})
                saved.stop_if_asked()
    saved.host = {}  # the next stage begins at its own step 0
    return state.params


def rl_stage(parts: Parts, saved: Run, driver: Driver, params: Any) -> TrainState:
    """Reinforcement learning; returns the final state."""
    cfg, rl = parts.cfg, parts.cfg.rl
    experience = Experience(parts.train, cfg, parts.heldout)
    with saved.compiles.warm_up():
        programs, state = make_programs(cfg, parts.spec, parts.mesh, params)
        step = saved.host.get("step", 0)
        resumed = saved.host.get("stage") == RL
        if resumed:
            state, _ = saved.checkpoints.restore(state)
            experience.set_state(saved.host["tasks"])
        driver.update_params(state.params, int(state.step))
    with saved.stage(RL, rl.steps, step):
        if not resumed:
            record_evaluation(parts, saved, driver, 0, {})
            saved.save(bundle_number(cfg, RL, 0), state, RL, 0, experience.get_state())
        while step < rl.steps:
            started = time.monotonic()
            chosen, rollout = collect(parts, driver, experience, step)
            collected = time.monotonic()
            state, metrics = learn(parts, programs, state, chosen.groups, experience, step)
            rollout |= experience.record(chosen.played, step)
            if presets.refresh_due(rl, step + 1):
                state = state.replace(reference=state.params)  # updates donate no parameters
            driver.update_params(state.params, int(state.step))
            ended = time.monotonic()
            step += 1
            metrics |= rollout | {
                "time/rollout_s": collected - started,
                "time/learn_s": ended - collected,
                "tokens_per_s": sum(len(t) for g in chosen.played for e in g.episodes for t in e.trajectories)
                / (ended - started),
                "policy_version": float(state.step),
            }
            saved.results["logprob_gap_max"] = max(
                saved.results.get("logprob_gap_max", 0.0), metrics.get("logprob_gap/max", 0.0)
            )
            if step == rl.steps or (cfg.eval.every and step % cfg.eval.every == 0):
                record_evaluation(parts, saved, driver, step, metrics)
            else:
                saved.record(RL, step, metrics | {"time/step_s": time.monotonic() - started})
            due = cfg.checkpoint.every and step % cfg.checkpoint.every == 0
            if due or step == rl.steps or saved.terminating:
                saved.save(bundle_number(cfg, RL, step), state, RL, step, experience.get_state())
                saved.stop_if_asked()
    return state


def collect(
    parts: Parts, driver: Driver, experience: Experience, step: int
) -> tuple[selection.Selection, dict[str, float]]:
    """The rollouts of one step, and their metrics. Attempts are numbered over the run: no two share randomness."""
    rl = parts.cfg.rl
    attempts = rl.group_size + rl.oversample.extra_attempts
    sampling = dataclasses.replace(rl.sampling, temperature=temperature(rl, step))
    rollout = parts.rollout(driver, sampling, attempts, rl.tool_epsilon)
    before, more = driver.stats(), {}

    def play(number: int, wanted: int) -> list[Group]:
        """Round `number` of the step; more than one with dynamic sampling."""
        tasks = experience.take(wanted + rl.oversample.extra_tasks, step, number)
        first = (step * rl.refill.max_rounds + number) * attempts

        async def attempt(task: Task, sample: int) -> Episode:
            return await rollout(task, first + sample)

        deadline = deadline_s(parts, len(tasks) * attempts)
        if not strategies.oversamples(rl):
            return parts.workers.collect(tasks, attempts, attempt, deadline)
        groups = early_stop.run_until_enough(
            tasks, attempts, rl.group_size, wanted, attempt, parts.cfg.engine.slots, deadline
        )
        groups = parts.workers.run(groups, deadline + STOP_TIMEOUT_S)
        kept = early_stop.usable(groups, rl.oversample.min_group, wanted)
        for name, count in early_stop.oversample_metrics(groups, rl.group_size, kept).items():
            more[name] = more.get(name, 0.0) + count
        return kept

    chosen = selection.refill(play, rl.tasks_per_step, rl.refill)
    hindsight.refuse_on_policy(chosen.played)
    chosen = dataclasses.replace(chosen, groups=selection.most_varied(chosen.groups, rl.keep_groups_frac))
    metrics = episode_metrics(chosen.played) | more
    if strategies.selects(rl):
        metrics |= selection.selection_metrics(chosen)
    if rl.temperature.schedule != "constant":
        metrics["sampling/temperature"] = sampling.temperature
    metrics |= {f"engine/{k}": v - before.get(k, 0.0) for k, v in driver.stats().items()}
    metrics["rollout/action_tokens"] = float(action_tokens(chosen.played))
    return chosen, metrics


def temperature(rl: RLConfig, step: int) -> float:
    """What a step's attempts are sampled at, and scored with."""
    return schedule.temperature(rl.temperature, rl.sampling.temperature, step, rl.steps)


def learn(
    parts: Parts, programs: Programs, state: TrainState, groups: list[Group], experience: Experience, step: int
) -> tuple[TrainState, dict[str, float]]:
    """Groups -> streams -> optimiser updates. The metrics of the first update are those of exactly on-policy data."""
    rl = parts.cfg.rl
    at = temperature(rl, step)
    trajectories = presets.trajectories(groups)
    values = reference = old = None
    if programs.values is not None:
        (values,) = programs.values(state.critic, trajectories)
    if programs.reference is not None:
        reference, _ = programs.reference(state.reference, trajectories, at)
    if programs.old is not None:
        old, _ = programs.old(state.params, trajectories, at)
    streams, metrics = [], {}
    if groups:  # dynamic sampling may find none
        streams, metrics = presets.streams(groups, rl, step / rl.steps, reference, values, old)
    if experience.replay is not None:
        past, counts = replay.choose(
            experience.replay.candidates(step), lambda t: programs.replay(state.params, t, at)[0], rl.replay
        )
        unused = 1 + max((s.episode for s in streams), default=-1)
        streams += replay.streams(past, rl.replay, rl.correction, unused)
        metrics |= {"replay/used": float(len(past)), "replay/scored": float(counts)}
    updates: list[dict[str, float]] = []
    for part in presets.mini_batches(streams, rl, (parts.cfg.seed, step)):
        train_policy = programs.values is None or step * rl.updates_per_step * rl.epochs >= rl.critic.warmup_updates
        state, of_update = programs.update(state, programs.packer.pack(part), train_policy, at)
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


def record_evaluation(parts: Parts, saved: Run, driver: Driver, step: int, metrics: dict[str, float]) -> None:
    """Evaluates, records, and keeps the first and the last evaluation for the summary."""
    started = time.monotonic()
    scores, episodes = evaluate(parts, driver)
    saved.record(RL, step, metrics | scores | {"time/eval_s": time.monotonic() - started})
    saved.show_episodes(episodes, parts.tokenizer.token_bytes(), RL, step)
    when = "before_rl" if step == 0 else "after_rl"
    for name in ("em", "em_sampled", "em_one_hop", "em_two_hop", "em_sampled_two_hop", "searches"):
        if f"eval/{name}" in scores:
            saved.results[f"eval/{name}_{when}"] = scores[f"eval/{name}"]
    saved.results["eval/n"] = int(scores["eval/n"])


def summary(saved: Run) -> dict[str, Any]:
    """What summary.json says."""
    return {"seed": saved.cfg.seed, "steps": saved.cfg.rl.steps, **saved.results}


def bundle_number(cfg: Config, stage: str, step: int) -> int:
    """Bundles are numbered in the order in which they are made, over all stages."""
    return step if stage == WARM_START else cfg.warm_start.max_steps + 1 + step


def row_shards(parts: Parts) -> int:
    """Into how many parts the mesh splits a batch's rows."""
    return parts.cfg.mesh.data * parts.cfg.mesh.fsdp
