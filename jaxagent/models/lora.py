"""LoRA: low-rank adapters beside frozen projections (Hu et al., https://arxiv.org/abs/2106.09685), for every family.

A projection W[inputs, outputs] becomes W + s A B with A[inputs, r], B[r, outputs] and s = alpha / r (section 4.1), or
alpha / sqrt(r), rank-stabilised (Kalajdzievski, https://arxiv.org/abs/2312.03732). Only A and B are trained: the base
has no gradient, no optimiser state and no copy, and it is the reference policy of a KL term as it stands.

Two ways to compute it, used where each is right:

*Gradients* come from `adapt`: x W + s (x A) B. No gradient of a weight's size ever exists, and backward leaves out the
product that would make it, a third of the training FLOPs of the projections.

*What is served* is `merge`: W + s A B, multiplied out once per update by one program. Generation then costs what it
costs without adapters, and runs the same programs. With exact numerics the trainer's log-probs are computed from these
very arrays, so they are the engine's bit for bit, by construction; that the two ways agree in floating point (gradients
then belong to these values) is what the tests rest on. The price is memory: the targeted matrices a second time, in
compute dtype and sharded like the base, where full fine-tuning has gradients and two moments in float32.

A critic, if the algorithm has one, stays a full model that starts at the base: its task is another, and it is not
served. Algorithms that take advantages from groups have none.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax

from jaxagent.config import ConfigError, LoraConfig, nearest
from jaxagent.models import layers
from jaxagent.models.layers import Adapter, LoraArray
from jaxagent.models.params import ArraySpec, Params, matrix, param_specs, per_expert, stacked, stacks_of
from jaxagent.models.spec import ModelSpec

# dict[str, Adapter] by field of `Layers`, a list of these where layers are of several kinds, as `Params.layers` are;
# leaves as in `Params`: arrays, ArraySpecs, shardings, ...
Adapters = Any

ALL_LINEAR = "all-linear"
ADAPTER_DTYPE = "float32"  # masters of what is trained, whatever the base is stored in


def projections(spec: ModelSpec) -> list[dict[str, str]]:
    """Every matrix that can have an adapter, of each kind of layer: its field of `Layers` -> its name in Hugging Face's
    families. A router has none: what it chooses would change under what is trained behind it.
    """
    return [
        {field: array.hf_name.split(".")[-2] for field, array in vars(kind).items() if array and array.projects}
        for kind in stacks_of(param_specs(spec).layers)
    ]


def targets(config: LoraConfig, spec: ModelSpec) -> list[str]:
    """The names of the `projections` that have adapters, in the layers' order.

    Raises:
      ConfigError: there is no such projection.
    """
    all_of = list(dict.fromkeys(name for kind in projections(spec) for name in kind.values()))
    names = [name.strip() for name in config.targets.split(",")]
    if names == [ALL_LINEAR]:
        return all_of
    for name in names:
        if name not in all_of:
            raise ConfigError(
                f"config.model.lora.targets: no projection '{name}'. {nearest(name, [*all_of, ALL_LINEAR])}"
            )
    return [name for name in all_of if name in names]


def scale(config: LoraConfig) -> float:
    """s, by which an adapter's product is multiplied."""
    return config.alpha / (math.sqrt(config.rank) if config.rank_stabilised else config.rank)


def adapter_specs(spec: ModelSpec, config: LoraConfig) -> Adapters:
    """The tree of `ArraySpec`s of the adapters, derived from those of the projections; names are PEFT's.

    A is Gaussian and B is 0 (section 4.1), so training starts at the base. The paper does not say the variance of A;
    that of its released code is 1 / (3 inputs).
    """
    layers, names = param_specs(spec).layers, targets(config, spec)
    kinds = zip(stacks_of(layers), projections(spec), strict=True)
    return _like(
        layers,
        [{f: _adapter(getattr(kind, f), config.rank) for f, name in of.items() if name in names} for kind, of in kinds],
    )


def adapt(base: Params, adapters: Adapters, config: LoraConfig) -> Params:
    """The model with each adapter beside its projection, not multiplied out: gradients are taken through this form."""
    return _replaced(base, carried(base, adapters, config))


def merge(base: Params, adapters: Adapters, config: LoraConfig, dtype: str) -> Params:
    """The model with its adapters multiplied out, in `dtype` where targeted; all else are the base's own arrays.

    Do not jit the whole function: jit copies every array that it returns, even one that only passes through.
    """
    return _replaced(base, products(carried(base, adapters, config), dtype))


def under(base: Params, adapters: Adapters) -> Any:
    """The matrices that have adapters, as these lie: by field of `Layers`, of several kinds of layer for each kind."""
    kinds = zip(stacks_of(base.layers), stacks_of(adapters), strict=True)
    return _like(base.layers, [{field: getattr(kind, field) for field in own} for kind, own in kinds])


def carried(base: Params, adapters: Adapters, config: LoraConfig) -> Any:
    """Each matrix that has an adapter with it, a `LoraArray`; as `under`."""

    def beside(adapter: Adapter, w: Any) -> LoraArray:
        return LoraArray(w, adapter.a, adapter.b, scale(config))

    return jax.tree.map(beside, adapters, under(base, adapters), is_leaf=lambda x: isinstance(x, Adapter))


@functools.partial(jax.jit, static_argnums=1)
def products(arrays: Any, dtype: str) -> Any:
    """The adapted projections, multiplied out."""
    multiplied = functools.partial(layers.product, dtype=dtype)
    return jax.tree.map(multiplied, arrays, is_leaf=lambda x: isinstance(x, LoraArray))


def _replaced(base: Params, arrays: Any) -> Params:
    """The model with other arrays, as `under` lists them."""
    kinds = zip(stacks_of(base.layers), stacks_of(arrays), strict=True)
    return base.replace(layers=_like(base.layers, [kind.replace(**own) for kind, own in kinds]))


def _like(layers: Any, kinds: list[Any]) -> Any:
    """Something of each kind of layer, in a list where `layers` has several."""
    return kinds if isinstance(layers, list) else kinds[0]


def _adapter(array: ArraySpec, rank: int) -> Adapter:
    """Specs of the adapter of a stack of projections; each expert has one of its own."""
    sizes = dict(zip(array.axes, array.shape, strict=True))
    inputs = {array.axes[axis]: array.shape[axis] for axis in array.summed}
    outputs = {axis: size for axis, size in sizes.items() if axis not in ("layers", "experts", *inputs)}
    name, experts = array.hf_name.removesuffix(".weight"), sizes.get("experts", 0)
    a = matrix(f"{name}.lora_A.weight", inputs, {"rank": rank}, std=(3 * array.hf_shape[1]) ** -0.5)
    b = matrix(f"{name}.lora_B.weight", {"rank": rank}, outputs, std=0.0)
    of_all = [per_expert(single, experts) if experts else single for single in (a, b)]
    return Adapter(*(stacked(single, array.layers, ADAPTER_DTYPE, "base_model.model.") for single in of_all))
