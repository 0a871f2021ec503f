"""What of a workdir can be made again, and what its record says against itself, by headers alone."""

import dataclasses

import pytest

from configs.search_r1 import get_config
from jaxagent import config
from jaxagent.config import ConfigError, to_dict
from jaxagent.runs import provenance, record
from jaxagent.runs.again import opened


def chain(steps, begins=(), cfg="c"):
    """Headers whose seals fit; those of `begins` know of no step before."""
    found, last = {}, "what is forgotten"
    for step in steps:
        header = {"record": 1, "step": step, "config": cfg, "code": provenance.code_digest(), "tasks": [], "rounds": []}
        header |= {"before": f"w{step}", "after": f"w{step + 1}", "previous": "" if step in begins else last}
        last = header["seal"] = record.seal_of(header)
        found[step] = header
    return found


def without(headers, *steps):
    return {step: header for step, header in headers.items() if step not in steps}


@pytest.mark.parametrize(
    ("headers", "differences"),
    [
        (chain(range(4), begins=[0]), []),
        (chain(range(2, 5)), []),  # older ones are forgotten
        (without(chain(range(6), begins=[0]), 2), ["step 2: the record's file"]),
        (without(chain(range(6), begins=[0]), 2, 3), ["step 3: the record's file"]),
        (without(chain(range(6), begins=[0, 3]), 2), []),  # recording was off for a while: told, and no damage
    ],
)
def test_a_missing_step_in_the_middle_is_damage(headers, differences):
    assert [f"{d.place}: {d.field}" for d in opened._broken(headers)] == differences


def test_where_a_record_begins_again_is_told(tmp_path):
    told = opened._told(tmp_path, without(chain(range(6), begins=[0, 3]), 2))
    assert told == ["steps were left out: the record begins again at 3, and its seals with it"]


def test_a_fleets_bundles_reach_the_steps_whose_weights_they_lead_to(tmp_path):
    """Their engines had weights of before the bundle, which nobody keeps: those steps need an older bundle."""
    cfg = config.parse(get_config("laptop"))
    cfg = dataclasses.replace(cfg, workdir=str(tmp_path), rl=dataclasses.replace(cfg.rl, staleness=2))
    headers = chain(range(6), begins=[0], cfg=provenance.config_digest(to_dict(cfg)))
    made = opened.Workdir(cfg, "rl", tmp_path, headers, {0: 5, 3: 8}, {}, frozenset(), (), ())
    assert [made.bundle_for(step) for step in range(6)] == [0, 0, 0, 3, 3, 3]
    made = dataclasses.replace(made, lagging=frozenset([3]))
    assert [made.bundle_for(step) for step in range(6)] == [0, 0, 0, 0, 0, 3] and made.replayable == list(range(6))
    made = dataclasses.replace(made, bundles={3: 8})
    assert made.replayable == [5]
    with pytest.raises(ConfigError, match=r"--step=4: no bundle is left .* Steps that can be made again: 5\."):
        made.bundle_for(4)
    other = {**headers, 4: headers[4] | {"config": "another"}}
    assert dataclasses.replace(made, bundles={0: 5, 3: 8}, headers=other).replayable == [0, 1, 2, 3]
