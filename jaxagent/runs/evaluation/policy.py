"""Which policy a command names, and its weights: a run's bundle (the newest, or one by number) or an exported folder.

Everything is only read: a run may be training in the same workdir meanwhile. What does not belong together (another
shape, another tokenizer) is told before any device work.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxagent.config import Config, ConfigError, modern, to_dict
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.learner import checkpoint
from jaxagent.learner.programs import merger
from jaxagent.models import hf, lora, params, peft, sharding
from jaxagent.models.params import Params
from jaxagent.runs import resume
from jaxagent.runs.parts import Parts, tokenizer_folder

LATEST = "latest"
# What a bundle's config must share with the one it is evaluated with: the shape, and how text becomes tokens.
_MODEL = (*resume.SHAPE, "lora")
_TOKENIZER = ("vocab_size", "use_chat_template", "template_variables", "end_token")


@dataclasses.dataclass(frozen=True)
class PolicySource:
    """Where a policy's weights are."""

    folder: Path  # of the bundle, or a Hugging Face folder
    bundle: int | None  # its number; None = a Hugging Face folder
    stage: str  # of the run, whose bundle it is; "" for a folder
    step: int  # of that stage
    digest: str  # differs between weights that differ
    base: Path | None = None  # the model, where the folder holds adapters to it alone, as PEFT writes them

    @property
    def label(self) -> str:
        """Short, for the names of files: "rl-70", "policy"."""
        return f"{self.stage}-{self.step}" if self.stage else self.folder.resolve().name

    def __str__(self) -> str:
        return f"{self.stage} step {self.step} (bundle {self.bundle})" if self.stage else str(self.folder)


def choose(cfg: Config, name: str) -> PolicySource:
    """The policy that `--checkpoint=name` means: "latest", a bundle's number, or a folder.

    Raises:
      ConfigError: there is no such policy, or the bundle's run had another shape or tokenizer than `cfg`.
    """
    if name != LATEST and not (name.isascii() and name.isdigit()):
        return _folder(Path(name), cfg.model.path)
    workdir, directory = Path(cfg.workdir), Path(cfg.workdir) / "checkpoints"
    if not workdir.is_dir():
        raise ConfigError(f"There is no run in '{workdir}': no such folder. Set --config.workdir=RUN.")
    numbers = checkpoint.bundles(directory)
    if not numbers:
        hint = f" Its exported policy: --checkpoint={workdir / 'policy'}." if (workdir / "policy").is_dir() else ""
        raise ConfigError(f"'{directory}' holds no complete checkpoint.{hint}")
    number = numbers[-1] if name == LATEST else int(name)
    if number not in numbers:
        hosts = [(number, checkpoint.read_host(directory, number)) for number in numbers]
        there = ", ".join(f"{number} ({host['stage']}, step {host['step']})" for number, host in hosts)
        raise ConfigError(f"'{directory}' has no checkpoint {number}. There are: {there}.")
    host = checkpoint.read_host(directory, number)
    _check_same(cfg, host["config"], f"{directory}/{number}")
    digest = hashlib.blake2b(json.dumps(host, sort_keys=True).encode(), digest_size=8).hexdigest()
    return PolicySource(directory / str(number), number, host["stage"], host["step"], digest)


def configured(cfg: Config, source: PolicySource) -> Config:
    """The config under which the parts around this policy are opened: of a folder, its shape and its tokenizer.

    Raises:
      ConfigError: there is no tokenizer, or the folder's is not the one that the config says; another shape.
    """
    folder = tokenizer_folder(cfg)
    if source.bundle is not None:
        if not (folder / "tokenizer.json").is_file():
            raise ConfigError(f"The run's tokenizer is gone: no tokenizer.json in '{folder}'.")
        return cfg
    own = model = source.base or source.folder
    hf.read_spec(own, cfg.model)
    if not (own / "tokenizer.json").is_file():
        if not (folder / "tokenizer.json").is_file():
            raise ConfigError(f"'{own}' has no tokenizer.json: set --config.tokenizer.path.")
        own = folder
    elif (folder / "tokenizer.json").is_file() and Tokenizer.load(own).digest() != Tokenizer.load(folder).digest():
        raise ConfigError(
            f"The tokenizer of '{own}' is not the config's ('{folder}'). If the policy's own is meant: "
            f"--config.tokenizer.path={own}."
        )
    return dataclasses.replace(
        cfg,
        model=dataclasses.replace(cfg.model, path=str(model)),
        tokenizer=dataclasses.replace(cfg.tokenizer, path=str(own)),
    )


