"""What a workdir holds for a replay: the record's headers, the stage's bundles, and which steps can be made again."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import Config, ConfigError, parse, to_dict
from jaxagent.config.run import STAGE_SECTIONS
from jaxagent.learner import checkpoint
from jaxagent.observe.files import CHECKPOINTS_FOLDER, RECORD_FOLDER, RUN_FILE
from jaxagent.replay import stage_end
from jaxagent.replay.record_diff import Difference
from jaxagent.runs import provenance, record, resume
from jaxagent.runs.checks import OPD, RL

HOW_TO_RECORD = (
    "A run keeps what a replay needs with --config.checkpoint.replay=all (every RL step, from its first bundle on) or "
    "newest (the steps that kept bundles reach)."
)


# What of a config no number of an RL step depends on.
_SIZES = ("slots", "steps_per_dispatch", "prefill_tokens", "pages", "memories", "request_timeout_s", "stop_states")
_ELSEWHERE = ("stages", "data.num_eval", "data.eval_source", *map("engine.{}".format, _SIZES))
_FREE = (*provenance.UNREAD, *STAGE_SECTIONS, *_ELSEWHERE)
_OWN = ("rl", "opd")  # sections that a step is made again with as they were then


@dataclasses.dataclass(frozen=True)
class ChainSegment:
    """Steps of the chain that one process made under one config."""

    first: int
    end: int  # one more than the last
    cfg: Config
    alone: bool  # its engine had no version before that of `first`


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """A run's folder, as far as a replay reads it."""

    cfg: Config
    stage: str  # whose steps are made again
    folder: Path  # of its record
    headers: Mapping[int, Mapping[str, Any]]
    bundles: Mapping[int, int]  # step of the stage -> number
    hosts: Mapping[int, Mapping[str, Any]]  # by step: the host's side of its bundle
    lagging: frozenset[int]  # steps whose bundle has not the earlier versions that the engines of a fleet had
    broken: tuple[Difference, ...]  # what the headers say against each other
    notes: tuple[str, ...]  # what is another than it was: code, packages
    alone: frozenset[int] = frozenset()  # steps at which one process went on from a lagging bundle
    final: int = 0  # the version that an ended stage came to; of one that is not over, that of the newest bundle
    over: bool = False  # the stage has ended
    configs: Mapping[str, Config | str] = dataclasses.field(default_factory=dict)  # by digest; a text says why not

    @property
    def end(self) -> int:
        """The version that the last recorded step made."""
        return max(self.headers) + 1

    @property
    def first(self) -> int:
        """The step of the oldest bundle from which every step to the last can be trained again.

        Raises:
          ConfigError: there is none.
        """
        able = self._able(self.end - 1)
        if starts := [step for step in self.bundles if step in able]:
            return min(starts)
        return self.bundle_for(self.end - 1)  # says why

    def bundle_for(self, step: int) -> int:
        """The step of the nearest bundle at or before `step` from which the record reaches it.

        Raises:
          ConfigError: the step is not one that can be made again; says why, and which can.
        """
        if step not in self.headers:
            steps = list(self.headers)
            raise ConfigError(f"--step={step}: the record of '{self.stage}' has the steps {steps[0]} to {steps[-1]}.")
        if starts := [at for at in self._able(step) if self._samples(at, step)]:
            return max(starts)
        able = [at for at in self.headers if any(self._samples(start, at) for start in self._able(at))]
        can = f"Steps that can be made again: {ranges(able)}."
        if step in (others := self.left_out):
            raise ConfigError(
                f"--step={step} was made under another config than the workdir's config.json, with which the run went "
                f"on later ({others[step]}). {can}"
            )
        raise ConfigError(
            f"--step={step}: no bundle is left from which it could be trained again; there are those of the steps "
            f"{sorted(self.bundles) or 'of other stages'}. {can}"
        )

    def sampled(self, start: int) -> list[int]:
        """The steps from a bundle on whose episodes can be sampled again."""
        return [step for step in self.headers if step >= start and self._samples(start, step)]

    @property
    def left_out(self) -> dict[int, str]:
        """RecordedRollout steps that this config cannot make again, and what of theirs was another."""
        configs = {step: self.configs[header["config"]] for step, header in self.headers.items()}
        return {step: why for step, why in configs.items() if isinstance(why, str)}

    def segments(self, start: int, end: int) -> list[ChainSegment]:
        """The chain from a bundle to `end`, cut where another config, or a process without earlier versions, began."""
        parts: list[ChainSegment] = []
        for step in range(start, end):
            cfg, alone = self.configs[self.headers[step]["config"]], step in self.alone
            if parts and not alone and parts[-1].cfg == cfg:
                parts[-1] = dataclasses.replace(parts[-1], end=step + 1)
            else:
                parts.append(ChainSegment(step, step + 1, cfg, alone))
        return parts

    def _able(self, step: int) -> list[int]:
        """Steps at or before `step` whose bundle is there, with nothing left out between."""
        able, out = [], self.left_out
        for at in range(step, -1, -1):
            if at not in self.headers or at in out:
                break
            able += [at] if at in self.bundles else []
        return able

    def _samples(self, start: int, step: int) -> bool:
        """Whether a chain from a bundle has the weights that `step` was sampled with."""
        has = start not in self.lagging or start in self.alone or step >= start + self.cfg.rl.staleness
        return has or any(start < at <= step for at in self.alone)


