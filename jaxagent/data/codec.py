"""The one codec: `types.Task`, `Trajectory` and `Episode` <-> values of JSON, and episodes <-> bytes; nothing is lost.

Logs of episodes and replay's part of a bundle hold what `encode_*` give; `decode_*` check every column. Log-probs and
policy versions are those of action tokens alone, since elsewhere they are always 0 and -1. Log-probs are float32
numbers, written so that they are read back bit for bit. Axis letters: T tokens of one trajectory, A its action tokens.

What is sent between processes, and lies in records, is an episode that is `pack`ed where it was played and `unpack`ed
where it is learnt: two lines of JSON, compressed, its result, then the rest. The result is what another play of the
episode must give again, token by token: the task, all trajectories, rewards and the reason of its end. Its SHA-256 is
the episode's digest. The rest (counters, times, text for people) may differ from play to play.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxagent.config import ConfigError
from jaxagent.types import Episode, StopReason, Task, TokenKind, Trajectory, UntrainedConversation

LARGEST_LOGPROB = float(np.finfo(np.float32).max)
REST = ("metrics", "text", "error", "heard")  # columns of an episode that are no part of its result
_TASK, _SAMPLE = '{"task":{', re.compile(r',"sample":(\d+)[,}]')  # how a result begins
COLUMNS = {"tokens": "<i4", "kinds": "u1", "logprobs": "<f4", "policy_versions": "<i4", "turns": "<i4"}
_TOKEN_BYTES = sum(np.dtype(dtype).itemsize for dtype in COLUMNS.values())
EXPERTS = "uint8", "uint16"  # dtypes
LEVEL = 1  # zlib's: level 6 takes several times as long for a tenth less
MOST_BYTES = 1 << 28  # of one unpacked episode


def encode_task(task: Task) -> dict[str, Any]:
    """A task as a JSON object, whose metadata is the task's own: `dataclasses.asdict` would copy all that is in it."""
    return {
        "id": task.id,
        "prompt": task.prompt,
        "answers": list(task.answers),
        "kind": task.kind,
        "metadata": dict(task.metadata),
    }


def encode_trajectory(trajectory: Trajectory) -> dict[str, list[Any]]:
    """A trajectory as columns: "tokens", "kinds" and "turns" of T entries, "logprobs" and "policy_versions" of A.

    "experts", where they were recorded: [dtype, W, base64 of T * W numbers].

    Raises:
      ValueError: a token that was not sampled has a log-prob or a policy version, which would be lost.
    """
    t, actions = trajectory, trajectory.action_mask
    if t.logprobs[~actions].any() or (t.policy_versions[~actions] != -1).any():
        raise ValueError("a trajectory has log-probs or policy versions of tokens that the policy did not sample")
    return {
        "tokens": t.tokens.tolist(),
        "kinds": t.kinds.tolist(),
        "turns": t.turns.tolist(),
        "logprobs": t.logprobs[actions].tolist(),
        "policy_versions": t.policy_versions[actions].tolist(),
        **({} if t.experts is None else {"experts": _encode_experts(t.experts)}),
    }


def _encode_experts(experts: np.ndarray) -> list[Any]:
    return [*_kind_of(experts), base64.b64encode(_bytes(experts)).decode()]


def _kind_of(experts: np.ndarray) -> tuple[str, int]:
    return experts.dtype.name, experts.shape[1]


def _bytes(experts: np.ndarray) -> bytes:
    return experts.astype(experts.dtype.newbyteorder("<")).tobytes()


def encode_episode(episode: Episode) -> dict[str, Any]:
    """An episode as a JSON object; numbers that are not finite are for the writer to refuse or replace."""
    heard = [
        {
            "role": conversation.role,
            "after": conversation.after,
            "turns": [list(turn) for turn in conversation.turns],
            "trajectory": None if conversation.trajectory is None else encode_trajectory(conversation.trajectory),
        }
        for conversation in episode.heard
    ]
    return {
        "task": encode_task(episode.task),
        "sample": episode.sample,
        "reward": episode.reward,
        "rewards": dict(episode.rewards),
        "turn_rewards": list(episode.turn_rewards),
        "stop_reason": str(episode.stop_reason),
        "turns": episode.turns,
        "metrics": dict(episode.metrics),
        "error": episode.error,
        "text": episode.text,
        "trajectories": [encode_trajectory(t) for t in episode.trajectories],
        **({"heard": heard} if heard else {}),
        **({} if episode.fork_of is None else {"fork_of": episode.fork_of}),
        **({"forked_at": episode.forked_at} if episode.forked_at else {}),
    }


