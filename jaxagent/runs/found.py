"""What a workdir holds when a run is opened in it: the newest bundle, and whether this config can go on from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxagent.config import Config, ConfigError
from jaxagent.learner import checkpoint, peers
from jaxagent.observe import jsonl
from jaxagent.observe.files import (
    CHECKPOINTS_FOLDER,
    EPISODES_FILE,
    EPISODES_FOLDER,
    METRICS_FILE,
    POLICY_FOLDER,
    RUN_FILE,
    SUMMARY_FILE,
)
from jaxagent.runs import provenance, resume


@dataclasses.dataclass(frozen=True)
class Found:
    """What there is to go on from."""

    starts: dict[str, Any]  # of run.json
    bundle: int | None = None  # the newest
    host: dict[str, Any] = dataclasses.field(default_factory=dict)  # its host side; {} for a new run
    changed: list[tuple[str, Any, Any]] = dataclasses.field(default_factory=list)  # config fields, which are taken


def find(cfg: Config, note: Callable[[str], None]) -> Found:
    """Reads what the workdir holds, and changes nothing.

    Args:
      cfg: of the run.
      note: is told what a user should know.

    Raises:
      ConfigError: the run cannot be continued with this config, or from what is there.
    """
    workdir = Path(cfg.workdir)
    starts = provenance.read(workdir / RUN_FILE)
    if found := checkpoint.bundles(workdir / CHECKPOINTS_FOLDER):
        return _of_bundle(cfg, workdir, found[-1], starts, note)
    _check_nothing_is_lost(workdir, starts, note)
    return Found(starts)


def _of_bundle(cfg: Config, workdir: Path, bundle: int, starts: dict[str, Any], note: Callable[[str], None]) -> Found:
    """The newest bundle, and whether this config and these logs can go on from it."""
    directory = workdir / CHECKPOINTS_FOLDER
    # Of several processes the first one looks, and ends all where it is damaged.
    if peers.is_first() and not checkpoint.check(directory, bundle):
        note(f"{directory / str(bundle)} has no digests: it is read unchecked.")
    host = checkpoint.read_host(directory, bundle)
    adapting = host["stage"] in ("opd", "rl")
    changed = resume.check_config(host["config"], cfg, str(directory / str(bundle)), adapting)
    jsonl.check(workdir / METRICS_FILE, host["metrics_position"], parse=True)
    jsonl.check(workdir / EPISODES_FILE, host["episodes_position"], parse=False)
    for name, position in host.get("episode_positions", {}).items():
        jsonl.check(workdir / EPISODES_FOLDER / f"{name}.jsonl", position, parse=False)
    return Found(starts, bundle, host, changed)


def _check_nothing_is_lost(workdir: Path, starts: dict[str, Any], note: Callable[[str], None]) -> None:
    """Records without a bundle are those of a run that was killed before its first one, or lost their bundles."""
    records = jsonl.count(workdir / METRICS_FILE)
    exported = (workdir / SUMMARY_FILE).exists() or (workdir / POLICY_FOLDER).exists()
    had = starts["checkpointed"] or exported or not (workdir / CHECKPOINTS_FOLDER).is_dir()
    if records and had:
        raise ConfigError(
            f"{workdir} holds {records} records and no checkpoint: use another workdir, or delete "
            f"{workdir / METRICS_FILE} to begin anew."
        )
    if records:
        note(f"{workdir} has no checkpoint yet: its {records} records are made again.")
