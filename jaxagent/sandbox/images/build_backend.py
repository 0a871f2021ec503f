"""The sandboxes that build steps run in: namespaces, where changes of owner are pretended and the network may be on."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from jaxagent.sandbox import seccomp
from jaxagent.sandbox.base import MIB, Limits
from jaxagent.sandbox.namespaces import Namespaces
from jaxagent.sandbox.owner import Owner
from jaxagent.sandbox.root import Roots, give

LIMITS = Limits(  # of one step; what it writes lies in memory until the step is kept
    memory_bytes=4096 * MIB,
    disk_bytes=8192 * MIB,
    inodes=1_000_000,
    processes=1024,
    cpus=float(os.cpu_count() or 1),
    flood_bytes=1024 * MIB,
)


class BuildBackend(Namespaces):
    """Sandboxes of build steps: one host user owns all layers, and a step may change the whole root.

    Args:
      network: share the host's network, its local services included. Only for recipes that you trust.
      roots: those of another back end of this owner, which has made them already.
    """

    separates = False  # what it keeps belongs to the one user of all layers
    protects = False  # a step may install programs, whatever user it runs as

    def __init__(self, owner: Owner, network: bool = False, roots: Roots | None = None):
        super().__init__(owner)
        self.network = network
        self.filter = self.filter_of_root = seccomp.program(pretend=True, tracing=True)
        own = Path(tempfile.mkdtemp(prefix="build-", dir=owner.path))
        own.chmod(0o755)
        self.roots = roots or Roots(own, self.uid)
        self._network_layer = own / "network"

    def network_layer(self) -> tuple[str, ...]:
        """What goes on top of the layers of a step that has the network, and is not kept: who knows names."""
        if not self.network:
            return ()
        directory = self._network_layer
        if not directory.is_dir():
            (directory / "etc").mkdir(parents=True)
            for name in ("resolv.conf", "hosts"):
                (directory / "etc" / name).write_bytes(Path("/etc", name).read_bytes())
            give(self.uid, directory, *directory.rglob("*"))
        return (str(directory),)
