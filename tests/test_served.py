"""Which weights the engine has while a run is stale on purpose."""

import types

import pytest

from jaxagent.runs.seams import LaggedWeights, publish_past


class Engine:
    def __init__(self):
        self.has, self.swaps = None, 0

    def update_params(self, params, version):
        self.has, self.swaps = (params, version), self.swaps + 1


def after(step):
    return types.SimpleNamespace(policy=f"weights {step}", params=f"adapters {step}", step=step * 2)  # two updates


def test_on_policy_the_engine_always_has_the_newest():
    engine = Engine()
    served = LaggedWeights(engine, staleness=0)
    for step in range(4):
        served.publish(step, after(step))
        assert engine.has == (f"weights {step}", step)
        with served.newest():
            assert engine.has == (f"weights {step}", step)
        assert engine.swaps == step + 1, "an evaluation swaps nothing"


def test_stale_rollouts_have_the_weights_of_so_many_steps_ago_and_evaluations_the_newest():
    engine, seen = Engine(), []
    served = LaggedWeights(engine, staleness=2)
    for step in range(5):
        served.publish(step, after(step))
        seen.append(engine.has[1])
        with served.newest():
            assert engine.has == (f"weights {step}", step)
        assert engine.has[1] == seen[-1]
    assert seen == [0, 0, 0, 1, 2]
    assert served.past() == {2: "adapters 2", 3: "adapters 3"}


@pytest.mark.parametrize("held", [[5, 6], [4, 5, 6, 7], [6], []])
def test_a_stage_that_goes_on_has_its_lag_from_its_first_step(held):
    engine, noted = Engine(), []
    saved = types.SimpleNamespace(
        step_of=lambda stage: 7,
        checkpoints=types.SimpleNamespace(past=lambda like: {version: f"adapters {version}" for version in held}),
        progress=types.SimpleNamespace(note=noted.append),
    )
    state = types.SimpleNamespace(params="", replace=lambda params: params)
    served = LaggedWeights(engine, staleness=2)
    publish_past(served, saved, "rl", state, lambda adapters: after(int(adapters[-1])))
    served.publish(7, after(7))
    there = [version for version in (5, 6) if version in held]
    assert list(served.past()) == there and engine.has[1] == min([*there, 7])
    said = f"the bundle of step 7 holds {len(there)} of the 2 policies before it"
    assert [said in line for line in noted] == [True] * (len(there) < 2)


def test_a_stage_that_begins_and_a_run_without_lag_ask_for_nothing():
    assert [list(LaggedWeights(None, 2).missing(step)) for step in (0, 1, 2, 3)] == [[], [0], [0, 1], [1, 2]]
    assert not LaggedWeights(None, 0).missing(7)
