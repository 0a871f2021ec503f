"""What each tracker's package is told of a run, by the process that track.py is. Their names are those of `TRACKERS`.

All get the same calls, and raise whatever they like. `sent` numbers what one is told, over all starts of a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import netrc
import os
import re
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PROJECT = "jaxagent"  # where the package's own variable names no other
COLUMNS = ("step", "task", "attempt", "prompt", "answer", "reward", "stop")  # of an episode in a table
CONNECT_S = 20.0  # for wandb's first word with its server, before it goes on offline
_MLFLOW_CHARS = 6000  # of a parameter's value


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """What a tracker opens a run by."""

    workdir: Path
    id: str  # what the tracker knows it by since an earlier start; "" for a new one
    fresh: str  # an id for a new one
    config: Mapping[str, Any]  # config.json
    process: int  # the one that trains


class Wandb:
    """Weights & Biases: online where a key is there, else offline, into the run's folder."""

    def __init__(self, run: TrackedRun, folder: Path):
        import wandb

        self._wandb, self.id, self.note = wandb, run.id or run.fresh, ""
        self._stages: set[str] = set()
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        settings = {
            "console": "off",
            "silent": True,
            "save_code": False,
            "disable_git": True,
            "x_stats_pid": run.process,
        }

        def start(mode: str) -> Any:
            own = wandb.Settings(**settings, init_timeout=CONNECT_S)
            where = {"project": project, "dir": str(folder), "mode": mode, "settings": own}
            return wandb.init(id=self.id, name=run.workdir.name, resume="allow", **where)

        mode = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
        try:
            self._run = start(mode)
        except Exception as error:
            if mode != "online":
                raise
            self.note = f"{error}; it goes on offline. "
            wandb.teardown()
            self._run = start("offline")
        self._run.config.update(dict(run.config), allow_val_change=True)
        if self._run.settings.mode == "offline":
            self.note += f"`wandb sync {folder}/wandb/offline-run-*-{self.id}` sends the run"
        else:
            self.note = self._run.url or ""

    def record(self, stage: str, step: int, metrics: Mapping[str, float], sent: int) -> None:
        """One record; its curves are over the step of its stage, since wandb's own steps only grow."""
        if stage not in self._stages:
            self._stages.add(stage)
            self._run.define_metric(f"{stage}/step", hidden=True)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        self._log({f"{stage}/step": step, **{f"{stage}/{name}": value for name, value in metrics.items()}}, sent)

    def episodes(self, log: str, step: int, rows: Sequence[Sequence[Any]], sent: int) -> None:
        """A table of episodes."""
        table = self._wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self._log({f"episodes/{log}": table}, sent)

    def alarm(self, title: str, text: str, step: int) -> None:
        """What the page of alarms shows, and a mail says where the user wants one."""
        self._run.alert(title=title, text=text, level=self._wandb.AlertLevel.WARN)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """None: the run has been interrupted."""
        for name, value in flat(summary or {}).items():
            self._run.summary[f"summary/{name}"] = value
        self._run.finish(exit_code=0 if summary is not None else 1)

    def _log(self, values: Mapping[str, Any], sent: int) -> None:
        self._run.log(dict(values), step=max(sent, self._run.step), commit=True)


def _has_wandb_key() -> bool:
    host = urllib.parse.urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    with contextlib.suppress(OSError, netrc.NetrcParseError, RuntimeError):
        return netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc").authenticators(host) is not None
    return False


