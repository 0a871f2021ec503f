"""What a run refuses, its dry run and its evaluation refuse, in the same words and before anything is opened."""

import pytest

from configs.search_r1 import get_config
from jaxagent import config, loop
from jaxagent.config import ConfigError
from jaxagent.plan import run as plan
from jaxagent.plan import topology
from jaxagent.runs import checks
from jaxagent.runs.evaluation import policy
from jaxagent.runs.evaluation import run as evaluation
from tests.algorithms import test_compose, test_distill
from tests.models import test_lora
from tests.rollout import test_strategies
from tests.tiny_run import put


def under(prefix, changes):
    """{"kl__where": "loss"} by dotted names under a prefix."""
    return {f"{prefix}.{name.replace('__', '.')}": value for name, value in changes.items()}


ADAPTERS = {"model.lora.rank": 2}
OFFLINE = {"stages": ("sft", "rft", "dpo", "outcome_model", "rl")}
TAUGHT = {"stages": ("warm_start", "opd"), "opd.distill.teacher": "./x"}
REFUSED = [
    {"workdir": " "},
    {"stages": ()},
    {"fleet": {}, "stages": ("warm_start",)},
    {"fleet": {}, "rl.oversample": {"extra_tasks": 1}},
    {"fleet": {"window": 2}},  # with the rule "pinned"
    {"fleet": {"rule": "in_flight", "window": 99}},
    {"fleet": {"trainers": 2}},  # of a mesh of one device
    {"fleet": {"hang_s": 10.0}},  # less than patience_s
    {"stages": ("rl", "warm_start", "rl")},
    {"stages": ("warm_start", "opd")},  # no teacher
    {"stages": ("warm_start", "rl", "rft"), **ADAPTERS},
    {"stages": ("opd", "rl"), "opd.distill.teacher": "./x", **ADAPTERS},
    TAUGHT | {"opd.distill.teacher": "http://x"},
    {"numerics": "exact", "engine.tile_rows": 32},
    {"rl.sampling.temperature": 0.0},
    {"rl.batch.row_tokens": 254},  # env.context_tokens is 256, and the last token is no input
    {"env.turn_tokens": 400},
    OFFLINE | {"rl.batch.row_tokens": 255},  # the outcome model scores the last token too
    OFFLINE | {"sft.negatives": "x.jsonl", "sft.negative_frac": 0.0},
    *(under("rl", changes) for changes, _ in test_compose.REFUSED),
    *(under("rl", changes) for changes, _ in test_strategies.REFUSED if "curriculum" not in changes),
    *(under("model.lora", {"rank": 2} | changes) for changes, _ in test_lora.REFUSED if "targets" in changes),
    *(
        under("rl", {"advantage": "group_mean_std", "distill": {"teacher": "./x"} | distillation} | changes)
        for changes, distillation, _ in test_distill.REFUSED
    ),
]
OPTIONS = evaluation.Options("latest", "held_out", None, 1, None, None, True, None, 1.0, False, None)


def test_rows_may_lack_the_last_token_alone():
    raw = get_config().to_dict()
    put(raw, "rl.batch.row_tokens", 255)
    checks.check(config.parse(raw))


@pytest.mark.parametrize("changes", REFUSED, ids=repr)
def test_refused_by_every_command(changes, tmp_path, monkeypatch):
    raw = get_config().to_dict()
    for path, value in ({"workdir": str(tmp_path / "run")} | changes).items():
        put(raw, path, {} if value == "on" else value)
    cfg = config.parse(raw)
    with pytest.raises(ConfigError) as refused:
        checks.check(cfg)

    def opened(*_):
        raise AssertionError("something was opened")

    monkeypatch.setattr(loop, "open_workdir", opened)
    monkeypatch.setattr(topology, "mesh_for", opened)
    monkeypatch.setattr(evaluation, "open_parts", opened)
    monkeypatch.setattr(policy, "choose", lambda *_: None)
    monkeypatch.setattr(policy, "configured", lambda cfg, _: cfg)
    for command in (
        lambda: loop.run(cfg),
        lambda: plan.run(cfg, "h100"),
        lambda: evaluation.run(cfg, OPTIONS),
    ):
        with pytest.raises(ConfigError) as why:
            command()
        assert str(why.value) == str(refused.value)
    assert not list(tmp_path.iterdir())
