"""Named combinations: each is whole, each parses and is accepted, and applying one leaves nothing of another."""

import functools
import pathlib
import re

import pytest

from configs.search_r1 import get_config
from jaxagent import config
from jaxagent.algorithms import checks, corrections, needs
from jaxagent.algorithms.advantages import GROUP_ADVANTAGES
from jaxagent.algorithms.aggregate import MODES
from jaxagent.algorithms.best_of_k import BEST_OF_K
from jaxagent.algorithms.kl import KL_ESTIMATORS
from jaxagent.algorithms.policy_loss import OBJECTIVES
from jaxagent.algorithms.process import TURN_ADVANTAGES
from jaxagent.algorithms.published import PUBLISHED
from jaxagent.algorithms.token_advantages import TOKEN_ADVANTAGES
from jaxagent.algorithms.value_bins import TARGETS
from jaxagent.config import ConfigError


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_on_top_of_a_config_is_a_valid_config(name):
    cfg = config.parse(get_config(f"laptop+{name}"))
    checks.check(cfg.rl)
    assert cfg.workdir.endswith(f"_{name}") and PUBLISHED[name].source


def test_every_preset_sets_the_same_fields():
    fields = {frozenset(preset.fields) for preset in PUBLISHED.values()}
    assert len(fields) == 1
    assert {"advantage", "objective", "kl.coefficient", "aggregation", "echo.coefficient"} <= next(iter(fields))


def test_names_mean_what_their_papers_say():
    rl = {name: config.parse(get_config(f"laptop+{name}")).rl for name in PUBLISHED}
    assert (rl["grpo"].advantage, rl["grpo"].aggregation) == ("group_mean_std", "sequence_mean")
    assert (rl["dapo"].clip_high, rl["dapo"].kl.coefficient, rl["dapo"].aggregation) == (0.28, 0.0, "token_mean")
    assert (rl["dapo"].refill.max_rounds, rl["grpo"].refill.max_rounds, rl["vapo"].refill.max_rounds) == (10, 1, 1)
    assert (rl["starpo_s"].keep_groups_frac, rl["ragen"].keep_groups_frac) == (0.25, 1.0)
    assert (rl["dr_grpo"].advantage, rl["dr_grpo"].aggregation) == ("group_mean", "constant")
    assert rl["reinforce_pp"].kl.where == "reward"
    assert {name for name in rl if needs.needs_critic(rl[name])} >= {"ppo"}


