"""tau-bench (Yao et al., https://arxiv.org/abs/2406.12045): an agent serves a simulated customer of a shop."""