def open_workdir(cfg: Config, stage: str) -> RecordedRun:
    """Reads the headers and the bundles of a run. Nothing is changed; its process may still be training.

    Args:
      cfg: the run's own.
      stage: "" = the last one of the run that samples and trains.

    Raises:
      ConfigError: there is nothing to make again; says what to do.
    """
    workdir = Path(cfg.workdir)
    if cfg.fleet is not None and cfg.fleet.rule == "in_flight":
        raise ConfigError(
            f"{workdir} was played with config.fleet.rule='in_flight': which weights sampled a token depended on the "
            "clock, so that its steps cannot be made again. Those of 'pinned' can."
        )
    stages = [name for name in cfg.stages if name in (RL, OPD)]
    if not stages:
        raise ConfigError(f"{workdir} has neither a stage 'rl' nor 'opd': nothing was sampled to be trained on.")
    stage = stage or stages[-1]
    if stage not in stages:
        raise ConfigError(f"--stage={stage}: the run has the stages {', '.join(cfg.stages)}.")
    folder = workdir / RECORD_FOLDER / stage
    directory = workdir / CHECKPOINTS_FOLDER
    bundles = [(number, checkpoint.read_host(directory, number)) for number in checkpoint.bundles(directory)]
    own = {host["step"]: (number, host) for number, host in bundles if host["stage"] == stage}
    came = stage_end.read(workdir, cfg, stage, own)  # before the record, which may grow meanwhile
    damaged: dict[int, str] = {}
    headers = record.headers(folder, damaged)
    if not headers:
        why = next(iter(damaged.values()), f"{workdir} has no record of the stage '{stage}'. {HOW_TO_RECORD}")
        raise ConfigError(why)
    numbers = {step: number for step, (number, _) in own.items()}
    hosts = {step: host for step, (_, host) in own.items()}
    starts = provenance.read(workdir / RUN_FILE)["starts"]
    notes, broken = _notes(starts, headers, provenance.own_code(cfg)), _broken(headers)
    broken += [Difference(f"step {step}", "the record's file", "a step", why) for step, why in damaged.items()]
    ends = stage_end.begins_late(cfg, headers, hosts, numbers), stage_end.cut_off(came, headers, hosts)
    broken += [end for end in ends if isinstance(end, Difference)]
    notes += [end for end in ends if isinstance(end, str)]
    without = {step: _without_past(directory, number, host) for step, (number, host) in own.items()}
    configs = [*record.configs(folder), *(host["config"] for _, host in bundles)]
    return RecordedRun(
        cfg=cfg,
        stage=stage,
        folder=folder,
        headers=headers,
        bundles=numbers,
        hosts=hosts,
        lagging=frozenset(step for step, lacks in without.items() if lacks),
        broken=tuple(broken),
        notes=tuple(notes),
        alone=frozenset(stage_end.begun_alone(starts, cfg, stage, without)),
        final=came.steps,
        over=came.over,
        configs=_configs(cfg, {header["config"] for header in headers.values()}, configs),
    )


def _configs(cfg: Config, digests: Collection[str], configs: Sequence[Mapping[str, Any]]) -> dict[str, Config | str]:
    """By digest: the config that steps are made again with, or why they cannot be."""
    then = {provenance.config_digest(config): config for config in configs}
    own = provenance.config_digest(to_dict(cfg))
    return {digest: cfg if digest == own else _of_then(cfg, then.get(digest)) for digest in digests}


def _of_then(cfg: Config, then: Mapping[str, Any] | None) -> Config | str:
    """The run's config with the stage's own settings of then; what else was another, where that decides numbers."""
    if then is None:
        return "nothing keeps what it was"
    changes = [each for each in resume.changes(then, cfg) if not _within(each[0], _FREE) or _within(each[0], _OWN)]
    if others := [each for each in changes if not _within(each[0], _OWN)]:
        return resume.changes_line(others)
    now = to_dict(cfg)
    sections = {name: now[name] | then[name] for name in _OWN if now.get(name) and then.get(name)}
    try:
        return parse(now | sections) if changes else cfg
    except ConfigError as error:  # of another version of this code
        return str(error)


