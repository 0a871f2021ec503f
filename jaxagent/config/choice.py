"""A choice brings its constants: a config field whose value is one entry of a dict, with that entry's own fields.

    OBJECTIVES = {"ppo_clip": PPOClip, "sapo": SoftGate}           # in the room that owns the choice
    objective: Annotated[Objective, Choice("jaxagent.algorithms.objectives:OBJECTIVES")]      # in the schema
    config.rl.objective = ConfigDict({"name": "sapo", "tau_positive": 1.0})                   # in a recipe
    --config.rl.objective=sapo --config.rl.objective.tau_positive=2                           # on the command line
    --config.rl.objective=my_package.my_module:MyObjective                                    # one of yours

An entry is a frozen dataclass. Its fields are the constants, which may have defaults: the published values, which a
config that names the entry alone takes, and which the run's config.json then holds. Its methods are the mathematics.
The dict is named by its path and imported when a config is read, so that the schema stands below every room.
"""

from __future__ import annotations

import dataclasses
import importlib
import operator
import os
from typing import Any

from jaxagent.config.errors import ConfigError, failure_line, nearest

# Modules of ours that moved: a config of an earlier version may name a class of theirs by its path.
MOVED = {
    "jaxagent.rewards.toolrl": "jaxagent.envs.toolcalls.rewards",
    "jaxagent.roles.arithmetic_team": "jaxagent.envs.agentflow.roles",
    "jaxagent.roles.orchestra_expert": "jaxagent.envs.orchestra.roles",
    "jaxagent.roles.retail_customer": "jaxagent.envs.tau.scripted_customer",
    "jaxagent.envs.search.judged": "jaxagent.envs.search.rewards",
    "jaxagent.envs.orchestra.latency": "jaxagent.envs.orchestra.experts",
    **{
        f"jaxagent.agents.{name}": "jaxagent.agents.programs"
        for name in ("claude_code", "codex", "command", "mini_swe_agent", "opencode", "qwen_code")
    },
}


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a field of the schema is annotated with; see the module."""

    options: str  # "module:DICT", names to frozen dataclasses or their paths, "module:Class"
    otherwise: str = (
        ""  # "name:field": any other text is that entry's field, as a path is of "files:path"; "" = refused
    )

    @property
    def entries(self) -> dict[str, type]:
        """The entries that come with the package, by name."""
        module, _, name = self.options.partition(":")
        table = getattr(importlib.import_module(module), name)
        return {
            key: object_at(entry, self.options) if isinstance(entry, str) else entry for key, entry in table.items()
        }

    def make(self, name: str) -> Any:
        """An entry with its published constants: what a field of the schema has as its default."""
        return self.entries[name]()

    def entry(self, name: Any, path: str) -> type:
        """The class that a config names: one of `entries`, or one of the user's as "package.module:Class".

        Raises:
          ConfigError: there is none; names the config field `path` and the nearest entry.
        """
        entries = self.entries
        if name in entries:
            return entries[name]
        if not isinstance(name, str) or ":" not in name:
            nor = f", and '{name}' is no file or folder" if self.otherwise else ""
            module, _, cls = str(name).rpartition(".")
            own = cls.isidentifier() and all(map(str.isidentifier, module.split(".")))
            advice = f"A class of yours is written '{module}:{cls}'." if own else nearest(str(name), entries)
            raise ConfigError(f"{path} has no choice {name!r}{nor}. {advice}")
        return own_class(name, path)

    def name_of(self, chosen: Any) -> str:
        """The name under which a config names the class of `chosen`."""
        cls = type(chosen)
        names = [name for name, entry in self.entries.items() if entry is cls]
        return names[0] if names else f"{cls.__module__}:{cls.__qualname__}"

    def spelled_out(self, value: Any) -> Any:
        """A text in a config as the section it stands for; a section as it is."""
        if not isinstance(value, str):
            return value
        name, _, field = self.otherwise.partition(":")
        return {"name": name, field: value} if field and self._is_other(value) else {"name": value}

    def _is_other(self, text: str) -> bool:
        if text in self.entries:
            return False
        module, colon, cls = text.partition(":")
        a_class = bool(colon) and all(map(str.isidentifier, [*module.split("."), *cls.split(".")]))
        return not a_class and (not text.isidentifier() or os.path.exists(text))


def object_at(name: str, path: str) -> Any:
    """What stands at "package.module:name".

    Raises:
      ConfigError: nothing, or its module cannot be imported; names the config field `path`.
    """
    module, _, attribute = name.partition(":")
    try:
        return operator.attrgetter(attribute)(importlib.import_module(MOVED.get(module, module)))
    except ModuleNotFoundError as error:
        ours = str(error.name).partition(".")[0] == __name__.partition(".")[0]
        what_to_do = (
            "This version of the package has it elsewhere, or no more: look for the name you import in the package."
            if ours
            else "Install it, or put its folder into PYTHONPATH."
        )
        raise ConfigError(f"{path}='{name}': Python finds no module '{error.name}'. {what_to_do}") from error
    except (Exception, SystemExit) as error:  # whatever the user's own module raises
        raise ConfigError(f"{path}='{name}': {failure_line(error)}.") from error


def own_class(name: str, path: str) -> type:
    """The frozen dataclass "package.module:Class" of the user's own.

    Raises:
      ConfigError: it cannot be imported, or is none; names the config field `path`.
    """
    cls = object_at(name, path)
    if not (isinstance(cls, type) and "__dataclass_fields__" in vars(cls) and cls.__dataclass_params__.frozen):
        raise ConfigError(
            f"{path}='{name}' must be a dataclass whose fields are its settings: write @dataclasses.dataclass("
            "frozen=True) above it."
        )
    module, qualname = cls.__module__, cls.__qualname__  # as config.json names it
    try:
        same = operator.attrgetter(qualname)(importlib.import_module(module)) is cls
    except (ImportError, AttributeError):
        same = False
    if not same:
        raise ConfigError(
            f"{path}='{name}' cannot be imported as '{module}:{qualname}': write it at the top of its module."
        )
    if "name" in cls.__dataclass_fields__:
        raise ConfigError(f"{path}='{name}' has a field 'name', which a config names the class itself by: rename it.")
    return cls
