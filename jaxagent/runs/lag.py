"""Rollouts that lag: which weights play, how old their tokens are, and how far log-probs are from the trainer's.

A version is the policy after so many published steps. The policy that a step trains is newer than its tokens, so its
log-probs differ from the recorded ones by what was learnt since (`policy/drift_max`). That would hide a wrong mask,
wrong weights or a wrong temperature. Under the very version that sampled a token the two agree within rounding, and
with exact numerics to the last bit: so tokens are scored again as they were sampled.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jaxagent.algorithms.streams import action_mask, sampled_trajectories
from jaxagent.engine.driver import Driver
from jaxagent.learner.programs import Programs
from jaxagent.learner.state import TrainState
from jaxagent.models.params import Params
from jaxagent.runs.attempts import temperature
from jaxagent.types import Group, Trajectory

METRICS = tuple(f"logprob_gap/{name}" for name in ("max", "mean", "scored_frac", "rescore_s"))


def gaps(
    programs: Programs, state: TrainState, params_of: Callable[[int], Params | None], groups: Sequence[Group], step: int
) -> dict[str, float | None]:
    """Scores the tokens that a step trains on again, each under the version that sampled it.

    `params_of` gives what was trained of an earlier version, None where that is not kept; `state` is the step's first.

    Returns:
      "logprob_gap/max" and "logprob_gap/mean" of the tokens that were scored, "logprob_gap/scored_frac", their part of
      all, and "logprob_gap/rescore_s", the seconds it took. None each in a step that `rl.rescore_every` leaves out, and
      the first two where no version is held.
    """
    rl = programs.rl
    if not rl.rescores or step % rl.rescore_every:
        return dict.fromkeys(METRICS)
    started = time.monotonic()
    trajectories = sampled_trajectories(groups)
    gaps_of_versions = []
    for version in versions(trajectories):
        then = state
        if version != step:
            if (trained := params_of(version)) is None:
                continue
            then = programs.update.merged(state.replace(params=trained))  # with LoRA its adapters multiplied out
        those = [each for each in trajectories if sampled_by(each, version).any()]
        scored = programs.policy_logprobs(then, those, temperature(rl, step))
        gaps_of_versions += [gap(each, version, logprobs) for each, logprobs in zip(those, scored, strict=True)]
    return summary(gaps_of_versions, trajectories) | {"logprob_gap/rescore_s": time.monotonic() - started}


def versions(trajectories: Sequence[Trajectory]) -> list[int]:
    """The versions that sampled the tokens, oldest first. Versions may have changed in the middle of an episode."""
    return sorted({int(v) for each in trajectories for v in np.unique(each.policy_versions[action_mask(each) > 0])})


def sampled_by(trajectory: Trajectory, version: int) -> np.ndarray:
    """bool[T]: tokens that a version sampled."""
    return (action_mask(trajectory) > 0) & (trajectory.policy_versions == version)


def gap(trajectory: Trajectory, version: int, logprobs: np.ndarray) -> np.ndarray:
    """f64[N] of the N tokens that a version sampled: how far their recorded log-probs are from f32[T] `logprobs`."""
    which = sampled_by(trajectory, version)
    return np.abs(trajectory.logprobs[which].astype(np.float64) - logprobs[which])


def summary(gaps_of_versions: Sequence[np.ndarray], trajectories: Sequence[Trajectory]) -> dict[str, float | None]:
    """The metrics of the gaps that were found in `trajectories`: None, never 0, of what was not scored."""
    scored = np.concatenate([np.zeros(0), *gaps_of_versions])
    total = sum(int((action_mask(each) > 0).sum()) for each in trajectories)
    return {
        "logprob_gap/max": float(scored.max()) if len(scored) else None,
        "logprob_gap/mean": float(scored.mean()) if len(scored) else None,
        "logprob_gap/scored_frac": len(scored) / total if total else None,
    }


def ages(groups: Sequence[Group], step: int, bound: int) -> dict[str, float | None]:
    """The ages of a step's sampled tokens as metrics; none where nothing may be older than the step's own version.

    Returns:
      "staleness/mean" and "staleness/max" in versions (None without tokens), and for every age 0..bound
      "staleness/frac_<age>", its part of the tokens.

    Raises:
      RuntimeError: a token's age is not from 0 to `bound`; names its task.
    """
    counts = np.zeros(bound + 1, np.int64)
    for trajectory, task in ((t, g.task.id) for g in groups for t in sampled_trajectories([g])):
        of_tokens = step - trajectory.policy_versions[trajectory.action_mask].astype(np.int64)
        if of_tokens.min() < 0 or of_tokens.max() > bound:
            wrong = of_tokens[(of_tokens < 0) | (of_tokens > bound)][0]
            raise RuntimeError(
                f"RL step {step} would train on a token of task '{task}' that version {step - wrong} sampled: versions "
                f"{max(0, step - bound)} to {step} are allowed (rl.staleness). Please report this."
            )
        counts += np.bincount(of_tokens, minlength=bound + 1)
    if not bound:
        return {}
    total, age = counts.sum(), np.arange(bound + 1)
    there = age[counts > 0]
    metrics: dict[str, float | None] = {
        "staleness/mean": float(counts @ age / total) if total else None,
        "staleness/max": float(there.max()) if total else None,
    }
    return metrics | {f"staleness/frac_{n}": float(counts[n] / total) if total else None for n in age.tolist()}


class LaggedWeights:
    """Which weights the engine has: the newest, or with `rl.staleness` those of so many steps ago.

    Staleness on one machine is what a run sees whose rollouts are that much older, step for step. The weights of
    the steps between are kept on the device, and bundles hold them.
    """

    def __init__(self, driver: Driver, staleness: int):
        self._driver = driver
        self._staleness = staleness
        # (version, policy to generate with, what was trained: the same, or its LoRA adapters), oldest first
        self._kept: collections.deque[tuple[int, Params, Params]] = collections.deque(maxlen=staleness + 1)

    def publish(self, version: int, state: TrainState) -> None:
        """The policy after `version` steps exists: rollouts get the oldest that is kept."""
        self._kept.append((version, state.policy, state.params))
        self._serve(0)

    def past(self) -> Mapping[int, Params]:
        """What is trained of every version but the newest, by version, oldest first."""
        return {version: trained for version, _, trained in list(self._kept)[:-1]}

    def missing(self, version: int) -> Sequence[int]:
        """Every earlier version that rollouts may still need: a process that starts holds none."""
        return range(max(0, version - self._staleness), version)

    def weights_of(self, version: int) -> Params | None:
        """What was trained of one of the versions that are kept."""
        return next((trained for number, _, trained in self._kept if number == version), None)

    @contextlib.contextmanager
    def newest(self) -> Iterator[None]:
        """For evaluation. Where nothing lags the engine is left alone, and keeps what it has cached."""
        if len(self._kept) > 1:
            self._serve(-1)
        yield
        if len(self._kept) > 1:
            self._serve(0)

    def _serve(self, place: int) -> None:
        version, policy, _ = self._kept[place]
        self._driver.update_params(policy, version)
