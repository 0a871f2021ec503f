"""`--dry_run`: prints the plan of a config and writes it to plan.json in the workdir.

Config and chip name in -> memory per device, FLOPs, and seconds of a step. Compiles for virtual CPU devices, or for
the named NVIDIA chip itself where the CUDA plug-in wheels are installed. No weights are allocated, and of a model
folder only config.json is read.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxagent.config import Config
from jaxagent.io import files
from jaxagent.learner.programs import describe, replays_routing
from jaxagent.models import choices, kernels
from jaxagent.models import params as model_params
from jaxagent.models.spec import ModelSpec
from jaxagent.observe.files import PLAN_FILE
from jaxagent.plan import costs, programs, topology
from jaxagent.plan.chips import CHIPS
from jaxagent.plan.memory import resolved
from jaxagent.runs.checks import check, model_spec

_GB = 1e9


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a dry run says. Bytes are of one device, FLOPs of all devices together."""

    chip: str
    compiled_for: str  # "virtual CPU devices" or the chip
    devices: int
    parameters: int
    resident_bytes: dict[str, int]
    programs: list[programs.Program]
    peak_bytes: int
    chip_memory_bytes: float
    work: costs.StepWork
    times: costs.StepTimes
    assumptions: list[str]


def run(cfg: Config, chip: str, console: Console | None = None) -> Plan:
    """Makes, prints and saves the plan.

    Raises:
      ConfigError: the config cannot run: sizes that do not divide, a context too long, a missing model folder.
    """
    console = console or Console()
    result = plan(cfg, chip, lambda p: console.print(f"compiled {p.name} in {p.compile_s:.1f} s", style="dim"))
    for table in tables(result):
        console.print(table)
    for line in result.assumptions:
        console.print(f"- {line}", style="dim", highlight=False)
    path = pathlib.Path(cfg.workdir) / PLAN_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace_json(path, to_dict(result))
    console.print(f"Written to {path}")
    return result


def plan(cfg: Config, chip: str, report: Callable[[programs.Program], None]) -> Plan:
    """The plan of a config on a chip; `report` is called with each `programs.Program` when it is compiled."""
    cfg = cfg.for_platform(CHIPS[chip].platform)
    check(cfg)
    spec = model_spec(cfg)
    spec.check_context(cfg.env.context_tokens)
    mesh, compiled_for = topology.mesh_for(cfg.mesh, chip)
    cfg = resolved(cfg, spec, mesh, CHIPS[chip].memory_bytes)
    spec = dataclasses.replace(spec, remat=cfg.model.remat)
    learner = describe(cfg, spec, mesh)
    resident = programs.resident_bytes(cfg, spec, mesh)
    compiled = programs.compile_all(cfg, spec, mesh, learner, report)
    work = costs.count(cfg, spec, learner.packer.row_targets)
    numbers = CHIPS[chip]
    times = costs.estimate(cfg, spec, work, numbers)
    with jax.set_mesh(mesh):
        batch, exact = cfg.rl.batch, cfg.numerics == "exact"
        chosen = kernels.report(spec, cfg.engine.page_tokens, batch.row_tokens, batch.share_prefix, exact)
    return Plan(
        chip=chip,
        compiled_for=compiled_for,
        devices=mesh.size,
        parameters=model_params.count(spec),
        resident_bytes=resident,
        programs=compiled,
        # Gradient accumulators are arguments of one program and outputs of another: they are in its account.
        peak_bytes=sum(resident.values()) + max(transient_bytes(p, resident) for p in compiled),
        chip_memory_bytes=numbers.memory_bytes,
        work=work,
        times=times,
        assumptions=[chosen, *_routing(cfg, spec), *assumptions(cfg, chip, compiled_for)],
    )


def transient_bytes(program: programs.Program, resident: dict[str, int]) -> int:
    """What a program needs on top of everything resident: temporaries, new outputs, gradient accumulators."""
    if "gradient" not in program.name and "optimiser" not in program.name:
        return program.extra_bytes
    adapters = resident["adapters"] if program.name.startswith("policy") else 0
    return program.extra_bytes + (adapters or resident["parameters"])


def _routing(cfg: Config, spec: ModelSpec) -> list[str]:
    if not replays_routing(cfg, spec):
        return []
    size = choices.width(spec) * np.dtype(choices.dtype(spec)).itemsize
    return [f"rl.routing.replay: {size} bytes per token for the experts it went to, in the cache and in packed rows"]


