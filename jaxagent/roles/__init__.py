"""Roles: who speaks in an episode beside the policy. `config.roles.<name>` chooses one, or names one of yours."""

# Name -> "module:Class". A role that only one environment has stands in that environment's folder.
ROLES: dict[str, str] = {
    "policy": "jaxagent.roles.engines:PolicyRole",
    "engine": "jaxagent.roles.engines:FrozenRole",
    "http": "jaxagent.roles.http:Http",
    "retail_customer": "jaxagent.envs.tau.scripted_customer:RetailCustomer",
    "arithmetic_executor": "jaxagent.envs.agentflow.roles:ArithmeticExecutor",
    "arithmetic_generator": "jaxagent.envs.agentflow.roles:ArithmeticGenerator",
    "arithmetic_verifier": "jaxagent.envs.agentflow.roles:ArithmeticVerifier",
    "random_player": "jaxagent.envs.textarena.environment:RandomPlayer",
    "orchestra_expert": "jaxagent.envs.orchestra.roles:OrchestraExpert",
}
