"""Arrays of a wrong rank, shape or type are refused, where NumPy and jax would broadcast or cast them silently."""

import numpy as np
import pytest

from jaxagent.algorithms import (
    advantages,
    aggregate,
    corrections,
    distill,
    echo,
    gae,
    outcome,
    policy_loss,
    teachers,
    value_losses,
)
from jaxagent.algorithms.estimators import TokenPath
from tests.algorithms.entries import BEST_OF_K, TOKEN, TURN
from tests.algorithms.entries import GROUP as GROUP_ENTRIES
from tests.wrong_arrays import B, F, I, array, refuses

T, FLAGS, IDS = array(F, 3), array(B, 3), array(I, 3)
GROUP = array(F, 2, 3), array(B, 2, 3)
TOKENS = array(F, 2, 3), array(F, 2, 3), array(F, 2, 3)
PATH = T, T, FLAGS, IDS, T
TURNS = array(F, 2, 2, 3), array(B, 2, 2, 3), array(I, 2, 2, 3)
FORKS = array(I, 2, 2) - 2, array(I, 2, 2) - 1
# What these do not read.
UNREAD = {name: tuple(f"{kind} of argument {i}" for i in which for kind in ("rank", "shape", "dtype"))
          for name, which in {"gae": (3, 4), "gae_adaptive": (3, 4), "return": (1, 3, 4), "gae_turns": (4,),
                              "vtrace": (3,)}.items()}  # fmt: skip
CASES = [
    (gae.check_tokens, (FLAGS, T, T)),
    (gae.gae, (T, T, FLAGS, 0.9, 0.8)),
    (gae.turn_starts, (FLAGS, IDS)),
    *((lambda *x, f=entry: f()(TokenPath(*x)), PATH, UNREAD.get(name, ())) for name, entry in TOKEN.items()),
    (advantages.check_groups, GROUP),
    *((entry, GROUP) for entry in GROUP_ENTRIES.values()),
    *((entry(k=2), GROUP) for entry in BEST_OF_K.values()),
    (advantages.zero_signal, GROUP),
    (advantages.whiten, GROUP),
    *((entry(), TURNS[: 2 + entry.reads_states]) for entry in TURN.values() if not entry.reads_branches),
    *((entry(), (*TURNS[:2], *FORKS)) for entry in TURN.values() if entry.reads_branches),
    *((entry(), (T, T)) for entry in (corrections.Importance, corrections.Mask)),
    (corrections.Mask(veto=1e-4).vetoes, (T, T)),
    (policy_loss.kl_estimate, (T, T, "k3")),
    (policy_loss.kl_loss, (T, T, "k1")),
    (outcome.auc, (T, FLAGS)),
    (outcome.accuracy, (T, FLAGS, 0.0)),
    (outcome.best_threshold, (T, FLAGS)),
    (policy_loss.tokens_of, (*TOKENS, array(B, 2, 3), array(I, 2, 3))),
    (policy_loss.sequence_mean, (array(F, 2, 3), array(B, 2, 3), array(I, 2, 3))),
    (distill.sampled_advantages, (T, T, FLAGS)),
    *((entry(), (array(F, 2, 3), array(F, 2, 3), array(B, 2, 3)), ("shape of argument 2",))
      for entry in (teachers.JSD, teachers.ReverseKL, teachers.ForwardKL)),
    (lambda *x: value_losses.TwoHot(bins=3)(x[0], x[1], x[1]), (array(F, 2, 3), array(F, 2))),
    (value_losses.Squared(), TOKENS),
]  # fmt: skip


@pytest.mark.parametrize(("function", "arguments", "taken"), [(*case, ())[:3] for case in CASES])
def test_wrong_arrays_are_refused(function, arguments, taken):
    refuses(function, arguments, taken)


def test_counts_and_episodes_are_of_the_same_sequences():
    counts = np.ones(3)
    for wrong in (np.ones((3, 1)), np.float64(1.0)):
        with pytest.raises(AssertionError):
            aggregate.TokenMean()(wrong)
    with pytest.raises(AssertionError):
        aggregate.RolloutMean()(counts, np.ones(1, np.int32))


def test_denominators_are_of_as_many_sequences_as_were_counted():
    with pytest.raises(AssertionError):
        echo.FullObservation()(np.ones(3), np.ones(1))
    with pytest.raises(AssertionError):
        echo.target_mask(np.zeros((1, 3), np.uint8), "env_only", 0)