def load(parts: Parts, source: PolicySource) -> tuple[Params, int]:
    """The weights, in training shardings, and their policy version (0 for a folder).

    Raises:
      ConfigError: other shapes than the config's, or a run that goes on has deleted the bundle meanwhile.
    """
    if source.bundle is None:
        policy = parts.init_params()
        if source.base is None:
            return policy, 0
        adapters, config = peft.load_adapters(source.folder, parts.spec)
        specs = params.shardings_of(lora.adapter_specs(parts.spec, config), parts.mesh, sharding.TRAIN)
        with jax.set_mesh(parts.mesh):
            return lora.merge(policy, jax.device_put(adapters, specs), config, parts.cfg.model.compute_dtype), 0
    try:
        return _load_bundle(parts, source)
    except Exception as error:
        if source.folder.is_dir():
            raise
        raise ConfigError(
            f"'{source.folder}' was deleted by its run, which keeps the newest only: try again."
        ) from error


def _load_bundle(parts: Parts, source: PolicySource) -> tuple[Params, int]:
    cfg, mesh = parts.cfg, parts.mesh
    checkpoint.check(source.folder.parent, source.bundle)

    def read(field: str, target: Any) -> Any:
        return checkpoint.read_field(source.folder.parent, source.bundle, field, target)

    if cfg.model.lora and source.stage in ("opd", "rl"):
        specs = lora.adapter_specs(parts.spec, cfg.model.lora)
        adapters = read("params", params.abstract_of(specs, mesh, sharding.TRAIN))
        base = parts.base_params()
        with jax.set_mesh(mesh):
            return merger(cfg)(base, adapters), source.step
    # The outcome model's stage trains a critic, and keeps the policy as its reference.
    field = "reference" if source.stage == "outcome_model" else "params"
    return read(field, params.abstract(parts.spec, mesh, sharding.TRAIN)), source.step


def _folder(folder: Path, model: str) -> PolicySource:
    """`model`: of the config, to which adapters belong whose own base is not there."""
    if not folder.is_dir():
        raise ConfigError(f"--checkpoint must be '{LATEST}', a checkpoint's number or a folder; no folder '{folder}'.")
    base = None
    if (folder / peft.CONFIG_FILE).is_file() and not (folder / "config.json").is_file():
        named = str(hf.read_json(folder / peft.CONFIG_FILE).get("base_model_name_or_path"))
        base = Path(named if Path(named).is_dir() else model)
        if not (base / "config.json").is_file():
            raise ConfigError(
                f"'{folder}' holds adapters to '{named}', which is no folder here: set --config.model.path."
            )
    elif not (folder / "config.json").is_file():
        raise ConfigError(f"'{folder}' is no whole Hugging Face folder: it has no config.json.")
    digest = hashlib.blake2b(((base or folder) / "config.json").read_bytes(), digest_size=8)
    for path in [path for own in (base, folder) if own for path in sorted(own.glob("*.safetensors"))]:
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "blake2b").digest())
    return PolicySource(folder, None, "", 0, digest.hexdigest(), base)


def _check_same(cfg: Config, saved: Mapping[str, Any], where: str) -> None:
    mine, saved = to_dict(cfg), modern(saved)
    for section, fields in (("model", _MODEL), ("tokenizer", _TOKENIZER)):
        for field in fields:
            value, has = mine[section][field], saved[section].get(field)
            if field == "lora" and value and has:  # where they began says nothing of a bundle
                value, has = ({name: own[name] for name in resume.ADAPTERS} for own in (value, has))
            if value != has and (field == "lora" or (value and has)):  # 0 and "" leave it to the model's folder
                raise ConfigError(
                    f"config.{section}.{field} is {value!r}, checkpoint {where} was made with {has!r}. "
                    "Leave --config out to take the run's own config."
                )
