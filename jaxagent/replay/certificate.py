"""The certificate of a replay: what was checked, against what, with what, and what came out. As JSON, and to read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import to_dict
from jaxagent.io import files
from jaxagent.learner import checkpoint
from jaxagent.observe.files import CHECKPOINTS_FOLDER, POLICY_FOLDER, SUMMARY_FILE
from jaxagent.replay.record_diff import Difference
from jaxagent.replay.recorded_run import RecordedRun, ranges
from jaxagent.replay.rerun import Findings, ReplayRequest
from jaxagent.runs import provenance

FOLDER = "replay"  # of the workdir
SHOWN = 20  # differences
NO_PROMISE = "numerics='fast' promises no equal bits: what is sampled beside an episode, and how, changes its numbers"


def certificate(
    workdir: RecordedRun,
    findings: Findings,
    selection: dict[str, Any],
    identity: dict[str, Any],
    request: ReplayRequest,
) -> dict[str, Any]:
    """The certificate as JSON values.

    `selection`: what was asked for, a step, or how many, and how they were drawn; `identity`: of the run's parts.
    """
    differences = findings.differences
    exact = workdir.cfg.numerics == "exact"
    newest = workdir.headers[max(workdir.headers)]
    policy = _policy(workdir, findings) if request.verifies else {}
    why = [f"rewards and the reasons of ends were not made again: {request.recorded}"] if request.recorded else []
    if request.verifies and not policy["compared"]:
        why += [
            "the trained policy was not compared: of its version no later bundle and no export is there, or no record"
        ]
    return {
        "certificate": 2,
        "verdict": "failed" if differences else "incomplete" if why and request.verifies else "passed",
        "why": why,
        "promise": "every token and log-prob, bit for bit" if exact else f"none: {NO_PROMISE}",
        "run": {"workdir": workdir.cfg.workdir, "stage": workdir.stage, "steps_recorded": len(workdir.headers)}
        | {"steps_reached": max(workdir.headers) + 1, "from_version": request.start},
        "asked": selection,
        "not_checked": _not_checked(workdir, findings, request),
        "digests": {
            "config": provenance.config_digest(to_dict(workdir.cfg)),
            "code": {"package": provenance.code_digest(), **provenance.commit(Path(__file__).parent)}
            | {"own": provenance.own_code(workdir.cfg)},
            "data": identity,
            "record": newest["seal"],  # stands for all steps up to the newest
            "seals": {str(step): header["seal"] for step, header in workdir.headers.items()},
        },
        "checked": {
            "steps": len(findings.steps),
            **{
                name: sum(getattr(step, name) for step in findings.steps) for name in ("episodes", "tokens", "logprobs")
            },
            "largest_logprob_difference": max((step.gap for step in findings.steps), default=0.0),
            "versions_trained_again": [each.version for each in findings.weights[1:]],
            "bundles": list(
                dict.fromkeys(value.version for value in findings.bytes if value.place.startswith("bundle"))
            ),
            "evaluations": findings.evaluated,
        },
        "policy": policy,
        "steps": [
            {name: value for name, value in vars(step).items() if name not in ("gap", "differences")}
            | {"largest_logprob_difference": step.gap, "equal": not step.differences}
            for step in findings.steps
        ],
        **{name: [dataclasses.asdict(each) for each in getattr(findings, name)] for name in ("weights", "bytes")},
        "differences": [dataclasses.asdict(difference) for difference in differences[:SHOWN]],
        "differences_in_all": len(differences),
        "told": list(workdir.notes),
        "made_again_with": provenance.machine(),
    }


def _not_checked(workdir: RecordedRun, findings: Findings, request: ReplayRequest) -> list[str]:
    """All that an honest reader might take for checked, by name."""
    stages, start, unscored = workdir.cfg.stages, request.start, findings.unscored
    before, after = stages[: stages.index(workdir.stage)], stages[stages.index(workdir.stage) + 1 :]
    trained = range(start, request.end)
    lines = [
        "code: which code made the run; this code, with these packages, has made it again",
        f"all before version {start}: its weights, optimiser state and place in the data are as bundle "
        f"{workdir.bundles[start]} has them" + (f", however {' and '.join(before)} made them" if before else ""),
        "data: tasks, tokenizer and corpus have the digests that the bundle gives; nobody asks where they are from",
        "another record in the place of this one: it is seen by who holds a seal that the run printed",
    ]
    if others := sorted(set(trained) - set(request.steps)):
        lines.append(f"tokens, rewards and ends in the steps {ranges(others)}: learnt from as recorded, not made again")
    if failed := findings.failed:
        counts = ", ".join(f"{count} {why}" for why, count in sorted(failed.items()))
        lines.append(f"failures: whether these attempts had to fail ({counts})")
    if request.recorded:
        lines.append(f"rewards, reasons of ends, and evaluations: {request.recorded}")
    for why in dict.fromkeys(workdir.left_out.values()):
        steps = [step for step, other in workdir.left_out.items() if other == why]
        lines.append(f"steps {ranges(steps)}: made under another config ({why})")
    if request.verifies and (early := [step for step in range(start) if step not in workdir.left_out]):
        lines.append(f"steps {ranges(early)}: the record of them, or a bundle before them, is not kept")
    if unsampled := [step for step in trained if step not in workdir.sampled(start)]:
        lines.append(f"steps {ranges(unsampled)}: never drawn, since the weights that sampled them are not kept")
    if not request.verifies:
        return [*lines, "the trained policy, later bundles, evaluations: --verify compares them", *findings.unchecked]
    lines += [f"evaluations after {ranges(unscored)} steps"] if unscored and not request.recorded else []
    compared = {workdir.bundles.get(version) for version in (start, *(value.version for value in findings.bytes))}
    if others := set(checkpoint.bundles(Path(workdir.cfg.workdir) / CHECKPOINTS_FOLDER)) - compared:
        lines.append(f"bundles {ranges(others)}: of another stage, an earlier step, or one that a later bundle has")
    lines += [] if workdir.over else [f"{POLICY_FOLDER}/ and {SUMMARY_FILE}: the run has not ended, or went on since"]
    lines += [f"{' and '.join(after)}: what came after the stage '{workdir.stage}'"] if after else []
    lines += ["the weights under the adapters: they are as they lie there"] if workdir.cfg.model.lora else []
    return [
        *lines,
        "times, counters, texts: of episodes, logs, report; numbers that are no results",
        *findings.unchecked,
    ]


def _policy(workdir: RecordedRun, findings: Findings) -> dict[str, Any]:
    """The newest weights that the run keeps, and where they were compared with those made again."""
    places = [value.place for value in findings.bytes if value.version == workdir.final]
    of_it = ["a bundle" if place.startswith("bundle") else place for place in places]
    return {"version": workdir.final, "ended": workdir.over, "compared": list(dict.fromkeys(of_it))}


def page(content: dict[str, Any], differences: Sequence[Difference]) -> str:
    """The certificate as a text for people."""
    counts, digests = content["checked"], content["digests"]
    versions, values = content["weights"], content["bytes"]
    equal, same = (sum(value["logged"] == value["again"] for value in part) for part in (versions, values))
    again = content["made_again_with"]
    lines = [
        f"{content['run']['workdir']}, stage '{content['run']['stage']}': {content['verdict'].upper()}",
        f"promised      {content['promise']}",
        f"asked         {', '.join(f'{name} {value}' for name, value in content['asked'].items())}",
        f"sampled again {counts['episodes']} episodes of {counts['steps']} steps: {counts['tokens']} tokens, "
        f"{counts['logprobs']} log-probs; the largest difference of a log-prob is "
        f"{counts['largest_logprob_difference']:g}",
        f"trained again {len(counts['versions_trained_again'])} versions of the weights, from version "
        f"{content['run']['from_version']} on: {equal} of {len(versions)} have the recorded digest",
        f"stored        {same} of {len(values)} parts of bundles and "
        "exported files have the SHA-256 of those made again",
        f"evaluated     again after {', '.join(map(str, counts['evaluations'])) or 'no'} steps",
    ]
    if policy := content["policy"]:
        which = f"version {policy['version']}" + (
            "" if policy["ended"] else ", the newest bundle of a run that goes on"
        )
        where = " and ".join(policy["compared"])
        lines.append(f"policy        {which}: {f'compared in {where}' if where else 'NOT COMPARED'}")
    for step in content["steps"]:
        not_compared = "".join(f", {count} {why} not compared" for why, count in step["not_compared"].items())
        verdict = "equal" if step["equal"] else "DIFFERENT"
        lines.append(
            f"  step {step['step']:<5} weights of version {step['version']:<5} {step['episodes']} episodes, "
            f"{step['tokens']} tokens, {step['logprobs']} log-probs{not_compared}: {verdict}"
        )
    if differences:
        lines.append(f"first difference: {differences[0]}")
        lines += [f"  {line}" for line in differences[1:SHOWN]]
        lines += [f"  and {len(differences) - SHOWN} more"] if len(differences) > SHOWN else []
    lines += [f"INCOMPLETE    {line}" for line in content["why"]]
    lines += ["NOT CHECKED", *(f"  - {line}" for line in content["not_checked"])]
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
