"""How good a policy is: a run's own evaluations (held_out.py), and pass@k of any checkpoint (jaxagent/evaluate.py)."""
