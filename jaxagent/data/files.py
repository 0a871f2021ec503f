"""A path -> its splits, each of one or several data files, as people lay them out; and their raw rows.

a file             one split without a name, of any format of `formats`
TFDS               dataset_info.json and features.json
tau2-bench         tasks.json: one list of tasks, and split_tasks.json with the ids of each split
save_to_disk       of `datasets`: state.json and *.arrow; dataset_dict.json and a folder per split
files              train.jsonl, test.parquet, ...; cut as the hub cuts them: train-00000-of-00004.parquet, ...
a hub's snapshot   the same inside `data/`, or inside the folder of the one configuration: main/, default/, ...;
                   a split may be a folder of files of one format (train/0000.parquet)

Files in `data/` that are named as splits are go before files beside it that are not: a preview.jsonl, say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from jaxagent.config import ConfigError, nearest
from jaxagent.data.formats import (
    FORMATS,
    ChainedRows,
    ListRows,
    RecordRows,
    Rows,
    builder,
    ending,
    from_json,
)
from jaxagent.data.formats import JsonlRows as JsonlRows

TASKS, TASK_SPLITS = "tasks.json", "split_tasks.json"
CORPUS = "corpus.jsonl"  # a dataset folder's own passages, not a split
PROVEN = "proven.jsonl"  # which of its tasks are proven; see `proofs`
TRAIN = "train"
HELD_OUT = ("heldout", "test", "validation", "dev", "val", "valid", "eval")  # in the order in which they are looked for
_USUAL = {TRAIN, *HELD_OUT}
_PLAIN = (".jsonl", ".parquet", ".array_record")  # what is a split under any name; others only under these names
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(?:-[0-9a-f]{16})?")  # older ones end in a fingerprint
_RETAIL = re.compile("retail_(train|dev|test)_tasks")  # tau-bench's splits; other files beside them are none


def _listed_rows(folder: Path, split: str) -> Rows:
    """Rows of one split of a folder with tasks.json, in the order of that file."""
    path, ids_of_split = folder / TASKS, _task_splits(folder)[split]
    tasks = from_json(path.read_bytes(), str(path))
    ids = [task.get("id") if isinstance(task, Mapping) else None for task in tasks] if isinstance(tasks, list) else []
    rows = ListRows(str(path), tasks, [number for number, one in enumerate(ids) if one in ids_of_split])
    for one in ids_of_split:
        if one not in ids:
            raise ConfigError(f"{folder / TASK_SPLITS}: split '{split}' names '{one}', and {path} has no such task.")
    return rows


def is_tfds(path: Path) -> bool:
    """True for a folder with TFDS metadata. `datasets` has a file of the same name, in which splits are an object."""
    if not (path / "dataset_info.json").is_file() or (path / "state.json").is_file():
        return False
    try:
        about = json.loads((path / "dataset_info.json").read_bytes())
    except (ValueError, RecursionError):
        return True  # damaged: TFDS says how
    return not (isinstance(about, dict) and (isinstance(about.get("splits"), dict) or "features" in about))


def splits(path: Path) -> dict[str, tuple[Path, ...]]:
    """Split name -> its files, or the TFDS folder that holds it. A single file is its own only split, named "".

    Of tau-bench's folder only retail_train_tasks.jsonl, retail_dev_tasks.jsonl and retail_test_tasks.jsonl are splits.

    Raises:
      ConfigError: nothing there, or nothing that can be read.
    """
    if path.is_file():
        if ending(path) not in FORMATS:
            raise ConfigError(f"{path}: unknown data format '{ending(path)}'. Valid: {', '.join(FORMATS)}.")
        return {"": (path,)}
    if not path.is_dir():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(f"No data at {path}. {_hub(path)}{nearest(path.name, siblings) if siblings else ''}".strip())
    if is_tfds(path):
        return dict.fromkeys(builder(path).info.splits, (path,))
    if (path / TASK_SPLITS).is_file():
        return dict.fromkeys(_task_splits(path), (path,))
    if (path / "state.json").is_file():
        return _saved(path)
    if (path / "dataset_dict.json").is_file():
        return _saved_splits(path)
    splits_here = _split_files(path)
    if splits_here and (
        _USUAL & splits_here.keys() or not (path / "data").is_dir() or not _USUAL & _split_files(path / "data").keys()
    ):
        return splits_here
    inner = {p.name: split_files for p in _folders(path) if (split_files := _split_files(p))}
    if len(inner) > 1 and "data" in inner:
        inner = {"data": inner["data"]}
    if len(inner) > 1:
        names = ", ".join(sorted(inner))
        raise ConfigError(f"{path} holds several data sets, {names}: name one of these folders.")
    if not inner:
        raise ConfigError(
            f"{path} holds no dataset: no <split>.jsonl or <split>.parquet, here or in data/, no state.json "
            "(datasets.save_to_disk) and no dataset_info.json (TFDS)."
        )
    return next(iter(inner.values()))


def _hub(path: Path) -> str:
    """How to get what is probably meant, if it reads like a name of the hub's."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(path)) or path.parent.is_dir():
        return ""
    return (
        "A data set of the Hugging Face hub is downloaded first: "
        f"hf download --repo-type=dataset {path} --local-dir {path}. "
    )


