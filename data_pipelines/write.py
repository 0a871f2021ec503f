"""Task rows -> a TFDS dataset folder in array_record files, which `jaxagent.data.sources` and TFDS itself read.

    folder/
      dataset_info.json, features.json           TFDS's own metadata
      tasks-<split>.array_record-00000, ...      one tf.Example per row

Needs no TensorFlow. A dataset appears whole or not at all: it is written beside its place and moved there.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from jaxagent import config
from jaxagent.data import rows

ROWS_PER_FILE = 50_000
_OURS = re.compile(r"dataset_info\.json|features\.json|tasks-.*\.array_record-\d+")
_ROWS_PER_CALL = 1_000  # rows encoded between two rewrites of the metadata


def features() -> tfds.features.FeaturesDict:
    """The schema of a task row."""
    return tfds.features.FeaturesDict(
        {
            "id": tfds.features.Text(),
            "prompt": tfds.features.Text(),
            "answers": tfds.features.Sequence(tfds.features.Text()),
            "kind": tfds.features.Text(),
            "metadata": tfds.features.Text(),  # a JSON object
        }
    )


def write_tasks(
    folder: str | os.PathLike[str],
    splits: Mapping[str, Iterable[Mapping[str, Any]]],
    *,
    description: str = "",
    need_answers: bool = True,
    progress: Callable[[str, int], None] = lambda split, rows: None,
) -> dict[str, int]:
    """Writes a dataset, replacing an older one at the same place.

    Args:
      folder: where it will stand.
      splits: split name -> rows, read once, in order: {"id", "prompt", "answers": [str], "kind", "metadata": JSON text
        or mapping}, or any other layout of `jaxagent.data.rows`.
      description: one line that goes into dataset_info.json.
      need_answers: refuse rows without a gold answer.
      progress: called with (split, rows written so far) now and then.

    Returns:
      Rows per split.

    Raises:
      config.ConfigError: a malformed row (named by split, row, column), two rows with one id, an empty split, or a
        `folder` that holds anything but an older dataset.
    """
    folder = Path(folder)
    _check_place(folder)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        counts = _write_splits(partial, splits, description, need_answers, progress)
        _replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return counts


def _write_splits(
    folder: Path,
    splits: Mapping[str, Iterable[Mapping[str, Any]]],
    description: str,
    need_answers: bool,
    progress: Callable[[str, int], None],
) -> dict[str, int]:
    identity = tfds.core.DatasetIdentity(
        name="tasks", version=tfds.core.Version("1.0.0"), data_dir=os.fspath(folder), module_name=__name__
    )
    info = tfds.core.DatasetInfo(builder=identity, features=features(), description=description or "Tasks of jaxagent.")
    writer = tfds.core.SequentialWriter(info, ROWS_PER_FILE, overwrite=True, file_format="array_record")
    writer.initialize_splits(list(splits))
    counts = dict.fromkeys(splits, 0)
    seen: dict[str, str] = {}
    for split, raw in splits.items():
        batch: list[dict[str, Any]] = []
        for row in raw:
            place = f"split '{split}', row {counts[split]}"
            task = rows.check(row, place, need_answers)
            if task.id in seen:
                raise config.ConfigError(f"{place}: column 'id': {task.id!r} is also the id of {seen[task.id]}.")
            seen[task.id] = place
            batch.append(rows.row_to_store(task, place))
            counts[split] += 1
            if len(batch) == _ROWS_PER_CALL:
                writer.add_examples({split: batch})
                batch = []
                progress(split, counts[split])
        writer.add_examples({split: batch})
        progress(split, counts[split])
    writer.close_all()
    empty = [split for split, count in counts.items() if count == 0]
    if empty or not counts:
        raise config.ConfigError(f"No rows for split '{empty[0]}'." if empty else "A dataset needs at least one split.")
    return counts


def _check_place(folder: Path) -> None:
    """Only a dataset of this writer, an empty folder or nothing at all may be replaced."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise config.ConfigError(f"{folder} is a file; a dataset is a folder.")
    foreign = sorted(path.name for path in folder.iterdir() if not _OURS.fullmatch(path.name))
    if foreign:
        raise config.ConfigError(f"{folder} also holds {foreign[0]}, which would be lost; it is not overwritten.")


def _replace(partial: Path, folder: Path) -> None:
    """Moves `partial` to `folder`. A kill between the two renames leaves no dataset, never half of one."""
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