def assumptions(cfg: Config, chip: str, compiled_for: str) -> list[str]:
    """What the numbers rest on, in words."""
    numbers = CHIPS[chip]
    engine = cfg.engine
    out = [
        f"engine: tiles of {engine.tile_rows} rows, pages of {engine.page_tokens} tokens, {engine.steps_per_dispatch} "
        f"steps per dispatch, {engine.prefill_tokens} tokens of prefill between two of them",
        f"times: {numbers.flops / 1e12:.0f} TFLOP/s, of which {numbers.train_mfu:.0%} in training and "
        f"{numbers.prefill_mfu:.0%} in prefill; {numbers.bandwidth / 1e9:.0f} GB/s, of which "
        f"{numbers.decode_bandwidth_frac:.0%} in decode; no time for communication, environments and the host",
        f"of the stages ({', '.join(cfg.stages)}) the one called rl; dpo keeps a reference and outcome_model a critic "
        "beside the policy, the others the policy and its optimiser",
        "every episode uses all its turns, sampled tokens and observations: an upper bound on tokens",
        "FLOPs by formula (matrix products and attention), recomputation included",
        "the allocator's own overhead and library workspaces are not counted",
    ]
    out.append(f"model.remat: {cfg.model.remat}")
    if cfg.rl.distill is not None or "opd" in cfg.stages:
        out.append("rl.distill: the teacher's weights, its forward pass and its part of the loss are not counted")
    if cfg.roles:
        out.append("roles: weights and caches of their engines are counted, not their programs and their time")
    if cfg.fleet is not None:
        out.append("fleet: the memory of a trainer that plays, too; the time is that of one process on config.mesh")
    if compiled_for != chip:
        out.append(
            f"memory of temporaries as compiled for {compiled_for}: the CPU back end computes bfloat16 in float32 and "
            "fuses less, so a chip needs less"
        )
    return out


def tables(result: Plan) -> list[Table]:
    """The plan for people."""
    worst = max(result.programs, key=lambda p: transient_bytes(p, result.resident_bytes))
    fits = "fits" if result.peak_bytes < 0.92 * result.chip_memory_bytes else "DOES NOT FIT"
    memory = [[name, _gb(size)] for name, size in result.resident_bytes.items() if size]
    memory += [[f"largest program ({worst.name})", _gb(transient_bytes(worst, result.resident_bytes))], []]
    whole = f"[bold]peak[/] ({fits} in {result.chip_memory_bytes / _GB:.0f} GB of {result.chip})"
    title = f"Memory of one device ({result.devices} devices, compiled for {result.compiled_for})"
    out = [_table(title, ["what"], ["GB"], [*memory, [whole, _gb(result.peak_bytes)]])]

    programs = [
        [p.name, *map(_gb, (p.argument_bytes, p.temp_bytes, p.output_bytes - p.alias_bytes)), f"{p.compile_s:.1f}"]
        for p in result.programs
    ]
    numbers = ["arguments GB", "activations GB", "outputs GB", "compiled in s"]
    out.append(_table("Programs, one device", ["program"], numbers, programs))

    work, times = result.work, result.times
    decode = f"{work.sampled_tokens} tokens per episode, {times.decode_step_s * 1e3:.2f} ms per token"
    phases = [
        ("prefill", f"{work.prefill_tokens} tokens per episode", work.prefill_flops, times.prefill_s),
        ("decode", decode, work.decode_flops, times.decode_s),
        *([("score", "reference, values", work.score_flops, times.score_s)] if work.score_flops else []),
        ("train", f"{work.micro_batches} micro-batches, {work.passes} pass(es)", work.train_flops, times.train_s),
    ]
    total = sum(flops for _, _, flops, _ in phases)
    step = [[phase, what, f"{flops:.2e}", _s(seconds)] for phase, what, flops, seconds in phases]
    step += [[], ["[bold]step", "", f"{total:.2e}", f"[bold]{_s(times.total_s)}"]]
    title = f"One RL step of {work.episodes} episodes, {result.parameters / 1e6:,.1f}M parameters, on {result.chip}"
    return [*out, _table(title, ["phase", "what"], ["FLOPs", "seconds"], step)]


def _table(title: str, words: list[str], numbers: list[str], rows: list[list[str]]) -> Table:
    """Columns of words, then of numbers; an empty row is a line across."""
    table = Table(title=title)
    for column in (*words, *numbers):
        table.add_column(column, justify="left" if column in words else "right")
    for row in rows:
        table.add_row(*row) if row else table.add_section()
    return table


def to_dict(result: Plan) -> dict[str, Any]:
    """The plan as JSON-ready data."""
    out = dataclasses.asdict(result)
    out["times"]["total_s"] = result.times.total_s
    return out


def _gb(size: float) -> str:
    return f"{size / _GB:.2f}" if size >= 0.01 * _GB else f"{size / _GB:.4f}"


def _s(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.3f}"
