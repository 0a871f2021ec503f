"""Each alarm is raised by its failure and by no other; five healthy runs raise none.

healthy_runs.json has what the rules look at of five runs of docs/results.md and docs/gpu.md, with the command that made
each. A failure is one of them in which one thing goes wrong, from some step on, as it does in such a failure.
"""

import dataclasses
import json
import pathlib
import re
import time
import typing

import numpy as np
import pytest

from jaxagent.config import Config
from jaxagent.config.choice import Choice
from jaxagent.observe import alarms
from jaxagent.observe.alarms import RULES, Watch

FOLDER = pathlib.Path(__file__).parent
RUNS = json.loads((FOLDER / "healthy_runs.json").read_text())
LAST = 70


def records(name: str) -> list[dict]:
    """A run's records of RL, step 0 first."""
    run, rows = RUNS[name], []
    for step in range(run["steps"] + 1):
        row = {
            metric: values[step] if isinstance(values, list) else values for metric, values in run["columns"].items()
        }
        rows.append({"stage": "rl", "step": step} | {k: v for k, v in row.items() if v is not None})
    return [{"stage": "rl", "step": 0} | {k: v for k, v in rows[0].items() if k.startswith("eval/")}, *rows[1:]]


def changed(rows: list[dict], first: int, **metrics) -> list[dict]:
    """From step `first` on, metrics are as their functions of (what they were, steps since) say.

    What the run has in other steps and not in one, was not measured there, and is not then.
    """
    out = []
    for row in rows:
        new = dict(row)
        for name, function in metrics.items():
            name = name.replace("__", "/")
            unmeasured = name not in row and any(name in other for other in rows)
            if row["step"] >= first and "reward/mean" in row and not unmeasured:
                new[name] = function(row.get(name), row["step"] - first)
        out.append(new)
    return out


def held_out_stays(rows: list[dict]) -> list[dict]:
    """Scores are those of step 30 from then on; the reward goes on rising where it did not."""
    then = {name: value for name, value in rows[30].items() if name.startswith("eval/")}
    return [row | {k: then[k] for k in row if k in then and row["step"] > 30} for row in rows]


def rises(was, since):
    return 0.5 + 0.012 * since


def staleness(ages):
    """Metrics of a step whose tokens are as old as `ages` say, by age."""
    shares = {f"staleness__frac_{age}": lambda was, since, share=share: share for age, share in enumerate(ages)}
    return {"staleness__mean": lambda was, since: 1.0, **shares}


# Name of the alarm -> (healthy run, changes of its config, what becomes of its records).
FAILURES = {
    # The learning rate is too high: the policy falls on one text within ten steps.
    "entropy_falls": ("search_r1", {}, lambda r: changed(r, 20, policy__entropy=lambda was, n: was * 0.7**n + 1e-4)),
    # A wrong position in the cache, once.
    "not_exact": ("search_r1", {}, lambda r: changed(r, 40, logprob_gap__max=lambda was, n: 1e-6 * (n == 3))),
    # Experts are chosen otherwise by the trainer, a little more with every step.
    "engine_gap": ("mixture", {}, lambda r: changed(r, 20, logprob_gap__mean=lambda was, n: 0.002 * n)),
    # Eighty updates of one batch.
    "clip_share": ("hybrid", {}, lambda r: changed(r, 10, policy__clip_frac=lambda was, n: min(0.9, 0.1 * n))),
    # A judge that answers the same to everything; updates find nothing to learn from.
    "no_signal": ("gpu", {}, lambda r: changed(r, 15, groups__zero_signal_frac=lambda was, n: 1.0,
                  policy__grad_norm=lambda was, n: None, policy__entropy=lambda was, n: None)),
    # Texts grow into the limit of a turn.
    "truncation": ("hybrid", {}, lambda r: changed(r, 30, stop__token_limit=lambda was, n: min(1.0, 0.05 * n))),
    "reward_alone": ("search_r1", {}, lambda r: changed(held_out_stays(r), 30, reward__mean=rises)),
    "length_pays": ("search_r1", {}, lambda r: changed(held_out_stays(r), 30, reward__mean=rises,
                    episode__action_tokens=lambda was, n: was * (1 + 0.02 * n))),
    "length_drifts": ("bandit", {}, lambda r: changed(r, 8, episode__action_tokens=lambda was, n: was * (1 + 0.3 * n))),
    # The search engine has lost its index.
    "tools_fail": ("search_r1", {}, lambda r: changed(r, 50, episode__empty_searches=lambda was, n: 1.5)),
    # One machine of sandboxes is gone.
    "episodes_fail": ("hybrid", {}, lambda r: changed(r, 12, stop__env_error=lambda was, n: 0.25)),
    "gradient_at_clip": ("gpu", {}, lambda r: changed(r, 5, policy__grad_norm=lambda was, n: was * 2.0 ** min(n, 8))),
    "rollout_slow": ("search_r1", {}, lambda r: changed(r, 10, time__rollout_s=lambda was, n: was + 120.0)),
    "learning_slow": ("hybrid", {}, lambda r: changed(r, 10, time__learn_s=lambda was, n: was * 40)),
    "policy_leaps": ("mixture", {}, lambda r: changed(r, 25, policy__kl_behaviour=lambda was, n: was + 0.02 * n)),
    "far_from_reference": ("search_r1", {}, lambda r: changed(r, 1, policy__kl_reference=lambda was, n: 0.03 * n)),
    # Rollouts are five and six steps old, and nothing but the clip bounds what that does.
    "stale_share": ("search_r1", {"rl": {"staleness": 6}},
                    lambda r: changed(r, 10, **staleness([0, 0, 0, 0, 0.1, 0.5, 0.4]))),
}  # fmt: skip