def _within(field: str, names: Collection[str]) -> bool:
    return any(field == name or field.startswith(f"{name}.") for name in names)


def _without_past(directory: Path, number: int, host: Mapping[str, Any]) -> bool:
    """Whether a bundle is a fleet's, whose engines had the versions before it; the run may have gone on without one."""
    fleet = host["config"].get("fleet") is not None and host["stage"] == RL
    return bool(fleet and host["step"]) and not checkpoint.has_past(directory, number)


def _broken(headers: Mapping[int, Mapping[str, Any]]) -> list[Difference]:
    """Where the chain of seals, or of weights, is cut."""
    differences = []
    for step, header in headers.items():
        if (seal := record.seal_of(dict(header))) != header["seal"]:
            differences.append(Difference(f"step {step}", "the record's seal", header["seal"][:16], seal[:16]))
        before = headers.get(step - 1)
        if before is None and header["previous"] and step > min(headers):
            differences.append(
                Difference(f"step {step - 1}", "the record's file", header["previous"][:16], "not there")
            )
        if before is not None and before["seal"] != header["previous"]:
            place = f"step {step}, what it says of step {step - 1}"
            differences.append(Difference(place, "the record's seal", header["previous"][:16], before["seal"][:16]))
        if before is not None and before["after"] != header["before"]:
            differences.append(Difference(f"step {step}", "weights before it", header["before"], before["after"]))
    return differences


# Facts of a process, by which XLA's programs for a CPU may round differently.
_ROUNDING = {
    "cpu_features": "the instructions that the processor has",
    "threads": "threads over which programs for a CPU split their work (PJRT_NPROC, NPROC, or the process's cores)",
    "xla_flags": "XLA_FLAGS",
    "few_optimizations": "JAX_DISABLE_MOST_OPTIMIZATIONS",
    "jax_settings": "what numbers JAX computes with",
}


def _notes(
    starts: Sequence[Mapping[str, Any]], headers: Mapping[int, Mapping[str, Any]], own: Mapping[str, str]
) -> list[str]:
    notes, code = [], provenance.code_digest()
    changed: dict[str, list[int]] = {}
    for step, header in headers.items():
        for what in provenance.code_changes(header.get("own_code"), own):
            changed.setdefault(what, []).append(step)
    notes += [f"steps {ranges(steps)} were made by another version of the {what}" for what, steps in changed.items()]
    if others := [step for step, header in headers.items() if header["code"] != code]:
        notes.append(
            f"steps {ranges(others)} were made by another version of this code "
            f"({headers[others[-1]]['code'][:12]}; this is {code[:12]})"
        )
    if again := [step for step, header in headers.items() if not header["previous"] and step > min(headers)]:
        notes.append(f"steps were left out: the record begins again at {ranges(again)}, and its seals with it")
    notes += [f"the run went on with other bits: {line}" for line in provenance.accepted(starts)]
    if starts:
        now = provenance.packages()
        for name, then in starts[-1].get("packages", {}).items():
            if name in now and now[name] != then and name != "jaxagent":
                notes.append(f"{name} was {then} and is {now[name]}")
        if (then := starts[-1].get("processor")) and then != provenance.processor():
            notes.append(f"the processor was {then} and is {provenance.processor()}")
        current, *then = (_rounding(each) for each in (provenance.machine(), *starts))
        for name, meaning in _ROUNDING.items():
            if others := sorted(
                {str(each[name] or "none") for each in then if each.get(name, current[name]) != current[name]}
            ):
                notes.append(f"{meaning}: {' and '.join(others)} when the run was made, {current[name] or 'none'} here")
    return notes


def _rounding(start: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a process by which XLA may round differently, as far as they are kept."""
    facts = {name: start[name] for name in _ROUNDING if name in start}
    return facts | ({"xla_flags": provenance.deciding_flags(facts["xla_flags"])} if "xla_flags" in facts else {})


def ranges(steps: Collection[int]) -> str:
    """ "0-3, 7"; "none"."""
    parts: list[list[int]] = []
    for step in sorted(steps):
        if parts and parts[-1][-1] == step - 1:
            parts[-1] = [parts[-1][0], step]
        else:
            parts.append([step])
    return ", ".join("-".join(map(str, dict.fromkeys(part))) for part in parts) or "none"
