"""Alarms: what goes wrong in a run, by name, with the config field to turn. Records of metrics.jsonl -> alarms.

Each rule is a pure function of the records of one stage and the config. Nothing is stored, so a run that goes on, a
page and a report come to the same alarms. A step in which a rule's metric is null, or not there, does not count for it.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxagent.config.parse import value_at
from jaxagent.observe import headline
from jaxagent.observe.text import number

STAGES = ("opd", "rl")  # that sample and train
FIRST = 5  # measured steps that later ones are compared with
EVALUATIONS = 4  # that are compared, the newest
STILL = 0.002  # nats: with less a policy already says the same, and what is left of it may fall
NOISE, SOLVED = 4, 0.9  # standard errors that a rise must exceed; a held-out share from which little is left to rise
AGES = {"neither": 0, "clip": 4, "correction": 8}  # of a token in steps, at most, by what limits its weight
Record = Mapping[str, Any]
Measured = Sequence[Any]  # numbers, or tuples of them
Numbers = Callable[[Record, Record], Any]
Judge = Callable[[Measured, Measured], float]


@dataclasses.dataclass(frozen=True)
class Rule:
    """One kind of alarm. It begins at the first step whose `value` is above `threshold`, and lasts as long as it is.

    Attributes:
      value: from the first `FIRST` measured steps of the stage and the last `reach`; called from `steps` steps on.
      numbers: what is measured in a step, of its record and the config, in place of `metric`; None where it is not.
      numerics: of runs with these only; "" = of all.
    """

    name: str
    metric: str  # whose curve shows it, or how the names of those curves begin
    sin: str  # what is wrong, one sentence without its full stop
    says: str  # what `value` is
    threshold: float
    steps: int
    knob: str  # the config field to turn
    source: str
    value: Judge
    numbers: Numbers | None = None
    reach: int = 0  # 0: as many as `steps`
    numerics: str = ""


@dataclasses.dataclass
class Alarm:
    """What went wrong, over the steps for which it did."""

    rule: Rule
    stage: str
    step: int  # the first
    value: float  # the largest
    last: int | None = None  # step; None while it goes on

    @property
    def text(self) -> str:
        """One line for people: what is wrong, how much, and what to turn; or that it is over."""
        rule, where = self.rule, f"alarm {self.rule.name}, {self.stage} step {self.step}"
        if self.last is not None:
            return f"{where}: over after step {self.last} (largest value {number(self.value)})"
        limit = f"{number(self.value)}, more than {number(rule.threshold)}"
        return f"{where}: {rule.sin} ({rule.metric}, {rule.says}: {limit}). Look at config.{rule.knob}."

    def entry(self) -> dict[str, Any]:
        """As summary.json and the page have it."""
        entry = {name: getattr(self.rule, name) for name in ("name", "metric", "knob", "sin", "says", "threshold")}
        return {**entry, **{name: getattr(self, name) for name in ("stage", "step", "last", "value", "text")}}


class Watch:
    """Looks at records one after the other; `alarms` are those so far, in the order in which they began.

    A record takes time by the rules' reach, not by the length of the run.
    """

    def __init__(self, config: Record, records: Iterable[Record] = ()):
        self._config = config
        self._stage, self._step = "", 0
        self._series: dict[str, tuple[list[Any], collections.deque[Any]]] = {}
        self._on: dict[str, Alarm] = {}
        self.alarms: list[Alarm] = []
        for record in records:
            self.add(record)

    def add(self, record: Record) -> list[Alarm]:
        """The alarms that begin or end with this record."""
        stage, step = str(record["stage"]), int(record["step"])
        news = []
        if stage != self._stage:
            news = [self._end(name) for name in list(self._on)]
            self._stage, self._series = stage, {}
        for rule in RULES if stage in STAGES else ():
            measured = rule.numbers(record, self._config) if rule.numbers else record.get(rule.metric)
            if measured is None or (rule.numerics and value_at(self._config, "numerics") != rule.numerics):
                continue
            if rule.name not in self._series:
                self._series[rule.name] = [], collections.deque(maxlen=rule.reach or rule.steps)
            first, last = self._series[rule.name]
            last.append(measured)
            if len(first) < FIRST:
                first.append(measured)
            value = rule.value(first, list(last)) if len(last) >= rule.steps else 0.0
            if value > rule.threshold and rule.name not in self._on:
                if stage == "opd":  # has its own, and all else from rl
                    knob = rule.knob.replace("rl.optimizer.learning_rate", "opd.learning_rate")
                    rule = dataclasses.replace(rule, knob=knob)
                self._on[rule.name] = alarm = Alarm(rule, stage, step, value)
                self.alarms.append(alarm)
                news.append(alarm)
            elif value > rule.threshold:
                self._on[rule.name].value = max(value, self._on[rule.name].value)
            elif rule.name in self._on:
                news.append(self._end(rule.name))
        self._step = step
        return news

    def _end(self, name: str) -> Alarm:
        alarm = self._on.pop(name)
        alarm.last = self._step
        return alarm


# ---- what is measured in a step: a number or several; None: it was not


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _rollout_share(record: Record, config: Record) -> float | None:
    """Rollout over learning; where others play meanwhile, how long the learner waits for them."""
    return _ratio(record.get("fleet/trainer_wait_s", record.get("time/rollout_s")), record.get("time/learn_s"))


def _learning_share(record: Record, config: Record) -> float | None:
    is_alone = "fleet/trainer_wait_s" not in record
    return _ratio(record.get("time/learn_s"), record.get("time/rollout_s")) if is_alone else None


def _clipped_norm(record: Record, config: Record) -> float | None:
    return _ratio(record.get("policy/grad_norm"), value_at(config, "rl.optimizer.grad_clip"))


def _failed_episodes(record: Record, config: Record) -> float | None:
    shares = [record.get(f"stop/{reason}") for reason in ("env_error", "timeout", "engine_error")]
    return None if None in shares else sum(filter(None, shares))


def _failed_calls(record: Record, config: Record) -> tuple[float, float] | None:
    """Failed calls of tools and all of them, by the counters that environments have."""
    pairs = [("tool_errors", "tool_calls"), ("empty_searches", "searches")]
    pairs += [(f"failed_{kind}", kind) for kind in ("calls", "commands", "programs")]
    values = [(record.get(f"episode/{bad}"), record.get(f"episode/{every}")) for bad, every in pairs]
    measured = [(bad, every) for bad, every in values if bad is not None and every]
    return (sum(bad for bad, _ in measured), sum(every for _, every in measured)) if measured else None


def _no_signal(record: Record, config: Record) -> float | None:
    """Of an advantage that compares the rewards of attempts: others, and teachers, find something in equal ones."""
    advantage = str(value_at(config, "rl.advantage.name") or "group_")
    compares = advantage.startswith(("group_", "leave_", "maxrl", "max_at_k", "pass_at_k"))
    judged = record["stage"] == "opd" or value_at(config, "rl.distill") is not None
    return record.get("groups/zero_signal_frac") if compares and not judged else None


def _held_out(record: Record, config: Record) -> tuple[float, float, list[float]] | None:
    """Reward, length, and of a step that evaluates the score, greedy and sampled."""
    reward, length = record.get("reward/mean"), record.get("episode/action_tokens")
    score = f"{headline.EVAL}{headline.score_of(record)}"
    scores = [record[name] for name in (score, f"{score}_sampled") if record.get(name) is not None]
    return None if reward is None or length is None else (reward, length, scores)


def _stale(record: Record, config: Record) -> float | None:
    """The share of tokens that are older than what limits their weights is known to bear."""
    shares = {age: record.get(f"staleness/frac_{age}") for age in range((value_at(config, "rl.staleness") or 0) + 1)}
    if None in shares.values():
        return None
    clips = value_at(config, "rl.objective.name") != "reinforce"
    limits = "correction" if value_at(config, "rl.correction") else "clip" if clips else "neither"
    return sum(share for age, share in shares.items() if share and age > AGES[limits])


# ---- what is judged, from the first and the last steps that were measured


def _over(function: Callable[[Measured], float]) -> Judge:
    return lambda first, last: function(last)


_MEAN, _MEDIAN, _LEAST = (_over(function) for function in (statistics.fmean, statistics.median, min))


def _fall(first: Measured, last: Measured) -> float:
    """By how much the mean of three steps was larger, within reach, than that of the last three, or than `STILL`."""
    means = [statistics.fmean(last[at - 3 : at]) for at in range(3, len(last) + 1)]
    return max(means) / max(means[-1], STILL)


def _rise(first: Measured, last: Measured) -> float:
    """Over the first steps, which count as 0.002 at least and 0.01 at most."""
    return statistics.fmean(last) / min(max(statistics.fmean(first), 0.002), 0.01)


def _drift(first: Measured, last: Measured) -> float:
    then, now = statistics.fmean(first), statistics.fmean(last)
    return max(now / then, then / now) if then > 0 and now > 0 else 1.0


def _failing(first: Measured, last: Measured) -> float:
    return sum(failed for failed, _ in last) / sum(calls for _, calls in last)


def _reward_alone(longer: bool) -> Judge:
    """By how much the reward has risen over the last evaluations while no held-out score has risen a tenth as much.

    0 where sampled texts have grown by three tenths meanwhile, with `longer` where they have not; where the rise
    is within what steps differ by anyhow; and where held-out tasks are solved, so that no score can rise.
    """

    def value(first: Measured, last: Measured) -> float:
        ends = [place for place, (_, _, scores) in enumerate(last) if scores][-EVALUATIONS:]
        if len(ends) < EVALUATIONS or len({len(last[end][2]) for end in ends}) > 1:
            return 0.0
        parts = [last[ends[0] + 1 : ends[1] + 1], last[ends[-2] + 1 : ends[-1] + 1]]
        (reward, length), (reward_now, length_now) = [
            [statistics.fmean(row[place] for row in part) for place in (0, 1)] for part in parts
        ]
        rise = reward_now - reward
        pairs = list(zip(last[ends[1]][2], last[ends[-1]][2], strict=True))
        solved = all(min(pair) >= SOLVED and max(pair) <= 1 for pair in pairs)
        rises = any(now - then >= 0.1 * rise for then, now in pairs)
        if rise <= 0 or solved or rises or (length_now > 1.3 * length) is not longer:
            return 0.0
        # From one step to the next, so that a trend is no noise; of this, some standard errors of the rise.
        noise = sum((now[0] - then[0]) ** 2 for then, now in itertools.pairwise(last)) / (len(last) - 1) / 2
        return rise if rise > NOISE * math.sqrt(noise * sum(1 / len(part) for part in parts)) else 0.0

    return value


OURS = "ours: no healthy run of docs exceeds it"
RULES = (
    Rule("entropy_falls", "policy/entropy", "the policy ceases to try anything else, and will learn no more",
         "times that it has fallen within 50 steps, means of 3, down to 0.002", 10, 6, "rl.optimizer.learning_rate",
         OURS, _fall, reach=50),
    Rule("not_exact", "logprob_gap/max", "numerics are exact, and engine and trainer compute different log-probs",
         "in a step", 0, 1, "numerics", "exact numerics: it is 0.0 by construction", _MEAN, numerics="exact"),
    Rule("engine_gap", "logprob_gap/mean", "the engine samples from another distribution than the trainer learns on",
         "mean, over that of the first 5 steps (0.002 to 0.01)", 5, 5, "rl.correction", OURS, _rise, numerics="fast"),
    Rule("clip_share", "policy/clip_frac", "most tokens lie beyond the clip: updates go too far from what sampled them",
         "mean", 0.5, 3, "rl.updates_per_step", "Miles' table of run health: above 0.5", _MEAN),
    Rule("no_signal", "groups/zero_signal_frac", "all attempts at a task get the same reward: nothing can be learnt",
         "mean", 0.95, 10, "rl.refill",
         "DAPO, arXiv 2503.14476, section 3.2, for the remedy; " + OURS, _MEAN, _no_signal),
    Rule("truncation", "stop/token_limit", "attempts run out of tokens before they can end",
         "mean", 0.25, 5, "env.turn_tokens",
         "DAPO, arXiv 2503.14476, section 3.4, for the harm; " + OURS, _MEAN),
    Rule("reward_alone", "reward/mean", "the reward rises and the held-out score does not: it is learnt by heart, or "
         "cheated", "its rise over 4 evaluations", 0.15, 1, "rl.kl",
         "Gao et al., arXiv 2210.10760, for the sin; " + OURS, _reward_alone(False), _held_out, 400),
    Rule("length_pays", "reward/mean", "reward and length rise and the held-out score does not: the reward or its "
         "judge likes length", "its rise over 4 evaluations", 0.15, 1, "rl.group_reward",
         "Singhal et al., arXiv 2310.03716, for the sin; " + OURS, _reward_alone(True), _held_out, 400),
    Rule("length_drifts", "episode/action_tokens", "texts become much longer or shorter than they were",
         "times its mean in the first 5 steps, or that over it", 2, 5, "rl.aggregation",
         "Dr. GRPO, arXiv 2503.20783, section 3.1, for a cause; " + OURS, _drift),
    Rule("tools_fail", "episode/failed", "nearly every call of a tool fails",
         "failed calls, commands, programs and empty searches over all", 0.8, 5, "env",
         OURS, _failing, _failed_calls),
    Rule("episodes_fail", "stop/env_error", "many episodes end by a failure of environment, engine or deadline",
         "mean share of them", 0.2, 5, "env.episode_timeout_s", OURS, _MEAN, _failed_episodes),
    Rule("gradient_at_clip", "policy/grad_norm", "every gradient is cut to a small part of its length",
         "least, over grad_clip", 10, 10, "rl.optimizer.grad_clip", OURS, _LEAST, _clipped_norm),
    Rule("rollout_slow", "time/rollout_s", "the learner waits for rollouts nearly all the time",
         "median of rollout over learning", 20, 10, "env.concurrent_episodes", OURS, _MEDIAN, _rollout_share),
    Rule("learning_slow", "time/learn_s", "the engine waits for the learner nearly all the time",
         "median of learning over rollout", 20, 10, "rl.batch.micro_rows", OURS, _MEDIAN, _learning_share),
    Rule("policy_leaps", "policy/kl_behaviour", "one step moves the policy far from what sampled its tokens",
         "mean, nats per token", 0.045, 5, "rl.optimizer.learning_rate",
         "PPO, arXiv 1707.06347, sections 4 and 6.1: 1.5 times its largest target, 0.03", _MEAN),
    Rule("far_from_reference", "policy/kl_reference", "the policy has gone far from its reference",
         "mean, nats per token", 1, 5, "rl.kl", OURS, _MEAN),
    Rule("stale_share", "staleness/mean", "most tokens are older than their weights' limits bear",
         "share older than 8 steps with rl.correction, 4 without, 0 with reinforce and none", 0.5, 5, "rl.staleness",
         "AReaL, arXiv 2505.24298: 8 with a correction; docs/algorithms.md, Staleness: 4 with a clip", _MEAN, _stale),
)  # fmt: skip
