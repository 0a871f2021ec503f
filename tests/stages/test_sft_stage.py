"""Negatives in supervised fine-tuning: how many, which, what they become, and that they are learnt and not unlearnt."""

import dataclasses
import json
import types
from collections import Counter

import numpy as np
import pytest

from configs.search_r1 import get_config
from jaxagent import config
from jaxagent.algorithms.supervised import sft
from jaxagent.config import ConfigError
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.rollout.conversation import Conversation
from jaxagent.rollout.templates import Plain
from jaxagent.runs.stages import sft as stage
from jaxagent.types import TokenKind

USES = {"prompt": "Where is Kumasi?", "turns": [
    {"action": "<search> Kumasi</search>", "observation": "\n\n<information>Ghana</information>\n\n"},
    {"action": "<answer> Ghana</answer>", "observation": ""}]}  # fmt: skip
NEEDS_NONE = {"prompt": "What is 1 + 1?", "turns": [{"action": "<answer> 2</answer>", "observation": ""}]}
OFFERS_NONE = {"prompt": [{"role": "user", "content": "Search for Kumasi."}],
               "turns": [{"action": "I cannot search.", "observation": ""}]}  # fmt: skip


@pytest.mark.parametrize("examples, frac, count", [(32, 0.1, 3), (8, 0.01, 1), (10, 0.26, 3), (4, 0.5, 2)])
def test_how_many(examples, frac, count):
    assert stage.negative_count(examples, frac) == count


def test_the_last_of_an_updates_examples_make_room_and_every_negative_comes_before_any_comes_again():
    positives, negatives = [{"p": i} for i in range(3)], [{"n": i} for i in range(8)]  # more of them than positives
    assert stage.with_negatives(positives, negatives, 0, (0, 0)) == positives
    drawn = []
    for update in range(8):
        rows = stage.with_negatives(positives, negatives, 2, (5, update))
        assert rows[:1] == positives[:1] and len(rows) == 3
        drawn += [row["n"] for row in rows[1:]]
    assert Counter(drawn[:8]) == Counter(range(8)) == Counter(drawn[8:])
    assert drawn[2:4] == [
        row["n"] for row in stage.with_negatives(positives, negatives, 2, (5, 1))[1:]
    ]  # a resumed run


@pytest.fixture(scope="module")
def parts():
    cfg = config.parse({**get_config().to_dict(), "stages": ("sft",)})
    tokenizer = Tokenizer.train([json.dumps(row) for row in (USES, NEEDS_NONE, OFFERS_NONE)] * 9, 320, cfg.env.tokens)
    return types.SimpleNamespace(
        cfg=cfg, environment=cfg.env, tokenizer=tokenizer,
        conversation=lambda: Conversation(tokenizer, Plain(), cfg.env.observation_tokens),
    )  # fmt: skip


def texts(parts, trajectory) -> tuple[str, str]:
    """What stands before the first action, and what is trained."""
    action = trajectory.kinds == TokenKind.ACTION
    first = int(np.argmax(action))
    return tuple(parts.tokenizer.decode(trajectory.tokens[at].tolist()) for at in (np.arange(first), action))


def test_the_two_kinds_of_negatives(parts):
    one, two = (stage.to_trajectory(parts, row) for row in (NEEDS_NONE, OFFERS_NONE))
    (usual,) = parts.environment.messages(NEEDS_NONE["prompt"])  # (1): the tool is offered and not used
    assert texts(parts, one) == (usual.content, "<answer> 2</answer>") and "1 + 1" in usual.content
    assert texts(parts, two) == (
        "Search for Kumasi.",
        "I cannot search.<eos>",
    )  # (2): the prompt as it stands offers none


def test_a_negative_is_trained_like_every_demonstration(parts):
    """Nothing is made less likely: every demonstrated token has the same weight, and all of them sum to 1."""
    rows = stage.with_negatives([USES, USES], [NEEDS_NONE], 1, (0, 0))
    streams = sft([stage.to_trajectory(parts, row) for row in rows], observations=False)
    counts = [int((s.trajectory.kinds == TokenKind.ACTION).sum()) for s in streams]
    for s in streams:
        wanted = (s.trajectory.kinds == TokenKind.ACTION) / sum(counts)
        np.testing.assert_allclose(s.ce_weights, wanted, rtol=1e-6)
    assert texts(parts, streams[1].trajectory)[1] == "<answer> 2</answer>" and min(counts) > 0


def test_every_update_of_the_stage_has_its_negatives(parts, tmp_path, monkeypatch):
    """The stage's own function from examples to streams, taken from where the loop over updates would get it."""
    (tmp_path / "full.jsonl").write_text(json.dumps(USES))
    (tmp_path / "negatives.jsonl").write_text(json.dumps(NEEDS_NONE) + "\n" + json.dumps(OFFERS_NONE))
    chosen = dict(negatives=str(tmp_path / "negatives.jsonl"), negative_frac=0.25, examples=4)
    cfg = dataclasses.replace(parts.cfg, sft=dataclasses.replace(parts.cfg.sft, **chosen))
    here = types.SimpleNamespace(**{**vars(parts), "cfg": cfg, "dataset": tmp_path})
    monkeypatch.setattr(stage.offline, "train", lambda *given: given)
    *_, examples, prepare = stage.run(here, None, None, None)
    assert examples == [USES]
    taught = []
    for update in range(2):
        streams, metrics = prepare(None, None)(types.SimpleNamespace(step=np.int32(update)), examples * 4)
        assert metrics == {} and len(streams) == 4
        assert sum(s.ce_weights.sum() for s in streams) == pytest.approx(1.0, rel=1e-6)
        assert all(texts(here, s.trajectory)[1].startswith("<search>") for s in streams[:3])
        taught.append(texts(here, streams[3].trajectory)[1])
    assert sorted(taught) == ["<answer> 2</answer>", "I cannot search.<eos>"]


def test_what_is_refused(parts, tmp_path):
    def refused(message, negatives, frac):
        cfg = dataclasses.replace(
            parts.cfg, sft=dataclasses.replace(parts.cfg.sft, negatives=negatives, negative_frac=frac)
        )
        with pytest.raises(ConfigError, match=message):
            stage.check(types.SimpleNamespace(cfg=cfg, dataset=tmp_path))

    (tmp_path / "full.jsonl").write_text(json.dumps(USES))
    (tmp_path / "negatives.jsonl").write_text(json.dumps(NEEDS_NONE) + "\n" + json.dumps(OFFERS_NONE))
    (tmp_path / "broken.jsonl").write_text(json.dumps(NEEDS_NONE) + '\n{"prompt": "q", "turns": []}')
    refused("no file", str(tmp_path / "none.jsonl"), 0.1)
    refused("row 2: column 'turns'", str(tmp_path / "broken.jsonl"), 0.1)
