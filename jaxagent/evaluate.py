"""Held-out evaluation: the same questions each time, greedy and sampled, by kind and by number of hops."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from jaxagent.build import Parts
from jaxagent.config import SamplingConfig
from jaxagent.engine.driver import Driver
from jaxagent.rollout.statistics import exact_match
from jaxagent.run import Run
from jaxagent.types import Episode, Task

SUMMARISED = ("em", "em_sampled", "em_one_hop", "em_two_hop", "em_sampled_two_hop", "searches")
GREEDY = SamplingConfig(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)


def evaluate(parts: Parts, driver: Driver) -> tuple[dict[str, float], list[Episode]]:
    """Exact match on the held-out questions.

    Returns:
      metrics: "eval/em", "eval/em_one_hop", "eval/em_two_hop", "eval/em/<kind>" of greedy decoding; the same with
        "em_sampled" at the training temperature when `eval.sampled`; "eval/searches" per question; "eval/n".
      The greedy episodes.
    """
    episodes = play(parts, driver, parts.heldout, GREEDY)
    metrics = {f"eval/{name}": value for name, value in exact_match(episodes).items()}
    metrics["eval/searches"] = sum(e.metrics.get("searches", 0.0) for e in episodes) / max(len(episodes), 1)
    metrics["eval/n"] = float(len(episodes))
    if parts.cfg.eval.sampled:
        sampled = exact_match(play(parts, driver, parts.heldout, parts.cfg.rl.sampling))
        metrics |= {
            f"eval/em_sampled{name.removeprefix('em')}": value
            for name, value in sampled.items()
            if name == "em" or name.startswith("em_")
        }
    return metrics, episodes


def record_evaluation(
    parts: Parts, saved: Run, driver: Driver, stage: str, step: int, metrics: dict[str, float]
) -> None:
    """Evaluates, records with the step's other metrics, and keeps a stage's first and last evaluation for the summary.

    Step 0 is "eval/em_before_<stage>", the latest other one "eval/em_after_<stage>".
    """
    started = time.monotonic()
    scores, episodes = evaluate(parts, driver)
    saved.record(stage, step, metrics | scores | {"time/eval_s": time.monotonic() - started})
    saved.show_episodes(episodes, parts.tokenizer.token_bytes(), stage, step)
    if parts.cfg.log_episodes:
        saved.log_episodes(f"{stage}.eval", step, episodes)
    when = "before" if step == 0 else "after"
    for name in SUMMARISED:
        if f"eval/{name}" in scores:
            saved.results[f"eval/{name}_{when}_{stage}"] = scores[f"eval/{name}"]
    saved.results["eval/n"] = int(scores["eval/n"])


def play(parts: Parts, driver: Driver, tasks: Sequence[Task], sampling: SamplingConfig) -> list[Episode]:
    """One episode per task, in task order."""
    groups = parts.workers.collect(tasks, 1, parts.rollout(driver, sampling, 1), deadline_s(parts, len(tasks)))
    return [episode for group in groups for episode in group.episodes]


def deadline_s(parts: Parts, episodes: int) -> float:
    """Seconds after which a batch of episodes is cut off: as many full episode deadlines as the slots need rounds."""
    rounds = math.ceil(episodes / parts.cfg.engine.slots)
    return rounds * parts.cfg.env.episode_timeout_s
