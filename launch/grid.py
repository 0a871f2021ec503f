"""A grid over config fields -> the list of runs, each with its folder, its command line and what it starts from."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import sys
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from jaxagent.algorithms import checks
from jaxagent.config import Config, ConfigError, Stage, flags, nearest, to_dict
from jaxagent.config.run import STAGE_SECTIONS
from jaxagent.observe.files import CONFIG_FILE, SUMMARY_FILE

_OF_NO_STAGE = ("workdir", "stages", "eval", "checkpoint")  # what may differ between runs that share a stage
_OF_RL = ("sampling", "batch", "optimizer")  # of the section rl, what the stages between warm_start and rl read


@dataclasses.dataclass(frozen=True)
class Run:
    """One point of the grid with one seed."""

    point: tuple[tuple[str, str], ...]  # ((field, value), ...) as given on the command line
    seed: int
    workdir: pathlib.Path
    command: tuple[str, ...]
    base: Run | None = None  # a run whose finished stages this one takes over

    @property
    def name(self) -> str:
        """The grid point without the seed, e.g. "algorithm=ppo"; what seeds are averaged over."""
        return ", ".join(f"{short}={value}" for short, value in _short(self.point)) or "base"

    @property
    def summary(self) -> dict | None:
        """The finished run's summary; None while there is none."""
        path = self.workdir / SUMMARY_FILE
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def runs(
    config: str,
    grid: Sequence[str],
    seeds: Sequence[int],
    workdir: pathlib.Path,
    share: str = "",
    fixed: Sequence[str] = (),
) -> list[Run]:
    """All runs of the sweep, seeds innermost.

    Every run's command line is parsed here, so that a typing mistake ends the sweep before its first run.

    Args:
      config: FILE[:PRESET].
      grid: "field=value,value" strings; the field "preset" stands for the preset of the config file.
      seeds: of every point.
      workdir: gets one folder per run.
      fixed: overrides of every run, "--config.field=value"; they stand in no folder's name.
      share: the stage up to which runs that differ only in later stages' sections are one run; "" = none.

    Raises:
      ConfigError: malformed grid, unknown field or stage, a value of the wrong type, a field that is set twice or that
        a sweep sets itself, or a point that comes twice; a run of an earlier call that had another config.
    """
    bases: dict[str, Run] = {}
    axes = [_axis(text) for text in grid]
    everywhere = [_field(arg) for arg in fixed]
    once: list[str] = []
    for field in [field.removesuffix(".name") for field, _ in axes]:
        if field in once:
            raise ConfigError(f"{field} is an axis of --grid twice: write all of its values into one.")
        once.append(field)
    for flag, field in [("--grid=", each) for each in once] + [("--config.", each) for each in everywhere]:
        if field in ("seed", "workdir"):  # as an axis it would be overridden, and one run be told as many
            raise ConfigError(f"{flag}{field}: a sweep sets it itself, from --{field.replace('seed', 'seeds')}.")
    for field in everywhere:
        if field.removesuffix(".name") in once:
            raise ConfigError(f"{field} is both an axis of --grid and fixed by --config.{field}.")
    source, _, base_preset = config.partition(":")
    out = []
    for values in itertools.product(*(values for _, values in axes)):
        point = tuple((field, value) for (field, _), value in zip(axes, values, strict=True))
        preset = dict(point).get("preset", base_preset)
        changes = [*fixed, *(f"--config.{field}={value}" for field, value in point if field != "preset")]
        for seed in seeds:
            names = [f"{short}={value.replace('/', '-')}" for short, value in _short(point)]
            folder = workdir / "_".join([*names, f"seed={seed}"])
            args = [f"--config={source}:{preset}" if preset else f"--config={source}", *changes]
            args += [f"--config.seed={seed}", f"--config.workdir={folder}"]
            cfg = flags.parse_argv(["sweep", *args]).config
            checks.check(cfg.rl)
            base = _base(cfg, share, args, workdir, bases) if share else None
            _check_earlier(folder, cfg)
            if base:
                _check_earlier(base.workdir, cfg, cfg.stages[: cfg.stages.index(share) + 1])
            if folder in [run.workdir for run in out]:
                raise ConfigError(f"--grid and --seeds name {folder.name} twice: it would be one run, counted twice.")
            out.append(Run(point, seed, folder, (sys.executable, "-m", "jaxagent.main", *args), base))
    return out


