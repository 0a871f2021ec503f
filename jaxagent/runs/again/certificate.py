"""The certificate of a replay: what was checked, against what, with what, and what came out. As JSON, and to read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxagent.config import to_dict
from jaxagent.io import files
from jaxagent.observe.files import POLICY_FOLDER
from jaxagent.runs import provenance
from jaxagent.runs.again.opened import Workdir
from jaxagent.runs.again.rerun import Found

FOLDER = "replay"  # of the workdir
SHOWN = 20  # differences
NO_PROMISE = "numerics='fast' promises no equal bits: what is sampled beside an episode, and how, changes its numbers"


def certificate(
    workdir: Workdir, found: Found, asked: dict[str, Any], identity: dict[str, Any], verifies: bool
) -> dict[str, Any]:
    """The certificate as JSON values.

    Args:
      workdir: of the run.
      found: by the replay.
      asked: what was asked for: steps, how they were drawn.
      identity: of the run's parts: model, data, tokenizer.
      verifies: it is of the run, and not of a step alone: then it says "passed" only with the trained policy compared.
    """
    differences = found.differences
    exact = workdir.cfg.numerics == "exact"
    newest = workdir.headers[max(workdir.headers)]
    policy = _policy(workdir, found) if verifies else {}
    equal = "incomplete" if verifies and not policy["compared"] else "passed"
    return {
        "certificate": 1,
        "verdict": "failed" if differences else equal,
        "promise": "every token and log-prob, bit for bit" if exact else f"none: {NO_PROMISE}",
        "run": {"workdir": workdir.cfg.workdir, "stage": workdir.stage, "steps_recorded": len(workdir.headers)}
        | {"steps_reached": max(workdir.headers) + 1},
        "asked": asked,
        "digests": {
            "config": provenance.config_digest(to_dict(workdir.cfg)),
            "code": {"package": provenance.code_digest(), **provenance.commit(Path(__file__).parent)}
            | {"own": provenance.own_code(workdir.cfg)},
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
            "versions_exported": [w.version for w in found.weights if w.origin == "exported"],
            "versions_trained_again": [w.version for w in found.weights if w.origin == "trained"],
        },
        "policy": policy,
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


def _policy(workdir: Workdir, found: Found) -> dict[str, Any]:
    """The newest weights that the run keeps, and with what of theirs the record was compared."""
    origins = {"restored": "a bundle", "stored": "a bundle", "exported": f"{POLICY_FOLDER}/"}
    of_it = [w.origin for w in found.weights if w.version == workdir.final and w.origin in origins]
    return {
        "version": workdir.final,
        "ended": workdir.over,
        "compared": list(dict.fromkeys(origins[origin] for origin in of_it)),
    }


def _told_of(policy: dict[str, Any], steps: int) -> str:
    """The line of the page."""
    what = f"version {policy['version']}" + ("" if policy["ended"] else ", the newest bundle of a run that goes on")
    if policy["compared"]:
        return f"{what}: compared in {' and '.join(policy['compared'])}"
    why = (
        f"the record has {steps} steps" if steps < policy["version"] else "no bundle and no exact export of it is there"
    )
    return f"{what}: NOT COMPARED, so that nothing is said of the trained policy ({why})"


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
        f"{len(checked['versions_restored'])} restored, {len(checked['versions_stored'])} in other bundles, "
        f"{len(checked['versions_exported'])} exported: "
        f"{equal} of {len(versions)} have the recorded digest",
    ]
    if content["policy"]:
        lines.append(f"policy        {_told_of(content['policy'], content['run']['steps_reached'])}")
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
        *(f"own code      {digest} {file}" for file, digest in digests["code"]["own"].items()),
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
