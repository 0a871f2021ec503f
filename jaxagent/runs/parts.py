"""Config -> the living parts of a run: dataset, tokenizer, model, engine, environment. Wiring only, no decisions.

Everything that can be wrong in the user's input is opened and checked here, before any training, in the order in which
it becomes expensive: data, tokenizer, model, what environments share, compilation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax

from jaxagent import contract
from jaxagent.config import Config, ConfigError, SamplingConfig, check_folder
from jaxagent.config.choice import own_class
from jaxagent.config.errors import as_config_error
from jaxagent.data import proofs, sources
from jaxagent.data.dataset import Files, Generated
from jaxagent.data.sources import TaskSource, balanced_sample
from jaxagent.data.tokenizer import Tokenizer, texts_of_dataset
from jaxagent.engine import automaton
from jaxagent.engine.driver import Driver
from jaxagent.engine.lm import LanguageModel
from jaxagent.engine.requests import EngineSetup
from jaxagent.envs.base import Attempt, Environment, Message, Opening, check_messages
from jaxagent.io.files import make_folder_once
from jaxagent.learner import peers
from jaxagent.learner.programs import replays_routing
from jaxagent.models import global_arrays, hf, kernels, lora, params, peft, sharding
from jaxagent.models.params import Params
from jaxagent.models.spec import ModelSpec
from jaxagent.roles.engines import FrozenRole, PolicyRole
from jaxagent.rollout.cast import ALONE
from jaxagent.rollout.conversation import Conversation
from jaxagent.rollout.episode import CLOSE_TIMEOUT_S, ForcedTools
from jaxagent.rollout.prompts import check_prompts, check_role_prompts, some
from jaxagent.rollout.templates import CHAT_DATE, Template, open_template, unended_messages
from jaxagent.rollout.workers import Rollout, Workers
from jaxagent.runs import provenance, replica, resume
from jaxagent.runs.roles import WARM_UP_TIMEOUT_S, RunRoles, check_folders, open_roles
from jaxagent.types import Task


@dataclasses.dataclass(frozen=True)
class Parts:
    """What the stages of a run work with. Lives as long as `open_parts` is open."""

    cfg: Config
    mesh: jax.sharding.Mesh
    dataset: Path  # folder or file of tasks
    train: TaskSource
    heldout: list[Task]  # the tasks of every evaluation
    tokenizer: Tokenizer
    template: Template
    spec: ModelSpec
    environment: Environment
    attempt: Callable[..., Attempt]  # begins one
    workers: Workers
    roles: RunRoles
    shared: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what every player is given besides
    held_out: TaskSource | None = None  # all of those of which `heldout` are some

    @property
    def row_shards(self) -> int:
        """Into how many parts the mesh splits a batch's rows."""
        return self.cfg.mesh.row_shards

    def identity(self) -> dict[str, Any]:
        """What the saved state of a run is about, by content: see resume.py."""
        return {
            "model": resume.of_spec(self.spec),
            "tokenizer": self.tokenizer.digest(),
            "tasks": self.train.fingerprint,
            "held_out": sources.fingerprint(self.heldout),
            **self.contents(),
        }

    def contents(self) -> dict[str, str]:
        """Digests of what episodes read besides their tasks."""
        place = self.cfg.data.eval_source
        digests: dict[str, str] = {}
        paths = {"identity": self.dataset} | ({"held_out_identity": Path(place)} if place else {})
        for method, path in paths.items():
            answer = contract.call(self.environment, path, method=method)
            if not isinstance(answer, Mapping):
                raise contract.wrong(self.environment, f"a result {contract.described(answer)}", "a mapping", method)
            digests |= answer
        return digests

    @functools.cached_property
    def player(self) -> Any:
        """The class that plays episodes of the environment."""
        return own_class(self.environment.rollout, "config.env.rollout")

    def rollout(self, driver: Driver, sampling: SamplingConfig, group_size: int, tool_epsilon: float = 0.0) -> Rollout:
        """Episodes of the environment, sampled by `driver`, in groups of `group_size`; see `episode.ForcedTools`."""
        cfg, company = self.cfg, {}
        if "company" in self.player.__dataclass_fields__:
            company = {"company": self.roles.company(driver) if cfg.roles else ALONE}
        return self.player(
            begin=self.attempt,
            policy=driver,
            tokenizer=self.tokenizer,
            template=self.template,
            config=cfg.env,
            sampling=sampling,
            request_timeout_s=cfg.engine.request_timeout_s,
            group_size=group_size,
            forced=ForcedTools(tool_epsilon, cfg.seed),
            **company,
            **self.shared,
        )

    def conversation(self) -> Conversation:
        """An empty conversation, for demonstrations."""
        return Conversation(self.tokenizer, self.template, self.cfg.env.observation_tokens)

    def init_params(self) -> Params:
        """The policy before any training, in its training shardings: random, or read from `model.path`."""
        where = params.shardings(self.spec, self.mesh, sharding.TRAIN)
        if self.cfg.model.path:
            return hf.load(Path(self.cfg.model.path), self.spec, where)
        with jax.set_mesh(self.mesh):
            return params.init(self.spec, jax.random.key(self.cfg.seed), where)

    def write_base(self, policy: Params) -> None:
        """Writes the weights that LoRA freezes where `base_params` reads them, unless they lie there already."""
        if base_folder(self.cfg) != Path(self.cfg.model.path):
            hf.save(base_folder(self.cfg), policy, self.spec, self.cfg.model.param_dtype, self._assets)
            peers.meet("keeping the weights under adapters")

    def base_params(self) -> Params:
        """The weights that LoRA froze, in their training shardings.

        Raises:
          ConfigError: they are not where RL with adapters would have left them.
        """
        folder = base_folder(self.cfg)
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"'{folder}' holds no weights under this run's adapters. If its RL began without model.lora, "
                "use another workdir."
            )
        where = params.shardings(self.spec, self.mesh, sharding.TRAIN)
        return hf.load(folder, self.spec, where)

    def export(self, policy: Params, folder: Path) -> None:
        """Writes the policy and its tokenizer as a folder that transformers loads."""
        hf.save(folder, policy, self.spec, self.cfg.model.compute_dtype, self._assets)
        if global_arrays.writes():
            self.tokenizer.save_files(folder)

    def export_adapter(self, adapters: lora.Adapters, folder: Path) -> None:
        """Writes LoRA adapters as a folder that PEFT loads."""
        peft.save_adapters(folder, adapters, self.spec, self.cfg.model.lora, str(base_folder(self.cfg)))

    @property
    def _assets(self) -> str | Path:
        return self.cfg.model.path or tokenizer_folder(self.cfg)

    @contextlib.contextmanager
    def engine(self, policy: Params, version: int) -> Iterator[Driver]:
        """A started, warmed-up engine that serves `policy`."""
        model = LanguageModel(self.spec, self.cfg.engine.cache_dtype, records=replays_routing(self.cfg, self.spec))
        setup = EngineSetup(
            cfg=self.cfg.engine,
            context=self.cfg.env.context_tokens,
            stops=automaton.build(self.environment.stop_strings, self.tokenizer.token_bytes(), model.vocab_size),
            eos_ids=self.tokenizer.eos_ids,
            exact=self.cfg.numerics == "exact",
            seed=self.cfg.seed,
        )
        if peers.count() > 1:
            with self._replica(model, policy, version, setup) as driver:
                yield driver
            return
        with Driver(model, policy, version, setup, self.mesh, self.roles.turns) as driver:
            driver.start(WARM_UP_TIMEOUT_S)
            yield driver

    @contextlib.contextmanager
    def _replica(self, model: LanguageModel, policy: Params, version: int, setup: EngineSetup) -> Iterator[Driver]:
        """The engine of process 0 on its own devices; in the other processes what stands for it."""
        own = replica.own_mesh(self.mesh)
        copy = functools.partial(replica.copied, model, mesh=self.mesh, own=own)
        mine = copy(policy)
        if not peers.is_first():
            yield cast(Driver, replica.NoEngine(copy))
            return
        with replica.Replica(model, mine, version, setup, own, self.roles.turns) as driver:
            driver.copy = copy
            driver.start(WARM_UP_TIMEOUT_S)
            yield driver


