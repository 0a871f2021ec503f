"""Relabelled attempts: marked, never of the evaluation, never in on-policy groups."""

import dataclasses

import pytest

from jaxagent.rollout.hindsight import is_relabelled, mark, refuse_on_policy, relabel
from jaxagent.types import Episode, Group, StopReason, Task

TASK, HELD = Task("t", "go to A", ("A",)), Task("h", "go to B", ("B",))


def attempt(task=TASK, reward=0.0, stop=StopReason.ANSWER, text="C"):
    return Episode(task, 0, (), reward, {}, stop, 1, text=text)


def to_where_it_went(episode):
    """The goal becomes the place that was reached."""
    if not episode.text:
        return None
    task = mark(episode.task, prompt=f"go to {episode.text}", answers=(episode.text,))
    return dataclasses.replace(episode, task=task, reward=1.0)


def test_failures_become_solved_attempts_at_another_task():
    episodes = [attempt(), attempt(reward=1.0), attempt(stop=StopReason.TIMEOUT), attempt(text="")]
    (new,) = relabel(episodes, to_where_it_went, [HELD], 1.0)
    assert (new.task.prompt, new.task.answers, new.reward) == ("go to C", ("C",), 1.0)
    assert is_relabelled(new.task) and new.task.id != TASK.id and not is_relabelled(TASK)


def test_held_out_tasks_are_refused_on_both_sides():
    with pytest.raises(ValueError, match="'h' is held out"):
        relabel([attempt(HELD)], to_where_it_went, [HELD], 1.0)
    with pytest.raises(ValueError, match="held out"):  # it went where an evaluation question asks to go
        relabel([attempt(text="B")], to_where_it_went, [HELD], 1.0)


@pytest.mark.parametrize(
    "broken, message",
    [
        (lambda e: dataclasses.replace(e, task=dataclasses.replace(TASK, id="x"), reward=1.0), "not marked"),
        (lambda e: dataclasses.replace(e, task=mark(TASK, id="t"), reward=1.0), "id of its own"),
        (lambda e: dataclasses.replace(e, task=mark(TASK)), "not solved"),
    ],
)
def test_a_hook_that_does_it_wrong_is_told(broken, message):
    with pytest.raises(ValueError, match=message):
        relabel([attempt()], broken, [], 1.0)


def test_never_on_policy():
    refuse_on_policy([Group(TASK, (attempt(),))])
    with pytest.raises(ValueError, match="cannot be in an on-policy group"):
        refuse_on_policy([Group(TASK, (attempt(), to_where_it_went(attempt())))])
    with pytest.raises(ValueError, match="cannot be in an on-policy group"):
        refuse_on_policy([Group(mark(TASK), (attempt(),))])
