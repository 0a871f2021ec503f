"""Which back end works here: each is made and tried with a real sandbox, best first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from jaxagent.config import ConfigError, nearest
from jaxagent.sandbox import init_program
from jaxagent.sandbox.apptainer import Apptainer
from jaxagent.sandbox.base import Backend, SandboxError, Spec
from jaxagent.sandbox.bubblewrap import Bubblewrap
from jaxagent.sandbox.container_engine import CGROUPFS, ContainerEngine
from jaxagent.sandbox.local import Plain
from jaxagent.sandbox.namespaces import Namespaces
from jaxagent.sandbox.owner import Owner

PROBE_TIMEOUT_S = 120.0
SAFE: dict[str, Callable[[Owner], Backend]] = {  # best first
    "namespaces": Namespaces,
    "bubblewrap": Bubblewrap,
    "podman": lambda owner: ContainerEngine(owner, ("podman",)),
    "podman-cgroupfs": lambda owner: ContainerEngine(owner, CGROUPFS),
    "docker": lambda owner: ContainerEngine(owner, ("docker",)),
    "apptainer": Apptainer,
}
UNSAFE: dict[str, Callable[[Owner], Backend]] = {"plain": Plain}
FORMER = {"namespaces-python": "namespaces"}  # in configs of runs that began before


async def probe(make: Callable[[Owner], Backend], owner: Owner, spec: Spec | None = None) -> Backend:
    """Makes a back end and runs one command and one file through it.

    Args:
      spec: what to start; engines need an image or a root.

    Raises:
      SandboxError: it does not work here, with the reason.
    """
    backend = await asyncio.to_thread(make, owner)  # engines ask their command line
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S), await backend.start(spec or Spec()) as sandbox:
            path = f"/tmp/jaxagent-probe-{owner.id}"
            await sandbox.write(path, b"42")
            result = await sandbox.run(f"cat {path} && rm {path}", 30.0, 1000)
            if result.output != b"42" or result.exit_code != 0:
                raise SandboxError(f"a probe printed {result.output[:200]!r} with status {result.exit_code}")
    except BaseException as failure:
        await backend.close()
        if isinstance(failure, ConfigError | OSError) and not isinstance(failure, TimeoutError):
            raise SandboxError(str(failure)) from failure
        if isinstance(failure, TimeoutError):
            raise SandboxError(f"no answer in {PROBE_TIMEOUT_S:g} s") from failure
        raise
    return backend


async def choose_backend(
    owner: Owner, names: Sequence[str] = tuple(SAFE), unsafe: bool = False, spec: Spec | None = None
) -> Backend:
    """The first of `names` that works; with `unsafe`, plain processes after them.

    Args:
      spec: what the run will start; a back end that cannot is passed over.
      names: keys of `SAFE`, best first. Remote workers are not looked for: see `remote.Remote`.

    Raises:
      ConfigError: an unknown name, or nothing works; each back end's reason is in the message. Or the program that
        every back end needs is not here: see `init_program.find`.
    """
    makers = {**SAFE, **(UNSAFE if unsafe else {})}
    reasons = []
    await asyncio.to_thread(init_program.find, owner.path)  # else it would be the reason of each of them
    for name in dict.fromkeys([*(FORMER.get(name, name) for name in names), *(UNSAFE if unsafe else ())]):
        if name not in makers:
            hint = " (it needs the unsafe flag)" if name in UNSAFE else nearest(name, makers)
            raise ConfigError(f"sandbox back end '{name}' is not known{hint}")
        try:
            return await probe(makers[name], owner, spec)
        except SandboxError as failure:
            reasons.append(f"{name}: {failure}")
    raise ConfigError("no sandbox back end works here: " + "; ".join(reasons))
