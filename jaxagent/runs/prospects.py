"""What a critic expects of tasks that nobody has played: for `rl.phases`."""

from __future__ import annotations

from collections.abc import Sequence

from jaxagent.algorithms.outcome import after
from jaxagent.learner.programs import Programs
from jaxagent.learner.state import TrainState
from jaxagent.runs.parts import Parts
from jaxagent.types import Task


def values_of(parts: Parts, programs: Programs, state: TrainState, tasks: Sequence[Task]) -> list[float]:
    """The critic's value of each task's prompt, before the policy has done anything."""
    prompts = []
    for task in tasks:
        conversation = parts.conversation()
        conversation.add_prompt(parts.environment.prompt_messages(task))
        prompts.append(after(conversation.pending))
    assert programs.values is not None
    (values,) = programs.values(state.critic, prompts)
    return [float(of_tokens[-1]) for of_tokens in values]
