"""Which sandbox back ends work on this machine: each is tried with a real sandbox.

    python -m jaxagent.sandbox

One line per back end, the best first: what protection it lacks here, or why it does not work. A run takes the first
that works (`env.*.sandbox.backend = "auto"`). Exit status 0 when one works, 1 when none does.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from jaxagent.config import ConfigError
from jaxagent.sandbox import choose, init_program
from jaxagent.sandbox.base import SandboxError
from jaxagent.sandbox.owner import Owner


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser("python -m jaxagent.sandbox", description=__doc__, formatter_class=form).parse_args(argv)
    try:
        owner = Owner()
    except SandboxError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    try:
        init_program.find(owner.path)  # all of them need it
        working = asyncio.run(_try_all(owner))
    except ConfigError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    finally:
        owner.close()
    print(f"a run takes: {working[0]}" if working else "none works here: docs/sandboxes.md says what each needs")
    return 0 if working else 1


async def _try_all(owner: Owner) -> list[str]:
    """Names of those that work."""
    working = []
    for name, make in choose.SAFE.items():
        try:
            backend = await choose.probe(make, owner)
        except SandboxError as failure:
            print(f"{name}: does not work here: {failure}", flush=True)
            continue
        print(f"{name}: works; missing: {'; '.join(backend.missing) or 'nothing'}", flush=True)
        working.append(name)
        await backend.close()
    return working


if __name__ == "__main__":
    sys.exit(main())
