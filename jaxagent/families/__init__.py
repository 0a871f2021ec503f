"""What a run needs around an environment: its shared resources, its prompts, its score. One file per family."""

from __future__ import annotations

from jaxagent.config import Config
from jaxagent.families.family import Family
from jaxagent.families.python import PythonFamily
from jaxagent.families.search import SearchFamily
from jaxagent.families.terminal import TerminalFamily

FAMILIES: dict[str, type[Family]] = {  # by env.name
    "search": SearchFamily,
    "terminal": TerminalFamily,
    "python": PythonFamily,
}


def make_family(cfg: Config) -> Family:
    """The family of `env.name`, not opened yet.

    Raises:
      ConfigError: settings of the environment that cannot work.
    """
    return FAMILIES[cfg.env.name](cfg)
