"""`seed_of`: the seed of a task that is nothing but a seed, as `config.data.source=seeds` makes them."""

import hashlib

from jaxagent.types import Task


def seed_of(task: Task) -> int:
    """The seed of a task, from its metadata or else from its id: below 2**31. Raises ValueError: the metadata's seed is
    no such number."""
    if "seed" not in task.metadata:
        return int.from_bytes(hashlib.blake2b(task.id.encode(), digest_size=4).digest(), "big") >> 1
    seed = task.metadata["seed"]
    if type(seed) is not int or not 0 <= seed < 2**31:
        raise ValueError(f"metadata['seed'] of task {task.id!r} must be a whole number below 2**31, got {seed!r}")
    return seed
