"""The roles of a run, alive: speakers of text that are open, and engines with frozen weights beside the policy's.

Roles with the same weights share one engine, and their turns are batched together. Weights of a folder are served from
the run's beginning. Those of `path=""` are what the RL stage begins with: before it the policy's own engine speaks, and
then a copy that lies in <workdir>/roles/start, so that a run that goes on, or is evaluated, has the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax

from jaxagent.config import Config, ConfigError, EngineConfig, nearest
from jaxagent.config.errors import as_config_error
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.engine import automaton
from jaxagent.engine.driver import Driver
from jaxagent.engine.lm import LanguageModel
from jaxagent.engine.requests import EngineSetup
from jaxagent.engine.turns import Turns
from jaxagent.envs.base import Environment
from jaxagent.envs.cast import POLICY
from jaxagent.learner import peers
from jaxagent.models import hf, params, sharding
from jaxagent.models.spec import ModelSpec
from jaxagent.roles.base import Run, TextRole
from jaxagent.roles.engines import FrozenRole, PolicyRole
from jaxagent.rollout.cast import Roles, SpeakerAt
from jaxagent.rollout.episode import SpeakerSettings
from jaxagent.rollout.templates import CHAT_DATE, Template, open_template

SECONDS = tuple(f"{of}_s" for of in ("env", "engine", "open", "queue", "prefill", "decode", "verify", "total"))
START = ""  # the `path` of weights that RL begins with
WARM_UP_TIMEOUT_S = 1800.0  # compiling a large model's engine can take long, but not for ever
START_FOLDER = Path("roles") / "start"  # of the workdir
# An engine, how text becomes its tokens, and whether these are the policy's.
Voice = tuple[Driver, Tokenizer, Template, bool]


def check(cfg: Config, environment: Environment) -> None:
    """Refuses roles that the environment does not know, roles that it lacks, and roles without the price it reads.

    Raises:
      ConfigError: naming the role, and the nearest.
    """
    required = tuple(environment.roles)
    for name in required:
        if name == POLICY or f"{name}_s" in SECONDS:
            raise ConfigError(f"The environment's role '{name}' must have another name: this one is taken.")
    for name in cfg.roles:
        if name not in required:
            advice = nearest(name, required) if required else "It has none."
            raise ConfigError(f"config.roles.{name}: the environment has no role '{name}'. {advice}")
    for name in required:
        if name not in cfg.roles:
            raise ConfigError(
                f"config.roles.{name} is missing: the environment talks to a role '{name}'. Say who plays it, for "
                f"example --config.roles.{name}=engine, or =http with --config.roles.{name}.url=URL."
            )
    for name in environment.priced_roles:
        if None in cfg.roles[name].prices:
            raise ConfigError(
                f"config.roles.{name} has no price, or half of one, and the environment counts what it costs: set "
                f"config.roles.{name}.price_prompt and config.roles.{name}.price_reply, of a million tokens; 0 is free."
            )
    for name, role in cfg.roles.items():
        if isinstance(role, FrozenRole | PolicyRole):
            _check_engine_role(cfg, name, role)
        elif not isinstance(role, TextRole):
            raise ConfigError(
                f"config.roles.{name}: {type(role).__qualname__} must extend jaxagent.roles.base.TextRole."
            )
    shards = cfg.mesh.row_shards * cfg.mesh.context
    for (name, *_), engine, context in frozen_engines(cfg).values():
        for field, size in (("slots", engine.slots), ("pages", engine.pages)):
            if size % shards:
                raise ConfigError(
                    f"config.roles.{name}.{field}={size} does not divide over mesh.data x fsdp x expert x context = "
                    f"{shards}."
                )
        needed = -(-context // engine.page_tokens) * shards
        if engine.pages < needed:
            raise ConfigError(
                f"config.roles.{name}.pages={engine.pages} cannot hold one conversation of context_tokens={context}; "
                f"at least {needed} are needed."
            )


def _check_engine_role(cfg: Config, name: str, role: FrozenRole | PolicyRole) -> None:
    of_policy = isinstance(role, PolicyRole) or role.path == START
    if of_policy and role.context_tokens > cfg.env.context_tokens:
        raise ConfigError(
            f"config.roles.{name}.context_tokens={role.context_tokens} is more than env.context_tokens="
            f"{cfg.env.context_tokens}, which the policy's engine is built for: lower it, or raise that."
        )
    if role.reply_tokens >= role.context_tokens:
        raise ConfigError(
            f"config.roles.{name}.reply_tokens={role.reply_tokens} must be less than its context_tokens="
            f"{role.context_tokens}: a reply follows a prompt."
        )


def check_folders(cfg: Config) -> None:
    """Refuses paths of roles that are no model folders, before anything is made.

    Raises:
      ConfigError: naming the role.
    """
    for name, role in cfg.roles.items():
        if isinstance(role, FrozenRole) and role.path and not (Path(role.path) / "config.json").is_file():
            raise ConfigError(f"config.roles.{name}.path='{role.path}' is no model folder: it has no config.json.")


def frozen_engines(cfg: Config) -> dict[str, tuple[list[str], EngineConfig, int]]:
    """By the path of a model folder: the roles with its weights, and the sizes and the context of their one engine.

    Sizes are the largest of what these roles want.
    """
    by_path: dict[str, dict[str, FrozenRole]] = {}
    for name, role in cfg.roles.items():
        if isinstance(role, FrozenRole):
            by_path.setdefault(role.path, {})[name] = role
    engines = {}
    for path, roles in sorted(by_path.items()):
        slots = max(role.slots or 0 for role in roles.values()) or cfg.engine.slots
        pages = max(role.pages or 0 for role in roles.values()) or cfg.engine.pages
        context = max(role.context_tokens for role in roles.values())
        engines[path] = [*roles], dataclasses.replace(cfg.engine, slots=slots, pages=pages), context
    return engines


class RunRoles:
    """The roles of a run. Made by `open_roles`."""

    def __init__(
        self,
        cfg: Config,
        speakers: Mapping[str, SpeakerAt],
        spec: ModelSpec,
        tokenizer: Tokenizer,
        template: Template,
        mesh: jax.sharding.Mesh,
    ) -> None:
        self._cfg, self._speakers, self._spec, self._mesh = cfg, dict(speakers), spec, mesh
        self._tokenizer, self._template = tokenizer, template
        self.turns = Turns()  # of all engines of the run: they share its mesh
        self._engines = frozen_engines(cfg)
        self._frozen: dict[str, Voice] = {}  # by path
        self._opened = contextlib.ExitStack()

    def company(self, driver: Driver) -> Roles:
        """Who plays beside the policy, which `driver` serves."""
        voices: dict[str, SpeakerSettings | SpeakerAt] = dict(self._speakers)
        policy: Voice = driver, self._tokenizer, self._template, True
        for name, role in self._cfg.roles.items():
            if not isinstance(role, FrozenRole | PolicyRole):
                continue
            by = self._frozen.get(role.path, policy) if isinstance(role, FrozenRole) else policy
            engine, tokenizer, template, policys_ids = by
            voices[name] = SpeakerSettings(
                engine=engine,
                tokenizer=tokenizer,
                template=template,
                sampling=role.sampling,
                turn_tokens=role.reply_tokens,
                context_tokens=role.context_tokens,
                observation_tokens=role.context_tokens,
                timeout_s=role.timeout_s,
                policys_ids=policys_ids,
            )
        return Roles(self._cfg.roles, voices)

    def start(self) -> None:
        """Starts the engines whose weights lie in a folder: given ones, and the one that RL began with.

        Raises:
          ConfigError: a folder holds no such model, or no tokenizer.
        """
        if not peers.is_first():  # of a trainer's processes the first one plays
            return
        for path in self._engines:
            if path not in self._frozen and (path != START or (self._start_folder / "config.json").is_file()):
                self._frozen[path] = self._open(path)

    def freeze(self, export: Callable[[Path], None]) -> None:
        """RL begins: the roles without a path keep the weights that it begins with, from now on.

        Args:
          export: writes them to a folder, unless an earlier process of this run did.
        """
        if START in self._engines and not (self._start_folder / "config.json").is_file():
            export(self._start_folder)
        self.start()

    def close(self) -> None:
        """Stops the engines."""
        self._opened.close()

    @property
    def _start_folder(self) -> Path:
        return Path(self._cfg.workdir) / START_FOLDER

    def _open(self, path: str) -> Voice:
        cfg, folder = self._cfg, Path(path) if path else self._start_folder
        spec, tokenizer, template = self._spec, self._tokenizer, self._template
        if path:
            spec = hf.read_spec(folder, cfg.model)
            if (folder / "tokenizer.json").is_file():
                tokenizer = Tokenizer.load(folder)
                template = open_template(tokenizer, cfg.tokenizer.use_chat_template, CHAT_DATE)
            tokenizer.check_fits(spec.vocab_size)
        _, engine, context = self._engines[path]
        spec.check_context(context)
        model = LanguageModel(spec, engine.cache_dtype)
        setup = EngineSetup(
            cfg=engine,
            context=context,
            stops=automaton.build((), tokenizer.token_bytes(), model.vocab_size),
            eos_ids=tokenizer.eos_ids,
            exact=cfg.numerics == "exact",
            seed=cfg.seed,
        )
        weights = hf.load(folder, spec, params.shardings(spec, self._mesh, sharding.TRAIN))
        driver = self._opened.enter_context(Driver(model, weights, 0, setup, self._mesh, self.turns))
        driver.start(WARM_UP_TIMEOUT_S)
        return driver, tokenizer, template, tokenizer.digest() == self._tokenizer.digest()


@contextlib.contextmanager
def open_roles(
    cfg: Config,
    spec: ModelSpec,
    tokenizer: Tokenizer,
    template: Template,
    mesh: jax.sharding.Mesh,
    run: Run,
    note: Callable[[str], None],
) -> Iterator[RunRoles]:
    """Opens the roles that speak text; engines are started later, by `start` and `freeze`.

    Raises:
      ConfigError: a role cannot speak.
    """
    with contextlib.ExitStack() as stack:
        speakers: dict[str, SpeakerAt] = {}
        for name, role in cfg.roles.items():
            if isinstance(role, TextRole):
                with as_config_error(f"config.roles.{name}", OSError):
                    speakers[name] = stack.enter_context(role.open(name, run, note))
        roles = RunRoles(cfg, speakers, spec, tokenizer, template, mesh)
        stack.callback(roles.close)
        yield roles