def _folders(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def _split_files(path: Path) -> dict[str, tuple[Path, ...]]:
    """The splits that a folder's files are, by their names; or its folders, where these are named as splits are."""
    files = _data_files(path)
    if retail := {match[1]: (file,) for file in files if (match := _RETAIL.fullmatch(file.stem))}:
        return retail
    parts_of_splits: dict[str, list[Path]] = {}
    for file in files:
        stem = file.name.removesuffix(ending(file))
        shard = _SHARD.fullmatch(stem)
        split = shard[1] if shard else stem
        if ending(file) == ".arrow":  # in the cache of `datasets` they are gsm8k-train.arrow
            split = split.rpartition("-")[2]
        if ending(file) in _PLAIN or split in _USUAL:
            parts_of_splits.setdefault(split, []).append(file)
    folders = {} if parts_of_splits else {p.name: _data_files(p) for p in _folders(path) if p.name in _USUAL}
    for split, parts in (parts_of_splits := parts_of_splits or folders).items():
        pieces = _pieces(parts)
        mixed = len({(ending(file), file.name in pieces) for file in parts}) > 1
        if mixed if folders else len(parts) > max(1, len(pieces)):
            raise ConfigError(f"{path}: {', '.join(file.name for file in parts)} all claim to be split '{split}'.")
        _check_complete(path, split, parts)
    return {split: tuple(parts) for split, parts in parts_of_splits.items() if parts}


def _data_files(folder: Path) -> list[Path]:
    """Those that may hold tasks, by name."""
    files = (p for p in sorted(folder.iterdir()) if ending(p) in FORMATS and not p.is_dir())
    return [file for file in files if file.name != CORPUS and not file.name.endswith(PROVEN)]


def _pieces(parts: Iterable[Path]) -> dict[str, re.Match[str]]:
    """Of files those that are pieces of a split, by name."""
    return {file.name: shard for file in parts if (shard := _SHARD.fullmatch(file.name.removesuffix(ending(file))))}


def _saved(folder: Path) -> dict[str, tuple[Path, ...]]:
    """Of what `Dataset.save_to_disk` wrote."""
    path = folder / "state.json"
    state = from_json(path.read_bytes(), str(path))
    listed = state.get("_data_files") if isinstance(state, dict) else None
    listed = [{"filename": file.name} for file in sorted(folder.glob("*.arrow"))] if listed is None else listed
    if not isinstance(listed, list) or not all(isinstance(one, dict) and "filename" in one for one in listed):
        raise ConfigError(f"{path} does not list data files, as that of datasets.save_to_disk does.")
    parts = [folder / str(one["filename"]) for one in listed]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ConfigError(f"{path} names {missing[0]}, which is missing.")
    if not parts:
        raise ConfigError(f"{path} lists no data file: the data set is empty.")
    return {str(state.get("_split") or ""): tuple(parts)}


def _saved_splits(folder: Path) -> dict[str, tuple[Path, ...]]:
    """Of what `DatasetDict.save_to_disk` wrote."""
    path = folder / "dataset_dict.json"
    about = from_json(path.read_bytes(), str(path))
    names = about.get("splits") if isinstance(about, dict) else None
    if not isinstance(names, list) or not all((folder / str(name) / "state.json").is_file() for name in names):
        raise ConfigError(f"{path} must name splits that lie beside it, each a folder with a state.json.")
    return {str(name): next(iter(_saved(folder / str(name)).values())) for name in names}


def open_rows(path: Path, split: str) -> Rows:
    """The rows of a split that `splits(path)` names. Raises ConfigError for another: a folder where a file is meant."""
    by_split = splits(path)
    if split not in by_split:
        meant = (
            f"has no split '{split}'. {nearest(split, by_split)}" if split else "is a folder: name one file of tasks."
        )
        raise ConfigError(f"{path} {meant}")
    places = by_split[split]
    if places[0].is_dir():
        return RecordRows(places[0], split) if is_tfds(places[0]) else _listed_rows(places[0], split)
    parts = [FORMATS[ending(place)](place) for place in places]
    return parts[0] if len(parts) == 1 else ChainedRows(parts)


def _check_complete(path: Path, split: str, parts: Sequence[Path]) -> None:
    """Raises ConfigError unless the files of a split that is cut are all of its pieces, each once."""
    if not (pieces := _pieces(parts)):
        return
    counts = sorted({int(shard[3]) for shard in pieces.values()})
    if len(counts) > 1:
        raise ConfigError(
            f"{path}: split '{split}' is cut into {' and into '.join(map(str, counts))} files at once: remove the "
            "files of an older cut."
        )
    numbers = [int(shard[2]) for shard in pieces.values()]
    if twice := [name for name, shard in pieces.items() if numbers.count(int(shard[2])) > 1]:
        raise ConfigError(f"{path}: {', '.join(twice)} are the same piece of split '{split}'.")
    if missing := sorted(set(range(counts[0])) - set(numbers)):
        raise ConfigError(
            f"{path}: split '{split}' is cut into {counts[0]} files, of which {len(missing)} are missing: the first is "
            f"number {missing[0]:05d}."
        )


def _task_splits(folder: Path) -> dict[str, list[str]]:
    """Split name -> ids of its tasks."""
    path = folder / TASK_SPLITS
    if not (folder / TASKS).is_file():
        raise ConfigError(f"{folder} has {TASK_SPLITS} and no {TASKS}.")
    ids_of_splits = from_json(path.read_bytes(), str(path))
    if not isinstance(ids_of_splits, dict) or not all(isinstance(ids, list) for ids in ids_of_splits.values()):
        raise ConfigError(f"{path} must be an object: the name of a split -> a list of ids.")
    return ids_of_splits
