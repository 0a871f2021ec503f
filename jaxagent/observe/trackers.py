"""What each tracker's package is told of a run, by the process that track.py is."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxagent.io import files

PROJECT = "jaxagent"  # where the package's own variable names no other
COLUMNS: list[Any] = ["step", "task", "attempt", "prompt", "answer", "reward", "stop"]  # of an episode in a table
CONNECT_S = 20.0  # for wandb's first word with its server, before it goes on offline


class Tracker(NamedTuple):
    """A run that is open at a tracker; its functions raise whatever the package does."""

    id: str  # what the tracker knows it by
    note: str  # where to look
    record: Callable[[str, int, Mapping[str, float], int], None]  # stage, step, numbers, calls before, of all starts
    episodes: Callable[[str, int, Sequence[Sequence[Any]], int], object]  # log, step, rows of a table, calls before
    alarm: Callable[[str, str, int], object]  # title, text, step
    finish: Callable[[Mapping[str, Any] | None], None]  # the summary; None: the run was interrupted


def open_wandb(workdir: Path, folder: Path, known_as: str, fresh: str, config: Mapping[str, Any]) -> Tracker:
    """Weights & Biases: online where that works, else offline, into `folder`."""
    import wandb

    def start(mode: Any) -> Any:
        settings = wandb.Settings(
            console="off",
            silent=True,
            save_code=False,
            disable_git=True,
            init_timeout=CONNECT_S,
            x_stats_pid=os.getppid(),
        )
        project, name = os.environ.get("WANDB_PROJECT", PROJECT), workdir.name
        return wandb.init(
            project=project, id=known_as or fresh, name=name, resume="allow", dir=folder, mode=mode, settings=settings
        )

    note = ""
    try:
        run = start(None)  # as WANDB_MODE says, else online
    except Exception as error:  # there is no key, or no answer
        note = f"{error}; it goes on offline. "
        wandb.teardown()
        run = start("offline")
    run.config.update(dict(config), allow_val_change=True)
    folders = f"{shlex.quote(f'{folder}/wandb')}/offline-run-*-{run.id}"
    note += f"`wandb sync {folders}` sends the run" if run.settings.mode == "offline" else run.url or ""
    stages = set[str]()

    def log(values: Mapping[str, Any], calls: int) -> None:
        run.log(dict(values), step=max(calls, run.step), commit=True)

    def record(stage: str, step: int, numbers: Mapping[str, float], calls: int) -> None:
        if stage not in stages:  # curves are over the step of the stage: wandb's own steps only grow
            stages.add(stage)
            run.define_metric(f"{stage}/step", hidden=True)
            run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        log({f"{stage}/step": step, **{f"{stage}/{name}": value for name, value in numbers.items()}}, calls)

    def finish(summary: Mapping[str, Any] | None) -> None:
        for name, value in flat(summary or {}).items():
            run.summary[f"summary/{name}"] = value
        run.finish(exit_code=0 if summary is not None else 1)

    return Tracker(
        run.id,
        note,
        record,
        lambda log_name, step, rows, calls: log(
            {f"episodes/{log_name}": wandb.Table(columns=COLUMNS, data=list(rows))}, calls
        ),
        lambda title, text, step: run.alert(title, text, level="WARN"),
        finish,
    )


def open_mlflow(workdir: Path, folder: Path, known_as: str, fresh: str, config: Mapping[str, Any]) -> Tracker:
    """MLflow: the store that MLFLOW_TRACKING_URI names, else a file of SQLite beside the workdir."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    beside, uri = workdir.absolute().parent, os.environ.get("MLFLOW_TRACKING_URI")
    store, name = f"sqlite:///{beside}/mlflow.db", os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    # Of runs that begin together only one can make the tables and the experiment.
    with files.one_at_a_time(beside / ".mlflow.lock"):
        client = MlflowClient(uri or store)
        if known_as:
            client.update_run(known_as, "RUNNING")
        else:
            experiment = client.get_experiment_by_name(name)
            artifacts = None if uri else (beside / "mlartifacts").as_uri()
            number = experiment.experiment_id if experiment else client.create_experiment(name, artifacts)
            known_as = client.create_run(number, run_name=workdir.name).info.run_id

    def legal(name: str) -> str:
        return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:250]

    there = client.get_run(known_as).data.params
    now = {legal(name): str(value)[:6000] for name, value in flat(config, of_any_kind=True).items()}
    new = [Param(name, value) for name, value in now.items() if name not in there]
    for begin in range(0, len(new), 100):  # as many as a request may have
        client.log_batch(known_as, params=new[begin : begin + 100])
    for name, value in now.items():
        if there.get(name, value) != value:  # a parameter stays as it was first said
            client.set_tag(known_as, f"changed.{name}", value)

    def record(stage: str, step: int, numbers: Mapping[str, float], calls: int) -> None:
        at = int(time.time() * 1000)
        metrics = [Metric(legal(f"{stage}/{name}"), value, at, step) for name, value in numbers.items()]
        for begin in range(0, len(metrics), 500):
            client.log_batch(known_as, metrics=metrics[begin : begin + 500])

    def finish(summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            client.log_dict(known_as, dict(summary), "summary.json")
            record("summary", 0, flat(summary), 0)
        client.set_terminated(known_as, "FINISHED" if summary is not None else "KILLED")

    return Tracker(
        known_as,
        "" if uri else f"`mlflow ui --backend-store-uri {shlex.quote(store)}` shows the run",
        record,
        lambda log, step, rows, calls: client.log_dict(
            known_as, {"columns": COLUMNS, "data": rows}, f"episodes/{log}.{step:06d}.json"
        ),
        lambda title, text, step: client.set_tag(known_as, legal(f"alarm.{title}"), f"step {step}: {text}"),
        finish,
    )


def open_trackio(workdir: Path, folder: Path, known_as: str, fresh: str, config: Mapping[str, Any]) -> Tracker:
    """Trackio: its folder in the user's home, or the Space that TRACKIO_SPACE_ID names."""
    import trackio

    project, name = os.environ.get("TRACKIO_PROJECT", PROJECT), known_as or f"{workdir.name}-{fresh}"
    run = trackio.init(project=project, name=name, resume="allow", config=dict(config), embed=False)

    def record(stage: str, step: int | None, numbers: Mapping[str, float], calls: int) -> None:
        run.log({f"{stage}/{name}": value for name, value in numbers.items()}, step=step)

    def finish(summary: Mapping[str, Any] | None) -> None:
        if summary:
            record("summary", None, flat(summary), 0)
        run.finish()

    return Tracker(
        name,
        f"`trackio show --project {project}` shows the run",
        record,
        lambda log, step, rows, calls: run.log({f"episodes/{log}": trackio.Table(COLUMNS, list(rows))}, step=step),
        lambda title, text, step: run.alert(title, text, level=trackio.AlertLevel.WARN, step=step),
        finish,
    )


TRACKERS = {"wandb": open_wandb, "mlflow": open_mlflow, "trackio": open_trackio}


def flat(values: Mapping[str, Any], of_any_kind: bool = False, prefix: str = "") -> dict[str, Any]:
    """{"rl.steps": 70}: the numbers in a nested dict, or all that it has, under dotted names."""
    leaves: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            leaves |= flat(value, of_any_kind, f"{prefix}{name}.")
        elif of_any_kind or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            leaves[prefix + name] = value
    return leaves
