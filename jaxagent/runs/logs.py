"""`Logs`: what a run writes as it goes: metrics, alarms, and every episode, whole, with what the trainer made of it.

A bundle keeps the position in each: what a log holds beyond it is dropped when the run goes on. Of a trainer's several
processes, process 0 writes what all have in common.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxagent.algorithms.streams import Streams
from jaxagent.config import Config, EpisodesConfig, to_dict
from jaxagent.data.episode_log import EVALUATION
from jaxagent.io import files
from jaxagent.learner import peers
from jaxagent.observe import episode_index, jsonl
from jaxagent.observe.alarms import Watch
from jaxagent.observe.episode_store import INDEX, EpisodeStore, Learnt
from jaxagent.observe.files import EPISODES_FILE, EPISODES_FOLDER, METRICS_FILE
from jaxagent.observe.metrics import MetricsWriter
from jaxagent.types import Episode


class Logs:
    """Closed until `open`, which drops what the files hold beyond the bundle."""

    def __init__(self, cfg: Config, host: Mapping[str, Any], note: Callable[[str], None]):
        self._workdir, self._note = Path(cfg.workdir), note
        self._keep, self._trackers = cfg.kept_episodes, cfg.trackers
        self._metrics_position = host.get("metrics_position", 0)
        self._blocks: dict[str, int] = dict(host.get("episode_blocks", {}))
        self._earlier = {  # logs of earlier versions: from a bundle of this one on nothing is added to them
            EPISODES_FILE: host.get("episodes_position"),
            **{f"{EPISODES_FOLDER}/{name}.jsonl": at for name, at in host.get("episode_positions", {}).items()},
        }
        self._metrics: MetricsWriter | None = None  # None in a process that does not write
        self._alarms = Watch(to_dict(cfg))
        self._episodes: dict[str, EpisodeStore] = {}
        self._told: set[str] = set()  # logs of which it was said that some of their episodes are given up
        self._stack = contextlib.ExitStack()

    def open(self) -> None:
        """Opens metrics and the logs of episodes that there are, where this process writes them."""
        if not peers.is_first():
            return
        self._metrics = MetricsWriter(self._workdir, self._metrics_position, self._trackers, self._note)
        self._stack.callback(self._metrics.close)
        for record in jsonl.read(self._workdir / METRICS_FILE):
            self._alarms.add(record)
        for name, position in self._earlier.items():
            if position is not None and (self._workdir / name).exists():
                jsonl.JsonlLog(self._workdir / name, position).close()
        folder = self._workdir / EPISODES_FOLDER
        for name, position in list(self._blocks.items()):
            new = episode_index.mended(folder, name, position, always_kept(self._keep, name))
            if new is not None:
                files.replace(folder / f"{name}{INDEX}", new)
                self._blocks[name] = position if new else 0
        for path in sorted(folder.glob(f"*{INDEX}")):
            self._log(path.stem)

    def close(self) -> None:
        """Closes what is open."""
        self._stack.close()

    @property
    def positions(self) -> dict[str, Any]:
        """What a bundle keeps of them: all that they hold is on disk by then."""
        for log in self._episodes.values():
            log.wait()
        return {
            "metrics_position": self._metrics.position if self._metrics else 0,
            "episode_blocks": {name: log.position for name, log in self._episodes.items()},
        }

    @property
    def dropped_trackers(self) -> dict[str, str]:
        """Trackers that are told nothing any more, and why."""
        return dict(self._metrics.dropped) if self._metrics else {}

    def end_tracking(self) -> None:
        """Gives trackers the time to send what is left of a run that has its summary."""
        if self._metrics:
            for log in self._episodes.values():
                log.wait()
            self._metrics.end_tracking(finished=True)

    def metrics(self, stage: str, step: int, metrics: Mapping[str, float | None]) -> None:
        """One line of metrics.jsonl, which trackers get, too; says which alarms begin or end with it."""
        if self._metrics:
            self._metrics.write(stage, step, metrics)
            for alarm in self._alarms.add(jsonl.plain({"stage": stage, "step": step, **metrics})):
                self._note(alarm.text)

    def keep(
        self,
        name: str,
        step: int,
        episodes: Iterable[Episode],
        learnt: Mapping[int, Learnt] = types.MappingProxyType({}),
    ) -> None:
        """Appends whole episodes to a log, with what was learnt of them in this step.

        `name` is the stage's, or "<stage>.eval" for held-out tasks.
        """
        if peers.is_first() and (self._keep.keep != "none" or always_kept(self._keep, name)):
            log = self._log(name)
            log.append(step, episodes, learnt)
            if log.dropped and name not in self._told:
                self._told.add(name)
                self._note(
                    f"episodes of '{name}': tokens of some are given up, since config.episodes.keep is "
                    f"'{self._keep.keep}'. Said once; the index has a row for each."
                )

    def _log(self, name: str) -> EpisodeStore:
        if name not in self._episodes:
            folder, position = self._workdir / EPISODES_FOLDER, self._blocks.get(name, 0)
            log = EpisodeStore(folder, name, position, self._keep, always_kept(self._keep, name))
            self._episodes[name] = log
            self._stack.callback(log.close)
        return self._episodes[name]


def always_kept(keep: EpisodesConfig, name: str) -> bool:
    """Whether stages learn from the log `name`, so that it is kept whole in any case."""
    return name == "sample" or (keep.learn and not name.endswith(EVALUATION))


def learnt_of(streams: Sequence[Streams], scored: Mapping[int, np.ndarray]) -> dict[int, Learnt]:
    """What a step's streams say of each trajectory, by its id.

    The trainer's log-probs are those of its first scoring, where a choice reads them, or those that the update which
    trained the trajectory started from (`scored`, f32[T] by id); of tokens that nothing counted they are not known.
    """
    learnt = {}
    for stream in streams:
        trajectory, counted = stream.trajectory, stream.policy_weights != 0
        logprobs, known = scored.get(id(trajectory), trajectory.logprobs), counted & (id(trajectory) in scored)
        if stream.old_logprobs is not trajectory.logprobs:
            logprobs, known = stream.old_logprobs, trajectory.action_mask
        said = np.where(known, logprobs, np.nan).astype(np.float32)
        learnt[id(trajectory)] = Learnt(stream.advantages, said, counted)
    return learnt
