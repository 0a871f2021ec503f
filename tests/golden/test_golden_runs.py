"""A change that is not meant to change numbers changes none: small runs of the recipes, compared bit for bit.

Where numbers are meant to change, `python -m tests.golden.write` writes them anew, and the commit says why.
"""

import copy
import json
import math

import pytest

from tests.golden import recipes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("golden")


@pytest.mark.slow
@pytest.mark.parametrize("name", recipes.RECIPES)
def test_every_number_is_the_golden_one(name, folder):
    file = recipes.file(name)
    if not file.parent.is_dir():
        pytest.skip(f"no golden numbers for {recipes.kind()}: `python -m tests.golden.write` at a good commit")
    golden = [json.loads(line) for line in file.read_text().splitlines()]
    found = recipes.differences(golden, recipes.run(name, folder))
    assert not found, f"{len(found)} numbers differ:\n" + "\n".join(found[:40])


def test_one_bit_is_a_difference():
    golden = [{"stage": "rl", "step": 1, "loss/policy": 0.1, "eval/em": None}, {"policy": "ab"}]
    assert recipes.differences(golden, copy.deepcopy(golden)) == []
    moved = copy.deepcopy(golden)
    moved[0]["loss/policy"] = math.nextafter(0.1, 1.0)
    moved[1]["new"] = 0
    first, second = recipes.differences(golden, moved)
    assert first == "rl 1 loss/policy: 0.1 golden, 0.10000000000000002 found"
    assert second == "end new: no such name golden, 0 found"
    assert recipes.differences(golden, golden[:1]) == ["2 golden records, 1 found"]


def test_clocks_and_arrival_are_left_out():
    left_out = ("time/step_s", "tokens_per_s", "episode/queue_s", "engine/dispatches", "episode/cached_tokens")
    kept = ("loss/policy", "engine/requests", "engine/sampled_tokens", "episode/tokens", "eval/em", "step")
    assert all(recipes.ARRIVAL.fullmatch(name) for name in left_out)
    assert not any(recipes.ARRIVAL.fullmatch(name) for name in kept)
