"""tau-bench's retail environment (Yao et al., https://arxiv.org/abs/2406.12045): serve a simulated customer of a shop.

    --config.env=tau_bench --config.data.source=FOLDER
    --config.roles.user=http --config.roles.user.url=http://127.0.0.1:8000/v1 --config.roles.user.model=NAME

FOLDER has the published files: orders.json, products.json, users.json and retail_{train,dev,test}_tasks.jsonl, and may
have wiki.md (the shop's policy) and tools_info.json (what the tools are said to be). Every attempt sees the data fresh.
The role "user" plays the customer, and alone is told the task's instruction. How the policy writes is `tools`; see
formats.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from jaxagent.config import ConfigError, nearest
from jaxagent.config.errors import Removed
from jaxagent.config.ranges import PositiveInt
from jaxagent.data.fields import RowError
from jaxagent.envs.base import Environment, Message, Observation, Opening, folder_of
from jaxagent.envs.cast import Cast
from jaxagent.envs.tau import catalog, prompts, rows
from jaxagent.envs.tau.attempt import ROLE, SOLVED, TauAttempt
from jaxagent.envs.tau.formats import FORMATS, Style
from jaxagent.envs.tau.store import ShopStore
from jaxagent.envs.tau.toolbox import TOOLS
from jaxagent.envs.tau2.toolkit import arguments_of
from jaxagent.types import Task

WIKI = "wiki.md"
OURS = "ours"  # in place of a digest


@dataclasses.dataclass(frozen=True, kw_only=True)
class TauBench(Environment):
    """A shop, its tools and its customers. The role "user" must be in config.roles."""

    tools: Style = "native"  # how the policy writes what it does; see formats.py
    store: str = ""  # folder of the shop's data; "" = where the tasks are
    policy: str = ""  # file with the shop's policy; "" = wiki.md beside the data, or else a short one of ours
    max_turns: PositiveInt = 30
    turn_tokens: PositiveInt = 1024
    observation_tokens: PositiveInt = 4096  # a product with its items takes 1,500 tokens
    context_tokens: PositiveInt = 32_768

    solves = True
    score = SOLVED
    removed: ClassVar = {"user_strategy": Removed("the customer says what it says", "llm")}
    calls = "tool_calls"
    roles = (ROLE,)

    @property
    def stop_strings(self) -> Sequence[str]:  # type: ignore[override]
        """What ends a generation."""
        return FORMATS[self.tools].stop_strings

    @property
    def tokens(self) -> Sequence[str]:  # type: ignore[override]
        """Texts that a tokenizer trained for this run keeps whole."""
        return FORMATS[self.tools].tokens

    @contextlib.contextmanager
    def open(self, opening: Opening) -> Iterator[Callable[[Task, Cast], TauAttempt]]:  # type: ignore[override]
        """Reads the shop's data once, for all attempts, and looks at all tasks."""
        folder = self._folder(opening.dataset)
        store = ShopStore.load(folder)
        prompt = self._prompt(folder)
        opening.check(lambda task: self._check(task, store, folder))

        def begin(task: Task, cast: Cast) -> TauAttempt:
            _check_actions(task)  # again: where the training tasks are not known when the environment is opened
            return TauAttempt(task, cast, self, store, prompt)

        yield begin

    def messages(self, text: str) -> Sequence[Message]:
        """The prompt of demonstrations, whose text is the customer's first words.

        With env.store unset it has our short policy and short descriptions of the tools, so demonstrations for another
        shop bring their own messages.
        """
        policy, tools = self._prompt(Path(self.store)) if self.store else (self._policy_text(""), catalog.short())
        return FORMATS[self.tools].messages(text, policy, tools)

    def role_messages(self, text: str) -> Mapping[str, Sequence[Message]]:
        """The least that the customer is shown: `text` is the instruction of a task."""
        return {ROLE: prompts.to_customer(text)}

    def observation(self, action: str, text: str) -> Observation:
        """What follows an action of a demonstration: `text` as the policy is shown it, tags and all."""
        style = FORMATS[self.tools]
        try:
            observation = style.after(style.parse(action, catalog.short())[0], text)
        except ValueError:
            observation = style.refused(text)
        return Observation(((text, observation.parts[0][1]),), observation.role)

    def identity(self, dataset: Path) -> Mapping[str, str]:
        """Digests of the shop's data, of its policy and of what the tools are said to be.

        Our own short texts have none: they are a part of the code.
        """
        folder = self._folder(dataset)
        policy, tools = self._policy_file(folder), folder / catalog.FILE
        return {
            "shop": ShopStore.load(folder).digest,
            "policy": _digest(self._policy_text(policy)) if policy else OURS,
            "tools": _digest(json.dumps(catalog.load(folder))) if tools.is_file() else OURS,
        }

    def _folder(self, dataset: Path | None) -> Path:
        if self.store:
            return Path(self.store)
        if dataset is None:
            raise ConfigError("config.env.store is empty, and there is no folder of tasks: name the shop's folder.")
        return folder_of(dataset)

    def _prompt(self, folder: Path) -> tuple[str, Sequence[Mapping[str, Any]]]:
        """The shop's policy, and its tools in OpenAI's form."""
        return self._policy_text(self._policy_file(folder)), catalog.load(folder)

    def _policy_file(self, folder: Path) -> str:
        """Where the shop's policy is written; "" = it is the short one of ours."""
        wiki = folder / WIKI
        return self.policy or (str(wiki) if wiki.is_file() else "")

    def _policy_text(self, path: str) -> str:
        if not path:
            return prompts.POLICY
        try:
            return Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"config.env.policy: {path} cannot be read: {error}.") from None

    def _check(self, task: Task, store: ShopStore, folder: Path) -> None:
        """Raises ConfigError for a task of another kind, or of another shop."""
        try:
            rows.check(task.metadata, "metadata")
        except RowError as error:
            raise ConfigError(f"Task '{task.id}' is no task of config.env=tau_bench: {error}.") from None
        _check_actions(task)
        user_id = task.metadata["user_id"]
        if user_id not in store.tables["users"]:
            raise ConfigError(f"Task '{task.id}' is of the user '{user_id}', whom {folder}/users.json does not have.")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _check_actions(task: Task) -> None:
    """Raises ConfigError for an action that no tool makes: what it leaves undone would be no part of the reward.

    Published actions of which the shop refuses what they ask for are none of these: they do nothing, as published.
    """
    for number, action in enumerate(task.metadata["actions"]):
        place = f"Task '{task.id}': column 'metadata.actions[{number}]"
        name, arguments = action["name"], rows.passed_arguments(action)
        if name not in TOOLS:
            raise ConfigError(f"{place}.name': there is no tool '{name}'. {nearest(name, TOOLS)}")
        argument_names = list(arguments_of(TOOLS[name]))
        if wrong := [argument for argument in arguments if argument not in argument_names]:
            hint = nearest(wrong[0], argument_names) if argument_names else "It takes none."
            raise ConfigError(f"{place}.kwargs': {name} has no argument '{wrong[0]}'. {hint}")
        if missing := [argument for argument in argument_names if argument not in arguments]:
            raise ConfigError(f"{place}.kwargs': {name} needs the argument '{missing[0]}'.")
