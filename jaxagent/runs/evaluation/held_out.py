"""Held-out evaluation: the same tasks each time, greedy and sampled, by kind and by family of kinds.

The score is the environment's own (`Environment.score`): "em" of a search agent, "solved" of a terminal agent, whose
mean over one attempt per task is pass@1.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from jaxagent.config import SamplingConfig
from jaxagent.engine.driver import Driver
from jaxagent.observe.headline import is_summarised
from jaxagent.rollout.groups import Failures, by_kind, end, mean
from jaxagent.rollout.workers import group_deadline_s
from jaxagent.runs.parts import Parts
from jaxagent.runs.workdir import Workdir
from jaxagent.types import Episode, Task

GREEDY = SamplingConfig(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)


def evaluate(parts: Parts, driver: Driver) -> tuple[dict[str, float | None], list[Episode], Failures]:
    """The score on the held-out tasks.

    Returns:
      metrics, for the score "em": "eval/em", "eval/em_one_hop", "eval/em_two_hop", "eval/em/<kind>" of greedy decoding;
        the same with "em_sampled" at the training temperature when `eval.sampled`; tool calls per task under their
        own name ("eval/searches"); "eval/cost" of a task, greedy, where the environment counts one; "eval/n", and
        "eval/failed" of them. None where every episode failed.
      All episodes, the greedy ones first.
      What failed, of all.
    """
    score, calls = parts.environment.score, parts.environment.calls
    episodes = play(parts, driver, parts.heldout, GREEDY)
    metrics = {f"eval/{name}": value for name, value in by_kind(episodes, score).items()}
    if calls:
        metrics[f"eval/{calls}"] = mean(e.metrics.get(calls, 0.0) for e in episodes if not e.stop_reason.is_failure)
    if parts.environment.cost:
        costs = (e.metrics.get(parts.environment.cost, 0.0) for e in episodes if not e.stop_reason.is_failure)
        metrics["eval/cost"] = mean(costs)
    metrics["eval/n"] = float(len(episodes))
    tries = list(episodes)
    if parts.cfg.eval.sampled:
        tries += play(parts, driver, parts.heldout, parts.cfg.rl.sampling)
        sampled = by_kind(tries[len(episodes) :], score)
        metrics |= {
            f"eval/{score}_sampled{name.removeprefix(score)}": value
            for name, value in sampled.items()
            if name == score or name.startswith(f"{score}_")
        }
        if sampled["failed"]:
            metrics["eval/failed_sampled"] = sampled["failed"]
    return metrics, tries, Failures.of(tries)


def record_evaluation(
    parts: Parts, workdir: Workdir, driver: Driver, stage: str, step: int, metrics: dict[str, float]
) -> None:
    """Evaluates, records with the step's other metrics, and keeps a stage's first and last evaluation for the summary.

    Step 0 is "eval/em_before_<stage>", the latest other one "eval/em_after_<stage>".

    Raises:
      SystemExit: every episode failed before the stage has begun: nothing that follows could be measured or learnt.
    """
    started = time.monotonic()
    scores, episodes, failures = evaluate(parts, driver)
    workdir.record(stage, step, metrics | scores | {"time/eval_s": time.monotonic() - started})
    tasks = len(parts.heldout)
    workdir.logs.keep(f"{stage}.eval", step, episodes[:tasks])
    if episodes[tasks:]:
        workdir.logs.keep(f"{stage}.sampled.eval", step, episodes[tasks:])
    ending = f"_{'before' if step == 0 else 'after'}_{stage}"
    for name in [name for name in workdir.results if name.startswith("eval/") and name.endswith(ending)]:
        del workdir.results[name]  # an earlier evaluation may have had scores that this one has not
    workdir.results |= {f"{name}{ending}": scores[name] for name in filter(is_summarised, scores)}
    workdir.results["eval/n"] = int(scores["eval/n"])
    workdir.failed.tell(f"{stage}.eval", step, failures)
    workdir.write_report()
    if step == 0 and failures.all:
        end(f"before the stage '{stage}' {failures}")


def play(parts: Parts, driver: Driver, tasks: Sequence[Task], sampling: SamplingConfig) -> list[Episode]:
    """One episode per task, in task order."""
    deadline = group_deadline_s(1, parts.cfg.concurrent_episodes, parts.cfg.env.episode_timeout_s)
    groups = parts.workers.collect(tasks, 1, parts.rollout(driver, sampling, 1), deadline)
    return [episode for group in groups for episode in group.episodes]
