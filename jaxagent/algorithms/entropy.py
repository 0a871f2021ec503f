"""Entropy held at a target: the bonus's coefficient rises while the policy is too sure of itself, and falls otherwise.

"Skywork Open Reasoner 1" (He et al., arXiv 2505.22312), section 3.2.5, adaptive entropy control. In: the entropy
measured over the action tokens of each RL step. Out: the coefficient of the next step. The coefficient is inside
the weights of the loss, so that changing it compiles nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, MutableMapping

from jaxagent.config import EntropyControlConfig, RLConfig

_RESULT, _MEASURED = "entropy_coefficient", "policy/entropy"


@dataclasses.dataclass(frozen=True)
class EntropyControl:
    """The controller's state: saved with a bundle, so that a resumed run goes on as if it had not stopped."""

    config: EntropyControlConfig | None  # None: the coefficient stays where it is
    coefficient: float
    active: bool = True  # whether the last measured entropy was at the target or below

    @classmethod
    def start(cls, rl: RLConfig, saved: Mapping[str, float | list[float]]) -> EntropyControl:
        """As a bundle has it, else from `rl.entropy_coefficient`."""
        state = saved.get(_RESULT)
        coefficient, active = state if isinstance(state, list) else (rl.entropy_coefficient, True)
        return cls(rl.entropy_control, float(coefficient), bool(active))

    @property
    def applied(self) -> float:
        """The coefficient of the next step: 0 while the entropy is above the target."""
        return self.coefficient if self.active else 0.0

    def apply(self, rl: RLConfig) -> RLConfig:
        """The config of the next step."""
        return dataclasses.replace(rl, entropy_coefficient=self.applied)

    def after(self, metrics: Mapping[str, float]) -> EntropyControl:
        """The state after a step that measured `metrics["policy/entropy"]`; unchanged when off or nothing measured."""
        if self.config is None or not metrics.get("policy/tokens"):
            return self
        coefficient, active = next_coefficient(self.coefficient, metrics[_MEASURED], self.config)
        return dataclasses.replace(self, coefficient=coefficient, active=active)

    def save(self, results: MutableMapping[str, object]) -> None:
        """Puts the state where `start` finds it; nothing when off."""
        if self.config is not None:
            results[_RESULT] = [self.coefficient, self.active]


def next_coefficient(coefficient: float, entropy: float, config: EntropyControlConfig) -> tuple[float, bool]:
    """c + step where entropy < target, c - step where entropy > target, kept in [0, maximum]; and entropy <= target.

    Args:
      coefficient: c.
      entropy: measured, nats per token.
      config: target, step, maximum.

    Returns:
      The next coefficient, and whether the bonus is applied at all.
    """
    change = config.step * ((entropy < config.target) - (entropy > config.target))
    return min(max(coefficient + change, 0.0), config.maximum), entropy <= config.target
