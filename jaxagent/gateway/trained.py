"""Which of a session's conversations are trained: those of the agent program, not those of a command that it ran.

A conversation belongs to a line: the program's own, or that of a sub-agent which a sampled call has begun. A line is
one talk at a time: it goes on in a new trajectory when its history is summed up or rewritten. See docs/gateway.md.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from jaxagent.gateway.chat import Answer, Ask, BadRequest, ChatMessage
from jaxagent.gateway.threads import Thread

Fate = Literal["drop", "train"]


@dataclasses.dataclass(frozen=True)
class TrainingRules:
    """What is done with conversations that are not the program's main one.

    Attributes:
      side_requests: requests without tools beside others with tools (titles), unless they go on with one of these.
      foreign: conversations that do not descend from the program's first request.
      instruction: the task as the program has it.
      spawns: tools of the program whose calls begin a sub-agent.
    """

    side_requests: Fate = "drop"
    foreign: Fate = "train"
    instruction: str = ""
    spawns: tuple[str, ...] = ()


def read_rules(data: Any) -> TrainingRules:
    """`dataclasses.asdict(rules)` as it arrived. Raises BadRequest."""
    try:
        return TrainingRules(**{**data, "spawns": tuple(data.get("spawns", ()))})
    except (TypeError, AttributeError, ValueError) as error:
        raise BadRequest(f"'rules' must have the fields of gateway.trained.TrainingRules: {error}", "rules") from None


class Lines:
    """The lines of a session's trajectories, in the order in which these begin."""

    def __init__(self, rules: TrainingRules) -> None:
        self._rules = rules
        self._by_system: dict[str, Thread] = {}  # the line whose conversations begin with this system text
        self._main: Thread | None = None
        self._prompts: list[str] = []  # of sampled calls that begin a sub-agent: each admits one conversation
        self._spawned: dict[Thread, str] = {}  # these, with the prompt
        self._openings: list[Sequence[ChatMessage]] = []  # of the program's conversations: it may ask the same again
        self._calling: set[Thread] = set()  # lines whose last answer has calls: the program is making them

    def admit(self, thread: Thread, ask: Ask, parents: Sequence[Thread], history: bool) -> None:
        """Gives a new trajectory its line, the first one's or none.

        `parents`: those whose turns it has; `history`: it begins with a conversation of the first of them.
        """
        thread.tools = bool(ask.tools) or any(parent.tools for parent in parents)
        system = "\n".join(message.text for message in ask.messages if message.role == "system")
        texts = [message.text for message in ask.messages if message.role == "user"]
        prompt = next((one for one in self._prompts if any(one in text for text in texts)), None)
        names_task = any(self._rules.instruction in text for text in texts)
        line = next((parent.line for parent in parents if parent.line is not None), None)
        if line is not None:  # a call's id alone is no sign of the program
            thread.line = line if history or names_task or system in self._by_system else None
        elif prompt is not None:
            self._prompts.remove(prompt)
            self._spawned[thread] = prompt
            thread.line = self._by_system[system] = thread
        elif self._main is None:
            thread.line = self._main = thread
            self._by_system.setdefault(system, thread)
        elif system and system in self._by_system:
            thread.line = self._idle(self._by_system[system], ask)
        elif self._rules.instruction and names_task:
            thread.line = self._idle(self._main, ask)
            self._by_system |= {system: thread.line} if thread.line is not None and thread.tools else {}
        self._openings += [ask.messages] if thread.line is not None and not parents else []
        for parent in parents:  # a summary with which the program goes on is the program's, whatever it was asked as
            parent.tools, parent.line = parent.tools or thread.tools, parent.line or thread.line

    def _idle(self, line: Thread, ask: Ask) -> Thread | None:
        """The line; None where its program is making calls and so asks nothing new: a command asks."""
        return None if line in self._calling and ask.messages not in self._openings else line

    def leave(self, thread: Thread) -> None:
        """A trajectory that has sampled nothing has begun no line."""
        self._by_system = {system: line for system, line in self._by_system.items() if line is not thread}
        self._main = None if self._main is thread else self._main
        self._prompts += [self._spawned.pop(thread)] if thread in self._spawned else []

    def note(self, thread: Thread, answer: Answer) -> None:
        """Looks for calls, and for those that begin a sub-agent: the longest of their texts is its task."""
        if thread.line is not None:
            self._calling = self._calling | {thread.line} if answer.calls else self._calling - {thread.line}
        elif not thread.tools:  # a summary, it may be, with which a line goes on
            self._calling = set()
        for call in answer.calls:
            if call.name in self._rules.spawns and not isinstance(call.arguments, str):
                texts = [value.strip() for value in call.arguments.values() if isinstance(value, str)]
                self._prompts += [text for text in [max(texts, key=len, default="")] if text]

    def select(self, threads: Sequence[Thread]) -> tuple[list[Thread], int, int]:
        """(those that are trained, number of foreign ones, number of side requests that are not trained).

        Foreign is also what was asked in the middle of a line, which then went on as if nothing had been: a command
        has copied the program's words; and what was asked behind a turn with which the line then went on otherwise. A
        trajectory ends in front of such turns.
        """
        side = [thread for thread in threads if not thread.tools] if any(thread.tools for thread in threads) else []
        untrained = side if self._rules.side_requests == "drop" else []
        trained = [thread for thread in threads if thread not in untrained]
        if self._rules.foreign == "train":
            return trained, 0, len(untrained)

        def ours(thread: Thread) -> bool:
            talk = [other for other in threads if other.line is thread.line and other not in side]
            first = thread.turn_numbers[0]
            around = thread not in side and any(one.turn_numbers[0] < first < one.turn_numbers[-1] for one in talk)
            return thread.line is not None and not around

        own = [thread for thread in trained if ours(thread)]
        abandoned = _abandoned_turns([thread for thread in own if thread not in side])
        for thread, turn in abandoned:
            thread.trained = min(thread.trained, turn)
        cut = {thread for thread, _ in abandoned}
        return [thread for thread in own if thread.trained], len(trained) - len(own) + len(cut), len(untrained)


def _abandoned_turns(threads: Sequence[Thread]) -> set[tuple[Thread, int]]:
    """Turns (trajectory, number of the turn in it) that a program has left, with all that goes on with them.

    Of two that go on with one turn, it has left the one whose last turn was asked before the other's first, unless that
    one has fewer turns: else one request of a command would be enough to undo a whole talk.
    """
    numbers = {(thread, i): number for thread in threads for i, number in enumerate(thread.turn_numbers)}
    before = {(thread, i): (thread, i - 1) if i else thread.parent for thread, i in numbers}
    size, latest, behind, abandoned = dict.fromkeys(numbers, 1), dict(numbers), collections.defaultdict(list), set()
    for turn in sorted(numbers, key=numbers.__getitem__, reverse=True):
        if (parent := before[turn]) in numbers:
            size[parent] += size[turn]
            latest[parent] = max(latest[parent], latest[turn])
            behind[parent].append(turn)
    for turn in sorted(numbers, key=numbers.__getitem__):
        others = [one for one in behind[before[turn]] if numbers[one] > latest[turn] and size[one] >= size[turn]]
        abandoned |= {turn} if others or before[turn] in abandoned else set()
    return abandoned
