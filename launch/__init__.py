"""Ways to start runs: sweeps, clusters. Nothing in jaxagent imports this."""
