"""What a critic expects of tasks that nobody has played: for `rl.phases`."""

from __future__ import annotations

from collections.abc import Sequence

from jaxagent.algorithms.outcome import after
from jaxagent.learner.programs import Programs
from jaxagent.learner.state import TrainState
from jaxagent.runs.parts import Parts
from jaxagent.types import Task


def values_of(parts: Parts, programs: Programs, state: TrainState, tasks: Sequence[Task]) -> list[float]:
    """The critic's value of each task's prompt, before the policy has done anything; 0 where it leaves no room."""
    prompts = []
    for task in tasks:
        conversation = parts.conversation()
        conversation.add_prompt(parts.environment.prompt_messages(task))
        prompts.append(conversation.pending)
    room = [len(prompt) < parts.cfg.env.context_tokens for prompt in prompts]
    assert programs.values is not None
    (values,) = programs.values(state.critic, [after(p) for p, has_room in zip(prompts, room, strict=True) if has_room])
    of_prompts = iter(values)
    return [float(next(of_prompts)[-1]) if has_room else 0.0 for has_room in room]
