"""The tail that all stages share, `Workdir.steps`: which steps are left, when a bundle is due, and how a stage ends."""

import gc
import signal
import types
import weakref

import pytest

from jaxagent.runs.stopping import Stopped, Stopping
from jaxagent.runs.workdir import Workdir


class Recorded(Workdir):
    """A run whose bundles are numbers in a list."""

    def __init__(self, every: int, host=()):
        self.host, self.saved, self.stages = dict(host), [], []
        self.cfg = types.SimpleNamespace(checkpoint=types.SimpleNamespace(every=every))
        self.progress = types.SimpleNamespace(stage=lambda *stage: self.stages.append(stage))
        self.failed = types.SimpleNamespace(stuck="")
        self.stage_seconds, self._recorded = {}, set()
        self._stopping, self._opened, self._saved_step, self._last_bundle = Stopping(), True, 0, 7

    def _save(self, stage, step, state, tasks):
        assert (state, tasks) == ("state", {"at": step})
        self.saved.append(step)
        self._saved_step = step
        if self.terminating:
            self.end_if_asked(step)

    def _wait(self):
        self.saved.append("complete")


def play(run, total, taken=None, **choices):
    """The steps that were yielded; a bundle's tasks are where the loop over them stands."""
    taken = [] if taken is None else taken
    start = run.host.get("step", 0)
    for step in run.steps("rl", total, lambda: ("state", {"at": start + len(taken)}), **choices):
        assert run._stopping.training
        taken.append(step)
    assert not run._stopping.training and run.host == {}
    return taken


def test_a_stage_that_begins():
    run, begun = Recorded(every=2), []
    assert play(run, 5, first=lambda: begun.append(list(run.saved))) == [0, 1, 2, 3, 4]
    assert run.saved == [0, 2, 4, 5, "complete"] and begun == [[]] and run.stages == [("rl", 5, 0)]
    assert run.stage_seconds["rl"] >= 0
    run = Recorded(every=2)
    play(run, 4)  # without a first evaluation there is nothing to keep at step 0
    assert run.saved == [2, 4, "complete"]


@pytest.mark.parametrize("at", range(6))
def test_a_stage_that_goes_on_at_any_step(at):
    run = Recorded(every=0, host={"stage": "rl", "step": at})
    assert play(run, 5, first=lambda: pytest.fail("it has begun before")) == list(range(at, 5))
    assert run.saved == ([5] if at < 5 else []) + ["complete"]


def test_the_bundle_of_another_stage_is_not_this_one_s():
    run = Recorded(every=0, host={"stage": "sft", "step": 3})
    taken = []
    for step in run.steps("rl", 2, lambda: ("state", {"at": len(taken)})):
        taken.append(step)
    assert taken == [0, 1] and run._first_bundle == 8


def test_the_collector_passes_over_what_existed_before_the_steps():
    class Node:
        pass

    def cycle():
        node = Node()
        node.itself = node
        return weakref.ref(node)

    run, taken = Recorded(every=0), []
    before = cycle()  # garbage when the steps begin
    assert not gc.get_freeze_count()
    for step in run.steps("rl", 2, lambda: ("state", {"at": len(taken)})):
        taken.append(step)
        assert before() is None and gc.get_freeze_count() > 1_000
        inside = cycle()
        gc.collect()
        assert inside() is None
    assert not gc.get_freeze_count()


def test_a_stage_that_is_over_early_saves_its_last_step():
    run, taken = Recorded(every=0), []
    assert play(run, 9, taken, over=lambda: len(taken) == 3) == [0, 1, 2]
    assert run.saved == [3, "complete"]
    run = Recorded(every=1)
    assert play(run, 4, save_after=lambda done: done == 3) == [0, 1, 2, 3]
    assert run.saved == [3, 4, "complete"]


@pytest.mark.parametrize("choices", [{}, {"save_after": lambda done: False}])
def test_a_signal_saves_after_the_step_and_ends(choices):
    run, taken = Recorded(every=0), []
    with pytest.raises(Stopped, match="saved at step 2"):
        for step in run.steps("rl", 5, lambda: ("state", {"at": len(taken)}), **choices):
            taken.append(step)
            if step == 1:
                run._stopping.end_signal = signal.SIGTERM
    assert taken == [0, 1] and run.saved == [2] and not run._stopping.training


def test_a_signal_in_the_last_step_ends_the_run_before_the_next_stage():
    run, taken = Recorded(every=0), []
    with pytest.raises(Stopped):
        for step in run.steps("rl", 1, lambda: ("state", {"at": len(taken)})):
            taken.append(step)
            run._stopping.end_signal = signal.SIGINT
    assert run.saved == [1]


def test_a_failed_step_saves_nothing_and_the_stage_is_closed():
    run = Recorded(every=1)
    try:
        for step in run.steps("rl", 5, lambda: ("state", {"at": 1})):
            if step == 1:
                raise RuntimeError("device lost")
    except RuntimeError:
        # Before anything else is closed: from here on a signal must end the process and not ask for a save.
        assert not run._stopping.training
    assert run.saved == [1] and run.stage_seconds["rl"] >= 0 and run._stage == ""


def test_what_the_oldest_bundle_holds_is_never_asked_for_again(tmp_path):
    run = Recorded(every=1)
    run.path, run._first_bundle = tmp_path, 8
    run.checkpoints = types.SimpleNamespace(pinned=set())
    assert run.committed() == 0, "there is none yet"
    found = []
    for numbers in ((7, 9), (9, 10), (10, 11)):  # 7 is the last one of the stage before
        for path in (tmp_path / "checkpoints").glob("*"):
            path.rmdir()
        for number in numbers:
            (tmp_path / f"checkpoints/{number}").mkdir(parents=True)
        (tmp_path / "checkpoints/12.orbax-checkpoint-tmp").mkdir()
        found.append(run.committed())
    assert found == [0, 1, 2]


def test_a_run_may_go_on_from_each_bundle_of_the_stage_and_from_the_one_being_written(tmp_path):
    run = Recorded(every=1)
    run.path, run._first_bundle, run._last_bundle = tmp_path, 8, 7
    assert run.bundled() == set(), "the stage begins"
    for number in (7, 8, 10):  # 7 is the last one of the stage before
        (tmp_path / f"checkpoints/{number}").mkdir(parents=True)
    (tmp_path / "checkpoints/12.orbax-checkpoint-tmp").mkdir()
    run._last_bundle = 12
    assert run.bundled() == {0, 2, 4}