def decode_task(row: Any, where: str) -> Task:
    """The task. Raises ConfigError where `row` is none; names `where` and the column."""
    row = _object(row, where)
    return Task(
        id=_get(row, "id", str, where),
        prompt=_get(row, "prompt", str, where),
        answers=tuple(_texts(row, "answers", where)),
        kind=_get(row, "kind", str, where),
        metadata=_get(row, "metadata", dict, where),
    )


def decode_episode(row: Any, where: str) -> Episode:
    """The episode. Logs of earlier versions have no "turn_rewards" (none were kept then), and some no "text".

    Raises ConfigError where `row` is none; names `where` and the column.
    """
    row = _object(row, where)
    task = decode_task(_get(row, "task", dict, where), f"{where}, task")
    reason = _get(row, "stop_reason", str, where)
    if reason not in list(StopReason):
        raise ConfigError(f"{where}: column 'stop_reason' must be one of {', '.join(StopReason)}, got '{reason}'.")
    trajectories = _get(row, "trajectories", list, where)
    return Episode(
        task=task,
        sample=_get(row, "sample", int, where),
        trajectories=tuple(decode_trajectory(t, f"{where}, trajectories[{i}]") for i, t in enumerate(trajectories)),
        reward=_number(row.get("reward"), "reward", where),
        rewards=_numbers(row, "rewards", where),
        stop_reason=StopReason(reason),
        turns=_get(row, "turns", int, where),
        metrics=_get(row, "metrics", dict, where),
        error=_get(row, "error", str, where),
        text=_get({"text": ""} | row, "text", str, where),
        turn_rewards=tuple(
            _number(value, "turn_rewards", where)
            for value in _get({"turn_rewards": []} | row, "turn_rewards", list, where)
        ),
        heard=tuple(
            _decode_heard(conversation, f"{where}, heard[{i}]")
            for i, conversation in enumerate(_get({"heard": []} | row, "heard", list, where))
        ),
        fork_of=_get(row, "fork_of", int, where) if "fork_of" in row else None,
        forked_at=_get({"forked_at": 0} | row, "forked_at", int, where),
    )


def _decode_heard(row: Any, where: str) -> UntrainedConversation:
    row = _object(row, where)
    turns = _get(row, "turns", list, where)
    for turn in turns:
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise ConfigError(f"{where}: column 'turns' must be pairs of texts, got {turn!r:.100}.")
    trajectory = row.get("trajectory")
    return UntrainedConversation(
        role=_get(row, "role", str, where),
        turns=tuple((message, reply) for message, reply in turns),
        trajectory=None if trajectory is None else decode_trajectory(trajectory, f"{where}, trajectory"),
        after=_get(row, "after", int, where),
    )


