"""The data sets that a run makes for itself, on first use, under its workdir: their names are values of data.source."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxagent.config import Config


def dataset(cfg: Config, note: Callable[[str], None]) -> Path:
    """Where the run's tasks are; made if they are built in and not there yet. The folder's name tells its settings."""
    if cfg.data.source not in BUILT_IN:
        return Path(cfg.data.source)
    settings, write = BUILT_IN[cfg.data.source](cfg)
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=4).hexdigest()
    folder = Path(cfg.workdir) / f"{cfg.data.source}-{digest}"
    if not folder.exists():
        note(f"building the {cfg.data.source} dataset in {folder}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        write(folder, **settings)
    return folder


Settings = tuple[Mapping[str, Any], Callable[..., None]]  # what a data set is made of, and what makes it


def _geography(cfg: Config) -> Settings:
    from jaxagent.data_pipelines import geography

    return dict(
        num_cities=cfg.data.num_cities,
        seed=cfg.data.seed,
        topk=cfg.env.retriever.topk,
        early_answer_frac=cfg.warm_start.early_answer_frac,
        curriculum=cfg.data.num_curriculum,
        full=cfg.data.num_demonstrations,
    ), geography.write


def _terminal(cfg: Config) -> Settings:
    from jaxagent.data_pipelines import terminal

    return dict(
        num=cfg.data.num_tasks,
        seed=cfg.data.seed,
        laptop=True,
        num_demonstrations=cfg.data.num_demonstrations,
        style=cfg.env.terminal.tools,
        early_done_frac=cfg.warm_start.early_answer_frac,
    ), terminal.write


def _of_python(cfg: Config) -> Mapping[str, Any]:
    return dict(
        num=cfg.data.num_tasks,
        seed=cfg.data.seed,
        num_demonstrations=cfg.data.num_demonstrations,
        style=cfg.env.python.format,
        early_frac=cfg.warm_start.early_answer_frac,
    )


def _arithmetic(cfg: Config) -> Settings:
    from jaxagent.data_pipelines import arithmetic

    return _of_python(cfg), arithmetic.write


def _python_tasks(cfg: Config) -> Settings:
    from jaxagent.data_pipelines import python_tasks

    return _of_python(cfg), python_tasks.write


BUILT_IN: dict[str, Callable[[Config], Settings]] = {
    "geography": _geography,
    "terminal": _terminal,
    "arithmetic": _arithmetic,
    "python_tasks": _python_tasks,
}
