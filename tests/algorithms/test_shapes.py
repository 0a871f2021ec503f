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
    kl,
    outcome,
    policy_loss,
    process,
    segments,
    turn_gae,
    value_bins,
    value_loss,
)
from tests.algorithms.entries import BEST_OF_K
from tests.algorithms.entries import GROUP as GROUP_ENTRIES
from tests.wrong_arrays import B, F, I, array, refuses

T, FLAGS, IDS = array(F, 3), array(B, 3), array(I, 3)
GROUP = array(F, 2, 3), array(B, 2, 3)
TOKENS = array(F, 2, 3), array(F, 2, 3), array(F, 2, 3)
BINS = value_bins.Bins(0.0, 1.0, 3, 0.75)
CASES = [
    (gae.check_tokens, (FLAGS, T, T)),
    (gae.gae, (T, T, FLAGS, 0.9, 0.8)),
    (turn_gae.turn_starts, (FLAGS, IDS)),
    (turn_gae.turn_gae, (T, T, FLAGS, IDS, 0.9, 0.8)),
    (turn_gae.turn_vtrace, (T, T, FLAGS, IDS, T, 0.9, 0.8)),
    (turn_gae.bilevel_gae, (T, T, FLAGS, IDS, 0.9, 0.8, 0.7)),
    (turn_gae.vtrace, (T, T, FLAGS, T, 0.9, 0.8)),
    (advantages.check_groups, GROUP),
    *((entry, GROUP) for entry in GROUP_ENTRIES.values()),
    *((entry(k=2), GROUP) for entry in BEST_OF_K.values()),
    (advantages.zero_signal, GROUP),
    (advantages.whiten, GROUP),
    (process.turn_mean_std, (array(F, 2, 2, 3), array(B, 2, 2, 3))),
    (process.group_in_group, (array(F, 2, 2, 3), array(B, 2, 2, 3), array(I, 2, 2, 3), 0.9, 1.0)),
    (corrections.importance_weights, (T, T, "truncate", "token", 0.0, 2.0)),
    (corrections.vetoed, (T, T, 1e-4)),
    (kl.kl_estimate, (T, T, "k3")),
    (kl.kl_loss, (T, T, "k1")),
    (outcome.auc, (T, FLAGS)),
    (outcome.accuracy, (T, FLAGS, 0.0)),
    (outcome.best_threshold, (T, FLAGS)),
    (policy_loss.clipped_policy_loss, (*TOKENS, 0.2, 0.3)),
    (policy_loss.dual_clip_loss, (*TOKENS, 0.2, 0.3, 3.0)),
    (policy_loss.sequence_ratio_loss, (*TOKENS, array(F, 2, 3), 0.2, 0.3)),
    (policy_loss.cispo_loss, (*TOKENS, 0.2, 0.3)),
    (policy_loss.probability_mask_loss, (*TOKENS, 0.2, 0.3, 20.0)),
    (policy_loss.soft_gate_loss, (*TOKENS, 1.0, 1.05)),
    (policy_loss.importance_sampling_loss, TOKENS),
    (policy_loss.reinforce_loss, TOKENS[:2]),
    (segments.sequence_mean, (array(F, 2, 3), array(B, 2, 3), array(I, 2, 3))),
    (distill.sampled_advantages, (T, T, FLAGS)),
    (distill.jsd, (array(F, 2, 3), array(F, 2, 3), array(B, 2, 3), 0.5), ("shape of argument 2",)),
    (distill.reverse_kl, (array(F, 2, 3), array(F, 2, 3), array(B, 2, 3)), ("shape of argument 2",)),
    (value_bins.categorical_value_loss, (array(F, 2, 3), array(F, 2), BINS, "two_hot")),
    (value_loss.clipped_value_loss, (*TOKENS, 0.5)),
]


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
