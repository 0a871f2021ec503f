"""Gymnasium's environments as ours: beside the real thing; wrong actions, hanging ones, wrong settings."""

import asyncio
import json
import re
import time

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, iterate
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.config import ConfigError
from jaxagent.envs.base import Opening, Transcript
from jaxagent.envs.gymnasium.environment import Gymnasium, as_action
from jaxagent.envs.gymnasium.spaces import as_text, check_writable, form
from jaxagent.envs.reasoning_gym.environment import ReasoningGym
from jaxagent.envs.seeds import seed_of
from jaxagent.envs.textarena.environment import TextArena
from jaxagent.types import StopReason, Task, TokenKind


class Counting(gymnasium.Env):
    """Text in, text out: counts to three."""

    action_space = gymnasium.spaces.Text(10)

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return "count is 0", {}

    def step(self, action):
        if action == "hang":
            time.sleep(1)
        self.count += action == "add"
        return f"count is {self.count}", 0.25, self.count == 3, False, {"success": self.count == 3}


def opened(environment):
    here = Opening(None, (), lambda coroutine, timeout_s: asyncio.run(coroutine), lambda line: None)
    with environment.open(here) as attempt_at:
        return attempt_at


TASK = Task("t", "", (), metadata={"seed": 5})


def play(environment, actions, task=TASK):
    """(prompt, steps, verdict) of one attempt."""

    attempt_at = opened(environment)

    async def run():
        attempt = attempt_at(task)
        try:
            (prompt,) = await attempt.start()
            steps = [await attempt.step(action) for action in actions]
            turns = tuple((action, "") for action in actions)
            return prompt.content, steps, await attempt.verify(Transcript(prompt.content, turns))
        finally:
            await attempt.close()

    return asyncio.run(run())


def test_it_is_the_same_world_as_gymnasiums():
    real = gymnasium.make("FrozenLake-v1", is_slippery=True)
    shown, _ = real.reset(seed=5)
    actions, seen, rewards = [2, 2, 1, 1, 1, 2], [], []
    for action in actions:
        shown, reward, ended, _, _ = real.step(action)
        seen.append(shown)
        rewards.append(reward)
        if ended:
            break
    texts = [f"<action>{a}</action>" for a in actions[: len(seen)]]
    _, steps, verdict = play(Gymnasium(make="FrozenLake-v1", max_turns=50), texts)
    for step, shown in zip(steps, seen, strict=True):
        assert step.stop_reason == StopReason.ANSWER or step.observation.text.strip() == str(shown)
    assert verdict.reward == sum(rewards)


def test_texts_and_success():
    environment = Gymnasium(make="tests.envs.test_gymnasium:Counting", max_turns=6, pay="turn")
    prompt, steps, verdict = play(environment, ["<action>add</action>", "nothing", *["x<action>add</action>"] * 2])
    assert prompt.endswith("count is 0\n")
    assert [s.stop_reason for s in steps] == [None, None, None, StopReason.ANSWER]
    assert steps[0].observation.text.strip() == "count is 1"
    assert steps[1].observation.parts[0][1] == TokenKind.WARNING
    assert verdict.turn_rewards == (0.25, 0.0, 0.25, 0.25) and verdict.reward == 0.0
    assert verdict.components == {"solved": 1.0, "return": 0.75}


def test_the_last_turn_ends_it():
    _, steps, verdict = play(Gymnasium(make="tests.envs.test_gymnasium:Counting", max_turns=1), ["nothing"])
    assert steps[0].stop_reason == StopReason.TURN_LIMIT and verdict.components["solved"] == 0.0


def test_one_that_hangs_is_a_timeout():
    environment = Gymnasium(make="tests.envs.test_gymnasium:Counting", step_timeout_s=0.1)
    with pytest.raises(TimeoutError):
        play(environment, ["<action>hang</action>"])


DISCRETE, BOX = spaces.Discrete(3, start=1), spaces.Box(-1, 1, (2,), np.float32)


@pytest.mark.parametrize(
    ("space", "names", "word", "action"),
    [
        (DISCRETE, (), "3", 3),
        (DISCRETE, ("left", "stay", "right"), "right", 3),
        (BOX, (), "[0.5, -1]", np.asarray([0.5, -1], np.float32)),
        (spaces.MultiDiscrete([3, 3]), (), "[2, 0]", np.asarray([2, 0])),
    ],
)
def test_actions(space, names, word, action):
    parsed_action, mistake = as_action(space, names, f"so: <action> {word} </action>")
    np.testing.assert_array_equal(parsed_action, action)
    assert not mistake


