"""What a decoder layer is made of: blocks, each in one file that says everything about it.

A layer is a tuple of blocks, each of which adds to the residual stream, and a family is the layers' pattern
(families.py). Trainer, engine, import and export, adapters and the dry run ask the blocks and know none of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from jaxagent.models.attention import Attend
    from jaxagent.models.params import ArraySpec, Layers
    from jaxagent.models.recurrence import Recurrence
    from jaxagent.models.spec import ModelSpec

# What a block keeps of sequences between calls: a pytree of arrays with a leading axis of pages or memories, or None.
State = Any
Cache = tuple[tuple[State, ...], ...]  # of each layer, of each of its blocks; None where a block keeps nothing

# What becomes of a block's choices: its state, the scores f32[N, X] of what each row may go to and the numbers
# i32[N, k] that it would choose -> the numbers i32[N, k] that it takes, ascending, and the new state.
Choose = Callable[[State, jax.Array, jax.Array], tuple[jax.Array, State]]


@dataclasses.dataclass(frozen=True)
class FlatRows:
    """What all layers of one forward pass share: how its rows (token, position) belong together.

    A block that relates tokens in yet another way brings a callback of its own, beside these.
    """

    angles: tuple[jax.Array, jax.Array]  # cos and sin f32[N, R/2] of each row's position, see `rope.table`
    attend: Attend
    recur: Recurrence | None = None  # for blocks with a memory of fixed size
    choose: Choose | None = None  # None: blocks go by their own choices, and nobody hears of them


@dataclasses.dataclass(frozen=True)
class LayerBlock:
    """One step of a layer, x -> x + block(x). Its fields are settings, so that it can be static under jit.

    Each block of a layer may keep a state of sequences; one that does not returns the None it gets. What grows with the
    tokens (`init_state`) lies in pages of `page_tokens` tokens, which sequences with the same beginning share: a page
    holds what later tokens need of its own. What has a fixed size (`init_memory`) lies in memories: each sequence in
    progress has one, which its tokens read and write in place, and what it was after some tokens is a copy of it.
    """

    def arrays(self, spec: ModelSpec) -> dict[str, ArraySpec | None]:
        """The arrays of one layer by their names in `Layers`; None for one that this setting of the block leaves out.

        Every matrix can have an adapter, under the last part of its Hugging Face name. A projection back into the
        residual stream starts at the scale of the embeddings: a layer then adds to what a token is without drowning it,
        and tied embeddings can be copied from the first steps on.
        """
        raise NotImplementedError

    def apply(
        self, layer: Layers, spec: ModelSpec, x: jax.Array, rows: FlatRows, state: State
    ) -> tuple[jax.Array, State]:
        """What is added to x compute_dtype[N, E], and the new state; `layer` is in compute dtype, whole over fsdp."""
        raise NotImplementedError

    def init_state(self, spec: ModelSpec, pages: int, page_tokens: int, dtype: str) -> State:
        """Zeros for one layer, pages sharded over `sharding.FLAT`, heads over tensor; None: it keeps nothing."""

    def init_memory(self, spec: ModelSpec, memories: int, dtype: str) -> State:
        """Zeros for one layer, memories sharded likewise, of a block that keeps these and no pages.

        A token at position 0 starts from zeros, whatever the memory holds: nobody clears it.
        """
        raise NotImplementedError

    @property
    def has_memory(self) -> bool:
        """Whether it keeps memories."""
        return type(self).init_memory is not LayerBlock.init_memory

    @property
    def choices(self) -> tuple[int, int]:
        """(k, X): the block sends each row to k of X, and asks `FlatRows.choose`; (0, 0): it chooses nothing."""
        return 0, 0

    def state_values(self, spec: ModelSpec, tokens: float) -> float:
        """Numbers of its state that a token reads with `tokens` before it."""
        return 0

    def matmul_params(self, spec: ModelSpec) -> float:
        """Weights of its matrices that a token is multiplied with."""
        return sum(array.size * self.used(array) for array in self.arrays(spec).values() if array and array.summed)

    def used(self, array: ArraySpec) -> float:
        """The part of a matrix that a token is multiplied with: all of it, unless a router chooses."""
        return 1

    def params_read(self, spec: ModelSpec, rows: float, expert_shards: int = 1) -> float:
        """Weights of its matrices that a device with a part of the experts reads for so many tokens at once."""
        return self.matmul_params(spec)

    def flops(self, spec: ModelSpec, keys: float) -> float:
        """Of a token's forward pass with `keys` before it, beside those of its matrices."""
        return 0
