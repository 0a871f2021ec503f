"""Sections of the model, the mesh it lies on and its tokenizer."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import ClassVar, Literal

from jaxagent.config.errors import ConfigError
from jaxagent.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

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
