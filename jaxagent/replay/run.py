"""A replay: opens the run's parts, runs the stage again from one bundle on, and says what differs."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxagent.algorithms.compose import as_opd
from jaxagent.config import Config, ConfigError
from jaxagent.learner import checkpoint
from jaxagent.models.params import Params
from jaxagent.observe.files import CHECKPOINTS_FOLDER
from jaxagent.observe.progress import Progress
from jaxagent.replay import certificate, rerun
from jaxagent.replay.record_diff import Difference
from jaxagent.replay.recorded_run import RecordedRun, open_workdir
from jaxagent.replay.rerun import ChainPoint, Findings, ReplayRequest, Rerun
from jaxagent.replay.stored_results import StoredResults
from jaxagent.runs import devices, resume
from jaxagent.runs.checks import OPD, check
from jaxagent.runs.parts import Parts, open_parts

StageRun = Callable[..., Params]  # loop.rl_stage


def run(cfg: Config, options: argparse.Namespace, rl_stage: StageRun) -> dict[str, Any]:
    """Replays, prints the certificate, and returns it; `--verify` writes it too. `options`: see `command.parser`.

    Raises:
      ConfigError: the run cannot be replayed, or not there; says why.
    """
    workdir = open_workdir(cfg, options.stage)
    steps, selection = _select_steps(workdir, options)
    start, end = (workdir.first, workdir.end) if options.step is None else (workdir.bundle_for(steps[0]), steps[0])
    check(cfg)
    devices.keep_compiled_programs()
    findings = Findings(record=list(workdir.broken))
    with Progress() as progress, open_parts(cfg, progress.note) as parts:
        for line in workdir.notes:
            progress.note(line)
        resume.check_identity(workdir.hosts[start].get("identity", {}), parts.identity(), cfg, workdir.hosts[start])
        recorded = "--recorded was said" if options.recorded else _not_repeatable(parts, progress.note)
        selection["environment"] = "from the record" if recorded else "run again"
        request = ReplayRequest(steps, start, end, options.episode, recorded)
        _chain(workdir, parts, request, findings, progress, rl_stage)
        if not findings.differences and not any(step.episodes for step in findings.steps):
            failed = sum(sum(step.not_compared.values()) for step in findings.steps)
            raise ConfigError(f"Nothing of the steps {steps} can be made again: all {failed} episodes failed then.")
        content = certificate.certificate(workdir, findings, selection, parts.identity(), request)
    text = certificate.page(content, findings.differences)
    print(text, end="")
    if options.verify is not None:
        name = f"verify-{options.verify}-{content['digests']['record'][:12] if options.draw is None else options.draw}"
        print(f"certificate: {certificate.write(Path(cfg.workdir), name, content, text)}")
    return content


def _select_steps(workdir: RecordedRun, options: argparse.Namespace) -> tuple[list[int], dict[str, Any]]:
    """The steps, and how they came to be chosen."""
    if options.step is not None:
        return [options.step], {"step": options.step} | ({"episode": options.episode} if options.episode else {})
    if not (can := workdir.sampled(workdir.first)):
        raise ConfigError(f"No bundle has the weights that sampled any of the steps from {workdir.first} on.")
    # Not to be chosen by who asks, nor, once somebody else holds the newest seal, by who made the record.
    seal = workdir.headers[workdir.end - 1]["seal"]
    chosen = random.Random(f"replay/{seal}/{'' if options.draw is None else options.draw}")
    steps = sorted(chosen.sample(can, min(options.verify or 0, len(can))))
    drawn = f"the newest seal {seal[:12]}" + ("" if options.draw is None else f" and {options.draw}")
    selection = {"steps": " ".join(map(str, steps)), "of": len(can), "recorded": len(workdir.headers)}
    return steps, selection | {"drawn with": drawn}


def _not_repeatable(parts: Parts, note: Callable[[str], None]) -> str:
    """Why the environment's side must be taken from the record; "" where it need not."""
    who = [f"config.roles.{name}" for name, role in parts.cfg.roles.items() if not role.repeatable]
    who += [] if parts.environment.repeatable else ["config.env"]
    if who:
        note(f"{who[0]} may answer otherwise at another time: observations are taken from the record")
    return f"{who[0]} may answer otherwise at another time" if who else ""


def _chain(
    workdir: RecordedRun,
    parts: Parts,
    request: ReplayRequest,
    findings: Findings,
    progress: Progress,
    rl_stage: StageRun,
) -> None:
    """Runs the stage again from one bundle to the end that is wanted, and from no other bundle."""
    start, number = request.start, workdir.bundles[request.start]
    stored_results = StoredResults(workdir, parts, request, findings)
    place = f"bundle {number} (step {start})"
    progress.note(f"{place}: training the steps up to {max(request.end - 1, start)} again")
    try:
        if not checkpoint.check(Path(workdir.cfg.workdir) / CHECKPOINTS_FOLDER, number):
            findings.unchecked.append(f"{place}: it has no digests of its files")
    except ConfigError as error:
        findings.record.append(Difference(place, "files", "as their digests say", str(error)))
        return
    connect = rerun.connect(workdir.folder, request, findings, progress.note)
    begin = ChainPoint(workdir.hosts[start], number)
    params = parts.base_params() if parts.cfg.model.lora else parts.init_params()  # the bundle's replace them
    with parts.engine(params, 0) as driver:
        parts.roles.start()
        for part in workdir.segments(start, max(request.end, *(step + 1 for step in request.steps))):
            own = dataclasses.replace(parts, cfg=as_opd(part.cfg) if workdir.stage == OPD else part.cfg)
            begin = dataclasses.replace(begin, past={} if part.alone else begin.past)
            try:
                with Rerun(own.cfg, progress, begin, part.end, stored_results) as saved:
                    rl_stage(own, saved, driver, params, workdir.stage, connect)
            except rerun.ChainEnd as end:
                if end.broken:
                    return
            begin = saved.left
            gc.collect()  # the learner's state, where a cycle still holds it


def last_line(content: dict[str, Any]) -> str:
    """For programs: the last line of stdout."""
    return json.dumps({name: content[name] for name in ("verdict", "asked", "checked", "differences_in_all", "why")})
