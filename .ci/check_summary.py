"""Checks a run's summary.json against the numbers its config promises: `check_summary.py FILE [RECIPE]`."""

import json
import pathlib
import sys

RECIPES = {
    "search_r1": {"score": "em", "n": 256, "before": 0.60, "after": 0.80, "gain": 0.25, "sampled_gain": 0.20},
    "gsm8k_python": {"score": "solved", "n": 96, "before": 0.60, "after": 0.80, "gain": 0.25, "sampled_gain": 0.10},
    "bandit": {"score": "solved", "n": 96, "before": 0.60, "after": 0.80, "gain": 0.25, "sampled_gain": 0.20},
    "coding_agent": {"score": "resolved", "n": 96, "before": 0.60, "after": 0.80, "gain": 0.25, "sampled_gain": 0.10},
}

summary = json.loads(pathlib.Path(sys.argv[1]).read_text())
promised = RECIPES[sys.argv[2] if len(sys.argv) > 2 else "search_r1"]
score = promised["score"]
names = [f"eval/{name}_{when}_rl" for name in (score, f"{score}_sampled") for when in ("before", "after")]
if missing := [name for name in names if summary.get(name) is None]:
    sys.exit(f"FAIL nothing was measured: {', '.join(missing)} ({summary.get('first_failure', 'no failure is told')})")
before, after, sampled_before, sampled_after = (summary[name] for name in names)
sampled = sampled_after - sampled_before
checks = {
    f"eval/n >= {promised['n']}": summary["eval/n"] >= promised["n"],
    f"{score} before RL <= {promised['before']}": before <= promised["before"],
    f"{score} after RL >= {promised['after']}": after >= promised["after"],
    f"greedy gain >= {promised['gain']}": after - before >= promised["gain"],
    f"sampled gain >= {promised['sampled_gain']}": sampled >= promised["sampled_gain"],
    "logprob_gap_max == 0 (exact numerics)": summary.get("logprob_gap_max") == 0.0,
    "compiles_after_warmup == 0": summary["compiles_after_warmup"] == 0,
}
print(json.dumps(summary, indent=2))
for claim, holds in checks.items():
    print(f"{'ok  ' if holds else 'FAIL'} {claim}")
sys.exit(0 if all(checks.values()) else 1)
