"""What a run refuses, its dry run and its evaluation refuse, in the same words and before anything is opened."""

import dataclasses

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


def flat(changes, prefix):
    """{"kl": {"where": "loss"}} or {"kl__where": "loss"}, under a prefix, by dotted names."""
    out = {}
    for name, value in changes.items():
        path = f"{prefix}.{name.replace('__', '.')}"
        out |= flat(value, path) if isinstance(value, dict) else {path: value}
    return out


def replaced(section, path, value):
    """A section of the config with one value replaced, in its range or not: the schema has other tests."""
    name, _, rest = path.partition(".")
    return dataclasses.replace(section, **{name: replaced(getattr(section, name), rest, value) if rest else value})


ADAPTERS = {"model.lora.rank": 2}
OFFLINE = {"stages": ("sft", "rft", "dpo", "outcome_model", "rl")}
TAUGHT = {"stages": ("warm_start", "opd"), "rl.distill.teacher": "x"}
REFUSED = [
    {"workdir": " "},
    {"stages": ()},
    {"stages": ("rl", "warm_start", "rl")},
    {"stages": ("warm_start", "opd")},  # no teacher
    {"stages": ("warm_start", "rl", "rft"), **ADAPTERS},
    {"stages": ("opd", "rl"), "rl.distill.teacher": "x", **ADAPTERS},
    TAUGHT | {"rl.distill.loss": "jsd", "rl.distill.jsd_beta": 1.0},
    {"numerics": "exact", "engine.tile_rows": 32},
    {"rl.sampling.top_p": 0.9},
    {"rl.sampling.top_k": 5},
    {"rl.sampling.min_p": 0.1},
    {"rl.sampling.temperature": 0.0},
    {"rl.batch.row_tokens": 254},  # env.context_tokens is 256, and the last token is no input
    {"env.turn_tokens": 400},
    *(OFFLINE | {f"{stage}.training.batch.row_tokens": 64} for stage in ("sft", "rft", "dpo", "outcome_model")),
    OFFLINE | {"outcome_model.training.batch.row_tokens": 255},
    OFFLINE | {"sft.negatives": "x.jsonl", "sft.negative_frac": 0.0},
    *(flat(changes, "rl") for changes, _ in test_compose.REFUSED),
    *(flat(changes, "rl") for changes, _ in test_strategies.REFUSED if "curriculum__name" not in changes),
    *(flat({"rank": 2} | changes, "model.lora") for changes, _ in test_lora.REFUSED),
    *(
        flat({"drop_zero_signal": False} | changes, "rl")
        | flat({"coefficient": 1.0, "teacher": "x"} | distillation, "rl.distill")
        for changes, distillation, _ in test_distill.REFUSED
    ),
]
OPTIONS = evaluation.Options("latest", "held_out", None, 1, None, None, True, None, 1.0, False, None)


def test_rows_may_lack_the_last_token_alone():
    checks.check(replaced(config.parse(get_config()), "rl.batch.row_tokens", 255))


@pytest.mark.parametrize("changes", REFUSED, ids=repr)
def test_refused_by_every_command(changes, tmp_path, monkeypatch):
    cfg = config.parse(get_config())
    for path, value in ({"workdir": str(tmp_path / "run")} | changes).items():
        cfg = replaced(cfg, path, value)
    with pytest.raises(ConfigError) as refused:
        checks.check(cfg)

    def opened(*_):
        raise AssertionError("something was opened")

    monkeypatch.setattr(loop, "open_run", opened)
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
