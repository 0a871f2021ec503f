"""What a workdir holds that a run can go on from, and what may differ between that and the run.

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
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxagent.config import MODEL_SHAPE, Config, ConfigError, modern, to_dict
from jaxagent.config.model import RateConfig, RowsConfig
from jaxagent.config.run import STAGE_SECTIONS
from jaxagent.learner import checkpoint, peers
from jaxagent.observe import episode_index, jsonl
from jaxagent.observe.files import (
    CHECKPOINTS_FOLDER,
    EPISODES_FILE,
    EPISODES_FOLDER,
    METRICS_FILE,
    POLICY_FOLDER,
    RUN_FILE,
    SUMMARY_FILE,
)
from jaxagent.runs import provenance
from jaxagent.runs.logs import always_kept

_WEIGHTS = "the weights would compute another function"
_STATE = "the saved position and results would be of something else"
SHAPE = (*MODEL_SHAPE, "vocab_multiple", "rope_theta", "tie_embeddings")
ADAPTERS = ("rank", "alpha", "rank_stabilised", "targets")
REFUSED = {
    **{f"model.{name}": _WEIGHTS for name in SHAPE},
    **dict.fromkeys(("model.lora", *(f"model.lora.{name}" for name in ADAPTERS)), _WEIGHTS),
    "model.lora.path": "the saved state holds the reference of another beginning",
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
    left_out = ("workdir", "resume", "resume.numerics", *STAGE_SECTIONS)
    return [change for change in _differences(modern(saved), to_dict(cfg), "") if change[0] not in left_out]


def check_config(saved: Mapping[str, Any], cfg: Config, checkpoint: str, adapting: bool) -> list[tuple[str, Any, Any]]:
    """The changes that are taken.

    Args:
      saved, cfg: as in `changes`.
      checkpoint: the bundle, for messages.
      adapting: whether the bundle is of a stage that trains adapters, if there are any.

    Raises:
      ConfigError: a field of `REFUSED` has changed; names it, and `checkpoint`.
    """
    accepted = []
    for field, then, now in changes(saved, cfg):
        # 0 and "" leave a model's shape to the model's folder.
        of_lora = field.startswith("model.lora")
        of_folder = field.startswith("model.") and not of_lora and not isinstance(now, bool) and not (then and now)
        unread = field == "tokenizer.vocab_size" and bool(cfg.tokenizer.path or cfg.model.path)
        no_adapters = of_lora and not adapting
        is_over = field.startswith("warm_start.") and adapting  # the stages that train adapters come after it
        if field in REFUSED and not (of_folder or unread or no_adapters or is_over):
            raise ConfigError(
                f"config.{field} is {now!r}, and {then!r} in checkpoint {checkpoint}: {REFUSED[field]}. "
                "Use another workdir, or that value."
            )
        accepted.append((field, then, now))
    return accepted


def check_identity(saved: Mapping[str, Any], now: Mapping[str, Any], cfg: Config, host: Mapping[str, Any]) -> None:
    """Compares the contents that a run works with.

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
    what = changes_line(
        [(name, then, now[name]) for name, then in (saved or {}).items() if then != now.get(name, then)]
    )
    if what and cfg.numerics == numerics == "exact" and not cfg.takes_other_rounding:
        affinity = f" (taskset -c 0-{saved['threads'] - 1})" if "threads " in what and saved.get("threads") else ""
        raise ConfigError(
            f"Checkpoint {checkpoint} was made where numbers round otherwise: {what}. With numerics='exact' a run goes "
            f"on with the bits of one machine: start it where these are as they were{affinity}, or take other bits "
            "from here on with --config.resume.numerics=accept, which run.json keeps and certificates say."
        )
    return what


def changes_line(changes: list[tuple[str, Any, Any]]) -> str:
    """ "rl.group_size 4 -> 2, rl.optimizer.learning_rate 0.001 -> 0.0003"."""
    return ", ".join(f"{field} {_value_text(then)} -> {_value_text(now)}" for field, then, now in changes)


def of_spec(spec: Any) -> dict[str, Any]:
    """What of a model's spec decides the function that its weights compute, as JSON values."""
    execution = ("embed_init_std", "compute_dtype", "param_dtype", "remat", "logprob_chunk_tokens", "max_position")

    # Of a block's settings only those that say something: a setting that a later version adds leaves the rest as it is.
    def of_block(block: Any) -> list[Any]:
        settings = {field.name: (getattr(block, field.name), field.default) for field in dataclasses.fields(block)}
        return [type(block).__name__, {name: value for name, (value, usual) in settings.items() if value != usual}]

    fields = dataclasses.asdict(spec) | {"pattern": str([[of_block(block) for block in kind] for kind in spec.pattern])}
    return {name: value for name, value in fields.items() if name not in execution}


