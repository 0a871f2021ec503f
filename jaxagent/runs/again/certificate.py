"""The certificate of a replay: what was checked, against what, with what, and what came out. As JSON, and to read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxagent.config import to_dict
from jaxagent.io import files
from jaxagent.runs import provenance
from jaxagent.runs.again.opened import Workdir
from jaxagent.runs.again.rerun import Found

FOLDER = "replay"  # of the workdir
SHOWN = 20  # differences
NO_PROMISE = "numerics='fast' promises no equal bits: what is sampled beside an episode, and how, changes its numbers"


def certificate(workdir: Workdir, found: Found, asked: dict[str, Any], identity: dict[str, Any]) -> dict[str, Any]:
    """The certificate as JSON values.

    Args:
      workdir: of the run.
      found: by the replay.
      asked: what was asked for: steps, how they were drawn.
      identity: of the run's parts: model, data, tokenizer.
    """
    differences = found.differences
    exact = workdir.cfg.numerics == "exact"
    newest = workdir.headers[max(workdir.headers)]
    return {
        "certificate": 1,
        "verdict": "failed" if differences else "passed",
        "promise": "every token and log-prob, bit for bit" if exact else f"none: {NO_PROMISE}",
        "run": {"workdir": workdir.cfg.workdir, "stage": workdir.stage, "steps_recorded": len(workdir.headers)},
        "asked": asked,
        "digests": {
            "config": provenance.config_digest(to_dict(workdir.cfg)),
            "code": {"package": provenance.code_digest(), **provenance.commit(Path(__file__).parent)},
            "data": identity,
            "record": newest["seal"],  # stands for all steps up to the newest
        },
        "checked": {
            "steps": len(found.steps),
            "episodes": sum(step.episodes for step in found.steps),
            "tokens": sum(step.tokens for step in found.steps),
            "logprobs": sum(step.logprobs for step in found.steps),
            "largest_logprob_difference": max((step.gap for step in found.steps), default=0.0),
            "versions_restored": [w.version for w in found.weights if w.origin == "restored"],
            "versions_stored": [w.version for w in found.weights if w.origin == "stored"],
            "versions_trained_again": [w.version for w in found.weights if w.origin == "trained"],
        },
        "steps": [
            {
                name: getattr(step, name)
                for name in ("step", "version", "episodes", "tokens", "logprobs", "not_compared")
            }
            | {"largest_logprob_difference": step.gap, "equal": not step.differences}
            for step in found.steps
        ],
        "weights": [dataclasses.asdict(weights) for weights in found.weights],
        "differences": [dataclasses.asdict(difference) for difference in differences[:SHOWN]],
        "differences_in_all": len(differences),
        "told": list(workdir.told),
        "made_again_with": provenance.machine(),
    }


def page(content: dict[str, Any], differences: list[str]) -> str:
    """The same for people."""
    checked, digests = content["checked"], content["digests"]
    versions = content["weights"]
    equal = sum(one["logged"] == one["again"] for one in versions)
    again = content["made_again_with"]
    lines = [
        f"{content['run']['workdir']}, stage '{content['run']['stage']}': {content['verdict'].upper()}",
        f"promised      {content['promise']}",
        f"asked         {', '.join(f'{name} {value}' for name, value in content['asked'].items())}",
        f"sampled again {checked['episodes']} episodes of {checked['steps']} steps: {checked['tokens']} tokens, "
        f"{checked['logprobs']} log-probs; the largest difference of a log-prob is "
        f"{checked['largest_logprob_difference']:g}",
        f"trained again {len(checked['versions_trained_again'])} versions of the weights, "
        f"{len(checked['versions_restored'])} restored, {len(checked['versions_stored'])} in other bundles: "
        f"{equal} of {len(versions)} have the recorded digest",
    ]
    for step in content["steps"]:
        left = "".join(f", {count} {why} not compared" for why, count in step["not_compared"].items())
        verdict = "equal" if step["equal"] else "DIFFERENT"
        lines.append(
            f"  step {step['step']:<5} weights of version {step['version']:<5} {step['episodes']} episodes, "
            f"{step['tokens']} tokens, {step['logprobs']} log-probs{left}: {verdict}"
        )
    if differences:
        lines.append(f"first difference: {differences[0]}")
        lines += [f"  {line}" for line in differences[1:SHOWN]]
        lines += [f"  and {len(differences) - SHOWN} more"] if len(differences) > SHOWN else []
    lines += [
        f"config        {digests['config']}",
        f"code          {digests['code']['package']}",
        f"              commit {digests['code']['commit']}{', changed since' if digests['code']['dirty'] else ''}",
        f"record        {digests['record']}",
    ]
    for name, value in digests["data"].items():
        lines.append(f"{name:<13} {value if isinstance(value, str) else json.dumps(value)}")
    packages = ", ".join(f"{name} {again['packages'][name]}" for name in ("jax", "jaxlib", "numpy"))
    lines.append(f"made with     {packages}, Python {again['python']}, {again['processor']}")
    lines += [f"note          {line}" for line in content["told"]]
    return "\n".join(lines) + "\n"


def write(workdir: Path, name: str, content: dict[str, Any], text: str) -> Path:
    """Writes both beside each other; returns the JSON file."""
    folder = workdir / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    files.replace(folder / f"{name}.txt", text)
    files.replace_json(path, content)
    return path
