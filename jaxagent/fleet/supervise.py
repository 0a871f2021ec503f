"""Starts the processes of a run, watches them, starts again what dies or hangs, and leaves nothing behind.

Processes that share fate are a gang: when one of them dies, the others are killed at once, since they would wait for it
in a collective until a heartbeat of minutes ends them; then the gang starts anew. A hang is found by progress
(vitals.py), not by heartbeats: stacks of everything are written, and the gang is killed. What is started again, and
what is final, is said in restarts.py.

No jax and no threads here; nothing is kept, so that a new supervisor goes on where a killed one was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from jaxagent.config.errors import EXIT_CODES, NAMES, WAITED, ending_signals
from jaxagent.fleet import restarts as rules
from jaxagent.fleet.child import LOGS, Child, Program
from jaxagent.fleet.restarts import Lives

SILENT_S, SILENT_PART = 30.0, 0.1  # silence that is told: seconds, and of a phase's budget
LOOK_S = 0.1  # between two looks at everything
STACKS_S = 10.0  # for writing stacks, at most: a process that starves, or was stopped, has to get a turn first
STILL_S = 0.2  # without a further byte: stacks are written
OTHERS_S = 2.0  # for the other processes of a gang to say why they end
END_S = 15.0  # for processes to end after SIGTERM


@dataclasses.dataclass(frozen=True)
class Gang:
    """Processes that start and end together."""

    name: str
    programs: Callable[[int], Sequence[Program]]  # of its so-many-th start, from 0
    leads: bool = False  # the run ends when it has ended
    needed: bool = False  # the run ends where it cannot work
    ready: Callable[[], bool] = lambda: True  # whether it may be started by now
    code: Callable[[int], int] = lambda code: code  # what an exit code means, where somebody between has made it


@dataclasses.dataclass
class _Running:
    gang: Gang
    lives: Lives
    children: list[Child] = dataclasses.field(default_factory=list)
    not_before: float = 0.0
    over: bool = False  # it will not be started again


@dataclasses.dataclass(eq=False)
class Supervisor:
    """Runs gangs until the leading one has ended; where none leads, the last one.


    Attributes:
      asked: the signal that asked for the end.
      newest_code: that of the process which was, or would have been, started again last; negative for a signal.
    """

    gangs: Sequence[Gang]  # in the order of their start
    folder: pathlib.Path  # for logs, signs of life and the list of restarts
    environment: Mapping[str, str]  # of all processes, beside this one's own
    restarts: int  # of one gang
    start_s: float  # budget of a process until its first sign of life
    on_end: Callable[[str], None] = lambda name: None  # told the name of every process whose end was seen
    grace_s: float = math.inf  # for the leading gang to end after a signal; then all is ended at once
    begin: Callable[[Program], Child] | None = None  # starts a program, and gives what has the methods of a `Child`

    def __post_init__(self) -> None:
        self._all = [_Running(gang, Lives(self.restarts, gang.leads)) for gang in self.gangs]
        self._leader = next((running for running in self._all if running.gang.leads), self._all[-1])
        self._begin = self.begin or (lambda program: Child(program, self.folder, self.environment, self.start_s))
        self._until = math.inf  # from a signal on
        self.newest_code = 0
        self._silences: dict[str, float] = {}  # process -> the sign since which it is silent, when that was told
        self.asked: signal.Signals | None = None
        self._interrupts, self._sent = 0, False
        self._code: int | None = None  # the run's, once it is decided
        (self.folder / LOGS).mkdir(parents=True, exist_ok=True)

    def run(self) -> int:
        """Returns the exit code of the run. When it returns, or raises, no process is left."""
        with self._listening():
            try:
                while self._code is None:
                    self._look()
                return self._code
            finally:
                self._end()

    # ---------------------------------------------------------------- one look

    def _look(self) -> None:
        self._answer_signals()
        for running in self._all:
            if self._code is not None:
                return
            if running.children:
                self._watch(running)
            elif not running.over and time.monotonic() >= running.not_before and running.gang.ready():
                self._start(running)
        self._pump(LOOK_S)

    def _start(self, running: _Running) -> None:
        programs = running.gang.programs(running.lives.starts)
        running.lives.starts += 1
        for program in programs:
            running.children.append(self._begin(program))

    def _watch(self, running: _Running) -> None:
        codes = [code and running.gang.code(code) for code in (child.exit_code() for child in running.children)]
        for child, code in zip(running.children, codes, strict=True):
            if code not in (None, 0):
                self._died(running, child, code)
                return
        if all(code == 0 for code in codes):
            self._close(running)
            if running is self._leader:
                self._code = 0
            elif running.gang.needed:
                self._again(running, 0, f"{running.gang.name} ended before the run did")
            else:
                running.over = True
            return
        for child in running.children:
            self._tell_silence(child)
            if child.exit_code() is None and (hang := child.hangs()):
                self._write_stacks()
                self._again(running, rules.HANGS, f"{child.program.name} hangs: it {hang}")
                return

    def _tell_silence(self, child: Child) -> None:
        """Once of every silence, long before it counts as a hang."""
        sign = child.sign() if child.program.watched else None
        if sign is None or sign.at == self._silences.get(child.program.name):
            return
        silent_s = time.monotonic() - sign.at
        if max(SILENT_S, SILENT_PART * sign.budget_s) < silent_s < sign.budget_s:
            self._silences[child.program.name] = sign.at
            then = f"without progress for {sign.budget_s:.0f} s in this phase it is ended, and starts again"
            self._say(f"{child.program.name} has been silent for {silent_s:.0f} s (it {sign.phase}); {then}.")

    def _died(self, running: _Running, child: Child, code: int) -> None:
        """One process of a gang has ended, and not as it should."""
        name = child.program.name
        says_why = code in (1, rules.MISTAKE, WAITED)
        reason = f"{name}: {child.last_line()}" if says_why else f"{name} {_ending(code)}"
        if not (running.lives.final(code) or (self.asked and running is self._leader and code in EXIT_CODES.values())):
            self._again(running, code, reason)
        elif running is self._leader:
            until = time.monotonic() + OTHERS_S  # for the others to say what they see
            while any(each.exit_code() is None for each in running.children) and time.monotonic() < until:
                self._pump(LOOK_S)
            self._code = code
        else:
            running.over = True
            self._say(f"{name} cannot work, and is not started again: {child.last_line()}")
            self._close(running)
            if running.gang.needed or self._no_engines():
                self._code = rules.MISTAKE

    def _no_engines(self) -> bool:
        return all(r.over for r in self._all if not (r.gang.needed or r.gang.leads))

    def _again(self, running: _Running, code: int, reason: str) -> None:
        """Ends what is left of a gang, and has it started again where that may help."""
        self.newest_code = WAITED if code == rules.HANGS else code
        lived_s = max((time.monotonic() - child.started for child in running.children), default=0.0)
        unknown = None if any(not child.program.watched for child in running.children) else 0
        progress = max((sign.done for child in running.children if (sign := child.sign())), default=unknown)
        self._close(running)
        if self.asked is not None and running is self._leader:
            self._say(f"{reason}, when it was to save and end: the last checkpoint counts.")
            self._code = EXIT_CODES[self.asked]
            return
        pause_s, never = running.lives.next_start(code, lived_s, progress)
        if never:
            self._say(f"{reason}. It is not started again, {never}; see {self.folder / LOGS}.")
            running.over = True
            if running.gang.leads or running.gang.needed or self._no_engines():
                self._code = code if code == rules.MISTAKE else 1
            return
        running.not_before = time.monotonic() + pause_s
        rules.note(self.folder, running.gang.name, reason)
        when, lives = f" in {pause_s:.3g} s" if pause_s else "", running.lives
        self._say(f"{reason}: {running.gang.name} starts again{when} ({lives.starts} of {lives.restarts} times).")

    # ---------------------------------------------------------------- ending

    def _answer_signals(self) -> None:
        if self.asked is None:
            return
        if self._interrupts > 1 or time.monotonic() > self._until:
            why = "interrupted twice" if self._interrupts > 1 else f"it has not ended within {self.grace_s:g} s"
            self._say(f"{why}: ended at once; the same command continues from the last checkpoint.")
            self._code = EXIT_CODES[self.asked]
            self._interrupts = 2
        elif not (self._leader.children and all(c.sign() or not c.program.watched for c in self._leader.children)):
            self._say(f"{NAMES[self.asked]} before {self._leader.gang.name} had begun: the same command starts it.")
            self._code = EXIT_CODES[self.asked]
        elif not self._sent:
            self._sent = True
            for child in self._leader.children:
                child.send(self.asked)

    def _end(self) -> None:
        """Ends everything: gently, the leader first of all, and then by force."""
        at_once = self._interrupts > 1
        ends = [running for running in self._all if running.children]
        for running in ends:
            for child in running.children:
                child.send(signal.SIGKILL if at_once else signal.SIGTERM)
        until = time.monotonic() + END_S
        while any(child.exit_code() is None for r in ends for child in r.children) and time.monotonic() < until:
            self._pump(LOOK_S)
            if self._interrupts > 1:
                break
        for running in ends:
            self._close(running)

    def _close(self, running: _Running) -> None:
        for child in running.children:
            child.kill()  # the process, and what it began
            child.close()
            self.on_end(child.program.name)
        running.children = []

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        before = [(s, signal.signal(s, self._on_signal)) for s in ending_signals()]
        try:
            yield
        finally:
            for signum, handler in before:
                signal.signal(signum, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        """The leader saves and ends, and the run with it. The second Ctrl-C ends everything at once."""
        self._interrupts += signum == signal.SIGINT
        first = self.asked is None
        self.asked = self.asked or signal.Signals(signum)
        if first:
            self._until = time.monotonic() + self.grace_s

    # ---------------------------------------------------------------- telling

    def _pump(self, wait_s: float) -> None:
        """Shows what processes print; waits for it for so long."""
        with selectors.DefaultSelector() as selector:
            child_of = {fd: child for r in self._all for child in r.children for fd in child.readable}
            for fd in child_of:
                selector.register(fd, selectors.EVENT_READ)
            if not child_of:
                time.sleep(wait_s)
                return
            for key, _ in selector.select(wait_s):
                child_of[key.fd].pump()

    def _write_stacks(self) -> None:
        """Of every process: where one hangs, another may be the reason.

        Waits until each file has grown and grows no more, which is a moment where there is processor time, and no
        longer than `STACKS_S`: what is in the kernel for good (a dead disk) never writes.
        """
        children = [child for running in self._all for child in running.children]
        first_bytes = {child: child.stacks_bytes() for child in children if child.write_stacks()}
        newest_bytes = dict(first_bytes)
        now = time.monotonic()
        changed, until = dict.fromkeys(first_bytes, now), now + STACKS_S
        waiting = list(first_bytes)
        while waiting and time.monotonic() < until and self._interrupts < 2:
            self._pump(LOOK_S)
            for child in waiting:
                if (size := child.stacks_bytes()) != newest_bytes[child]:
                    newest_bytes[child], changed[child] = size, time.monotonic()
            now = time.monotonic()
            waiting = [
                child
                for child in waiting
                if child.exit_code() is None
                and (newest_bytes[child] <= first_bytes[child] or now - changed[child] < STILL_S)
            ]
        self._say(f"stacks of all processes: {self.folder / LOGS}/*.stacks")
        for child in first_bytes:
            if child.stacks_bytes() <= first_bytes[child] and child.exit_code() is None:
                self._say(f"{child.program.name} has written no stacks within {STACKS_S:g} s; {child.state()}.")

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"fleet: {line}\n")
            sys.stderr.flush()
        with contextlib.suppress(OSError), open(self.folder / LOGS / "supervisor.log", "a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")


def _ending(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"
    return "ended by an unexpected error" if code == rules.CRASHED else f"ended with exit code {code}"