@contextlib.contextmanager
def open_parts(cfg: Config, note: Callable[[str], None], plays_train: bool = True) -> Iterator[Parts]:
    """Opens and checks everything but the weights.

    Args:
      cfg: the run's config.
      note: told of every long step.
      plays_train: whether the environment must be able to play the training tasks, too: settings of an evaluation
        alone (of longer documents) need not fit them.

    Raises:
      ConfigError: bad data, tokenizer, model folder or mesh; one line each.
    """
    for folder in filter(None, (cfg.model.path, cfg.tokenizer.path)):
        check_folder(folder)  # before a dataset is made
    check_folders(cfg)
    environment = cfg.env
    assert isinstance(environment, Environment)  # runs.checks has seen to it
    mesh = sharding.make_mesh(cfg.mesh)
    plays_on = mesh if peers.count() == 1 else replica.own_mesh(mesh)
    with one_after_another("making the data and the tokenizer"):
        dataset = cfg.data.source.folder(cfg.workdir, cfg.data.seed, cfg.env, note)
        needs = environment.needs_answers, environment.takes_messages
        train, held_out = sources.open_train_and_held_out(dataset, cfg.data, *needs, note)
        tokenizer = _tokenizer(cfg, dataset, train, environment, note)
    if cfg.tokenizer.template_variables:
        tokenizer = tokenizer.with_template_variables(cfg.tokenizer.template_variables)
    if cfg.tokenizer.end_token:
        tokenizer = tokenizer.with_end_token(cfg.tokenizer.end_token)
    source = cfg.data.source.path if isinstance(cfg.data.source, Files) else ""
    places = [Path(place) for place in (dataset, source, cfg.data.eval_source, cfg.workdir) if str(place)]
    unchecked = cfg.data.unchecked
    # Said without being asked of files alone, which others have made, and where something could be done about it.
    silent = unchecked is None and (isinstance(cfg.data.source, Generated) or not environment.has_solutions)
    looks = not silent and unchecked != "ignore"
    if looks and (line := proofs.check(train, held_out, places, environment.content, unchecked == "refuse")):
        note(line)
    for repeated in more_than_an_epoch(cfg, len(train)):
        note(repeated)
    heldout = balanced_sample(held_out, cfg.data.num_eval, cfg.data.seed)
    place = Path(cfg.data.eval_source) if cfg.data.eval_source else None
    spec = _spec(cfg, tokenizer)
    note(f"{params.count(spec) / 1e6:.4g} M parameters on {mesh.size} x {mesh.devices.flat[0].device_kind}")
    if cfg.model.path and (left_out := hf.unread(cfg.model.path, spec)):
        note(left_out)
    with jax.set_mesh(mesh):
        batch, exact = cfg.rl.batch, cfg.numerics == "exact"
        note(kernels.report(spec, cfg.engine.page_tokens, batch.row_tokens, batch.share_prefix, exact))
        model = LanguageModel(spec, cfg.engine.cache_dtype)
        if size := model.memory_bytes:
            note(f"engine: {cfg.engine.memory_count} memories of {size / 1e6:.3g} MB for recurrent blocks")
    if mesh.devices.flat[0].platform == "gpu":
        note(f"XLA_FLAGS: {provenance.deciding_flags(os.environ.get('XLA_FLAGS', '')) or 'none'}")
    template = open_template(tokenizer, cfg.tokenizer.use_chat_template, CHAT_DATE)
    if tokenizer.chat_template and (unended := unended_messages(tokenizer, CHAT_DATE)):
        note(unended)

    def conversation() -> Conversation:
        return Conversation(tokenizer, template, cfg.env.observation_tokens)

    def context_of(run: Callable[..., Any]) -> Opening:
        training_tasks = train if plays_train else ()
        return Opening(
            dataset, heldout, run, note, place, training_tasks, lambda task: held_out.place(task) or train.place(task)
        )

    def prompt(task: Task) -> Sequence[Message]:
        method, argument = ("prompt_messages", task) if environment.takes_messages else ("messages", task.prompt)
        messages = contract.call(environment, argument, method=method)
        check_messages(environment, messages, method)
        return messages

    for name, tasks in (("held-out", heldout), ("training", some(train))):
        check_prompts(name, tasks, prompt, conversation, cfg.env, note)
        _check_roles(cfg, environment, tasks, conversation)
    with (
        (Workers if peers.count() == 1 else replica.PlayedByFirst)(cfg.concurrent_episodes) as workers,
        _shared(environment, workers, note) as shared,
        open_environment(environment, context_of(workers.run)) as attempt,
        open_roles(cfg, spec, tokenizer, template, plays_on, workers.run, note) as roles,
    ):
        _try_attempt(environment, attempt, heldout, workers, note)
        yield Parts(
            cfg=cfg,
            mesh=mesh,
            dataset=dataset,
            train=train,
            heldout=heldout,
            tokenizer=tokenizer,
            template=template,
            spec=spec,
            environment=environment,
            attempt=attempt,
            workers=workers,
            roles=roles,
            shared=shared,
            held_out=held_out,
        )


