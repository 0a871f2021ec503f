"""Episodes of runs of earlier versions, for the page: lines of JSON, made elsewhere into the logs kept today."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxagent.config import ConfigError, EpisodesConfig
from jaxagent.data import codec
from jaxagent.data.episode_log import EVALUATION
from jaxagent.observe.episode_store import BLOCKS, INDEX, EpisodeStore
from jaxagent.observe.files import EPISODES_FILE, EPISODES_FOLDER
from jaxagent.types import Episode

EARLIER = "earlier."  # before the name of a log of a run that this version went on with


def episodes_folder(workdir: Path, spare: Path) -> Path:
    """Where a run's logs of episodes are: in its workdir, or, of a run of an earlier version, made anew in `spare`.

    Of one that this version went on with, the logs of both: links to those of now, and the others as "earlier.<name>".
    """
    own = workdir / EPISODES_FOLDER
    lines = [*sorted(own.glob("*.jsonl")), workdir / EPISODES_FILE]
    if not any(path.is_file() for path in lines):
        return own
    goes_on = any(own.glob(f"*{INDEX}"))
    made = spare / ("both" if goes_on else EPISODES_FOLDER)
    if not made.is_dir():
        _make(made, spare / "part", lines, EARLIER if goes_on else "")
    for path in made.iterdir():
        if path.is_symlink() and not path.exists():  # its blocks were given up
            path.unlink()
    for path in (*own.glob(f"*{INDEX}"), *own.glob(f"*{BLOCKS}")):
        with contextlib.suppress(FileExistsError):
            (made / path.name).symlink_to(path.resolve())
    return made


def _make(made: Path, part: Path, lines: Sequence[Path], prefix: str) -> None:
    """The logs of files of lines. Whole or not at all, as what is there is taken for all."""
    shutil.rmtree(part, ignore_errors=True)
    has_evaluations, logs = lines[-1].is_file(), dict[str, EpisodeStore]()
    with contextlib.ExitStack() as stack:
        for path in lines:
            if path.is_file() and not (
                has_evaluations and path.stem.endswith(EVALUATION)
            ):  # they stand in the other, too
                for (stage, step), rows in itertools.groupby(_read(path), lambda row: row[:2]):
                    name = prefix + (f"{stage}{EVALUATION}" if path.name == EPISODES_FILE else path.stem)
                    if name not in logs:
                        logs[name] = EpisodeStore(part, name, 0, EpisodesConfig(), False)
                        stack.callback(logs[name].close)
                    logs[name].append(step, [episode for _, _, episode in rows], {})
                    logs[name].wait()
    part.mkdir(parents=True, exist_ok=True)
    part.rename(made)


def _read(path: Path) -> Iterator[tuple[str, int, Episode]]:
    """(stage, step, episode); lines that are none, and those of the oldest form, which has no tokens, are left out."""
    with path.open("rb") as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError, ConfigError):
                row = json.loads(line)
                yield str(row["stage"]), int(row["step"]), codec.decode_episode(row, str(path))
