"""What a critic's `loss` can name: how values are learnt, and what the critic's head says of a state.

The formulas are in `value_loss.py` and `value_bins.py`. No jax before an entry is called: a config is read without it.
Axis letter: N bins.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, ClassVar

from jaxagent.config.ranges import FiniteFloat, NonNegativeFloat, PositiveFloat, at_least

if TYPE_CHECKING:
    import jax

    from jaxagent.algorithms.value_bins import Bins


@dataclasses.dataclass(frozen=True)
class Squared:
    """Clipped regression; 0.5 is verl's range. The head says the value itself."""

    heads: ClassVar[int] = 0  # logits of the head; 0: one number, f32[...] without an axis for it
    value_clip: NonNegativeFloat = 0.5  # in units of reward; 0 = not clipped

    def __call__(self, outputs: jax.Array, old_values: jax.Array, returns: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The loss of each token, and 1 where the clipped branch is active, f32[...] both."""
        from jaxagent.algorithms.value_loss import clipped_value_loss

        return clipped_value_loss(outputs, old_values, returns, self.value_clip)

    def values(self, outputs: jax.Array) -> jax.Array:
        """f32[...] of what the head gave."""
        return outputs


@dataclasses.dataclass(frozen=True)
class Categorical:
    """Cross-entropy over bins (arXiv 2403.03950): the head gives logits f32[..., N]."""

    target: ClassVar[str]  # of value_bins.TARGETS
    bins: Annotated[int, at_least(2)] = 51
    low: FiniteFloat = -0.25  # for rewards from 0 to 1: the width of a few bins beyond, for the spread of hl_gauss
    high: FiniteFloat = 1.25

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"low ({self.low:g}) must be less than high ({self.high:g}).")

    @property
    def heads(self) -> int:
        """Logits of the head."""
        return self.bins

    @property
    def support(self) -> Bins:
        """The bins."""
        from jaxagent.algorithms.value_bins import Bins

        return Bins(self.low, self.high, self.bins, getattr(self, "sigma", 0.0))

    def __call__(self, outputs: jax.Array, old_values: jax.Array, returns: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As `Squared`; nothing is clipped."""
        import jax.numpy as jnp

        from jaxagent.algorithms.value_bins import categorical_value_loss

        del old_values
        return categorical_value_loss(outputs, returns, self.support, self.target), jnp.zeros_like(returns)

    def values(self, outputs: jax.Array) -> jax.Array:
        """The expectations."""
        from jaxagent.algorithms.value_bins import expectation

        return expectation(outputs, self.support)


@dataclasses.dataclass(frozen=True)
class HLGauss(Categorical):
    """The target is a normal distribution around the return."""

    target: ClassVar[str] = "hl_gauss"
    sigma: PositiveFloat = 0.75  # standard deviation of the target, in bin widths


class TwoHot(Categorical):
    """The target lies on the two bins around the return."""

    target: ClassVar[str] = "two_hot"


VALUE_LOSSES: dict[str, type] = {"squared": Squared, "hl_gauss": HLGauss, "two_hot": TwoHot}