def config_of(name: str, changes=None) -> dict:
    own = RUNS[name]["config"]
    return own | {"rl": own["rl"] | (changes or {}).get("rl", {})}


@pytest.mark.parametrize("name", RUNS)
def test_a_healthy_run_raises_no_alarm(name):
    assert Watch(config_of(name), records(name)).alarms == []


def test_every_rule_has_its_failure():
    assert list(FAILURES) == [rule.name for rule in RULES]


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_raises_its_alarm_and_no_other(name):
    base, changes, spoil = FAILURES[name]
    watch = Watch(config_of(base, changes))
    spoken = [(row["step"], alarm.text) for row in spoil(records(base)) for alarm in watch.add(row)]
    assert [alarm.rule.name for alarm in watch.alarms] == [name]
    (alarm,) = watch.alarms
    begun = [text for step, text in spoken if step == alarm.step]
    assert len(begun) == 1 and f"config.{alarm.rule.knob}" in begun[0] and alarm.rule.name in begun[0]
    assert len(spoken) == 1 + (alarm.last is not None), "once when it begins, once when it is over"
    assert alarm.value > alarm.rule.threshold


def test_an_alarm_ends_when_its_cause_does_and_can_begin_again():
    rows = [{"stage": "rl", "step": step, "stop/token_limit": 1.0 if step % 40 > 20 else 0.0} for step in range(1, 90)]
    first, second = Watch({}, rows).alarms
    assert (first.rule.name, first.step, first.last) == ("truncation", 22, 42)
    assert (second.step, second.last) == (62, 82)
    assert first.value == 1.0 and "over after step 42" in first.text


@pytest.mark.parametrize("name", FAILURES)
def test_a_run_that_goes_on_comes_to_the_same_alarms_and_says_none_twice(name):
    base, changes, spoil = FAILURES[name]
    rows = spoil(records(base))
    whole, texts = Watch(config_of(base, changes)), []
    for row in rows:
        texts += [alarm.text for alarm in whole.add(row)]
    position, told = 0, []
    for end in (5, 21, 33, 34, 60, len(rows)):
        watch = Watch(config_of(base, changes), rows[:position])
        told += [alarm.text for row in rows[position:end] for alarm in watch.add(row)]
        position = end
    assert told == texts and watch.alarms == whole.alarms


def test_what_was_not_measured_raises_no_alarm_and_ends_none():
    rows = [{"stage": "rl", "step": step, "stop/token_limit": 1.0} for step in range(1, 8)]
    rows += [{"stage": "rl", "step": step, "stop/token_limit": None} for step in range(8, 20)]
    rows += [{"stage": "rl", "step": step} for step in range(20, 30)]
    (alarm,) = Watch({}, rows).alarms
    assert (alarm.step, alarm.last) == (5, None)
    nulls = [dict.fromkeys(row, None) | {"stage": "rl", "step": row["step"]} for row in records("search_r1")]
    assert Watch({}, nulls).alarms == [] and Watch(config_of("search_r1"), nulls).alarms == []


def test_a_stage_that_follows_ends_the_alarms_of_the_one_before():
    rows = [{"stage": stage, "step": step, "stop/token_limit": 1.0} for stage in ("opd", "rl") for step in range(1, 8)]
    rows.append({"stage": "dpo", "step": 1, "loss": 1.0})
    assert [(a.stage, a.step, a.last) for a in Watch({}, rows).alarms] == [("opd", 5, 7), ("rl", 5, 7)]


