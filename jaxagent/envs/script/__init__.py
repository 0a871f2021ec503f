"""Your own agent script, started on this machine: trusted, without a sandbox. See docs/bring_your_agent.md."""

from jaxagent.envs.script.environment import Script as Script
