"""Earlier versions as the trainer trained them, read again from what it has published."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxagent.fleet import weight_reader, weights
from jaxagent.fleet.manifest import MissingError, WeightsError
from jaxagent.fleet.whereabouts import WEIGHTS
from jaxagent.fleet.wire import Sources
from jaxagent.fleet.worker import WAITING
from jaxagent.models import lora, params
from jaxagent.models.params import Params
from jaxagent.runs.fleet import places, trees
from jaxagent.runs.parts import Parts


class Link(Protocol):
    """Who knows which weights were published: `fleet.client.Client`."""

    def weights(self, version: int) -> Sources | None:
        """Where a version's weights are; None: it is not published."""
        ...

    def status(self) -> Mapping[str, Any]:
        """What the coordinator tells people."""
        ...


@dataclasses.dataclass(frozen=True)
class Published:
    """What `Sink.held` gives in a fleet: so a trainer keeps no earlier version on its devices.

    Where several processes share the trainer's mesh, each of them has to ask for the same versions.
    """

    parts: Parts
    link: Link
    folder: pathlib.Path  # of all versions
    note: Callable[[str], None]  # prints a line
    _deleted: set[int] = dataclasses.field(default_factory=set)  # versions that were found so

    def trained(self, version: int) -> Params | None:
        """All weights of a version, or its adapters, in the dtypes in which they are trained; None: it is deleted.

        A version that cannot be read for another reason is not held either. Both are told: the run does not need it.
        """
        lora_config = self.parts.cfg.model.lora
        adapted = lora_config is not None
        spec = self.parts.spec
        specs: Any = lora.adapter_specs(spec, lora_config) if adapted else params.param_specs(spec)
        try:
            sources = self.link.weights(version)
            if sources is None:
                return None
            _, found = places.read(
                self.folder, sources, *((trees.paths(specs), None) if adapted else (trees.of_floats(specs), ""))
            )
        except MissingError:
            if not self._deleted:
                self.note(
                    f"the tokens of version {version} are not scored again: it is deleted. Said once; "
                    "logprob_gap/scored_frac has the rest."
                )
            self._deleted.add(version)
            return None
        except WeightsError as failure:
            self.note(f"the tokens of version {version} are not scored again: {failure}")
            return None
        return trees.placed(found, specs, self.parts.mesh, lambda path, array: array.dtype)


def lacking(link: Link, folder: pathlib.Path, version: int, tick: Callable[[], None] = lambda: None) -> str:
    """Why nobody can have a version's weights; "" where somebody can. Reads all of them where no engine has them.

    Args:
      link: to the coordinator.
      folder: of all versions, here.
      version: which.
      tick: called again and again while they are read.
    """
    sources = link.weights(version)
    if sources is None:
        return f"version {version} is not published."
    if any(_may_have(row, version) for row in link.status()["members"]["engine"].values()):
        return ""
    try:
        with weight_reader.Held(weights.path_of(folder, version)) as held:
            held.compare(tick)
    except WeightsError as failure:
        return str(failure)
    return ""


def _may_have(engine: Mapping[str, Any], version: int) -> bool:
    """Whether an engine has a version whole, for all that is known: one that waits for weights serves parts, too."""
    return engine["phase"] not in (WEIGHTS, WAITING) and version in engine["numbers"].get("versions", [])