def _types(hint) -> list:
    """The dataclasses that a field may hold: of a choice those of all its entries."""
    arguments = typing.get_args(hint)
    choices = [argument for argument in arguments if isinstance(argument, Choice)]
    if choices:
        return [entry for entry in choices[0].entries.values() if dataclasses.is_dataclass(entry)]
    return [hint] if dataclasses.is_dataclass(hint) else [cls for each in arguments for cls in _types(each)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_knob_is_a_field_of_the_config(rule):
    classes = [Config]
    for name in rule.knob.split("."):
        hints = [typing.get_type_hints(cls, include_extras=True) for cls in classes]
        assert all(name in hint for hint in hints), f"config.{rule.knob}: no field '{name}'"
        classes = [cls for hint in hints for cls in _types(hint[name])]


def test_docs_have_the_table():
    page = (FOLDER.parents[1] / "docs/seeing.md").read_text(encoding="utf-8")
    assert alarms_table() in page, f"docs/seeing.md, Alarms, should have:\n{alarms_table()}"


def alarms_table() -> str:
    """The table of docs/seeing.md."""
    head = "| alarm | looks at | begins above | from step | what is wrong | turn | source |\n" + "| --- " * 7 + "|\n"
    return head + "\n".join(
        f"| `{r.name}` | `{r.metric}`: {r.says} | {r.threshold:g} | {r.steps} | {r.sin} | `{r.knob}` | {r.source} |"
        for r in RULES
    )


def test_a_step_costs_next_to_nothing_however_long_the_run_is():
    watch, rows = Watch(config_of("search_r1")), records("search_r1")
    for step in range(3000):
        watch.add(rows[1 + step % LAST] | {"step": step})
    started = time.process_time()
    for step in range(100):
        watch.add(rows[1 + step % LAST] | {"step": step})
    assert (time.process_time() - started) / 100 < 0.01
    assert all(len(first) <= alarms.FIRST and len(last) <= 400 for first, last in watch._series.values())


def test_names_are_words():
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", rule.name) for rule in RULES)


def _noisy(seed: int, tasks: int, attempts: int, every: int, evaluated: int, scale: float = 1.0) -> list[dict]:
    """A run that neither learns nor cheats: rewards and scores of tasks of which half are solved."""
    draw, rows = np.random.default_rng(seed), list[dict]()
    for step in range(1, 71):
        chances = draw.beta(0.5, 0.5, tasks)
        row = {"stage": "rl", "step": step, "reward/mean": scale * draw.binomial(attempts, chances).mean() / attempts}
        if step % every == 0:
            row["eval/em"] = scale * draw.binomial(evaluated, 0.5) / evaluated
        rows.append(row | {"episode/action_tokens": 100 * draw.lognormal(0, 0.2)})
    return rows


@pytest.mark.parametrize("sizes", [(4, 4, 5, 50), (8, 8, 2, 64), (2, 8, 10, 20), (16, 8, 10, 100, 100.0)], ids=str)
def test_noise_is_no_reward_alone(sizes):
    assert [seed for seed in range(20) if Watch({}, _noisy(seed, *sizes)).alarms] == []


def test_where_held_out_tasks_are_solved_no_score_can_rise():
    rows = [row | {"eval/em": 1.0} if "eval/em" in row else row for row in _noisy(0, 16, 8, 10, 100)]
    rising = [row | {"reward/mean": 0.4 + 0.008 * row["step"]} for row in rows]
    assert Watch({}, rising).alarms == []
    flat = [row | {"eval/em": 0.6} if "eval/em" in row else row for row in rising]
    assert [alarm.rule.name for alarm in Watch({}, flat).alarms] == ["reward_alone"]


@pytest.mark.parametrize(
    ("stage", "rl", "alarms_of_it"),
    [
        ("rl", {"advantage": {"name": "group_mean_std"}}, ["no_signal"]),
        ("rl", {"advantage": {"name": "gae"}}, []),
        ("rl", {"advantage": {"name": "no_reward"}, "distill": {"teacher": "x"}}, []),
        ("opd", {"advantage": {"name": "group_mean_std"}}, []),
    ],
)
def test_equal_rewards_are_a_sin_only_where_attempts_are_compared(stage, rl, alarms_of_it):
    rows = [{"stage": stage, "step": step, "groups/zero_signal_frac": 1.0} for step in range(1, 20)]
    assert [alarm.rule.name for alarm in Watch({"rl": rl}, rows).alarms] == alarms_of_it


def test_a_policy_that_has_settled_may_settle_further():
    rows = [{"stage": "rl", "step": step, "policy/entropy": 0.019 * 0.8**step} for step in range(1, 70)]
    assert Watch({}, rows).alarms == []


def test_distillation_has_a_learning_rate_of_its_own():
    rows = [{"stage": "opd", "step": step, "policy/kl_behaviour": 1.0} for step in range(1, 9)]
    (alarm,) = Watch({}, rows).alarms
    assert alarm.rule.knob == "opd.learning_rate" and "config.opd.learning_rate." in alarm.text
