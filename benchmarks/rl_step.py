"""What an RL step of a mixture of experts or a hybrid costs beside that of a dense model of the same active size.

    python -m benchmarks.rl_step [--presets=laptop,laptop-moe] [--numerics=exact] [--repetitions=5]

Presets of configs/search_r1.py with random weights, one step of each in turn: a rollout (128 episodes of the laptop's
lengths, with prompts that no cache has seen) and its updates. The last line is JSON: seconds of both, medians, and
`step_ratio`, `rollout_ratio` and `update_ratio` of each preset to the first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import workloads
from benchmarks.train_step import Learner
from jaxagent.engine import automaton
from jaxagent.engine.driver import Driver
from jaxagent.engine.lm import LanguageModel
from jaxagent.engine.requests import EngineSetup
from jaxagent.models.spec import ModelSpec


def step_seconds(learners: Mapping[str, Learner], repetitions: int) -> tuple[dict[str, float], dict[str, float]]:
    """Medians of the seconds of a rollout and of its updates, by learner; one step of each in turn."""
    rng = np.random.default_rng(0)
    rollouts: dict[str, list[float]] = {name: [] for name in learners}
    updates: dict[str, list[float]] = {name: [] for name in learners}
    with contextlib.ExitStack() as stack:
        drivers = {name: stack.enter_context(driver_of(learner)) for name, learner in learners.items()}
        for driver in drivers.values():
            driver.start(600.0)
        cfg = next(iter(learners.values())).cfg
        for repetition in range(repetitions + 1):  # the first one compiles
            prompts = [_turn(rng, cfg.tokenizer.vocab_size, 15, 6) for _ in range(cfg.rl.tasks_per_step)]
            for name, learner in learners.items():
                started = time.perf_counter()
                asyncio.run(rollout(drivers[name], learner, prompts, rng))
                rolled = time.perf_counter() - started
                seconds = learner.step()
                if repetition:
                    rollouts[name].append(rolled)
                    updates[name].append(seconds)
    medians = ({name: statistics.median(seconds) for name, seconds in of.items()} for of in (rollouts, updates))
    return next(medians), next(medians)


def driver_of(learner: Learner) -> Driver:
    """An engine with a learner's weights, not started."""
    cfg = learner.cfg
    spec = ModelSpec.from_config(cfg.model, cfg.tokenizer.vocab_size)
    stops = automaton.build(["no such"], [b"ab"] * spec.padded_vocab_size, spec.padded_vocab_size)
    exact = cfg.numerics == "exact"
    setup = EngineSetup(cfg=cfg.engine, context=cfg.env.context_tokens, stops=stops, eos_ids=(), exact=exact)
    # A copy: an update takes the learner's own arrays.
    weights = jax.tree.map(jnp.copy, learner.state.params)
    return Driver(LanguageModel(spec, cfg.engine.cache_dtype), weights, 0, setup, learner.mesh)


async def rollout(driver: Driver, learner: Learner, prompts: list[workloads.Turn], rng: np.random.Generator) -> None:
    """One step's episodes, all at once: a prompt, one or two searches, an answer."""
    cfg = learner.cfg

    async def episode(i: int, turns: list[workloads.Turn]) -> None:
        session = await driver.open(f"{i // cfg.rl.group_size}", i % cfg.rl.group_size)
        for number, turn in enumerate(turns):
            await driver.generate(session, turn.given, turn.sampled, cfg.rl.sampling, number, 600.0)
        driver.close(session)

    def turn(given: int, sampled: int) -> workloads.Turn:
        return _turn(rng, cfg.tokenizer.vocab_size, given, sampled)

    jobs = []
    for i in range(cfg.rl.tasks_per_step * cfg.rl.group_size):
        prompt = prompts[i // cfg.rl.group_size]
        jobs.append(episode(i, [prompt, *(turn(75, 6) for _ in range(i % 2)), turn(75, 4)]))
    await asyncio.gather(*jobs)


def _turn(rng: np.random.Generator, vocab_size: int, given: int, sampled: int) -> workloads.Turn:
    return workloads.Turn(rng.integers(1, vocab_size, given).astype(np.int32), sampled)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="laptop,laptop-moe")
    parser.add_argument("--numerics", choices=("exact", "fast"), default="exact")
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    names = args.presets.split(",")
    rollouts, updates = step_seconds({name: Learner(name, 0, args.numerics) for name in names}, args.repetitions)
    first, out = names[0], {}
    print(f"{'preset':<16} {'rollout s':>9} {'update s':>9} {'step':>6} {'rollout':>8} {'update':>7}  times the first")
    for name in names:
        step = (rollouts[name] + updates[name]) / (rollouts[first] + updates[first])
        ratios = step, rollouts[name] / rollouts[first], updates[name] / updates[first]
        print(
            f"{name:<16} {rollouts[name]:9.3f} {updates[name]:9.3f} {ratios[0]:6.2f} {ratios[1]:8.2f} {ratios[2]:7.2f}"
        )
        named = zip(("step_ratio", "rollout_ratio", "update_ratio"), ratios, strict=True)
        out[name] = {"rollout_s": rollouts[name], "update_s": updates[name], **dict(named)}
    print(json.dumps({name: {key: round(value, 4) for key, value in of.items()} for name, of in out.items()}))


if __name__ == "__main__":
    main()