@pytest.mark.parametrize("word", ["0", "4", "left", "1.5", "[1]", "true", "null", '{"a": 1}', "9" * 400, "[" * 9000])
def test_what_is_no_action_is_told(word):
    assert as_action(DISCRETE, (), f"<action>{word}</action>") == (None, "An action is a whole number from 1 to 3.")


def test_a_space_that_fails_is_no_mistake_of_the_policys():
    class Broken(gymnasium.spaces.Discrete):
        def contains(self, x):
            raise ValueError("the space's own mistake")

    with pytest.raises(ValueError, match="own mistake"):
        as_action(Broken(3), (), "<action>1</action>")


FLOATS = st.sampled_from([np.float16, np.float32, np.float64])
INTEGERS = st.sampled_from([np.int8, np.uint8, np.int32, np.int64, np.uint64])
SHAPES = st.lists(st.integers(1, 3), max_size=3).map(tuple)
ENDS = st.sampled_from([(-2, 2), (-np.inf, np.inf), (0, np.inf), (-np.inf, 1)])
# What a text may hold that JSON, a tag or a blank at its end could spoil.
CHARACTERS = st.sampled_from(["ab", ' \t\n"\\', "</action>", "{}[]0:,", "\u00e9\u2028\U0001f600"])
LEAVES = st.one_of(
    st.builds(
        lambda n, start, dtype: spaces.Discrete(n, start=start, dtype=dtype),
        st.integers(1, 9),
        st.integers(0, 5),
        st.sampled_from([np.int64, np.int32, np.uint8]),
    ),
    st.builds(spaces.Discrete, st.integers(1, 9), start=st.integers(-5, 5)),
    st.builds(lambda ends, shape, dtype: spaces.Box(*ends, shape, dtype), ENDS, SHAPES, FLOATS),
    st.builds(lambda shape, dtype: spaces.Box(0, 100, shape, dtype), SHAPES, INTEGERS),
    st.just(spaces.Box(np.asarray([-1, -np.inf]), np.asarray([np.inf, 3.5]), dtype=np.float64)),
    st.builds(
        lambda nvec, start: spaces.MultiDiscrete(nvec, start=[start] * len(nvec)),
        st.lists(st.integers(1, 5), min_size=1, max_size=3),
        st.integers(-3, 3),
    ),
    st.just(spaces.MultiDiscrete([[2, 3], [4, 1]])),
    st.builds(spaces.MultiBinary, st.integers(1, 4) | st.lists(st.integers(1, 2), min_size=1, max_size=2)),
    st.builds(lambda length, chars: spaces.Text(length, min_length=0, charset=chars), st.integers(1, 9), CHARACTERS),
)
SPACES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(["a", "b c"]), inner, min_size=1).map(spaces.Dict),
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
        st.lists(inner, min_size=1, max_size=3).map(spaces.OneOf),
        inner.map(spaces.Sequence),
        LEAVES.map(lambda space: spaces.Sequence(space, stack=True)),
        st.builds(spaces.Graph, LEAVES, st.none() | LEAVES),
        st.builds(lambda one, other: spaces.Graph(spaces.Dict(a=one, b=other), None), LEAVES, LEAVES),
    ),
    max_leaves=4,
)


def as_json(space, action):
    """An action in JSON's types, element by element where the package has stacked them."""
    if isinstance(space, spaces.Graph):
        node, edge, (nodes, edges, links) = space.node_space, space.edge_space, action
        written = {"nodes": [as_json(node, one) for one in iterate(batch_space(node, 1), nodes)]}
        if edges is not None:
            written["edges"] = [as_json(edge, one) for one in iterate(batch_space(edge, 1), edges)]
        return written | ({} if links is None else {"edge_links": links.tolist()})
    if isinstance(space, spaces.Sequence):
        elements = iterate(batch_space(space.feature_space, 1), action) if space.stack else action
        return [as_json(space.feature_space, one) for one in elements]
    if isinstance(space, spaces.OneOf):
        return [int(action[0]), as_json(space.spaces[action[0]], action[1])]
    if isinstance(space, spaces.Dict):
        return {name: as_json(space.spaces[name], one) for name, one in action.items()}
    if isinstance(space, spaces.Tuple):
        return [as_json(*pair) for pair in zip(space.spaces, action, strict=True)]
    return getattr(action, "tolist", lambda: action)()