def _value_text(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else ("''" if value == "" else str(value))


GONE = "gone"  # a field that exists no more, and had a value that no run has now


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any, Any]]:
    for name in saved:
        field, before, value = f"{prefix}{name}", saved[name], now.get(name, GONE)
        if _comparable(before) != _comparable(value):
            yield field, _comparable(before), _comparable(value)
        elif isinstance(before, Mapping) and isinstance(value, Mapping):
            yield from _differences(before, value, f"{field}.")


def _comparable(value: Any) -> Any:
    """A choice's name, "on" for a section, and any other value as JSON has it."""
    if isinstance(value, Mapping):
        return value.get("name", "on")
    return list(value) if isinstance(value, tuple) else value


# Of run.json; the newest bundle; its host side, {} for a new run; config fields that differ from its and are taken.
Continued = tuple[dict[str, Any], int | None, dict[str, Any], list[tuple[str, Any, Any]]]


def newest_bundle(cfg: Config, note: Callable[[str], None]) -> Continued:
    """Reads what the workdir holds, and changes nothing.

    Raises:
      ConfigError: the run cannot be continued with this config, or from what is there.
    """
    workdir = Path(cfg.workdir)
    starts = provenance.read(workdir / RUN_FILE)
    if bundles := checkpoint.bundles(workdir / CHECKPOINTS_FOLDER):
        return _of_bundle(cfg, workdir, bundles[-1], starts, note)
    _check_nothing_is_lost(workdir, starts, note)
    return starts, None, {}, []


def _of_bundle(
    cfg: Config, workdir: Path, bundle: int, starts: dict[str, Any], note: Callable[[str], None]
) -> Continued:
    """The newest bundle, and whether this config and these logs can go on from it."""
    directory = workdir / CHECKPOINTS_FOLDER
    # Of several processes the first one looks, and ends all where it is damaged.
    if peers.is_first() and not checkpoint.check(directory, bundle):
        note(f"{directory / str(bundle)} has no digests: it is read unchecked.")
    host = checkpoint.read_host(directory, bundle)
    adapting = host["stage"] in ("opd", "rl")
    changed = check_config(host["config"], cfg, str(directory / str(bundle)), adapting)
    jsonl.check(workdir / METRICS_FILE, host["metrics_position"], parse=True)
    folder = workdir / EPISODES_FOLDER
    for name, position in host.get("episode_blocks", {}).items() if peers.is_first() else ():
        new = episode_index.mended(folder, name, position, always_kept(cfg.kept_episodes, name))
        if new is not None:
            now = "it is made anew from its blocks" if new else "it begins anew"
            note(f"{folder / name}.index is damaged or gone: {now} when the run goes on.")
    jsonl.check(workdir / EPISODES_FILE, host.get("episodes_position", 0), parse=False)  # of earlier versions
    for name, position in host.get("episode_positions", {}).items():
        jsonl.check(workdir / EPISODES_FOLDER / f"{name}.jsonl", position, parse=False)
    return starts, bundle, host, changed


def _check_nothing_is_lost(workdir: Path, starts: dict[str, Any], note: Callable[[str], None]) -> None:
    """Records without a bundle are those of a run that was killed before its first one, or lost their bundles."""
    records = jsonl.count(workdir / METRICS_FILE)
    exported = (workdir / SUMMARY_FILE).exists() or (workdir / POLICY_FOLDER).exists()
    had = starts["checkpointed"] or exported or not (workdir / CHECKPOINTS_FOLDER).is_dir()
    if records and had:
        raise ConfigError(
            f"{workdir} holds {records} records and no checkpoint: use another workdir, or delete "
            f"{workdir / METRICS_FILE} to begin anew."
        )
    if records:
        note(f"{workdir} has no checkpoint yet: its {records} records are made again.")


def check_processes_agree(bundle: int | None, identity: Mapping[str, Any], cfg: Config) -> None:
    """Compares what the processes of one trainer go on from; of one process nothing.

    Raises:
      PeerError: they see another workdir, other data, or another config.
    """
    if peers.count() > 1:
        for what, value in (("newest bundle", bundle), ("data", dict(identity)), ("config", to_dict(cfg))):
            text = json.dumps(value, sort_keys=True, default=str)
            peers.agree(f"the {what}", hashlib.sha256(text.encode()).hexdigest()[:16])
