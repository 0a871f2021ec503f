"""Every key of Harbor's task.toml: its form where it is honoured, and why where it is refused.

A test walks the schema of the installed package, so that a key of a newer one is seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from jaxagent.data.fields import RowError, show
from jaxagent.envs.forms import EACH, TEXT, shaped
from jaxagent.envs.terminal import fields

WORDS = object  # about the task, for people and registries: nothing of how it is played


def refused(why: str) -> Callable[[Any, str], Any]:
    """A form of a key that is not honoured. What says nothing (null, false, 0, an empty list) is no request."""

    def form(value: Any, column: str) -> Any:
        if value or value == "":
            raise RowError(column, f"is not supported: {why}")
        return value

    return form


def _variable(value: Any, column: str) -> str:
    """A form of a variable. ${NAME:-text} is its text: variables of the host are not given to a task's programs."""
    text = fields.word(value, column)
    template = re.fullmatch(r"\$\{([^}:]+)(?::-(.*))?\}", text)
    if template is None:
        return text
    if template[2] is None:
        raise RowError(column, f"asks for the host's variable {template[1]}, which sandboxes do not get: write a value")
    return template[2]


def _user(value: Any, column: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)) or not re.fullmatch(r"[\w.-]+", str(value)):
        raise RowError(column, f"must be a user's name or number, got {show(value)}")
    return str(value)


def _not_negative(value: Any, column: str) -> float:
    return 0.0 if value == 0 and not isinstance(value, bool) else fields.positive(value, column)


def _count(value: Any, column: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RowError(column, f"must be a whole number, got {show(value)}")
    return value


def _absolute(value: Any, column: str) -> str:
    if not isinstance(value, str) or not value.startswith("/"):
        raise RowError(column, f"must be an absolute path, got {show(value)}")
    return value


def _os(value: Any, column: str) -> str:
    if not isinstance(value, str) or value.lower() != "linux":
        raise RowError(column, f"must be 'linux', got {show(value)}: there are no sandboxes of another system")
    return value


def _artifact(value: Any, column: str) -> Any:
    """A form: a path, or a record of one. `destination` names a place of a host that keeps artifacts for people."""
    form = {"source": TEXT, "destination~": WORDS, "exclude~": [str], "service~": ("main",)}
    record = shaped({"source": value} if isinstance(value, str) else value, form, column)
    if ".." in record["source"].split("/"):
        raise RowError(f"{column}.source", f"must not lead upwards, got {value!r}")
    return record


def _least(value: Any, column: str) -> Any:
    return shaped(value, {EACH: float} if isinstance(value, dict) else float, column)


_HOSTS = refused("sandboxes have no network")
_ENV = {EACH: _variable}
_NETWORK = {"network_mode~": ("no-network", "public", "allowlist"), "allowed_hosts~": _HOSTS}
_HEALTH = {
    **{"command": TEXT, "retries~": _count, "timeout_sec~": fields.positive},
    **dict.fromkeys(("interval_sec~", "start_period_sec~", "start_interval_sec~"), _not_negative),
}
_MACHINE = {
    **_NETWORK,
    **dict.fromkeys(("build_timeout_sec~", "cpus~", "memory_mb~", "storage_mb~"), fields.positive),
    **{"memory~": TEXT, "storage~": TEXT, "docker_image~": str, "workdir~": _absolute, "env~": _ENV, "os~": _os},
    **{"gpus~": refused("sandboxes have no GPU"), "gpu_types~": refused("sandboxes have no GPU")},
    **{"tpu~": refused("sandboxes have no TPU"), "allow_internet~": bool},
}
_ENVIRONMENT = {
    **_MACHINE,
    "healthcheck~": _HEALTH,
    "skills_dir~": _absolute,
    "mcp_servers~": [
        {
            **{"name": TEXT, "transport~": ("stdio", "sse", "http", "streamable-http"), "command~": TEXT},
            **{"args~": [str]},
            **dict.fromkeys(("url~", "headers~"), refused("a server is a command in the sandbox, without a network")),
        }
    ],
}
_NOT_THE_VERIFIERS = "the verifier's own sandbox only runs the test"
_VERIFIER = {
    **_NETWORK,
    **{"timeout_sec~": fields.positive, "env~": _ENV, "user~": _user, "environment_mode~": ("shared", "separate")},
    "collect~": [
        {
            **{"command": TEXT, "service~": ("main",), "timeout_sec~": fields.positive},
            "user~": refused("a sandbox has one user for all programs"),
        }
    ],
    "environment~": _MACHINE
    | dict.fromkeys(("healthcheck~", "skills_dir~", "mcp_servers~"), refused(_NOT_THE_VERIFIERS)),
}
_AGENT = {**_NETWORK, "timeout_sec~": fields.positive, "user~": _user}
FORM = {
    **{"version~": TEXT, "schema_version~": TEXT, "source~": WORDS, "metadata~": dict, "artifacts~": [_artifact]},
    "task~": dict.fromkeys(("name~", "version~", "authors~", "description~", "keywords~"), WORDS),
    **{"agent~": _AGENT, "verifier~": _VERIFIER, "environment~": _ENVIRONMENT, "solution~": {"env~": _ENV}},
    "multi_step_reward_strategy~": ("mean", "final"),
    "steps~": [
        {
            **{"name": TEXT, "agent~": _AGENT, "verifier~": _VERIFIER, "min_reward~": _least, "healthcheck~": _HEALTH},
            "artifacts~": [_artifact],
        }
    ],
}
