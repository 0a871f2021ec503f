"""`--dry_run`: what a run will need, known before it starts.

`programs` lowers and compiles the run's real programs from abstract arrays, `costs` counts FLOPs and bytes by
formula, `chips` holds data-sheet numbers, `run` puts them into a table and plan.json. Allocates no weights.
"""
