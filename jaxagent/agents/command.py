"""Any program that speaks one of the gateway's dialects, by its command line."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from jaxagent.agents.base import Agent, Where
from jaxagent.config import ConfigError

PLACES = re.compile(r"\{(url|token|model|instruction|directory|home)\}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command(Agent):
    """A command line in which {url}, {token}, {model}, {instruction}, {directory} and {home} are filled in.

    The official clients find the gateway by themselves: the variables that they read are set.
    """

    foreign: Literal["drop", "train"] = "train"  # nobody knows how many conversations it means to hold
    words: tuple[str, ...] = ()  # ("python3", "/opt/agent.py", "{instruction}"); each stays one argument

    def argv(self, where: Where) -> Sequence[str]:
        """The words with what the episode says.

        Raises:
          ConfigError: there are none.
        """
        if not self.words:
            raise ConfigError('env.agent \'command\' needs its words, such as ("python3", "agent.py", "{instruction}")')
        return tuple(_filled(word, where) for word in self.words)

    def env(self, where: Where) -> Mapping[str, str]:
        """What the openai and anthropic packages read."""
        return {**super().env(where), **client_variables(where)}


def client_variables(where: Where) -> dict[str, str]:
    """The variables by which clients of OpenAI's and Anthropic's interfaces find the gateway, and the model's name.

    All names are set that clients read, so that no key and no address of the user's own stays in the place of one, and
    no proxy of the user's is asked for this machine.
    """
    return {
        **dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), f"{where.url}/v1"),
        "OPENAI_API_KEY": where.token,
        "OPENAI_MODEL": where.model,
        **dict.fromkeys(("ANTHROPIC_BASE_URL", "ANTHROPIC_API_URL", "ANTHROPIC_API_BASE"), where.url),
        **dict.fromkeys(("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"), where.token),
        "ANTHROPIC_MODEL": where.model,
        **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
    }


def _filled(word: str, where: Where) -> str:
    """Other braces stay, and so do those in what is filled in."""
    return PLACES.sub(lambda found: getattr(where, found[1]), word)