class MLflow:
    """MLflow: the store that MLFLOW_TRACKING_URI names, else a file of SQLite beside the run's folder."""

    def __init__(self, run: TrackedRun, folder: Path):
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, beside = Metric, run.workdir.absolute().parent
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(uri or f"sqlite:///{beside}/mlflow.db")
        if run.id:
            self.id = run.id
            self._client.update_run(self.id, "RUNNING")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            if experiment := self._client.get_experiment_by_name(name):
                experiment_id = experiment.experiment_id
            else:
                experiment_id = self._client.create_experiment(name, None if uri else (beside / "mlartifacts").as_uri())
            self.id = self._client.create_run(experiment_id, run_name=run.workdir.name).info.run_id
        self._tables: list[str] = []
        self.note = "" if uri else f"`mlflow ui --backend-store-uri sqlite:///{beside}/mlflow.db` shows the run"
        there = self._client.get_run(self.id).data
        config = {
            _mlflow_name(name): str(value)[:_MLFLOW_CHARS] for name, value in flat(run.config, all_kinds=True).items()
        }
        new = [Param(name, value) for name, value in config.items() if name not in there.params]
        for begin in range(0, len(new), 100):  # as many as a request may have
            self._client.log_batch(self.id, params=new[begin : begin + 100])
        for name, value in config.items():
            if there.params.get(name, value) != value:  # a parameter stays as it was first said
                self._client.set_tag(self.id, f"changed.{name}", value)

    def record(self, stage: str, step: int, metrics: Mapping[str, float], sent: int) -> None:
        """One record. Of two values at a step the later one counts, and the store keeps both."""
        now = int(time.time() * 1000)
        values = [self._metric(_mlflow_name(f"{stage}/{name}"), value, now, step) for name, value in metrics.items()]
        for begin in range(0, len(values), 500):
            self._client.log_batch(self.id, metrics=values[begin : begin + 500])

    def episodes(self, log: str, step: int, rows: Sequence[Sequence[Any]], sent: int) -> None:
        """A table of episodes, an artifact."""
        file = f"episodes/{log}.{step:06d}.json"
        self._client.log_dict(self.id, {"columns": list(COLUMNS), "data": [list(row) for row in rows]}, file)
        self._tables.append(file)
        shown = [{"path": path, "type": "table"} for path in self._tables[-20:]]
        self._client.set_tag(self.id, "mlflow.loggedArtifacts", json.dumps(shown))  # what its page shows as tables

    def alarm(self, title: str, text: str, step: int) -> None:
        """A tag, the only place for words."""
        self._client.set_tag(self.id, _mlflow_name(f"alarm.{title}"), f"step {step}: {text}")

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """None: the run has been interrupted."""
        if summary is not None:
            self._client.log_dict(self.id, dict(summary), "summary.json")
            self.record("summary", 0, flat(summary), 0)
        self._client.set_terminated(self.id, "FINISHED" if summary is not None else "KILLED")


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:250]


class Trackio:
    """Trackio: its folder in the user's home, or the Space that TRACKIO_SPACE_ID names."""

    def __init__(self, run: TrackedRun, folder: Path):
        import trackio

        self._trackio, self.id = trackio, run.id or f"{run.workdir.name}-{run.fresh}"
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        config = {name: value for name, value in run.config.items() if not name.startswith("_")}
        self._run = trackio.init(project=project, name=self.id, resume="allow", config=config, embed=False)
        self.note = f"`trackio show --project {project}` shows the run"

    def record(self, stage: str, step: int, metrics: Mapping[str, float], sent: int) -> None:
        """One record. A second one at a step stands beside the first."""
        self._run.log({f"{stage}/{name}": value for name, value in metrics.items()}, step=step)

    def episodes(self, log: str, step: int, rows: Sequence[Sequence[Any]], sent: int) -> None:
        """A table of episodes."""
        table = self._trackio.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self._run.log({f"episodes/{log}": table}, step=step)

    def alarm(self, title: str, text: str, step: int) -> None:
        """An alert."""
        self._run.alert(title, text, level=self._trackio.AlertLevel.WARN, step=step)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """None: the run has been interrupted."""
        if summary:
            self._run.log({f"summary/{name}": value for name, value in flat(summary).items()})
        self._run.finish()


TRACKERS = {"wandb": Wandb, "mlflow": MLflow, "trackio": Trackio}


def flat(values: Mapping[str, Any], all_kinds: bool = False, prefix: str = "") -> dict[str, Any]:
    """{"rl.steps": 70}: the numbers in a nested dict, or all that it has, under dotted names."""

    def leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in values.items():
            if isinstance(value, Mapping):
                yield from leaves(value, f"{prefix}{name}.")
            elif all_kinds or (isinstance(value, (int, float)) and not isinstance(value, bool)):
                yield f"{prefix}{name}", value

    return dict(leaves(values, prefix))
