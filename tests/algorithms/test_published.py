"""Named combinations: each is whole, each parses and is accepted, and applying one leaves nothing of another."""

import pathlib
import re
import typing

import pytest
from ml_collections import ConfigDict

from configs import _parts
from configs.search_r1 import get_config
from jaxagent import config
from jaxagent.algorithms import checks, published
from jaxagent.algorithms.aggregate import AGGREGATIONS
from jaxagent.algorithms.corrections import CORRECTIONS
from jaxagent.algorithms.estimators import ADVANTAGES
from jaxagent.algorithms.objectives import OBJECTIVES
from jaxagent.algorithms.published import PUBLISHED
from jaxagent.algorithms.value_losses import VALUE_LOSSES
from jaxagent.config import ConfigError
from jaxagent.config.parse import hints, kind


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_on_top_of_a_config_is_a_valid_config(name):
    cfg = config.parse(get_config(f"laptop+{name}"))
    checks.check(cfg.rl)
    assert cfg.workdir.endswith(f"_{name}") and PUBLISHED[name].source


@pytest.mark.parametrize("base", ["laptop", "laptop-ppo", "laptop-echo"])
def test_an_algorithm_leaves_nothing_of_the_one_before_it(base):
    """But the critic, which is the run's."""
    for name in PUBLISHED:
        first, then = get_config(f"{base}+mis"), get_config(f"laptop+{name}").rl.to_dict()
        published.apply(first, name, _parts.critic())
        changed = {field for field in first.rl.to_dict() if first.rl.to_dict()[field] != then.get(field)}
        assert changed <= {"steps"}, name


# What released code sets, field by field: RAGEN's config/base.yaml and train_all.sh (USE_BASE), slime's mis.yaml,
# OpenRLHF's train_reinforce_baseline_hybrid_engine.sh, verl's default loss.


def test_unknown_names_are_one_line():
    with pytest.raises(ConfigError, match=r"No published algorithm 'gpso'\. Did you mean 'gspo'"):
        get_config("laptop+gpso")
    with pytest.raises(ConfigError, match=r"has no preset 'lapto'\. Did you mean 'laptop'"):
        get_config("lapto+gspo")


# What a page need not say: what is off, and what belongs to the run.
NEUTRAL = {
    "drop_zero_signal": False, "multi_trajectory": "full", "whiten_advantages": False, "keep_groups_frac": 1.0,
    "refresh_every": 0, "veto": 0.0, "normalise": False, "tasks_per_round": 0,
}  # fmt: skip
OF_THE_RUN = ("critic", "constant")


def settings(name: str) -> str:
    """What the page shows of a preset: its choices, their constants, and what else is not neutral."""
    lines = []
    for field, value in PUBLISHED[name].fields.items():
        constants = dict(value) if isinstance(value, dict) else {}
        if value is not None and NEUTRAL.get(field) != value and constants.keys() <= {"name"}:
            lines.append((field, constants.get("name", value)))
        elif "name" in constants:
            lines.append((field, constants.pop("name")))
        for constant, number in constants.items():
            if constant not in ("name", *OF_THE_RUN) and NEUTRAL.get(constant) != number:
                lines.append((f"{field}.{constant}", number["name"] if isinstance(number, dict) else number))
    return "\n".join(f"rl.{field} = {value!r}".replace("'", '"') for field, value in lines)


PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs/algorithms.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_page_has_a_heading_for_each_with_its_settings(name):
    _, section = PAGE.split(f"\n### `{name}`\n")
    assert section.split("```python\n", 1)[1].split("\n```", 1)[0] == settings(name)


def test_the_page_names_every_choice_and_no_other_preset():
    published = PAGE.split("## Published combinations", 1)[1].split("\n## ", 1)[0]
    assert sorted(re.findall(r"^### `(\w+)`$", published, re.MULTILINE)) == sorted(PUBLISHED)
    estimators = typing.get_args(kind(hints(config.KLConfig)["estimator"]).value)
    for name in (*ADVANTAGES, *OBJECTIVES, *CORRECTIONS, *AGGREGATIONS, *VALUE_LOSSES, *estimators):
        assert f"`{name}`" in PAGE, name


def test_an_algorithm_keeps_the_runs_critic_and_counts_its_last_turn():
    raw = get_config("laptop-ppo")
    raw.rl.advantage.critic.warmup_updates = 77
    raw.rl.epochs, raw.env.final_turn = 3, True
    published.apply(raw, "vapo", ConfigDict())
    assert raw.rl.advantage.critic.warmup_updates == 77 and raw.rl.epochs == 3
    published.apply(raw, "rloo", ConfigDict())
    assert raw.rl.aggregation.constant == (3 + 1) * 12  # turns, and tokens of each
    assert (raw.rl.updates_per_step, raw.rl.epochs) == (1, 1)
