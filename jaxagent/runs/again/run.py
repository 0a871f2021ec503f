"""A replay: opens the run's parts, runs the stage again from the nearest bundles, and says what differs."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import random
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxagent.algorithms.opd import as_opd
from jaxagent.config import Config, ConfigError
from jaxagent.learner import checkpoint, weight_digest
from jaxagent.models import hf
from jaxagent.models.params import Params, shardings
from jaxagent.models.sharding import TRAIN
from jaxagent.observe.files import CHECKPOINTS_FOLDER, POLICY_FOLDER
from jaxagent.observe.progress import Progress
from jaxagent.runs import devices, resume
from jaxagent.runs.again import certificate, rerun
from jaxagent.runs.again.compare import Difference
from jaxagent.runs.again.opened import Workdir, open_workdir
from jaxagent.runs.again.rerun import Digests, Found, Rerun, Wanted, Weights
from jaxagent.runs.checks import OPD, check
from jaxagent.runs.parts import Parts, open_parts

StageRun = Callable[..., Params]  # loop.rl_stage


@dataclasses.dataclass(frozen=True)
class Options:
    """What one command asks for; see jaxagent/replay.py."""

    step: int | None
    episode: str
    verify: int | None
    draw: int | None
    recorded: bool
    stage: str


def run(cfg: Config, options: Options, rl_stage: StageRun) -> dict[str, Any]:
    """Replays, prints what was found, and returns the certificate; `--verify` writes it too.

    Args:
      cfg: the run's own.
      options: of the command.
      rl_stage: of the loop.

    Raises:
      ConfigError: the run cannot be replayed, or not there; says why.
    """
    workdir = open_workdir(cfg, options.stage)
    steps, asked = _asked(workdir, options)
    starts = {step: workdir.bundle_for(step) for step in steps}
    check(cfg)
    devices.keep_compiled_programs()
    found = Found(record=list(workdir.broken))
    with Progress() as progress, open_parts(cfg, progress.note) as parts:
        for line in workdir.told:
            progress.note(line)
        for step in sorted(set(starts.values())):
            resume.check_identity(workdir.hosts[step].get("identity", {}), parts.identity(), cfg, workdir.hosts[step])
        wanted = Wanted(steps, options.episode, options.recorded or _not_repeatable(parts, progress.note))
        asked["environment"] = "from the record" if wanted.recorded else "run again"
        with _engine(parts) as (driver, params):
            for start in sorted(set(starts.values())):
                own = [step for step in steps if starts[step] == start]
                _segment(
                    workdir,
                    parts,
                    driver,
                    params,
                    start,
                    dataclasses.replace(wanted, steps=own),
                    found,
                    progress,
                    rl_stage,
                )
                gc.collect()  # the learner's state, where a cycle still holds it
            if options.verify is not None:
                _compare_stored(workdir, parts, set(starts.values()), found)
                _compare_exported(workdir, parts, found)
        if not found.differences and not any(step.episodes for step in found.steps):
            failed = sum(sum(step.not_compared.values()) for step in found.steps)
            raise ConfigError(f"Nothing of the steps {steps} can be made again: all {failed} episodes failed then.")
        content = certificate.certificate(workdir, found, asked, parts.identity(), options.verify is not None)
    differences = list(map(str, found.differences))
    text = certificate.page(content, differences)
    print(text, end="")
    if options.verify is not None:
        name = f"verify-{options.verify}-{asked['drawn with']}"
        print(f"certificate: {certificate.write(Path(cfg.workdir), name, content, text)}")
    return content


def _asked(workdir: Workdir, options: Options) -> tuple[list[int], dict[str, Any]]:
    """The steps, and how they came to be chosen."""
    if options.step is not None:
        return [options.step], {"step": options.step} | ({"episode": options.episode} if options.episode else {})
    can = workdir.replayable
    if not can:
        workdir.bundle_for(max(workdir.headers))  # says why
    count = min(options.verify or 0, len(can))
    seed = secrets.randbits(32) if options.draw is None else options.draw
    steps = sorted(random.Random(f"replay/{seed}").sample(can, count))
    told = {"steps": " ".join(map(str, steps)), "of": len(can), "recorded": len(workdir.headers), "drawn with": seed}
    return steps, told


def _not_repeatable(parts: Parts, note: Callable[[str], None]) -> bool:
    """Whether the environment's side must be taken from the record; tells why."""
    who = [f"config.roles.{name}" for name, role in parts.cfg.roles.items() if not role.repeatable]
    who += [] if parts.environment.repeatable else ["config.env"]
    if who:
        note(f"{who[0]} may answer otherwise at another time: observations are taken from the record")
    return bool(who)


