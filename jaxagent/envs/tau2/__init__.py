"""tau2-bench (Barres et al., https://arxiv.org/abs/2506.07982): agent and user both act on a shared world."""