# What released code sets, field by field: RAGEN's config/base.yaml and train_all.sh (USE_BASE), slime's mis.yaml,
# OpenRLHF's train_reinforce_baseline_hybrid_engine.sh, verl's default loss.
RELEASED = {
    "ragen": {
        "advantage": "gae", "critic.gamma": 1.0, "critic.lam": 1.0, "whiten_advantages": True, "objective": "dual_clip",
        "clip_dual": 3.0, "clip_low": 0.2, "clip_high": 0.2, "kl.coefficient": 0.001, "kl.estimator": "k1",
        "kl.where": "reward", "keep_groups_frac": 1.0, "aggregation": "token_mean", "drop_zero_signal": False,
    },
    "starpo_s": {
        "advantage": "gae", "critic.gamma": 1.0, "critic.lam": 1.0, "whiten_advantages": True, "objective": "dual_clip",
        "clip_dual": 3.0, "clip_low": 0.2, "clip_high": 0.28, "kl.coefficient": 0.0, "keep_groups_frac": 0.25,
        "aggregation": "token_mean", "drop_zero_signal": False,
    },
    "mis": {
        "correction.name": "mask", "correction.level": "token", "correction.low": 0.5, "correction.high": 2.0,
        "correction.veto": 1e-4, "correction.normalise": True,
    },
    "reinforce_pp_baseline": {
        "advantage": "group_mean", "whiten_advantages": True, "kl.coefficient": 1e-5, "kl.estimator": "k2",
        "kl.where": "loss", "objective": "ppo_clip",
    },
    "grpo": {"objective": "dual_clip", "clip_dual": 3.0},
    "flow_grpo": {"objective": "dual_clip", "clip_dual": 3.0, "clip_high": 0.3},
    "memagent": {"objective": "dual_clip", "clip_dual": 3.0, "clip_high": 0.2},
    "echo": {
        "objective": "ppo_clip", "echo.coefficient": 0.05, "echo.max_tokens": 0, "echo.denominator": "full_observation",
        "echo.targets": "env_only", "echo.schedule": "constant",
    },
    "rloo": {"updates_per_step": 1, "epochs": 1},
    "pkpo": {"updates_per_step": 1, "epochs": 1},
    "gspo": {"updates_per_step": 2, "epochs": 1},  # the run's own
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_presets_set_what_released_code_sets(name):
    rl = get_config(f"laptop+{name}").rl
    got = {field: functools.reduce(getattr, field.split("."), rl) for field in RELEASED[name]}
    assert got == RELEASED[name]


def test_unknown_names_are_one_line():
    with pytest.raises(ConfigError, match=r"No published algorithm 'gpso'\. Did you mean 'gspo'"):
        get_config("laptop+gpso")
    with pytest.raises(ConfigError, match=r"has no preset 'lapto'\. Did you mean 'laptop'"):
        get_config("lapto+gspo")


# The constants that a choice reads: a page that names the choice shows them, whatever their values are.
CONSTANTS = {
    ("objective", "ppo_clip"): ["clip_low", "clip_high"],
    ("objective", "dual_clip"): ["clip_low", "clip_high", "clip_dual"],
    ("objective", "gspo"): ["clip_low", "clip_high"],
    ("objective", "cispo"): ["clip_low", "clip_high"],
    ("objective", "sapo"): ["tau_positive", "tau_negative"],
    ("advantage", "gae"): ["critic.gamma", "critic.lam"],
    ("advantage", "gae_adaptive"): ["critic.gamma", "critic.adaptive_alpha", "critic.returns_lam"],
    ("advantage", "vtrace"): ["critic.gamma", "critic.lam"],
    ("advantage", "max_at_k"): ["best_of"],
    ("advantage", "pass_at_k"): ["best_of"],
    ("correction.name", "truncate"): ["correction.level", "correction.low", "correction.high"],
    ("correction.name", "mask"): ["correction.level", "correction.low", "correction.high"],
    ("correction.name", "opsm"): ["correction.opsm_delta"],
}


def settings(name: str) -> str:
    """What the page shows of a preset: the choices of every algorithm, their constants, and what is not neutral."""
    fields, neutral = PUBLISHED[name].fields, PUBLISHED["sapo"].fields | {"objective": "ppo_clip"}
    shown = []
    for field in ("advantage", "objective", "correction.name", "aggregation"):
        if field != "correction.name" or fields[field] != "none":
            shown += [field, *CONSTANTS.get((field, fields[field]), [])]
    if fields["kl.coefficient"]:
        shown += ["kl.coefficient", "kl.estimator", "kl.where"]
    shown += [field for field in fields if fields[field] != neutral[field] and field not in shown]
    return "\n".join(f"rl.{field} = {fields[field]!r}".replace("'", '"') for field in shown)


PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs/algorithms.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_page_has_a_heading_for_each_with_its_settings(name):
    _, section = PAGE.split(f"\n### `{name}`\n")
    assert section.split("```python\n", 1)[1].split("\n```", 1)[0] == settings(name)


def test_the_page_names_every_choice_and_no_other_preset():
    published = PAGE.split("## Published combinations", 1)[1].split("\n## ", 1)[0]
    assert sorted(re.findall(r"^### `(\w+)`$", published, re.MULTILINE)) == sorted(PUBLISHED)
    advantages = (*GROUP_ADVANTAGES, *BEST_OF_K, *TURN_ADVANTAGES, *TOKEN_ADVANTAGES)
    for name in (*advantages, *OBJECTIVES, *corrections.NAMES, *KL_ESTIMATORS, *MODES, "squared", *TARGETS):
        assert f"`{name}`" in PAGE, name
