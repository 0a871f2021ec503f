"""Roles: who speaks in an episode beside the policy. `config.roles.<name>` chooses one, or names one of yours."""

from __future__ import annotations

from jaxagent.config.roles import RoleConfig
from jaxagent.roles.arithmetic_team import ArithmeticExecutor, ArithmeticGenerator, ArithmeticVerifier
from jaxagent.roles.engines import FrozenRole, PolicyRole
from jaxagent.roles.http import Http
from jaxagent.roles.orchestra_expert import OrchestraExpert
from jaxagent.roles.retail_customer import RetailCustomer

ROLES: dict[str, type[RoleConfig]] = {
    "policy": PolicyRole,
    "engine": FrozenRole,
    "http": Http,
    "retail_customer": RetailCustomer,
    "arithmetic_executor": ArithmeticExecutor,
    "arithmetic_generator": ArithmeticGenerator,
    "arithmetic_verifier": ArithmeticVerifier,
    "orchestra_expert": OrchestraExpert,
}
