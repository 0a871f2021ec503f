"""Sections of the model, the mesh it lies on, its tokenizer, the engine, the optimiser and batches."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Annotated, Any, ClassVar, Literal

from jaxagent.config.errors import ConfigError, Removed
from jaxagent.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Seconds, between

Remat = Literal["none", "products", "dots", "attention", "layer", "auto"]


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; their product is the number of devices used."""

    data: PositiveInt  # copies of the model, each on its own part of the batch
    fsdp: PositiveInt  # shards of the parameters and of the batch
    tensor: PositiveInt  # shards of heads and of the MLP
    context: PositiveInt  # shards of the tokens of a packed row, for rows too long for one device
    expert: PositiveInt = 1  # shards of the experts of a mixture, and of the batch

    @property
    def row_shards(self) -> int:
        """Into how many parts the rows of a batch are split."""
        return self.data * self.fsdp * self.expert

    @property
    def devices(self) -> int:
        """How many there are."""
        return self.data * self.fsdp * self.expert * self.context * self.tensor


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (arXiv 2106.09685) beside frozen weights; read by the RL stage. See models/lora.py."""

    rank: PositiveInt  # of an adapter's two factors
    alpha: PositiveFloat = 32.0  # an adapter's product is scaled by alpha / rank
    rank_stabilised: bool = False  # by alpha / sqrt(rank) instead (arXiv 2312.03732)
    # Projections with adapters, "q_proj,v_proj"; "all-linear" = all but the head and routers.
    targets: str = "all-linear"
    path: str = ""  # a folder of PEFT's whose adapters training begins with, and KL is measured to; "" = the base alone

    off: ClassVar = {"rank": 0}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The policy. With a `path`, the shape is read from its config.json; fields below must agree with it or be 0."""

    path: str  # a Hugging Face folder; "" = random weights of the shape below; a flag for it clears that shape
    family: str  # one of models/families.py, or a Family of yours as "package.module:NAME"; "" = as the folder says
    num_layers: NonNegativeInt
    embed_dim: NonNegativeInt
    num_heads: NonNegativeInt
    num_kv_heads: NonNegativeInt
    head_dim: NonNegativeInt
    mlp_dim: NonNegativeInt
    vocab_multiple: PositiveInt  # vocabulary rows are padded up to a multiple of this
    rope_theta: NonNegativeFloat
    tie_embeddings: bool
    embed_init_std: NonNegativeFloat  # also the scale at which each layer starts to add to the residual stream
    param_dtype: Literal["float32", "bfloat16"]  # master weights
    compute_dtype: Literal["float32", "bfloat16"]
    # What is kept for the backward pass, from most memory to least, the rest being computed again: everything; all but
    # what costs little (norms, activations); matrix products, so that attention runs again; attention and the stream
    # around it, so that the MLP runs again; a layer's input. "auto": the first that fits a device (plan/memory.py).
    remat: Remat
    logprob_chunk_tokens: PositiveInt  # tokens whose [V] logits exist at once
    lora: LoraConfig | None = None  # None: all weights are trained
    settings: str | None = None  # of the family besides, a JSON object with config.json's keys: '{"num_experts": 8}'


# Fields of ModelConfig that a Hugging Face folder describes: left "" or 0, or equal to what it says.
MODEL_SHAPE = ("family", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "settings")


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """Where the tokenizer comes from."""

    path: str  # folder with tokenizer.json; "" = model.path when set, else trained on the dataset
    vocab_size: PositiveInt  # when trained here
    use_chat_template: bool  # render prompts with the tokenizer's own chat template
    template_variables: str = ""  # what the template is given besides, a JSON object: '{"enable_thinking": false}'
    end_token: str = ""  # of a base model: one that ends a message, too, as its chat template writes it ("<|im_end|>")


def check_folder(path: str | pathlib.Path) -> None:
    """Raises ConfigError where a model's or tokenizer's folder is none, and says how to get one of the hub's."""
    if not pathlib.Path(path).is_dir():
        named = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(path))
        hub = f"A model of the Hugging Face hub is downloaded first: hf download {path} --local-dir {path}. "
        raise ConfigError(
            f"The folder '{path}' does not exist. {hub if named else ''}A small model for a laptop is made by: "
            f"python -m jaxagent.data_pipelines.smollm2 --out={path}"
        )


