"""Hindsight relabelling: a failed attempt becomes a solved one of another task, the one that it did solve.

A hook is a function Episode -> Episode | None that an environment's author writes: it sets the goal to what was
achieved, writes the new prompt's tokens in place of the old ones, asks the verifier again, and marks the new task with
`metadata["hindsight"] = True`. Give it to `experience.Experience`; its episodes go to the replay buffer
(`rl.replay`), as examples of another policy. Another prompt is another group, so they never enter on-policy groups, and
nothing of the held-out tasks is ever relabelled: both are errors, not filters.

After Hindsight Experience Replay (Andrychowicz et al., arXiv 1707.01495).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence

from jaxagent.types import Episode, Group, Task

Hook = Callable[[Episode], Episode | None]  # None: there is nothing that this attempt solved
FLAG = "hindsight"


def is_relabelled(task: Task) -> bool:
    """Whether a task is what an attempt at another one solved."""
    return task.metadata.get(FLAG) is True


def relabel(episodes: Iterable[Episode], hook: Hook, heldout: Sequence[Task], solved: float) -> list[Episode]:
    """What the hook makes of attempts that did not solve their task.

    Args:
      episodes: of training tasks; those that failed outside the policy, or have `solved` or more, are passed over.
      hook: the environment's.
      heldout: tasks of the evaluation.
      solved: reward from which an attempt has solved its task.

    Raises:
      ValueError: an attempt at a held-out task; a new task that is one (by id or by prompt), that is not marked, that
        keeps its old id, or whose attempt has not `solved`.
    """
    ids, prompts = {task.id for task in heldout}, {task.prompt for task in heldout}
    out = []
    for episode in episodes:
        _refuse_heldout(episode.task, ids, prompts)
        if episode.stop_reason.is_failure or episode.reward >= solved:
            continue
        new = hook(episode)
        if new is None:
            continue
        _refuse_heldout(new.task, ids, prompts)
        if not is_relabelled(new.task):
            raise ValueError(f"hindsight: task {new.task.id!r} is not marked with metadata['{FLAG}'] = True")
        if new.task.id == episode.task.id:
            raise ValueError(f"hindsight: the new task must have an id of its own, not {new.task.id!r}")
        if new.reward < solved:
            raise ValueError(f"hindsight: the attempt at {new.task.id!r} has reward {new.reward}, not solved")
        out.append(new)
    return out


def refuse_on_policy(groups: Sequence[Group]) -> None:
    """Raises ValueError if a group to learn from on-policy holds a relabelled task or episode."""
    for group in groups:
        for task in (group.task, *(episode.task for episode in group.episodes)):
            if is_relabelled(task):
                raise ValueError(f"task {task.id!r} is relabelled in hindsight and cannot be in an on-policy group")


def mark(task: Task, **changes: object) -> Task:
    """The task with changes, an id of its own and the mark: what a hook gives its new episode."""
    metadata = {**task.metadata, FLAG: True}
    return dataclasses.replace(task, **{"id": f"{task.id}#{FLAG}", "metadata": metadata} | changes)


def _refuse_heldout(task: Task, ids: Collection[str], prompts: Collection[str]) -> None:
    if task.id in ids or task.prompt in prompts:
        raise ValueError(f"hindsight: task {task.id!r} is held out, and nothing of the evaluation is relabelled")
