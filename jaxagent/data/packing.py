"""An episode as bytes: what is sent, and what lies on disk. Packed where it was played, unpacked where it is learnt.

Two lines of JSON, compressed: the episode's result, then the rest. The result is what another play of the episode must
give again, token by token: the task, all trajectories, rewards and the reason of its end. Its SHA-256 is the episode's
digest. The rest (counters, times, text for people) may differ from play to play.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
import zlib
from collections.abc import Sequence

import numpy as np

from jaxagent.config import ConfigError
from jaxagent.data import codec
from jaxagent.types import Episode, Trajectory

REST = ("metrics", "text", "error", "heard")  # columns of an episode that are no part of its result
_TASK, _SAMPLE = '{"task":{', re.compile(r',"sample":(\d+)[,}]')  # how a result begins
COLUMNS = {"tokens": "<i4", "kinds": "u1", "logprobs": "<f4", "policy_versions": "<i4", "turns": "<i4"}
LEVEL = 1  # zlib's: level 6 takes several times as long for a tenth less
MOST_BYTES = 1 << 28  # of one unpacked episode


@dataclasses.dataclass(frozen=True)
class Packed:
    """An episode's bytes, with the digest of its result."""

    digest: str
    body: bytes


def pack(episode: Episode) -> Packed:
    """The other way is `unpack`. Raises ValueError: a number is not finite."""
    row = codec.encode_episode(episode)
    result = {name: value for name, value in row.items() if name not in REST}
    rest = {name: row[name] for name in REST if name in row}
    first, second = (
        json.dumps(part, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        for part in (result, rest)
    )
    return Packed(hashlib.sha256(first).hexdigest(), zlib.compress(first + b"\n" + second, LEVEL))


def check(packed: Packed, where: str) -> None:
    """Whether the body is whole and its result has the digest; does not look into it.

    Raises:
      ConfigError: names `where`.
    """
    _lines(packed.body, packed.digest, where)


def task_and_sample(packed: Packed, where: str) -> tuple[str, int]:
    """The task's id and the attempt's number that a result has, without the work of reading its trajectories.

    Raises:
      ConfigError: damaged, or no episode; names `where`.
    """
    first, _ = _lines(packed.body, packed.digest, where)
    text = first.decode("utf-8", "surrogatepass")
    try:
        if text.startswith(_TASK):  # as `pack` writes it: trajectories come later, and are long
            task, end = json.JSONDecoder().raw_decode(text, len(_TASK) - 1)
            if sample := _SAMPLE.match(text, end):
                return str(task["id"]), int(sample[1])
        row = json.loads(text)
        return str(row["task"]["id"]), int(row["sample"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(f"{where}: not an episode ({type(error).__name__}: {error}).") from None


def unpack(packed: Packed, where: str) -> Episode:
    """The episode.

    Raises:
      ConfigError: damaged, another episode's, or none at all; names `where`.
    """
    parts = [part.decode("utf-8", "surrogatepass") for part in _lines(packed.body, packed.digest, where)]
    try:
        result, rest = map(json.loads, parts)
    except ValueError as error:
        raise ConfigError(f"{where}: not an episode ({error}).") from None
    return codec.decode_episode(result | rest, where)


def digest_of(body: bytes, where: str) -> str:
    """The digest that the result in a body has, whatever was said of it.

    Raises:
      ConfigError: it is damaged; names `where`.
    """
    return hashlib.sha256(_inflated(body, where)[0]).hexdigest()


def to_columns(episodes: Sequence[Episode]) -> bytes:
    """Checked episodes for another process of the same trainer, which need not read a number of them as text again.

    A line of JSON with all but the trajectories, then these, column by column. The other way is `of_columns`.
    """
    slim = [codec.encode_episode(dataclasses.replace(episode, trajectories=())) for episode in episodes]
    trajectories = [list(episode.trajectories) for episode in episodes]
    header = json.dumps([slim, [list(map(len, each)) for each in trajectories]]).encode()
    columns = [
        getattr(trajectory, name).astype(dtype).tobytes()
        for name, dtype in COLUMNS.items()
        for each in trajectories
        for trajectory in each
    ]
    return b"".join([header, b"\n", *columns])


def of_columns(data: bytes) -> list[Episode]:
    """The episodes that `to_columns` was given."""
    at = data.index(b"\n") + 1
    slim, lengths = json.loads(data[:at])
    total, columns = sum(map(sum, lengths)), dict[str, np.ndarray]()
    for name, dtype in COLUMNS.items():
        columns[name] = np.frombuffer(data, dtype, total, at).astype(np.dtype(dtype).newbyteorder("="))
        at += np.dtype(dtype).itemsize * total
    ends = itertools.accumulate(itertools.chain(*lengths), initial=0)
    parts = itertools.starmap(slice, itertools.pairwise(ends))
    return [
        dataclasses.replace(
            codec.decode_episode(row, "an episode of another process"),
            trajectories=tuple(
                Trajectory(**{name: column[part] for name, column in columns.items()})
                for part in itertools.islice(parts, len(own))
            ),
        )
        for row, own in zip(slim, lengths, strict=True)
    ]


def _lines(body: bytes, digest: str, where: str) -> tuple[bytes, bytes]:
    first, second = _inflated(body, where)
    if (actual_digest := hashlib.sha256(first).hexdigest()) != digest:
        raise ConfigError(f"{where}: the result's digest is {actual_digest}, and not {digest}.")
    return first, second


def _inflated(body: bytes, where: str) -> tuple[bytes, bytes]:
    inflate = zlib.decompressobj()
    try:
        content = inflate.decompress(body, MOST_BYTES)
    except zlib.error as error:
        raise ConfigError(f"{where}: damaged ({error}).") from None
    if not inflate.eof or inflate.unused_data:
        raise ConfigError(f"{where}: damaged (it is cut off, has more behind its end, or is too long).")
    first, _, second = content.partition(b"\n")
    return first, second
