"""Named combinations: each is whole, each parses and is accepted, and applying one leaves nothing of another."""

import pathlib

import pytest

from configs.search_r1 import get_config
from jaxagent import config
from jaxagent.algorithms import corrections, presets
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
    presets.check(cfg.rl)
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
    assert (rl["starpo_s"].advantage, rl["starpo_s"].clip_high) == ("gae_bilevel", 0.28)
    assert (rl["dr_grpo"].advantage, rl["dr_grpo"].aggregation) == ("group_mean", "constant")
    assert rl["reinforce_pp"].kl.where == "reward" and rl["reinforce_pp_baseline"].kl.where == "advantage"
    assert {name for name in rl if presets.needs_critic(rl[name])} >= {"ppo"}


def test_unknown_names_are_one_line():
    with pytest.raises(ConfigError, match=r"No published algorithm 'gpso'\. Did you mean 'gspo'"):
        get_config("laptop+gpso")
    with pytest.raises(ConfigError, match=r"has no preset 'lapto'\. Did you mean 'laptop'"):
        get_config("lapto+gspo")


def test_the_page_has_a_row_for_each_and_names_every_choice():
    page = (pathlib.Path(__file__).resolve().parents[2] / "docs/algorithms.md").read_text()
    table = page.split("| preset | formula |", 1)[1].split("\n\n", 1)[0]
    rows = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(PUBLISHED)
    advantages = (*GROUP_ADVANTAGES, *BEST_OF_K, *TURN_ADVANTAGES, *TOKEN_ADVANTAGES)
    for name in (*advantages, *OBJECTIVES, *corrections.NAMES, *KL_ESTIMATORS, *MODES, "squared", *TARGETS):
        assert f"`{name}`" in page, name