@contextlib.contextmanager
def one_after_another(what: str) -> Iterator[None]:
    """Process 0 does what is inside, which may write files for all, and then the others, which find them."""
    if not peers.is_first():
        peers.meet(what)
    yield
    if peers.is_first():
        peers.meet(what)


def _check_roles(
    cfg: Config, environment: Environment, tasks: Sequence[Task], conversation: Callable[[], Conversation]
) -> None:
    """The first prompts of roles that this run's own tokenizer encodes; of which environments say what they are."""
    role_messages = getattr(environment, "role_messages", None)
    for name, role in cfg.roles.items():
        own = isinstance(role, PolicyRole) or (isinstance(role, FrozenRole) and not role.path)
        if own and tasks and role_messages is not None and name in role_messages(tasks[0].prompt):
            check_role_prompts(
                name, tasks, lambda text, name=name: role_messages(text)[name], conversation, role.context_tokens
            )


def _try_attempt(environment: Environment, attempt: Callable, tasks: Sequence[Task], workers: Workers, note: Callable):
    """Looks at an attempt of a user's own environment. What raises here fails episodes too, which tell it."""
    if not contract.is_own(environment) or environment.roles or environment.rollout != Environment.rollout:
        return
    try:
        begun = attempt(tasks[0])
    except Exception:
        return
    for name in contract.check_methods(environment, begun, "attempt", "start", "step", "verify", "close"):
        who = f"{contract.name_of(begun)}.{name}"
        note(f"{who} is `def`, not `async def`: unless it returns something to await, episodes that call it fail")
    with contextlib.suppress(Exception):
        workers.run(contract.awaited(begun, "close"), CLOSE_TIMEOUT_S)


