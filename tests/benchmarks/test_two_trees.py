"""The comparison of two checkouts: what it makes of the metrics of their runs."""

from benchmarks import two_trees


def run(*steps: float, loss: float = 0.5, arrival: float = 0.0, **more: float) -> two_trees.Rows:
    return [{"time/step_s": step, "loss": loss, "cached": arrival} | more for step in steps]


def test_times_are_medians_without_the_first_step_and_the_least_of_each_step():
    this, other = [run(9, 2, 1, 2), run(9, 4, 4, 4)], [run(9, 4, 2, 4), run(9, 2, 8, 2)]
    found = two_trees.compare(this, other)
    assert found["runs"] == [[2, 4], [4, 2]]
    assert (found["this_s"], found["other_s"], found["ratio"]) == (3, 3, 1)
    assert found["least_ratio"] == ((2 + 1 + 2) / 3) / ((2 + 2 + 2) / 3)


def test_steps_that_evaluate_have_no_step_time():
    this = [[*run(9, 2, 2, 2), {"time/eval_s": 5.0}]] * 2
    assert two_trees.compare(this, this)["this_s"] == 2


def test_a_metric_differs_if_it_differs_between_the_trees_alone():
    this = [run(1, 1, 1, arrival=1), run(1, 1, 1, arrival=2)]
    other = [run(2, 2, 2, arrival=3, loss=0.25), run(2, 2, 2, arrival=4, loss=0.25, extra=1)]
    assert two_trees.differing(this, other) == ["loss", "time/step_s"]
    assert two_trees.differing(this, this) == []


def test_a_metric_of_one_tree_alone_differs():
    """Whatever its values: a clock that is new is new."""
    for second in (1, 2):
        assert two_trees.differing([run(1), run(1)], [run(1, new=1), run(1, new=second)]) == ["new"]
        assert two_trees.differing([run(1, new=1), run(1, new=second)], [run(1), run(1)]) == ["new"]
