"""Rollouts: a task and a policy in, an episode out."""