@contextlib.contextmanager
def _engine(parts: Parts):
    """An engine with weights that the first version replaces, and those."""
    params = parts.base_params() if parts.cfg.model.lora.rank else parts.init_params()
    with parts.engine(params, 0) as driver:
        parts.roles.start()
        yield driver, params


def _segment(
    workdir: Workdir,
    parts: Parts,
    driver: Any,
    params: Params,
    start: int,
    wanted: Wanted,
    found: Found,
    progress: Progress,
    rl_stage: StageRun,
) -> None:
    """Runs the stage again from the bundle of one step up to the last of the wanted steps."""
    number, digests = workdir.bundles[start], Digests(workdir.headers, found)
    progress.note(f"bundle {number} (step {start}): training the steps up to {max(wanted.steps)} again")
    try:
        checkpoint.check(Path(workdir.cfg.workdir) / CHECKPOINTS_FOLDER, number)
    except ConfigError as error:
        found.record.append(Difference(f"bundle {number} (step {start})", "files", "as their digests say", str(error)))
        return
    if workdir.stage == OPD:
        parts = dataclasses.replace(parts, cfg=as_opd(parts.cfg))
    connect = rerun.connect(workdir.folder, wanted, found, progress.note)
    with (
        Rerun(parts.cfg, progress, number, workdir.hosts[start], digests) as saved,
        contextlib.suppress(rerun.Over),
    ):
        rl_stage(parts, saved, driver, params, workdir.stage, connect)


def _compare_stored(workdir: Workdir, parts: Parts, begun: set[int], found: Found) -> None:
    """Compares the weights of every bundle that nothing was begun from, the newest one above all, with the record."""
    directory = Path(workdir.cfg.workdir) / CHECKPOINTS_FOLDER
    for step, number in workdir.bundles.items():
        logged = rerun.logged_digest(workdir.headers, step)
        if step in begun or logged is None or not (directory / str(number)).is_dir():
            continue
        try:
            params = checkpoint.read_params(directory, number, jax.NamedSharding(parts.mesh, jax.P()))
        except ConfigError as error:
            place = f"bundle {number} (step {step})"
            found.record.append(Difference(place, "files", "as their digests say", str(error)))
            continue
        with jax.set_mesh(parts.mesh):
            found.weights.append(Weights(step, logged, weight_digest.digest(params), "stored"))


def _compare_exported(workdir: Workdir, parts: Parts, found: Found) -> None:
    """Compares the exported policy with the record, where the folder holds the trained weights bit for bit."""
    cfg, spec = workdir.cfg, parts.spec
    folder, logged = Path(cfg.workdir) / POLICY_FOLDER, rerun.logged_digest(workdir.headers, workdir.final)
    # An export has no padding rows, and adapters are multiplied out in it.
    whole = spec.padded_vocab_size == spec.vocab_size and cfg.model.compute_dtype == cfg.model.param_dtype
    theirs = workdir.over and workdir.stage == cfg.stages[-1] and folder.is_dir()
    if logged is None or not theirs or not whole or cfg.model.lora.rank:
        return
    try:
        params = hf.load(folder, spec, shardings(spec, parts.mesh, TRAIN))
    except ConfigError as error:
        found.record.append(Difference(f"{POLICY_FOLDER}/", "files", "a whole policy", str(error)))
        return
    with jax.set_mesh(parts.mesh):
        found.weights.append(Weights(workdir.final, logged, weight_digest.digest(params), "exported"))


def last_line(content: dict[str, Any]) -> str:
    """For programs: the last line of stdout."""
    return json.dumps({name: content[name] for name in ("verdict", "asked", "checked", "differences_in_all")})