def same(one, other):
    """Equal in types, shapes and values."""
    if isinstance(one, dict | tuple):
        pairs = zip(one.items(), other.items(), strict=True) if isinstance(one, dict) else zip(one, other, strict=True)
        return type(one) is type(other) and all(same(*pair) for pair in pairs)
    if isinstance(one, str) or one is None:
        return one == other
    return np.array_equal(one, other) and (one.dtype, np.shape(one)) == (other.dtype, np.shape(other))


UNBOUNDED, WHOLE = spaces.Box(-np.inf, np.inf, (1,), np.float32), spaces.Box(0, 9, (2,), np.int64)


def test_a_policy_is_told_which_characters_a_text_may_have():
    assert form(spaces.Text(3, charset='b"a')) == 'a text of 1 to 3 characters from "\\"ab"'
    many = spaces.Text(3, charset=frozenset(map(chr, range(32, 300))))
    assert form(many) == "a text of 1 to 3 characters from a set of 268"


@settings(max_examples=200, deadline=None)
@given(SPACES, st.integers(0, 2**31))
def test_what_a_space_samples_is_read_back(space, seed):
    check_writable(space)
    space.seed(seed)
    action = space.sample()
    assert space.contains(action)
    word = json.dumps(as_json(space, action)).replace("<", "\\u003c")  # a policy cannot write </action> in an action
    back, mistake = as_action(space, (), f"<action>{word}</action>")
    assert not mistake and space.contains(back) and same(action, back), (space, action, back)
    assert form(space)


@settings(max_examples=100, deadline=None)
@given(SPACES, st.integers(0, 2**31))
def test_what_is_shown_has_the_form_of_an_action(space, seed):
    """Where nothing is stacked, which is shown as the package has it, what was shown can be written as an action."""
    space.seed(seed)
    shown = space.sample()
    if not isinstance(shown, str | dict) and "Dict" not in str(space):
        back, mistake = as_action(space, (), f"<action>{as_text(shown).replace('<', chr(92) + 'u003c')}</action>")
        assert not mistake and same(shown, back)


@pytest.mark.parametrize("name", gymnasium.spaces.__all__)
def test_every_space_of_the_package_is_written_or_refused_by_name(name):
    """A space that a later version adds fails here until it is one or the other."""
    made = {
        "Box": lambda: BOX,
        "Discrete": lambda: DISCRETE,
        "Text": lambda: spaces.Text(3),
        "MultiDiscrete": lambda: spaces.MultiDiscrete([2, 3]),
        "MultiBinary": lambda: spaces.MultiBinary(2),
        "Dict": lambda: spaces.Dict(a=BOX),
        "Tuple": lambda: spaces.Tuple([BOX]),
        "Sequence": lambda: spaces.Sequence(BOX),
        "OneOf": lambda: spaces.OneOf([BOX, DISCRETE]),
        "Graph": lambda: spaces.Graph(BOX, DISCRETE),
    }
    cls = getattr(spaces, name)
    if not isinstance(cls, type) or not issubclass(cls, spaces.Space):
        assert name in ("GraphInstance", "flatdim", "flatten_space", "flatten", "unflatten")  # no spaces
    elif name == "Space":
        with pytest.raises(ConfigError, match="actions are a Space"):
            check_writable(cls())
    else:
        space = made[name]()
        check_writable(space)
        for _ in range(100):
            action = space.sample()
            word = json.dumps(as_json(space, action))
            assert same(as_action(space, (), f"<action>{word}</action>")[0], action)


