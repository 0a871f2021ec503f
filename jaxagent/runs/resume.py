"""What may differ between a checkpoint and the run that goes on from it.

The rule: what changes the function that the saved weights compute, or what the saved state means, is refused, and
everything else is taken and told.

  - Refused by config field: the model's shape and rotary base, its adapters (once a stage has begun that trains them),
    whether a chat template renders prompts, the size of a tokenizer trained here, both seeds, and the environment.
  - Refused by content, wherever it lies: the model's spec (of a model folder: also what the config does not say), the
    tokenizer, the training tasks, the held-out tasks, and what the environment reads besides: a corpus, documents, a
    shop with its policy. Folders may be moved.
  - Refused with exact numerics then and now, unless `resume.numerics` says "accept": a machine that rounds otherwise. A
    run whose bundle does not say what it was made on goes on, and is told so.
  - Taken and told: everything else, `numerics`, learning rates, group sizes, sampling and paths among it.

Imports no JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jaxagent.config import Config, ConfigError, modern, to_dict
from jaxagent.config.learner import RateConfig, RowsConfig
from jaxagent.config.run import STAGE_SECTIONS

_WEIGHTS = "the weights would compute another function"
_STATE = "the saved position and results would be of something else"
_SHAPE = ("family", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "vocab_multiple")
_ADAPTERS = ("rank", "alpha", "rank_stabilised", "targets")
REFUSED = {
    **{f"model.{name}": _WEIGHTS for name in (*_SHAPE, "rope_theta", "tie_embeddings")},
    **dict.fromkeys(("model.lora", *(f"model.lora.{name}" for name in _ADAPTERS)), _WEIGHTS),
    **{
        f"warm_start.{section}.{name}": f"{removed.now} for all runs now"
        for section, cls in (("optimizer", RateConfig), ("batch", RowsConfig))
        for name, removed in cls.removed.items()
    },
    "tokenizer.vocab_size": "the weights know the tokenizer that the run has trained",
    **{
        f"tokenizer.{name}": "the weights have learnt prompts that are written the other way"
        for name in ("use_chat_template", "template_variables", "end_token")
    },
    "seed": _STATE,
    "data.seed": _STATE,
    "env": _STATE,
}
# What `identity` holds, and what to call it.
_CONTENTS = {
    "model": "The model that config.model describes",
    "tokenizer": "The tokenizer",
    "tasks": "The training data",
    "held_out": "The held-out data",
    "corpus": "The corpus",
    "documents": "The file of documents",
    "held_out_documents": "The file of documents beside the held-out data",
    "shop": "The shop's data",
    "policy": "The text of the policy that the agent is told",
    "tools": "The description of the tools",
}


def changes(saved: Mapping[str, Any], cfg: Config) -> list[tuple[str, Any, Any]]:
    """(field, then, now) of every config field that differs, but for the workdir, which may be moved.

    Of a choice that is another one now the names, and of a section that was or is off None and "on": not their fields.
    What a field said that exists no more counts where that was in use.

    Args:
      saved: the config in a bundle, as `to_dict` made it. A field that it lacks is left out.
      cfg: the config now.
    """
    # That a stage's section is there or not, `stages` says.
    unsaid = ("workdir", "resume", "resume.numerics", *STAGE_SECTIONS)
    return [change for change in _differences(modern(saved), to_dict(cfg), "") if change[0] not in unsaid]


def check_config(saved: Mapping[str, Any], cfg: Config, checkpoint: str, adapting: bool) -> list[tuple[str, Any, Any]]:
    """The changes that are taken.

    Args:
      saved, cfg: as in `changes`.
      checkpoint: the bundle, for messages.
      adapting: whether the bundle is of a stage that trains adapters, if there are any.

    Raises:
      ConfigError: a field of `REFUSED` has changed; names it, and `checkpoint`.
    """
    taken = []
    for field, then, now in changes(saved, cfg):
        # 0 and "" leave a model's shape to the model's folder.
        of_lora = field.startswith("model.lora")
        of_folder = field.startswith("model.") and not of_lora and not isinstance(now, bool) and not (then and now)
        unread = field == "tokenizer.vocab_size" and bool(cfg.tokenizer.path or cfg.model.path)
        no_adapters = of_lora and not adapting
        if field in REFUSED and not (of_folder or unread or no_adapters):
            raise ConfigError(
                f"config.{field} is {now!r}, and {then!r} in checkpoint {checkpoint}: {REFUSED[field]}. "
                "Use another workdir, or that value."
            )
        taken.append((field, then, now))
    return taken


def check_identity(saved: Mapping[str, Any], now: Mapping[str, Any], cfg: Config, host: Mapping[str, Any]) -> None:
    """Compares the contents that a run works with.

    Args:
      saved, now: what `runs.parts.Parts.identity` said then and says now.
      cfg: the config now.
      host: of the bundle.

    Raises:
      ConfigError: one is another.
    """
    for name in now:
        if name not in saved or saved[name] == now[name]:
            continue
        if name == "held_out" and host["config"]["data"]["num_eval"] != cfg.data.num_eval:
            continue  # asked for, and told
        what = ""
        if isinstance(now[name], Mapping):
            # What only one of two versions of the code knows of a model is left out, as of the config.
            fields = [field for field in now[name] if field in saved[name] and saved[name][field] != now[name][field]]
            if not fields:
                continue
            what = f": {fields[0]} was {saved[name][fields[0]]!r} and is {now[name][fields[0]]!r}"
        called = _CONTENTS.get(name, name)
        raise ConfigError(
            f"{called} has changed since {cfg.workdir} was trained with it{what}. Restore it, or use another workdir."
        )


def other_rounding(
    saved: Mapping[str, Any] | None, now: Mapping[str, Any], cfg: Config, checkpoint: str, numerics: str = "exact"
) -> str:
    """What decides how numbers round and is not as it was: "threads 4 -> 1"; "" where nothing is.

    Args:
      saved: `provenance.rounding` of the process that wrote the bundle; None: an earlier version kept none.
      now: of this process. What only one of both has, the mesh decides there.
      cfg: the config now.
      checkpoint: the bundle, for messages.
      numerics: under which the bundle was made.

    Raises:
      ConfigError: numerics are and were exact, and the config does not say that other bits are taken.
    """
    what = told([(name, then, now[name]) for name, then in (saved or {}).items() if then != now.get(name, then)])
    if what and cfg.numerics == numerics == "exact" and not cfg.takes_other_rounding:
        affinity = f" (taskset -c 0-{saved['threads'] - 1})" if "threads " in what and saved.get("threads") else ""
        raise ConfigError(
            f"Checkpoint {checkpoint} was made where numbers round otherwise: {what}. With numerics='exact' a run goes "
            f"on with the bits of one machine: start it where these are as they were{affinity}, or take other bits "
            "from here on with --config.resume.numerics=accept, which run.json keeps and certificates say."
        )
    return what


def told(taken: list[tuple[str, Any, Any]]) -> str:
    """ "rl.group_size 4 -> 2, rl.optimizer.learning_rate 0.001 -> 0.0003"."""
    return ", ".join(f"{field} {_short(then)} -> {_short(now)}" for field, then, now in taken)


def of_spec(spec: Any) -> dict[str, Any]:
    """What of a model's spec decides the function that its weights compute, as JSON values."""
    execution = ("embed_init_std", "compute_dtype", "param_dtype", "remat", "logprob_chunk_tokens", "max_position")
    return {name: value for name, value in dataclasses.asdict(spec).items() if name not in execution}


def _short(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else ("''" if value == "" else str(value))


GONE = "gone"  # a field that exists no more, and had a value that no run has now


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any, Any]]:
    for name in saved:
        field, before, value = f"{prefix}{name}", saved[name], now.get(name, GONE)
        if _in_short(before) != _in_short(value):
            yield field, _in_short(before), _in_short(value)
        elif isinstance(before, Mapping) and isinstance(value, Mapping):
            yield from _differences(before, value, f"{field}.")


def _in_short(value: Any) -> Any:
    """A choice's name, "on" for a section, and any other value as JSON has it."""
    if isinstance(value, Mapping):
        return value.get("name", "on")
    return list(value) if isinstance(value, tuple) else value
