"""Steps of a run made again, and compared with its record: every token and log-prob, bit for bit.

    python -m jaxagent.replay --config.workdir=runs/search_r1 --step=12                        # all episodes of a step
    python -m jaxagent.replay --config.workdir=runs/search_r1 --step=12 --episode=TASK#ATTEMPT
    python -m jaxagent.replay --config.workdir=runs/search_r1 --verify=5                       # and a certificate

For --step the nearest bundle before it is restored, the steps between are trained again from the recorded episodes, and
the step's episodes are sampled again with the weights that come out, through engine and environment. What differs is
named: step, episode, position, both values. The config is the run's own, and nothing of it can be overridden.

Where the environment cannot be run again (it says so of itself, as roles behind HTTP do, or with --recorded), its side
is taken from the record, and the policy's tokens are sampled again in the recorded contexts.

--verify trains every step again from the first bundle to the last, and compares each later bundle, the exported policy
and the results that the run wrote down; the episodes of K steps are sampled again, drawn by the newest seal. It writes
WORKDIR/replay/verify-K-*.json and .txt, which name what is NOT CHECKED. Exit codes: 0 everything is equal, 1 something
differs, 2 a mistake in the command, or nothing that could be made again, 3 INCOMPLETE: what --verify made again is
equal, and rewards or the trained policy could not be made again or compared; it says why.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxagent.algorithms.compose import as_opd
from jaxagent.config import Config, ConfigError, flags, nearest
from jaxagent.config.command import Parser, count, exit_code, number, quiet_libraries
from jaxagent.config.ranges import at_least, between
from jaxagent.evaluate import stored_config
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


WORKDIR = "config.workdir"
VERDICTS = {"passed": 0, "failed": 1, "incomplete": 3}  # exit codes


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code. `argv[0]` is the program's name."""
    argv = list(sys.argv if argv is None else argv)
    if flags.wants_help(argv):
        print(parser().format_help())
        return 0
    return exit_code(lambda: _run(argv))


def _run(argv: Sequence[str]) -> int:
    options, rest = parser().parse_known_args(argv[1:])
    if (options.step is None) == (options.verify is None):
        raise ConfigError("Say either --step=N or --verify=K.")
    if options.episode and options.step is None:
        raise ConfigError("--episode is of one step: say --step=N too.")
    if options.draw is not None and options.verify is None:
        raise ConfigError("--draw chooses the steps of --verify=K, which is not there.")
    config = read_config([argv[0], *rest])
    quiet_libraries()
    config = devices.provide_for(config)
    # Late imports: what they name loads jax, which costs seconds.
    from jaxagent import loop

    content = run(config, options, loop.rl_stage)
    print(last_line(content))
    return VERDICTS[content["verdict"]]


def read_config(argv: Sequence[str]) -> Config:
    """The config of the run in `--config.workdir`.

    Raises:
      ConfigError: there is no run; a flag that is none of this program's.
    """
    for arg in argv[1:]:
        name = arg.lstrip("-").partition("=")[0]
        if (arg.startswith("-") and name == "config") or (name.startswith("config.") and name != WORKDIR):
            raise ConfigError(f"--{name}: a replay has the run's own config, of which nothing but the workdir is said.")
        if arg.startswith("-") and name != WORKDIR:
            raise ConfigError(f"Unknown flag '{arg}'. {nearest(name, [*vars(parser().parse_args([])), WORKDIR])}")
    return flags.parse_config(argv, (), stored_config)


def parser() -> argparse.ArgumentParser:
    """The flags of this program alone."""
    out = Parser(
        prog="python -m jaxagent.replay",
        usage="%(prog)s --config.workdir=RUN (--step=N [--episode=ID] | --verify=K) [flags]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    out.add_argument("--step", type=number(int, at_least(0)), help="make the episodes of this step again, from 0")
    out.add_argument("--episode", default="", help="only this one, 'task#attempt', or 'task' for all attempts at it")
    out.add_argument("--verify", type=count, help="train all again, and sample so many steps, drawn by chance")
    out.add_argument(
        "--draw", type=number(int, between(0, 2**32 - 1)), help="a number of yours that decides, with the seal, which"
    )
    out.add_argument("--recorded", action="store_true", help="take the environment's side from the record")
    out.add_argument("--stage", default="", help="'rl' or 'opd' (default: the last of them that the run has)")
    return out
