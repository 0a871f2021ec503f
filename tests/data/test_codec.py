"""The codec: every field of a task, a trajectory and an episode comes back, also from files of earlier versions."""

import base64
import dataclasses
import json
import math
import re
import typing
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.config import ConfigError
from jaxagent.data import codec
from jaxagent.types import Episode, StopReason, Task, TokenKind, Trajectory, UntrainedConversation

FINITE = st.floats(allow_nan=False, allow_infinity=False)
INT32 = st.integers(0, 2**31 - 1)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | st.text(),
    lambda x: st.lists(x) | st.dictionaries(st.text(), x),
)
# Of a token of a trajectory: (dtype, where the policy sampled it, elsewhere).
COLUMNS = {
    "tokens": ("i4", INT32, INT32),
    "kinds": ("u1", st.just(TokenKind.ACTION), st.sampled_from([k for k in TokenKind if k != TokenKind.ACTION])),
    "logprobs": ("f4", st.floats(width=32, allow_nan=False, allow_infinity=False), st.just(0.0)),
    "policy_versions": ("i4", st.integers(-1, 2**31 - 1), st.just(-1)),
    "turns": ("i4", INT32, INT32),
}


@st.composite
def trajectories(draw):
    sampled = draw(st.lists(st.booleans(), max_size=5))
    shape, dtype = (len(sampled), draw(st.integers(1, 3))), draw(st.sampled_from(codec.EXPERTS))
    experts = st.binary(min_size=10 * math.prod(shape), max_size=10 * math.prod(shape)).map(
        lambda raw: np.frombuffer(raw, dtype)[: math.prod(shape)].reshape(shape)
    )
    return Trajectory(
        experts=draw(st.none() | experts),
        **{
            name: np.array([draw(here if action else elsewhere) for action in sampled], dtype)
            for name, (dtype, here, elsewhere) in COLUMNS.items()
        },
    )


# By the type of a field: of a dataclass to come, a field of a type that is not here fails.
VALUES = {
    str: st.text(),
    int: st.integers(),
    int | None: st.none() | st.integers(),
    float: FINITE,
    StopReason: st.sampled_from(StopReason),
    tuple[str, ...]: st.lists(st.text(), max_size=3).map(tuple),
    tuple[float, ...]: st.lists(FINITE, max_size=3).map(tuple),
    Mapping[str, float]: st.dictionaries(st.text(), FINITE, max_size=3),
    Mapping[str, typing.Any]: st.dictionaries(st.text(), JSON, max_size=3),
    Sequence[Trajectory]: st.lists(trajectories(), max_size=2).map(tuple),
}


def instances(kind):
    """Instances of a dataclass with a value for every field that it has."""
    return st.fixed_dictionaries({name: VALUES[hint] for name, hint in typing.get_type_hints(kind).items()}).map(
        lambda values: kind(**values)
    )


VALUES[Task] = instances(Task)
VALUES[Sequence[tuple[str, str]]] = st.lists(st.tuples(st.text(), st.text()), max_size=2).map(tuple)
VALUES[Trajectory | None] = st.none() | trajectories()
VALUES[Sequence[UntrainedConversation]] = st.lists(instances(UntrainedConversation), max_size=2).map(tuple)


def same(a, b) -> bool:
    """Equal, and so in every field of dataclasses and to the bit in arrays."""
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(
            same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(type(a))
        )
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, tuple):
        return type(b) is tuple and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def through_json(value):
    return json.loads(json.dumps(value, allow_nan=False))


@settings(max_examples=40, deadline=None)
@given(instances(Task), trajectories(), instances(Episode))
def test_every_field_comes_back(task, trajectory, episode):
    assert {*COLUMNS, "experts"} == {f.name for f in dataclasses.fields(Trajectory)}
    assert set(codec.encode_task(task)) == {f.name for f in dataclasses.fields(Task)}
    assert same(codec.decode_task(through_json(codec.encode_task(task)), "here"), task)
    assert same(codec.decode_trajectory(through_json(codec.encode_trajectory(trajectory)), "here"), trajectory)
    assert same(codec.decode_episode(through_json(codec.encode_episode(episode)), "here"), episode)
    assert same(tuple(codec.of_columns(codec.to_columns([episode, episode]))), (episode, episode))


def columns(**changes) -> Trajectory:
    fields = dict(
        tokens=np.array([5, 9, 61000, 3], np.int32),
        kinds=np.array([0, 1, 2, 1], np.uint8),
        logprobs=np.array([0, -0.1, 0, -2.5], np.float32),
        policy_versions=np.array([-1, 7, -1, 8], np.int32),
        turns=np.array([0, 0, 0, 1], np.int32),
    )
    return Trajectory(**{name: np.asarray(value) for name, value in (fields | changes).items()})


