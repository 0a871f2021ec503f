"""Trajectory tokens are the engine's tokens, whatever was sampled; kinds, turns and texts are what they should be."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.envs.base import Message, Observation
from jaxagent.rollout.conversation import Conversation, span_kinds
from jaxagent.rollout.templates import Plain
from jaxagent.types import Generation, TokenKind

PROMPT, ACTION, OBSERVATION, WARNING = TokenKind
PIECES = ["<search>", "</search>", "<answer>", "\n", "\n\n", " ", "é", "🤖", "e\u0301", "<", "/", "search", "233", "\t"]


def generation(ids, finish="stop", overshoot=0, version=3):
    ids = np.asarray(ids, np.int32)
    logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
    return Generation(ids, logprobs, np.full(len(ids), version, np.int32), finish, overshoot_bytes=overshoot)


def conversation(tokenizer, limit=50):
    return Conversation(tokenizer, Plain(), limit)


class Engine:
    """Sees only what an engine sees: pending context, then its own samples."""

    def __init__(self):
        self.tokens = []

    def turn(self, pending, sampled):
        self.tokens += [*pending, *sampled]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_trajectory_tokens_are_the_engines_tokens(tokenizer, data):
    """Sampled ids are arbitrary: tags split anywhere, tokens that are parts of characters, newline runs."""
    text = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=6).map("".join)
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=8)
    sampled = st.one_of(ids, text.map(tokenizer.encode).filter(bool))
    talk, engine = conversation(tokenizer, data.draw(st.integers(1, 12))), Engine()
    talk.add_prompt([Message("user", data.draw(text))])
    actions, kinds_of_actions = [], 0
    for turn in range(data.draw(st.integers(1, 4))):
        action = data.draw(sampled)
        engine.turn(talk.pending, action)
        heard = talk.add_action(generation(action, version=turn))
        assert heard == tokenizer.decode_bytes(action).decode("utf-8", errors="replace")
        assert talk.pending == []
        actions += action
        kinds_of_actions += len(action)
        if data.draw(st.booleans()):
            talk.add_observation(Observation(((data.draw(text), OBSERVATION),)))
    out = talk.trajectory()
    assert out.tokens.tolist() == engine.tokens
    assert out.tokens[out.action_mask].tolist() == actions
    assert out.action_mask.sum() == kinds_of_actions
    assert (out.logprobs[~out.action_mask] == 0).all() and (out.logprobs[out.action_mask] < 0).all()
    assert (out.policy_versions[~out.action_mask] == -1).all()
    assert (out.policy_versions[out.action_mask] == out.turns[out.action_mask]).all()
    assert (np.diff(out.turns) >= 0).all()


def test_an_exact_small_trajectory(trained):
    talk = conversation(trained)
    talk.add_prompt([Message("user", "Question: x?\n")])
    prompt = trained.encode("Question: x?\n")
    assert talk.pending == prompt
    action = trained.encode("<search> code</search>")
    assert talk.add_action(generation(action)) == "<search> code</search>"
    observed = talk.add_observation(Observation((("WARNING\n", WARNING), ("233 é", OBSERVATION))))
    assert observed == "WARNING\n233 é"
    assert talk.pending == trained.encode("WARNING\n233 é")
    observation = talk.pending
    answer = trained.encode("<answer>233</answer>")
    talk.add_action(generation(answer))
    talk.add_observation(Observation((("never seen", OBSERVATION),)))  # no action follows: not part of the trajectory
    out = talk.trajectory()
    assert out.tokens.tolist() == [*prompt, *action, *observation, *answer]
    warned = len(trained.encode("WARNING\n"))
    assert out.kinds.tolist() == (
        [PROMPT] * len(prompt)
        + [ACTION] * len(action)
        + [WARNING] * warned
        + [OBSERVATION] * (len(observation) - warned)
        + [ACTION] * len(answer)
    )
    first = len(prompt) + len(action) + len(observation)
    assert out.turns.tolist() == [0] * first + [1] * len(answer)
    assert talk.transcript.actions == "<search> code</search><answer>233</answer>"
    assert talk.transcript.response == "<search> code</search>WARNING\n233 é<answer>233</answer>never seen"
    assert [a.dtype for a in (out.tokens, out.kinds, out.logprobs, out.turns)] == [
        np.int32, np.uint8, np.float32, np.int32,
    ]  # fmt: skip


def test_overshoot_is_kept_as_sampled_but_not_heard(trained):
    talk = conversation(trained)
    talk.add_prompt([Message("user", "q")])
    ids = trained.encode("<answer>é</answer>") + trained.encode("é")[:1]  # half a character past the boundary
    assert talk.add_action(generation(ids, overshoot=1)) == "<answer>é</answer>"
    assert talk.trajectory().tokens[-len(ids) :].tolist() == ids


def test_eos_is_kept_as_sampled_but_not_heard(trained):
    talk = conversation(trained)
    talk.add_prompt([Message("user", "q")])
    ids = [*trained.encode("hello"), trained.eos_ids[0]]
    assert talk.add_action(generation(ids, finish="eos")) == "hello"
    assert talk.trajectory().tokens[-1] == trained.eos_ids[0]


def test_observations_are_cut_at_the_head(trained):
    talk = conversation(trained, limit=3)
    talk.add_prompt([Message("user", "q")])
    talk.add_action(generation(trained.encode("x")))
    text = "calling code of Ghana"
    kept = talk.add_observation(Observation(((text, OBSERVATION),)))
    assert talk.pending == trained.encode(text)[:3]
    assert kept == trained.decode(trained.encode(text)[:3]) and text.startswith(kept)


def test_plain_prompts_start_with_the_prefix(tokenizer):
    talk = conversation(tokenizer)
    talk.add_prompt([Message("user", "hello")])
    assert talk.pending == [*tokenizer.prefix_ids, *tokenizer.encode("hello")]


def test_an_empty_generation_takes_nothing_from_what_is_pending(trained):
    talk = conversation(trained)
    talk.add_prompt([Message("user", "q")])
    talk.add_action(generation(trained.encode("x")))
    talk.add_observation(Observation((("y", OBSERVATION),)))
    assert talk.add_action(generation([], finish="length")) == ""
    assert trained.decode(talk.trajectory().tokens) == "qx"


def test_misuse_is_an_error(trained):
    talk = conversation(trained)
    with pytest.raises(ValueError, match="follows an action"):
        talk.add_observation(Observation((("x", OBSERVATION),)))
    talk.add_prompt([Message("user", "q")])
    with pytest.raises(ValueError, match="one prompt"):
        talk.add_prompt([Message("user", "q")])
    bad = Generation(np.zeros(2, np.int32), np.zeros(1, np.float32), np.zeros(2, np.int32), "stop")
    with pytest.raises(ValueError, match="2 tokens with 1 log-probs"):
        talk.add_action(bad)


def test_the_kind_of_a_token_is_told_by_its_bytes():
    """The definition, byte by byte, beside random spans and tokens: empty ones, and some behind the end, too."""
    rng = np.random.default_rng(0)
    kinds = [PROMPT, ACTION, OBSERVATION, WARNING]
    for _ in range(2000):
        spans = [
            ("é" * rng.integers(3) + "a" * rng.integers(6), kinds[rng.integers(4)]) for _ in range(rng.integers(6))
        ]
        of_byte = [kind for text, kind in spans for _ in text.encode()]
        lengths = rng.integers(0, 5, rng.integers(1 + len(of_byte)) + 1)
        expected = []
        for end, length in zip(np.cumsum(lengths).tolist(), lengths.tolist(), strict=True):
            touched = set(of_byte[end - length : end])
            mixed = WARNING if touched and PROMPT not in touched else PROMPT
            expected.append(touched.pop() if len(touched) == 1 else mixed)
        assert span_kinds(spans, lengths) == expected
