"""Which weights the engine has while a run is stale on purpose."""

import types

from jaxagent.runs.stages.served import Served


class Engine:
    def __init__(self):
        self.has, self.swaps = None, 0

    def update_params(self, params, version):
        self.has, self.swaps = (params, version), self.swaps + 1


def after(step):
    return types.SimpleNamespace(policy=f"weights {step}", step=step * 2)  # two updates per step


def test_on_policy_the_engine_always_has_the_newest():
    engine = Engine()
    served = Served(engine, staleness=0)
    for step in range(4):
        served.update(after(step))
        assert engine.has == (f"weights {step}", 2 * step)
        with served.newest():
            assert engine.has == (f"weights {step}", 2 * step)
        assert engine.swaps == step + 1, "an evaluation swaps nothing"


def test_stale_rollouts_have_the_weights_of_so_many_steps_ago_and_evaluations_the_newest():
    engine, seen = Engine(), []
    served = Served(engine, staleness=2)
    for step in range(5):
        served.update(after(step))
        seen.append(engine.has[1])
        with served.newest():
            assert engine.has == (f"weights {step}", 2 * step)
        assert engine.has[1] == seen[-1]
    assert seen == [0, 0, 0, 2, 4]