@pytest.mark.parametrize("changes", [{"logprobs": [0.5, -0.1, 0, -2.5]}, {"policy_versions": [-1, 7, 0, 8]}])
def test_what_would_be_lost_is_refused(changes):
    with pytest.raises(ValueError, match="did not sample"):
        codec.encode_trajectory(columns(**changes))


def test_a_trajectory_of_replay_in_a_bundle_of_an_earlier_version():
    packed = "eJxjZWBg4ARij3cMDMxAmoGRiRFEnT1zZi8DGCgc+A8E7EAWiOZgQAUgxQDD4g1W"
    assert same(codec.decode_trajectory(packed, "here"), columns())


def test_an_episode_in_a_log_of_an_earlier_version():
    """Which has neither its text nor the rewards of turns."""
    line = (
        '{"stage":"rl","step":3,"task":{"id":"t","prompt":"Who?","answers":["me"],"kind":"k","metadata":{}},"sample":2,'
        '"reward":0.5,"rewards":{"em":0.5},"stop_reason":"answer","turns":2,"metrics":{"s":0.25},"error":"",'
        '"trajectories":[{"tokens":[5,9,61000,3],"kinds":[0,1,2,1],"turns":[0,0,0,1],'
        '"logprobs":[-0.10000000149011612,-2.5],"policy_versions":[7,8]}]}'
    )
    task = Task("t", "Who?", ("me",), "k")
    want = Episode(task, 2, (columns(),), 0.5, {"em": 0.5}, StopReason.ANSWER, 2, {"s": 0.25})
    assert same(codec.decode_episode(json.loads(line), "here"), want)


ROW = {"tokens": [5, 9], "kinds": [0, 1], "turns": [0, 0], "logprobs": [-0.5], "policy_versions": [7]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": [1e39]}, "column 'logprobs' must hold finite numbers of 32 bits"),
        ({"logprobs": [-(10**400)]}, "column 'logprobs' must hold finite numbers of 32 bits"),
        ({"logprobs": [float("nan")]}, "column 'logprobs' must hold finite numbers of 32 bits"),
        ({"logprobs": [True]}, "column 'logprobs' must hold finite numbers of 32 bits"),
        ({"logprobs": []}, "column 'logprobs' has 0 entries for 1 action tokens"),
        ({"kinds": [0, 9]}, "column 'kinds' must hold integers from 0 to"),
        ({"tokens": [5, 2**31]}, "column 'tokens' must hold integers from 0 to"),
        ({"turns": [0]}, "column 'turns' has 1 entries for 2 tokens"),
    ],
)
def test_a_damaged_trajectory_is_one_line(changes, message):
    with pytest.raises(ConfigError, match=f"^here: {re.escape(message)}"):
        codec.decode_trajectory(ROW | changes, "here")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\x00" * 18, "1 bytes are left over"),
        (b"\x00" * 4 + b"\x09" + b"\x00" * 12, "column 'kinds' must hold integers from 0 to"),
    ],
)
def test_a_damaged_packed_trajectory_is_one_line(raw, message):
    with pytest.raises(ConfigError, match=f"^here: .*{message}"):
        codec.decode_trajectory(base64.b64encode(zlib.compress(raw)).decode(), "here")
    with pytest.raises(ConfigError, match=r"^here: not a packed trajectory"):
        codec.decode_trajectory("!" + base64.b64encode(zlib.compress(b"")).decode(), "here")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": 10**400}, "column 'reward' must be a finite number"),
        ({"reward": None}, "column 'reward' must be a finite number"),
        ({"rewards": {"em": None}}, "column 'rewards.em' must be a finite number"),
        ({"turn_rewards": ["1"]}, "column 'turn_rewards' must be a finite number"),
        ({"sample": True}, "column 'sample' must be int"),
        ({"stop_reason": "over"}, "column 'stop_reason' must be one of"),
    ],
)
def test_a_damaged_episode_is_one_line(changes, message):
    row = codec.encode_episode(Episode(Task("t", "p", ("a",), "k"), 0, (), 0.0, {}, StopReason.ANSWER, 1, {}))
    with pytest.raises(ConfigError, match=f"^here: {message}"):
        codec.decode_episode(row | changes, "here")
    with pytest.raises(ConfigError, match=r"^here, task: column 'answers' must hold texts"):
        codec.decode_episode(row | {"task": row["task"] | {"answers": [7]}}, "here")