def decode_trajectory(row: Any, where: str) -> Trajectory:
    """The trajectory: of columns, or packed into a text as replay had it in bundles of earlier versions.

    Raises ConfigError where `row` is none; names `where` and the column.
    """
    if isinstance(row, str):
        return _unpacked(row, where)
    row = _object(row, where)
    tokens = _integers(row, "tokens", where, 0, 2**31 - 1)
    kinds = _integers(row, "kinds", where, 0, max(TokenKind))
    turns = _integers(row, "turns", where, 0, 2**31 - 1)
    for name, column in (("kinds", kinds), ("turns", turns)):
        if len(column) != len(tokens):
            raise ConfigError(f"{where}: column '{name}' has {len(column)} entries for {len(tokens)} tokens.")
    actions = kinds == TokenKind.ACTION
    logprobs = _get(row, "logprobs", list, where)
    versions = _integers(row, "policy_versions", where, -1, 2**31 - 1)
    for name, column in (("logprobs", logprobs), ("policy_versions", versions)):
        if len(column) != actions.sum():
            raise ConfigError(f"{where}: column '{name}' has {len(column)} entries for {actions.sum()} action tokens.")
    if not all(type(value) in (int, float) and abs(value) <= LARGEST_LOGPROB for value in logprobs):
        raise ConfigError(f"{where}: column 'logprobs' must hold finite numbers of 32 bits.")
    every_logprob, every_version = np.zeros(len(tokens), np.float32), np.full(len(tokens), -1, np.int32)
    every_logprob[actions], every_version[actions] = logprobs, versions
    experts = _decode_experts(row["experts"], len(tokens), where) if "experts" in row else None
    return Trajectory(
        tokens.astype(np.int32), kinds.astype(np.uint8), every_logprob, every_version, turns.astype(np.int32), experts
    )


def _decode_experts(value: Any, tokens: int, where: str) -> np.ndarray:
    try:
        dtype, width, text = value
        if dtype not in EXPERTS:
            raise ValueError(f"numbers are one of {', '.join(EXPERTS)}, not {dtype!r:.20}")
        flat = np.frombuffer(base64.b64decode(text, validate=True), np.dtype(dtype).newbyteorder("<"))
        return flat.astype(dtype).reshape(tokens, width)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: column 'experts' is none of {tokens} tokens ({error}).") from None


def _unpacked(text: str, where: str) -> Trajectory:
    """Base64 of zlib of the columns, one after the other."""
    try:
        raw = zlib.decompress(base64.b64decode(text, validate=True))
    except (ValueError, zlib.error) as error:
        raise ConfigError(f"{where}: not a packed trajectory ({error}).") from None
    length, rest = divmod(len(raw), _TOKEN_BYTES)
    if rest:
        raise ConfigError(f"{where}: not a packed trajectory ({rest} bytes are left over).")
    columns = _columns(raw, 0, length)
    if columns["kinds"].max(initial=0) > max(TokenKind):
        raise ConfigError(f"{where}: column 'kinds' must hold integers from 0 to {max(TokenKind)}.")
    return Trajectory(**columns)


def _columns(raw: bytes, at: int, length: int) -> dict[str, np.ndarray]:
    """The columns of `length` tokens, which lie one after the other."""
    columns = {}
    for name, dtype in COLUMNS.items():
        columns[name] = np.frombuffer(raw, dtype, length, at).astype(np.dtype(dtype).newbyteorder("="))
        at += np.dtype(dtype).itemsize * length
    return columns


