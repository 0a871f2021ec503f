"""A planner that is trained, and an executor, tools and a verifier that are not (AgentFlow, arXiv 2510.05592)."""
