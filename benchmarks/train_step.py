"""What ECHO and PPO add to GRPO's train step: the same trajectories, the same model, three learners in turn.

    python -m benchmarks.train_step [--repetitions=7]

The last line is JSON: seconds per step of each algorithm and the ratios to GRPO. Trajectories are synthetic, with the
lengths of the laptop task: a prompt of 15 tokens, one or two searches of 6 sampled tokens and 75 observed ones, an
answer of 4.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Iterator

import jax
import numpy as np

from jaxagent.algorithms import compose
from jaxagent.algorithms.streams import sampled_trajectories
from jaxagent.config import Config, parse
from jaxagent.configs import search_r1
from jaxagent.learner.programs import make_programs
from jaxagent.learner.state import Batch
from jaxagent.models import params, sharding
from jaxagent.models.spec import ModelSpec
from jaxagent.types import Episode, Group, StopReason, Task, TokenKind, Trajectory

PRESETS = {"grpo": "laptop", "ppo": "laptop-ppo", "echo": "laptop-echo"}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Tokens of an episode: the prompt, one or two turns of action and observation, the last action."""

    prompt: int
    action: int
    observation: int
    last: int


SEARCH = Shape(prompt=15, action=6, observation=75, last=4)


def synthetic_groups(cfg: Config, rng: np.random.Generator, shape: Shape = SEARCH) -> list[Group]:
    """A rollout batch: every group has both rewards, so that all of it is trained."""
    groups = []
    for t in range(cfg.rl.tasks_per_step):
        task = Task(id=str(t), prompt="", answers=("",))
        episodes = []
        for sample in range(cfg.rl.group_size):
            kinds = [TokenKind.PROMPT] * shape.prompt
            for _ in range(1 + sample % 2):
                kinds += [TokenKind.ACTION] * shape.action + [TokenKind.OBSERVATION] * shape.observation
            kinds += [TokenKind.ACTION] * shape.last
            length = len(kinds)
            trajectory = Trajectory(
                tokens=rng.integers(0, cfg.tokenizer.vocab_size, length).astype(np.int32),
                kinds=np.asarray(kinds, np.uint8),
                logprobs=np.where(np.asarray(kinds) == TokenKind.ACTION, -8.0, 0.0).astype(np.float32),
                policy_versions=np.zeros(length, np.int32),
                turns=np.zeros(length, np.int32),
            )
            reward = float(sample % 2)
            episodes.append(Episode(task, sample, (trajectory,), reward, {"em": reward}, StopReason.ANSWER, 2))
        groups.append(Group(task, tuple(episodes)))
    return groups


class Learner:
    """One algorithm's learner with its state; `step()` is one RL step on the batch."""

    def __init__(self, preset: str, seed: int, numerics: str = "exact", family: str = ""):
        raw = search_r1.get_config(preset)
        raw.numerics, raw.model.family = numerics, family or raw.model.family
        self._open(parse(raw), seed, SEARCH)

    @classmethod
    def of(cls, cfg: Config, seed: int, shape: Shape) -> Learner:
        """The learner of any config, with episodes of any shape."""
        made = cls.__new__(cls)
        made._open(cfg, seed, shape)
        return made

    def _open(self, cfg: Config, seed: int, shape: Shape) -> None:
        self.cfg = cfg
        self.mesh = sharding.make_mesh(self.cfg.mesh)
        spec = ModelSpec.from_config(self.cfg.model, self.cfg.tokenizer.vocab_size)
        where = params.shardings(spec, self.mesh, sharding.TRAIN)
        with jax.set_mesh(self.mesh):
            policy = params.init(spec, jax.random.key(seed), where)
        self.programs, self.state = make_programs(self.cfg, spec, self.mesh, policy)
        self.groups = synthetic_groups(self.cfg, np.random.default_rng(seed), shape)

    def step(self) -> float:
        """Seconds of one step: critic values where needed, streams, packing, updates."""
        started = time.perf_counter()
        for batches in self.updates():
            self.state, _ = self.programs.update(self.state, batches)
        jax.block_until_ready(self.state.params)
        return time.perf_counter() - started

    def updates(self) -> Iterator[list[Batch]]:
        """The packed micro-batches of every update of a step."""
        rl = self.cfg.rl
        scores = self.programs.score(self.state, sampled_trajectories(self.groups), rl.sampling.temperature)
        streams, _ = compose.streams(self.groups, rl, 0.0, scores)
        for part in compose.mini_batches(streams, rl, (0, 0)):
            yield self.programs.packer.pack(part)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    learners = {name: Learner(preset, seed=0) for name, preset in PRESETS.items()}
    times: dict[str, list[float]] = {name: [] for name in learners}
    for learner in learners.values():
        learner.step()
    for _ in range(args.repetitions):
        for name, learner in learners.items():
            times[name].append(learner.step())
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    print(f"{'algorithm':<10} {'median s':>9} {'min s':>7} {'max s':>7} {'vs grpo':>8}")
    for name, seconds in times.items():
        ratio = median[name] / median["grpo"]
        print(f"{name:<10} {median[name]:9.3f} {min(seconds):7.3f} {max(seconds):7.3f} {ratio:8.2f}")
    print(
        json.dumps(
            {f"{name}_s": round(value, 4) for name, value in median.items()}
            | {f"{name}_vs_grpo": round(median[name] / median["grpo"], 3) for name in ("ppo", "echo")}
        )
    )


if __name__ == "__main__":
    main()