def _check_earlier(folder: pathlib.Path, cfg: Config, shared: Sequence[str] = ()) -> None:
    """Refuses a folder whose run was made with another config, which its name does not tell.

    Args:
      folder: of a run; there may be none yet.
      cfg: that the run is to have.
      shared: it is of these stages alone, for runs that share them: only what they read is compared.
    """
    path = folder / CONFIG_FILE
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if not isinstance(stored, dict):
        return
    first = list(stored.get("stages", ()))
    shorter = first == list(cfg.stages[: len(first)]) != list(cfg.stages)
    if not shared and shorter and not (folder / SUMMARY_FILE).exists():
        shared = first  # taken over from a shared run, which has these alone, and not gone on with yet
    wanted = {**_read(cfg, shared), "stages": shared} if shared else {**to_dict(cfg), "workdir": stored.get("workdir")}
    if "engine" in wanted:  # where it says 0, the run has what suited its platform
        wanted["engine"] = {name: value for name, value in wanted["engine"].items() if value != 0}
    for field, was, now in _differences(stored, json.loads(json.dumps(wanted)), ""):
        raise ConfigError(f"{folder} was made with {field}={was}, not {now}: use another --workdir.")


def _differences(stored: dict[str, Any], wanted: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """(field, then, now) of what differs. Fields that another version of the code has or lacks are left out."""
    for name in [name for name in wanted if name in stored]:
        was, now = stored[name], wanted[name]
        if f"{prefix}{name}" == "roles" and was and now and set(was) != set(now):  # their names are the user's
            yield "roles", sorted(was), sorted(now)
        elif isinstance(was, dict) and isinstance(now, dict) and was.get("name") == now.get("name"):
            yield from _differences(was, now, f"{prefix}{name}.")
        elif was != now:
            yield f"{prefix}{name}", _in_short(was), _in_short(now)


def _in_short(value: Any) -> Any:
    """A choice's name, and "on" for a section."""
    return value.get("name", "on") if isinstance(value, dict) else value


def _read(cfg: Config, stages: Sequence[str]) -> dict[str, Any]:
    """What of a config the first stages read, which runs that share them agree on."""
    later = {*typing.get_args(Stage), *_OF_NO_STAGE} - set(stages)
    values: dict[str, Any] = {name: value for name, value in to_dict(cfg).items() if name not in later}
    if list(stages) != ["warm_start"]:
        rl = to_dict(cfg.rl)
        values["rl"] = rl if "opd" in stages else {name: rl[name] for name in _OF_RL}
    return values


def _base(cfg: Config, share: str, args: Sequence[str], workdir: pathlib.Path, bases: dict[str, Run]) -> Run:
    """The run of the first stages of `cfg`, the same one for all that agree on everything those stages read."""
    if share not in cfg.stages:
        raise ConfigError(f"--share: no stage '{share}' in the config. {nearest(share, cfg.stages)}")
    first = cfg.stages[: cfg.stages.index(share) + 1]
    if first == cfg.stages:
        raise ConfigError(f"--share={share} is the last stage of the config: nothing would be left to compare.")
    later = {*typing.get_args(Stage), *_OF_NO_STAGE} - set(first)
    read = [arg for arg in args if _field(arg).partition(".")[0] not in later.intersection(STAGE_SECTIONS)]
    key = json.dumps(_read(cfg, first), sort_keys=True)
    if key not in bases:
        folder = workdir / f"{share}_{len(bases)}_seed={cfg.seed}"
        changes = [f"--config.stages={','.join(first)}", f"--config.workdir={folder}"]
        bases[key] = Run((), cfg.seed, folder, (sys.executable, "-m", "jaxagent.main", *read, *changes))
    return bases[key]


def _field(arg: str) -> str:
    """ "rl.steps" of "--config.rl.steps=7"."""
    return arg.removeprefix("--config.").partition("=")[0]


def _axis(text: str) -> tuple[str, list[str]]:
    field, equals, values = text.partition("=")
    if not equals or not values:
        raise ConfigError(f"Grid '{text}' must look like field=value,value, for example rl.advantage=group_mean,gae.")
    return field.removeprefix("config."), values.split(",")


def _short(point: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Fields by their last part where that tells them apart, else in full."""
    leaves = [field.rpartition(".")[2] for field, _ in point]
    return [
        (leaf if leaves.count(leaf) == 1 else field, value) for leaf, (field, value) in zip(leaves, point, strict=True)
    ]
