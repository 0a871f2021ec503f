"""THE loop. Read it top to bottom: warm start, evaluate, reinforcement learning, evaluate, report.

    tasks -> rollout workers <-> engine -> groups -> streams -> packed batches -> update -> weights back to the engine

One process, one mesh. The engine's thread generates while this thread waits in `collect`; then this thread updates
while the engine idles, so every token is exactly on-policy at the start of its update. New weights are a pointer: the
engine takes the arrays that the update returned.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import jax

from jaxagent import warm_start
from jaxagent.algorithms import presets
from jaxagent.build import Parts, open_parts
from jaxagent.config import Config, ConfigError
from jaxagent.data.tasks import TaskIterator
from jaxagent.engine.driver import Driver
from jaxagent.evaluate import deadline_s, evaluate
from jaxagent.learner import forward, loss
from jaxagent.learner.batching import Packer, check_context
from jaxagent.learner.optimizer import make_optimizer
from jaxagent.learner.programs import Programs, make_programs
from jaxagent.learner.state import TrainState, init_state
from jaxagent.learner.teacher import open_teacher
from jaxagent.learner.update import make_update
from jaxagent.observe.progress import Progress
from jaxagent.rollout.statistics import action_tokens, episode_metrics
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
    tasks = TaskIterator(parts.train, cfg.seed, shuffle=True)
    with saved.compiles.warm_up():
        programs, state = make_programs(cfg, parts.spec, parts.mesh, params, open_teacher(cfg, parts.mesh))
        step = saved.host.get("step", 0)
        resumed = saved.host.get("stage") == RL
        if resumed:
            state, _ = saved.checkpoints.restore(state)
            tasks.set_state(saved.host["tasks"])
        driver.update_params(state.params, int(state.step))
    with saved.stage(RL, rl.steps, step):
        if not resumed:
            record_evaluation(parts, saved, driver, 0, {})
            saved.save(bundle_number(cfg, RL, 0), state, RL, 0, tasks.get_state())
        while step < rl.steps:
            started = time.monotonic()
            groups, rollout = collect(parts, driver, tasks.take(rl.tasks_per_step), step)
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
                record_evaluation(parts, saved, driver, step, metrics)
            else:
                saved.record(RL, step, metrics | {"time/step_s": time.monotonic() - started})
            due = cfg.checkpoint.every and step % cfg.checkpoint.every == 0
            if due or step == rl.steps or saved.terminating:
                saved.save(bundle_number(cfg, RL, step), state, RL, step, tasks.get_state())
                saved.stop_if_asked()
    return state


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
