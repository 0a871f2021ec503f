"""What would an asynchronous run gain? A model in virtual time around the real coordinator; no device is used.

    python -m benchmarks.async_model [--workloads=ABC] [--staleness=1,2,4] [--devices=64] [--groups=256] [--steps=10]

Synchronous is all devices sampling, then all devices training, switched for nothing. Asynchronous is devices split into
engines and a trainer, for each workload the best of an eighth, a quarter and three eighths for the trainer at the
smallest staleness; the three are printed first. The inputs are stated constants (`async_simulation.py`: Costs,
and the workloads below), not measurements of a machine: what can be trusted is the order of the rules, not the second
digit.

  A  reasoning: one turn, 3,625 tokens on average with a heavy tail, at most 30,000
  B  tools: six turns, 2,275 tokens together, an environment that takes 2 s on average
  C  slow environments: twelve turns, 2,809 tokens together, 8 s on average with a heavy tail

The last line is JSON: for every workload, rule and staleness the speed-up over synchronous, and the step's seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
from collections.abc import Sequence

import numpy as np

from benchmarks.async_simulation import Costs, Layout, Report, Turns, simulate
from jaxagent.fleet.plan import EpisodeId, Plan, Rule

ATTEMPTS = 8
SPLITS = (1 / 8, 1 / 4, 3 / 8)  # of the devices, for the trainer
RULES: tuple[Rule, ...] = ("pinned", "in_flight")


@dataclasses.dataclass(frozen=True)
class Workload:
    """Independent lognormal turns: `mean` is what a turn has on average before the cap."""

    turns: int
    tokens: float
    tokens_sigma: float
    most_tokens: float
    wait_s: float
    wait_sigma: float

    def play(self, seed: int, episode: EpisodeId) -> Turns:
        """An episode's turns, from its id alone."""
        rng = np.random.Generator(np.random.PCG64([seed, *episode.group, episode.sample]))
        tokens = np.minimum(_lognormal(rng, self.tokens, self.tokens_sigma, self.turns), self.most_tokens)
        waits = _lognormal(rng, self.wait_s, self.wait_sigma, self.turns) if self.wait_s else np.zeros(self.turns)
        return tuple(zip(np.maximum(tokens, 1).tolist(), waits.tolist(), strict=True))


WORKLOADS = {
    "A": Workload(1, 3625 * 1.055, 1.2, 30_000, 0.0, 0.0),  # the cap takes a twentieth
    "B": Workload(6, 2275 / 6, 1.0, 8_000, 2.0, 1.0),
    "C": Workload(12, 2809 / 12, 1.0, 8_000, 8.0, 1.2),
}


def _lognormal(rng: np.random.Generator, mean: float, sigma: float, count: int) -> np.ndarray:
    return rng.lognormal(math.log(mean) - sigma * sigma / 2, sigma, count)


def measure(
    workload: Workload, rule: Rule, staleness: int, layout: Layout, groups: int, steps: int, seed: int
) -> Report:
    """One run of the model with `steps` counted steps."""
    plan = Plan(steps + 2 * staleness + 2, groups, ATTEMPTS, staleness=staleness, rule=rule)
    turns = functools.lru_cache(maxsize=None)(functools.partial(workload.play, seed))
    return simulate(plan, layout, Costs(), turns)


def split(devices: int, share: float) -> Layout:
    """Devices for the trainer, the rest are engines."""
    trainer = max(1, round(devices * share))
    return Layout(devices - trainer, trainer)


def compare(name: str, allowed: Sequence[int], devices: int, groups: int, steps: int, seed: int) -> dict[str, object]:
    """Prints a workload's rows, and returns its figures."""
    workload = WORKLOADS[name]
    run = functools.partial(measure, workload, groups=groups, steps=steps, seed=seed)
    base = run("pinned", 0, Layout(devices, devices))
    tried = {share: run("in_flight", min(allowed), split(devices, share)) for share in SPLITS}
    share = min(tried, key=lambda share: tried[share].step_s)
    print(f"{name}  synchronous                            step {base.step_s:7.1f} s")
    for part, report in tried.items():
        print(
            f"{name}  in_flight  S={min(allowed)}  {base.step_s / report.step_s:5.2f}x  step {report.step_s:7.1f} s  "
            f"trainer waits {report.trainer_waits:4.0%}  engines idle {report.engines_idle:4.0%}  "
            f"{part:.3f} of the devices train{' (below)' if part == share else ''}",
            flush=True,
        )
    figures: dict[str, object] = {"sync_step_s": round(base.step_s, 2), "trainer_share": share}
    figures["splits"] = {f"{part:.3f}": round(base.step_s / report.step_s, 3) for part, report in tried.items()}
    for rule in RULES:
        for staleness in allowed:
            known = rule == "in_flight" and staleness == min(allowed)
            report = tried[share] if known else run(rule, staleness, split(devices, share))
            episodes = sum(report.ages.values())
            ages = " ".join(f"{age}:{count / episodes:.2f}" for age, count in report.ages.items())
            print(
                f"{name}  {rule:9}  S={staleness}  {base.step_s / report.step_s:5.2f}x  step {report.step_s:7.1f} s  "
                f"trainer waits {report.trainer_waits:4.0%}  engines idle {report.engines_idle:4.0%}  "
                f"length {report.tokens_trained / report.tokens_sampled:.3f}  ages {ages}",
                flush=True,
            )
            figures[f"{rule}_s{staleness}"] = round(base.step_s / report.step_s, 3)
            figures[f"{rule}_s{staleness}_step_s"] = round(report.step_s, 2)
    return figures


def main() -> None:
    """Parses the flags, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="ABC", help="letters of the table above")
    parser.add_argument("--staleness", default="1,2,4", help="versions, with commas")
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--groups", type=int, default=256, help=f"of a step, each of {ATTEMPTS} attempts")
    parser.add_argument("--steps", type=int, default=10, help="that are counted")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    allowed = [int(word) for word in options.staleness.split(",")]
    figures: dict[str, object] = {"devices": options.devices, "groups": options.groups, "steps": options.steps}
    for name in options.workloads:
        figures[name] = compare(name, allowed, options.devices, options.groups, options.steps, options.seed)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
