"""Which processes a run has: what they said when they joined, what they do, and for how long they have waited.

Who plays what is not known here (leases.py); this is for refusing what does not belong, and for people.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jaxagent.fleet import wire
from jaxagent.fleet.wire import RefusedCallError

ROLES = ("trainer", "engine")
# With rule `pinned` and exact numerics these are equal in all engines and trainers: a token's bits hang on them.
COMPARED = ("jax", "jaxlib", "xla_flags", "cpu_features", "threads", "device_kind", "program")
ENGINES = ("mesh",)  # likewise, but of engines only: the trainer's is its own
_TRAINER = re.compile(r"(\d{1,9})-t(\d{1,9})-(\d{1,9})")  # the coordinator's epoch, which one it was then, its rank


@dataclasses.dataclass
class Member:
    """A process that joined."""

    name: str
    role: str
    facts: dict[str, Any]
    joined: float  # on the server's clock
    heard_at: float
    phase: str = "joined"
    phase_s: float = 0.0  # for so long, when it said so
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)  # of its newest beat
    waited_s: float = 0.0  # for an answer to `take` (nothing in hand) or to `batch`, as the server saw it
    drain: bool = False
    differs: dict[str, list[Any]] = dataclasses.field(default_factory=dict)  # fact -> [the run's, its own]
    key: str = ""  # that only the process itself has


class Members:
    """Everybody who is there.

    Args:
      config: digest of the run's settings; "" = not compared.
      strict: refuses processes whose facts differ; else they are labelled.
    """

    def __init__(self, run: str, config: str, strict: bool):
        self._run, self._config, self._strict = run, config, strict
        self._all: dict[str, Member] = {}
        self._reference: Member | None = None  # the trainer, or the engine that came first
        self._newest: dict[str, str] = {}  # by rank: the newest trainer process that ever was there
        self._trainers: dict[str, str] = {}  # key -> name, of all trainer processes that ever were there
        self._count = 0
        self.waited_s: dict[str, float] = dict.fromkeys(ROLES, 0.0)  # of all that were ever there

    def check(self, role: str, facts: Mapping[str, Any], run: str, version: int) -> None:
        """Whether a process belongs to this run.

        Raises:
          RefusedCallError: it does not.
        """
        if why := self._why_not(role, facts, run, version):
            raise RefusedCallError("refused", why)

    def _why_not(self, role: str, facts: Mapping[str, Any], run: str, version: int) -> str:
        """Why a process does not belong to this run; "" where it does."""
        if version != wire.WIRE:
            return f"it speaks version {version} of the calls, this coordinator {wire.WIRE}: use one code."
        if role not in ROLES:
            return f"role '{role}' is neither of {', '.join(ROLES)}."
        if run and run != self._run:
            return f"it is of run {run}; this coordinator's is {self._run}: it has another folder."
        if self._config and facts.get("config") != self._config:
            return (
                f"its settings have the digest {facts.get('config')}, this run's {self._config}: start all processes "
                "with the same config file and the same flags."
            )
        differs = self._differences(role, facts)
        is_led = self._reference is not None and self._reference.role == "trainer"  # a trainer has said what is right
        if not differs or not self._strict or (role == "trainer" and not is_led):
            return ""
        pairs = "; ".join(f"{name} is {theirs!r}, not {ours!r}" for name, (ours, theirs) in differs.items())
        return (
            f"tokens would not be equal to the bit, which rule 'pinned' with numerics='exact' needs: {pairs}. "
            "Compared with the trainer, or the engine that came first."
        )

    def add(self, name: str, role: str, facts: Mapping[str, Any], now: float, key: str) -> list[str]:
        """A process that `check` let in. Returns engines that must leave, since the trainer's facts are others."""
        member = Member(name, role, dict(facts), now, now, differs=self._differences(role, facts), key=key)
        out = list[str]()
        if role == "trainer":
            rank = name.rpartition("-")[2]
            self.remove(self._newest.get(rank, ""))
            self._newest[rank] = name
        if not _compares(role, facts):
            pass
        elif role == "trainer":
            self._reference, member.differs = member, {}
            for engine in self.of("engine"):
                engine.differs = self._differences("engine", engine.facts)
                out += [engine.name] if engine.differs and self._strict else []
        elif self._reference is None:
            self._reference = member
        self._all[name] = member
        return out

    def name_of_trainer(self, epoch: int, was: str, rank: int, key: str) -> str:
        """For a trainer that joins: a process keeps the one that it `was`, which says how new it is among its rank.

        So it does where its first call comes a second time, late, or had an answer that was lost: its key is the same.
        Raises RefusedCallError, as `check_newest`.
        """
        was = was or self._trainers.get(key, "")
        if not _TRAINER.fullmatch(was):
            self._count += 1
            was = f"{epoch}-t{self._count}-{rank}"
        self.check_newest(was)
        self._trainers[key] = was
        return was

    def check_newest(self, name: str) -> None:
        """Raises RefusedCallError: a newer process has joined as this trainer, whether that one lives or not."""
        parts = _TRAINER.fullmatch(name)
        newest = _TRAINER.fullmatch(self._newest.get(parts[3], "")) if parts else None
        if parts and newest and [*map(int, parts.groups())] < [*map(int, newest.groups())]:
            raise RefusedCallError(
                "replaced", f"trainer {name} has been replaced by {newest[0]}, which joined later: it must end."
            )

    def get(self, name: str) -> Member | None:
        """Who has the name."""
        return self._all.get(name)

    def of(self, role: str) -> list[Member]:
        """All of a role."""
        return [member for member in self._all.values() if member.role == role]

    def remove(self, name: str) -> Member | None:
        """A process has left, or was silent for too long."""
        member = self._all.pop(name, None)
        if member is not None and member is self._reference and member.role == "engine":
            self._reference = next(iter(self.of("engine")), None)
        return member

    def silent(self, now: float, lease_s: float) -> list[Member]:
        """Trainers that were not heard for so long; the leases tell of engines."""
        return [member for member in self.of("trainer") if now - member.heard_at > lease_s]

    def waited(self, name: str, seconds: float) -> None:
        """A process had nothing to do, and asked for something."""
        member = self._all.get(name)
        if member is not None:
            member.waited_s += seconds
            self.waited_s[member.role] += seconds

    def sources(self, version: int, asks: str) -> tuple[list[str], int]:
        """Where a version's weights may be had, and how many of these are trainer processes, which come last.

        Before them come engines that say they hold it, the idlest first.
        """
        engines = [
            member
            for member in self.of("engine")
            if member.name != asks and member.facts.get("source") and version in _versions(member)
        ]
        engines.sort(key=lambda member: member.numbers.get("sending", 0))
        trainers = {str(member.facts["source"]) for member in self.of("trainer") if member.facts.get("source")}
        urls = dict.fromkeys(str(member.facts["source"]) for member in engines)
        return [url for url in urls if url not in trainers] + sorted(trainers), len(trainers)

    def _differences(self, role: str, facts: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Facts that are not those of the reference; of an engine, also those that are not the first engine's."""
        if not _compares(role, facts):
            return {}
        pairs: list[tuple[Member | None, tuple[str, ...]]] = [(self._reference, COMPARED)]
        if role == "engine":
            pairs.append((next(iter(self.of("engine")), None), ENGINES))
        return {
            name: [other.facts.get(name), facts.get(name)]
            for other, names in pairs
            if other is not None
            for name in names
            if other.facts.get(name) != facts.get(name)
        }


def _compares(role: str, facts: Mapping[str, Any]) -> bool:
    """A trainer that joins only to say that its run is over has no device, and tells nothing to compare."""
    return role != "trainer" or not facts.keys().isdisjoint(COMPARED)


def _versions(member: Member) -> list[int]:
    versions = member.numbers.get("versions", [])
    return versions if isinstance(versions, list) else []