_MOST_TILE_ROWS = 256  # of a GPU's
_SHARED_ROWS = 16  # tiles are whole multiples: so many rows of prefill may read the pages of one sequence together


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The generation engine. "0 = by platform": a run takes `suitable_sizes`, and its config.json says which."""

    slots: PositiveInt  # turns that generate at once
    steps_per_dispatch: NonNegativeInt  # K: tokens per slot between two looks of the host; 0 = by platform
    prefill_tokens: NonNegativeInt  # cached between two dispatches, at most: others generate on; 0 = by platform
    pages: PositiveInt  # of the key/value cache
    page_tokens: NonNegativeInt  # per page; part of the numerics: exact scoring goes page by page; 0 = by platform
    tile_rows: NonNegativeInt  # rows computed together; part of the numerics likewise; 0 = by platform
    kv_on_update: Literal["keep", "recompute"]  # what sessions in progress have cached when weights change
    cache_dtype: Literal["float32", "bfloat16"]
    request_timeout_s: Seconds
    # States of fixed size, where a model has recurrent blocks: one for each sequence in progress, the others for
    # prefixes that can be reused; None = two per slot.
    memories: PositiveInt | None = None
    stop_states: PositiveInt = 128  # of all stop strings in use at once; a string has about one per character

    @property
    def memory_count(self) -> int:
        """Memories of a model that keeps any."""
        return self.memories or 2 * self.slots

    def for_platform(self, platform: str, shards: int) -> EngineConfig:
        """With `suitable_sizes` where fields are 0; the mesh splits the slots over `shards`."""
        suitable = suitable_sizes(platform, -(-self.slots // shards))
        return dataclasses.replace(self, **{name: getattr(self, name) or size for name, size in suitable.items()})


def suitable_sizes(platform: str, slots: int) -> dict[str, int]:
    """What suits a platform, by field of `EngineConfig`.

    A GPU reads all weights and launches all kernels once per tile and step, so one tile holds all slots: up to 256,
    where products begin to take as long as reading their weights, and 128 at least, since prefill goes through the
    same tiles. A TPU's kernels want pages of 128 tokens.

    Args:
      platform: as jax calls it.
      slots: of one shard of the mesh.
    """
    if platform not in ("gpu", "cuda", "tpu"):
        return {"tile_rows": 64, "page_tokens": 64, "steps_per_dispatch": 4, "prefill_tokens": 4096}
    tile, pages = 128, 128 if platform == "tpu" else 64
    if platform != "tpu":
        tiles = -(-slots // _MOST_TILE_ROWS)
        tile = max(tile, -(-slots // (tiles * _SHARED_ROWS)) * _SHARED_ROWS)
    return {"tile_rows": tile, "page_tokens": pages, "steps_per_dispatch": 16, "prefill_tokens": 16_384}


@dataclasses.dataclass(frozen=True)
class RateConfig:
    """A learning rate and how it goes on. All else of the warm start's AdamW is `rl.optimizer`'s."""

    learning_rate: NonNegativeFloat  # the highest of the schedule
    schedule: Literal["constant", "cosine", "linear", "wsd"]  # wsd: constant, linear over the last fifth
    warmup_steps: NonNegativeInt

    removed: ClassVar = {
        name: Removed(f"it is rl.optimizer.{name}", like=f"rl.optimizer.{name}")
        for name in ("b2", "weight_decay", "grad_clip")
    } | {"b1": Removed("it is 0.9", 0.9), "eps": Removed("it is 1e-8", 1e-8)}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(RateConfig):
    """AdamW on f32 masters, with b1 = 0.9 and eps = 1e-8 (`learner/update.py`)."""

    b2: Annotated[float, between(0, 1, without="high")]
    weight_decay: NonNegativeFloat
    grad_clip: NonNegativeFloat  # of the global norm; 0 = off

    removed: ClassVar = {
        "b1": Removed("it is 0.9, as in every published recipe", 0.9),
        "eps": Removed("it is 1e-8, as in every published recipe", 1e-8),
    }


@dataclasses.dataclass(frozen=True)
class RowsConfig:
    """How sequences become packed rows."""

    row_tokens: PositiveInt  # T: tokens of one packed row
    micro_rows: PositiveInt  # rows per micro-batch over all devices
    share_prefix: bool  # what sequences of an update begin with alike is computed once per row

    removed: ClassVar = {
        "targets_multiple": Removed("it is rl.batch.targets_multiple", like="rl.batch.targets_multiple")
    }


@dataclasses.dataclass(frozen=True)
class BatchConfig(RowsConfig):
    """How trajectories become device arrays."""

    targets_multiple: PositiveInt  # log-prob positions per row are padded to a multiple of this

    removed: ClassVar = {}


def completed(part: RateConfig | RowsConfig, full: Any) -> Any:
    """A section of the class of `full`, with the fields of `part` and all else as `full` has it."""
    return type(full)(**dataclasses.asdict(full) | dataclasses.asdict(part))