@contextlib.contextmanager
def _shared(environment: Environment, workers: Workers, note: Callable[[str], None]) -> Iterator[Mapping[str, Any]]:
    """What all players of the run get beside their own: the server of those that have one, as `shared`."""
    player = own_class(environment.rollout, "config.env.rollout")
    opening = getattr(player, "open_shared", None)
    if opening is None:
        yield {}
        return
    with opening(workers, note) as shared:
        yield {"shared": shared}


@contextlib.contextmanager
def open_environment(environment: Environment, context: Opening) -> Iterator[Callable[..., Attempt]]:
    """`environment.open(context)`, of which any class may be the user's own.

    Raises:
      ConfigError: it does not open, for whatever reason.
    """
    with contextlib.ExitStack() as stack:
        with as_config_error(f"config.env: {type(environment).__qualname__}.open", OSError):
            attempt = stack.enter_context(environment.open(context))
        yield attempt


def more_than_an_epoch(cfg: Config, tasks: int) -> Iterator[str]:
    """Yields what to tell of stages whose one step plays some of the `tasks` training tasks more than once."""
    fields = {"sample.tasks_per_step": cfg.sample.tasks_per_step} if "sample" in cfg.stages else {}
    if "rl" in cfg.stages or "opd" in cfg.stages:
        fields["rl.tasks_per_step"] = cfg.rl.tasks_per_step
    for field, per_step in fields.items():
        if per_step > tasks:
            epochs = per_step / tasks
            yield f"{field} is {per_step}, there are {tasks} training tasks: one step plays {epochs:.3g} epochs"


def base_folder(cfg: Config) -> Path:
    """Where the weights under LoRA adapters lie: the given model, or what the run itself made before RL."""
    starts_with_rl = cfg.model.path and cfg.stages[0] == "rl"
    return Path(cfg.model.path) if starts_with_rl else Path(cfg.workdir) / "base"


def _tokenizer(
    cfg: Config, dataset: Path, train: TaskSource, environment: Environment, note: Callable[[str], None]
) -> Tokenizer:
    folder = tokenizer_folder(cfg)
    if not (cfg.tokenizer.path or cfg.model.path or (folder / "tokenizer.json").is_file()):
        note(f"training a tokenizer of {cfg.tokenizer.vocab_size} tokens")
        corpus = texts_of_dataset(
            dataset,
            train,
            lambda prompt: (message.content for message in environment.messages(prompt)),
            environment.corpus(dataset),
        )
        trained = Tokenizer.train(corpus, cfg.tokenizer.vocab_size, environment.tokens)
        if make_folder_once(folder, trained.save):
            note(f"another process of this run trained another tokenizer, which counts: {folder}")
    return Tokenizer.load(folder)


def tokenizer_folder(cfg: Config) -> Path:
    """Where the config says that the tokenizer is; a tokenizer trained by the run lies in its workdir."""
    return Path(cfg.tokenizer.path or cfg.model.path or Path(cfg.workdir) / "tokenizer")


def _spec(cfg: Config, tokenizer: Tokenizer) -> ModelSpec:
    if cfg.model.path:
        spec = hf.read_spec(cfg.model.path, cfg.model)
    else:
        spec = ModelSpec.from_config(cfg.model, tokenizer.vocab_size)
    tokenizer.check_fits(spec.vocab_size)
    spec.check_context(cfg.env.context_tokens)
    replays_routing(cfg, spec)  # for its error
    if cfg.model.lora:
        lora.targets(cfg.model.lora, spec)
    return spec
