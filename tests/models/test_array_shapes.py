"""The model's and the learner's functions refuse arrays of a wrong rank, shape or type instead of broadcasting them."""

import dataclasses

import numpy as np
import pytest

from configs import search_r1
from jaxagent import config as schema
from jaxagent.algorithms.value_losses import Squared
from jaxagent.learner import loss
from jaxagent.learner.batching import Packer
from jaxagent.learner.state import PER_TARGET, check_batch
from jaxagent.models import attention, exact, layers, logprobs, rope
from tests.wrong_arrays import B, F, I, array, refuses

PAGES = array(F, 4, 2, 8, 16), array(F, 4, 2, 16, 8)


@pytest.mark.parametrize(
    ("function", "arguments", "taken"),
    [
        (attention.attend_dense, (array(F, 2, 3, 4, 8), *[array(F, 2, 5, 2, 8)] * 2, array(B, 2, 3, 5)), ()),
        (layers.cut, (*PAGES, array(I, 2), array(I, 2), 4), tuple(f"{k} of argument {i}" for i in (0, 1)
                                                               for k in ("shape", "dtype"))),
        (layers.rms_norm, (array(F, 2, 8), array(F, 8), 1e-6), ("rank of argument 0",)),
        (rope.rotate, (array(F, 2, 3, 8), array(F, 2, 4), array(F, 2, 4)), ()),
        (logprobs.row_logprobs, (array(F, 2, 8), array(I, 2), array(F, 2)), ("shape of argument 0",)),
        (logprobs.block_sums, (array(F, 2, 8),), ("shape of argument 0",)),
        (exact.with_value, (array(F, 2, 3), array(F, 2, 3)), ()),
    ],
)  # fmt: skip
def test_wrong_arrays_are_refused(function, arguments, taken):
    refuses(function, arguments, taken)


def a_batch():
    config = dataclasses.replace(schema.parse(search_r1.get_config()).rl.batch, row_tokens=8, micro_rows=2)
    return Packer(config, 4).empty()


def test_the_losses_take_what_the_packer_makes():
    batch = a_batch()
    scores = np.zeros(batch.targets.shape, np.float32)
    loss.policy_loss(scores, scores, batch)
    loss.value_loss(scores, batch, Squared())
    for wrong in (scores[:, :1], scores[None], scores.astype(np.int32)):
        with pytest.raises(AssertionError):
            loss.policy_loss(wrong, scores, batch)
        with pytest.raises(AssertionError):
            loss.value_loss(wrong, batch, Squared())


@pytest.mark.parametrize("name", ["tokens", "positions", "segments", *PER_TARGET])
def test_a_wrong_array_of_a_batch_is_refused(name):
    batch = a_batch()
    check_batch(batch)
    right = getattr(batch, name)
    for wrong in (right[:, :1], right[None], right.astype(np.int32 if right.dtype == np.float32 else np.float32)):
        with pytest.raises(AssertionError):
            check_batch(batch.replace(**{name: wrong}))
