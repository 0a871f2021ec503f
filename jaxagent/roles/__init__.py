"""Roles: who speaks in an episode beside the policy. `config.roles.<name>` chooses one, or names one of yours."""

from __future__ import annotations

from jaxagent.config.roles import RoleConfig
from jaxagent.roles.engines import FrozenRole, PolicyRole
from jaxagent.roles.http import Http
from jaxagent.roles.orchestra_expert import OrchestraExpert

ROLES: dict[str, type[RoleConfig]] = {
    "policy": PolicyRole,
    "engine": FrozenRole,
    "http": Http,
    "orchestra_expert": OrchestraExpert,
}
