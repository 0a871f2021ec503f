"""Which tasks are proven: whoever does what the row says solves it, scores 1, and who does nothing scores 0.

`python -m jaxagent.envs.check` plays both and writes a line per task beside the data, into `files.PROVEN` of a folder
or FILE.proven.jsonl: {"id", "task" (digest of the row), "oracle", "idle", "error"}. The last line on a task counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.data import files
from jaxagent.data.sources import TaskSource
from jaxagent.types import Task


def place(dataset: Path) -> Path:
    """Where the proofs of a data set are."""
    return dataset / files.PROVEN if dataset.is_dir() else dataset.with_name(f"{dataset.name}.{files.PROVEN}")


def read(path: Path) -> dict[str, Mapping[str, Any]]:
    """What is known of tasks, by the digests of their rows. A last line that a kill has cut off says nothing.

    Raises ConfigError where another line is none of a proof.
    """
    latest: dict[str, Mapping[str, Any]] = {}
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True) if path.is_file() else [], 1):
        if line.endswith(b"\n"):
            proof = files.from_json(line, f"{path}, line {number}")
            if not isinstance(proof, dict) or not isinstance(proof.get("task"), str):
                raise ConfigError(
                    f"{path}, line {number} is no proof of a task: make it anew with jaxagent.envs.check."
                )
            latest[proof["task"]] = proof
    return latest


def drop_cut_line(path: Path) -> None:
    """Removes what a kill has left of a last line: what is written next would be part of it."""
    if path.is_file():
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def is_proven(proof: Mapping[str, Any] | None) -> bool:
    """Whether the solution scores 1 and doing nothing 0."""
    return proof is not None and proof.get("oracle") == 1.0 and proof.get("idle") == 0.0


def check(
    train: TaskSource, held_out: TaskSource, datasets: Sequence[Path], content: Callable[[Task], str], refuses: bool
) -> str:
    """What to say of tasks that no proof beside or in `datasets` proves; "" = nothing: all are proven.

    Args:
      content: gives a digest of what a task's row only names, as proofs have it.

    Raises:
      ConfigError: there are such, and `refuses` is set.
    """
    proofs: dict[str, Mapping[str, Any]] = {}
    for dataset in datasets:
        proofs |= read(place(dataset))
    lacks = [
        [
            (source.ids[i], row)
            for i, row in enumerate(source.digests)
            if not is_proven(proof := proofs.get(row, {}))
            or ("content" in proof and proof["content"] != content(source[i]))
        ]
        for source in (train, held_out)
    ]
    if not any(lacks):
        return ""
    failed = sum(digest in proofs and not is_proven(proofs[digest]) for _, digest in lacks[0] + lacks[1])
    line = (
        f"{len(lacks[0])} of {len(train)} training and {len(lacks[1])} of {len(held_out)} held-out tasks are not "
        f"proven by their solutions ({failed} were tried and failed)"
    )
    if refuses:
        first = ", ".join(id for id, _ in (lacks[0] + lacks[1])[:3])
        raise ConfigError(
            f"data.unchecked=refuse: {line}, the first {first}. python -m jaxagent.envs.check proves them."
        )
    return line
