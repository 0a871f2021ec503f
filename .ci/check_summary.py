"""Checks a run's summary.json against the numbers the default config promises: `check_summary.py FILE`."""

import json
import pathlib
import sys

summary = json.loads(pathlib.Path(sys.argv[1]).read_text())
checks = {
    "eval/n >= 256": summary["eval/n"] >= 256,
    "eval/em_before_rl <= 0.60": summary["eval/em_before_rl"] <= 0.60,
    "eval/em_after_rl >= 0.80": summary["eval/em_after_rl"] >= 0.80,
    "greedy gain >= 0.25": summary["eval/em_after_rl"] - summary["eval/em_before_rl"] >= 0.25,
    "sampled gain >= 0.20": summary["eval/em_sampled_after_rl"] - summary["eval/em_sampled_before_rl"] >= 0.20,
    "logprob_gap_max == 0 (exact numerics)": summary["logprob_gap_max"] == 0.0,
    "compiles_after_warmup == 0": summary["compiles_after_warmup"] == 0,
}
print(json.dumps(summary, indent=2))
for claim, holds in checks.items():
    print(f"{'ok  ' if holds else 'FAIL'} {claim}")
sys.exit(0 if all(checks.values()) else 1)
