"""Where an engine process looks for what the trainer has published.

The trainer's folder is read where it is to be seen; else it is fetched over HTTP into a folder of this process, which
hands it on. Whatever comes is compared, byte by byte, with what the coordinator says was published.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from collections.abc import Callable, Mapping

from jaxagent.fleet import weight_reader
from jaxagent.fleet.leaves import Leaves, Path
from jaxagent.fleet.manifest import DamagedError, Manifest, MismatchError, MissingError, WeightsError
from jaxagent.fleet.weight_fetch import WeightFetcher
from jaxagent.fleet.wire import Sources
from jaxagent.models.params import ArraySpec

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Places:
    """Of versions, or of the frozen weights under them."""

    seen: pathlib.Path  # the trainer's folder, which this process may see or not
    own: pathlib.Path  # this process's
    fetcher: WeightFetcher  # into `own`
    fetch_s: float  # longest time for a fetch

    def read(
        self, ask: Callable[[], Sources], like: Mapping[Path, ArraySpec], base: str | None = ""
    ) -> tuple[Manifest, Leaves]:
        """What `ask` names, from the first place that has it as it was published.

        Args:
          ask: what is wanted and who has it; asked again while it is fetched.
          like, base: what it must be, as in `weight_reader.hold`.

        Raises:
          WeightsError: it cannot be had, or is not what was published.
          OSError: the disk is full, or failed.
        """
        sources = ask()
        what = f"version {sources.version} in {self.own.name}"
        try:
            return read(self.seen, sources, like, base)
        except MissingError:
            pass  # another machine's, most likely
        except WeightsError as failure:
            logger.warning("The trainer's folder does not give %s: %s", what, failure)
        try:
            return read(self.own, sources, like, base)
        except MissingError:
            pass
        except WeightsError as failure:
            logger.warning("What lies here of %s is fetched again: %s", what, failure)
            self.fetcher.drop(sources.version)
        self.fetcher.fetch(ask, self.fetch_s, base, like)
        return read(self.own, sources, like, base)


def read(
    folder: pathlib.Path, sources: Sources, like: Mapping[Path, ArraySpec], base: str | None = ""
) -> tuple[Manifest, Leaves]:
    """What lies in a folder, if it is what was published.

    Raises:
      WeightsError: it is not, or is not there.
    """
    with weight_reader.hold(folder, sources.version, sources.lineage, base, like) as held:
        if held.manifest.digest != sources.digest:
            raise MismatchError(
                f"{folder} has version {sources.version} with digest {held.manifest.digest}, and "
                f"{sources.digest} was published."
            )
        try:
            return held.manifest, held.read()
        except FileNotFoundError as failure:  # deleted meanwhile, where the file system has no locks
            raise DamagedError(str(failure)) from None