def _object(row: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected an object, got {type(row).__name__}.")
    return row


def _get(row: Mapping[str, Any], column: str, kind: type, where: str) -> Any:
    value = row.get(column)
    if not isinstance(value, kind) or isinstance(value, bool):
        problem = "is missing" if column not in row else f"must be {kind.__name__}, got {type(value).__name__}"
        raise ConfigError(f"{where}: column '{column}' {problem}.")
    return value


def _number(value: Any, column: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise ConfigError(f"{where}: column '{column}' must be a finite number, got {value!r}.")
    return float(value)


def _texts(row: Mapping[str, Any], column: str, where: str) -> list[str]:
    values = _get(row, column, list, where)
    if not all(isinstance(value, str) for value in values):
        raise ConfigError(f"{where}: column '{column}' must hold texts.")
    return values


def _numbers(row: Mapping[str, Any], column: str, where: str) -> dict[str, float]:
    values = _get(row, column, dict, where)
    return {name: _number(value, f"{column}.{name}", where) for name, value in values.items()}


def _integers(row: Mapping[str, Any], column: str, where: str, low: int, high: int) -> np.ndarray:
    values = _get(row, column, list, where)
    if not all(type(value) is int and low <= value <= high for value in values):
        raise ConfigError(f"{where}: column '{column}' must hold integers from {low} to {high}.")
    return np.array(values, np.int64)


@dataclasses.dataclass(frozen=True)
class Packed:
    """An episode's bytes, with the digest of its result."""

    digest: str
    body: bytes


def pack(episode: Episode) -> Packed:
    """The other way is `unpack`. Raises ValueError: a number is not finite."""
    row = encode_episode(episode)
    result = {name: value for name, value in row.items() if name not in REST}
    rest = {name: row[name] for name in REST if name in row}
    first, second = (
        json.dumps(part, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        for part in (result, rest)
    )
    return Packed(hashlib.sha256(first).hexdigest(), zlib.compress(first + b"\n" + second, LEVEL))


def check(packed: Packed, where: str) -> None:
    """Raises ConfigError unless the body is whole and its result has the digest; does not look into it."""
    _lines(packed.body, packed.digest, where)


def task_and_sample(packed: Packed, where: str) -> tuple[str, int]:
    """The task's id and the attempt's number that a result has, without the work of reading its trajectories.

    Raises ConfigError where it is damaged, or no episode; names `where`.
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
    """The episode. Raises ConfigError for one that is damaged, another one's, or none at all; names `where`."""
    parts = [part.decode("utf-8", "surrogatepass") for part in _lines(packed.body, packed.digest, where)]
    try:
        result, rest = map(json.loads, parts)
    except ValueError as error:
        raise ConfigError(f"{where}: not an episode ({error}).") from None
    return decode_episode(result | rest, where)


def digest_of(body: bytes, where: str) -> str:
    """The digest that the result in a body has, whatever was said of it. Raises ConfigError where it is damaged."""
    return hashlib.sha256(_inflated(body, where)[0]).hexdigest()


def to_columns(episodes: Sequence[Episode]) -> bytes:
    """Checked episodes for another process of the same trainer, which need not read a number of them as text again.

    A run's logs hold them so, too (observe/episode_store.py): what `of_columns` reads today it must read for ever.
    A line of JSON with all but the trajectories, then these, column by column. The other way is `of_columns`.
    """
    slim = [encode_episode(dataclasses.replace(episode, trajectories=())) for episode in episodes]
    trajectories = [list(episode.trajectories) for episode in episodes]
    experts = [trajectory.experts for each in trajectories for trajectory in each]
    kinds = [None if recorded is None else _kind_of(recorded) for recorded in experts]
    header = json.dumps([slim, [list(map(len, each)) for each in trajectories], kinds]).encode()
    columns = [
        getattr(trajectory, name).astype(dtype).tobytes()
        for name, dtype in COLUMNS.items()
        for each in trajectories
        for trajectory in each
    ]
    return b"".join([header, b"\n", *columns, *(_bytes(recorded) for recorded in experts if recorded is not None)])


def of_columns(data: bytes) -> list[Episode]:
    """The episodes that `to_columns` was given."""
    at = data.index(b"\n") + 1
    slim, lengths, kinds = json.loads(data[:at])
    tokens = sum(map(sum, lengths))
    columns = _columns(data, at, tokens)
    ends = itertools.accumulate(itertools.chain(*lengths), initial=0)
    parts = itertools.starmap(slice, itertools.pairwise(ends))
    experts = _experts_of(data, at + tokens * _TOKEN_BYTES, zip(itertools.chain(*lengths), kinds, strict=True))
    return [
        dataclasses.replace(
            decode_episode(row, "an episode of another process"),
            trajectories=tuple(
                Trajectory(**{name: column[part] for name, column in columns.items()}, experts=next(experts))
                for part in itertools.islice(parts, len(own))
            ),
        )
        for row, own in zip(slim, lengths, strict=True)
    ]


def _experts_of(data: bytes, at: int, kinds: Iterable[tuple[int, Any]]) -> Iterator[np.ndarray | None]:
    """Of one trajectory after the other, (tokens, (dtype, W) or None) each."""
    for tokens, kind in kinds:
        if kind is None:
            yield None
            continue
        dtype, width = kind
        flat = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), tokens * width, at)
        at += flat.nbytes
        yield flat.astype(dtype).reshape(tokens, width)


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