@pytest.mark.parametrize(
    ("space", "word"),
    [
        *((UNBOUNDED, word) for word in ("[1e999]", "[Infinity]", "[NaN]", "[1e300]")),
        *((WHOLE, word) for word in ("[1.7, 1]", "[1]", "[true, 1]", f"[{2**70}, 1]", '["1", 1]', "[-1, 1]")),
        (spaces.Box(0, 9, (2, 2), np.int64), "[[1, 2, 3], [4]]"),
        *((spaces.Dict({"a": DISCRETE}), word) for word in ("{}", '{"a": 1, "b": 1}', '{"a": 0}', "[1]")),
        *((spaces.Tuple([DISCRETE, BOX]), word) for word in ("[1]", "[1, [0]]", "[1, [0, 9]]", '{"0": 1}')),
        (spaces.Dict({"a": spaces.Text(3)}), '{"a": 1}'),
        *((spaces.OneOf([DISCRETE, BOX]), word) for word in ("1", "[0, 9]", "[2, 1]", "[1, 1]", "[-1, [0, 0]]")),
        (spaces.OneOf([DISCRETE]), "[0.5, 1]"),
        *((spaces.Sequence(DISCRETE), word) for word in ("1", "[0]", "[[1]]", "[1, null]")),
        *((spaces.Sequence(BOX, stack=True), word) for word in ("1", "[1]", "[[0, 9]]", "[[0, 0], [0]]")),
        *(
            (spaces.Graph(DISCRETE, DISCRETE), word)
            for word in (
                "[]",
                "{}",
                '{"nodes": [9]}',
                '{"nodes": [1], "edges": [1]}',
                '{"nodes": [1], "edges": [1], "edge_links": [[0, 1]]}',
                '{"nodes": [1], "edges": [1], "edge_links": [[0, 0, 0]]}',
                '{"nodes": [1], "edges": [1], "edge_links": [[0, 99999999999]]}',
                '{"nodes": [1], "edges": [1], "edge_links": [0, 0]}',
                '{"nodes": [1], "edges": [1, 1], "edge_links": [[0, 0]]}',
                '{"nodes": [1], "links": []}',
            )
        ),
        (spaces.Graph(DISCRETE, None), '{"nodes": [1], "edges": [1], "edge_links": [[0, 0]]}'),
    ],
)  # fmt: skip
def test_what_is_not_in_a_composed_space_is_told(space, word):
    assert as_action(space, (), f"<action>{word}</action>") == (None, f"An action is {form(space)}.")


class Foreign(spaces.Space):
    """Of another package."""


class Graph(spaces.Space):
    """Bears a name of the package's, and is none of its."""


@pytest.mark.parametrize("space", [Foreign(), Graph()])
def test_a_space_that_no_text_expresses_is_refused_by_name(space):
    inside = [(spaces.Dict({"a": spaces.Tuple([space])}), "actions['a'][0]"), (spaces.OneOf([space]), "actions[0]")]
    for whole, at in ((space, "actions"), (spaces.Sequence(space), "actions['element']"), *inside):
        with pytest.raises(ConfigError, match=re.escape(f"{at} are a {type(space).__name__}, and the policy can")):
            check_writable(whole)


def test_names_that_json_does_not_tell_apart_are_refused():
    mixed = spaces.Dict({"1": DISCRETE})
    mixed.spaces[1] = DISCRETE
    with pytest.raises(ConfigError, match="one and the same in JSON: '1', 1"):
        check_writable(mixed)


def test_observations_as_text():
    assert as_text({"at": np.asarray([1, 2]), "says": "hello"}) == "at: [1, 2]\nsays: hello"
    assert as_text(np.asarray([[0.1, 2]], np.float32)) == "[[0.1, 2.0]]" and as_text(np.float32(0.1)) == "0.1"
    assert as_text((np.asarray([1, 2]), np.int64(3), "x", {"a": np.float64(0.5)})) == '[[1, 2], 3, "x", {"a": 0.5}]'
    assert as_text(np.asarray([True, False])) == "[true, false]" and as_text([np.float16(0.1)]) == "[0.1]"


def test_seeds():
    assert seed_of(Task("a", "", (), metadata={"seed": 7})) == 7
    assert seed_of(Task("a", "", ())) == seed_of(Task("a", "", ())) != seed_of(Task("b", "", ()))
    with pytest.raises(ValueError, match="seed"):
        seed_of(Task("a", "", (), metadata={"seed": -1}))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"make": "NoSuchLake-v1"}, "NoSuchLake"),
        ({"make": "tests.envs.test_gymnasium:Missing"}, "Missing"),
        ({"make": "FrozenLake-v1", "actions": ("left", "right")}, "2 names"),
    ],
)
def test_what_cannot_be_made_is_refused_at_start(config, told):
    with pytest.raises(ConfigError, match=told):
        opened(Gymnasium(**config))


def test_an_environment_must_be_named():
    with pytest.raises(ConfigError, match="FrozenLake"):
        Gymnasium()


def test_a_package_that_is_not_installed_is_told_before_any_work(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install gymnasium"):
        Gymnasium(make="FrozenLake-v1")
    with pytest.raises(ConfigError, match="pip install textarena"):
        opened(TextArena(make="GuessTheNumber-v0"))
    with pytest.raises(ConfigError, match="pip install reasoning-gym"):
        ReasoningGym(make="chain_sum").tasks(0, 1, 1)
