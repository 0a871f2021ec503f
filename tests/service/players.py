"""Players for nodes that are processes of their own. No jax, so that they start at once."""

import asyncio
import contextlib
import pathlib

from jaxagent.service.play import of_rollout
from tests.service.cluster import episode


@contextlib.contextmanager
def patient(here):
    """Plays as long as the task's file `hold` exists, and notes each begin in its file `begun`."""

    async def rollout(task, sample):
        with pathlib.Path(task.metadata["begun"]).open("a") as begun:
            begun.write(f"{sample}\n")
        while pathlib.Path(task.metadata["hold"]).exists():
            await asyncio.sleep(0.02)
        return episode(task, sample)

    yield of_rollout(rollout)
