"""What a family of models is, and how its layers repeat; the families are in families.py."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxagent.models.blocks import LayerBlock

if TYPE_CHECKING:
    from jaxagent.models.spec import ModelSpec

Pattern = tuple[tuple[LayerBlock, ...], ...]  # the blocks of each layer of a period; layer i is of kind i % its length


@dataclasses.dataclass(frozen=True)
class Family:
    """All in which a family differs from the others. One whose blocks read keys of config.json extends this class."""

    model_type: str  # as config.json has it
    architecture: str  # transformers' class
    pattern: Pattern
    norm_eps: float = 1e-6  # as released; a Hugging Face folder says its own
    zero_centred_norms: bool = False  # see `ModelSpec.zero_centred_norms`
    # What transformers takes for keys that a config.json leaves out, where this is no other family's way.
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reads: frozenset[str] = frozenset()  # keys of config.json that only this family reads, its `pattern_of` or its RoPE
    # Keys of the family's class in transformers that change nothing of what is computed, and why not.
    harmless: Mapping[str, str] = dataclasses.field(default_factory=dict)
    skips: tuple[str, ...] = ()  # beginnings of names of stored weights that are not read, see `hf.unread`

    def pattern_of(self, hf: Mapping[str, Any], source: str) -> Pattern:
        """The pattern that a parsed config.json describes; `source` is its name, for ConfigErrors."""
        return self.pattern

    def settings_of(self, spec: ModelSpec) -> dict[str, Any]:
        """What `pattern_of` reads, for the config.json of an exported model."""
        return {}

    def scaling_of(self, spec: ModelSpec) -> dict[str, Any]:
        """What `pattern_of` reads in the section about scaled RoPE."""
        return {}


def period_of(layers: Sequence[tuple[LayerBlock, ...]]) -> Pattern:
    """The shortest pattern that repeats to these layers."""
    n = len(layers)
    return next(tuple(layers[:p]) for p in range(1, n + 1) if n % p == 0 and layers[:p] * (n // p) == layers)


@functools.lru_cache(maxsize=64)
def before_repetition(layers: Pattern) -> tuple[int, int]:
    """How many layers come before those that repeat, and the period of these: of both together the fewest."""
    n = len(layers)
    splits = ((first, kinds - first) for kinds in range(1, n + 1) for first in range(kinds))
    return next(
        (first, p)
        for first, p in splits
        if not (n - first) % p and layers[first : first + p] * ((n - first) // p) == layers[first:]
    )
