"""The forecast of a fleet, for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from jaxagent.plan.fleet import Case, Forecast


def show(forecast: Forecast, console: Console) -> None:
    """Prints a table and a verdict per case, then where the numbers are from."""
    for case in forecast.cases:
        console.print(table(forecast, case))
        console.print(case.verdict, style="bold", highlight=False)
    for line in forecast.notes:
        console.print(f"- {line}", style="dim", highlight=False)


def table(forecast: Forecast, case: Case) -> Table:
    """Synchronous, and every split that was tried."""
    assumed = ", assumed" if len(forecast.cases) > 1 else ""
    made = Table(
        title=f"Fleet: a step on {forecast.devices} devices, rl.staleness {forecast.staleness}\n"
        f"(engines of {forecast.engine_devices}, environments of {case.wait_s:.2g} s a turn{assumed})"
    )
    for column in ("devices: trainer + engines", "seconds", "gain", "trainer waits", "engines idle"):
        made.add_column(column, justify="left" if column == "devices: trainer + engines" else "right")
    made.add_row("synchronous: all, all", _s(case.synchronous_step_s), "1.00x", "", "")
    for split in case.tried:
        told = " [bold]asked[/]" if split == case.asked else ""
        told += " [bold]fastest[/]" if split == case.best else ""
        made.add_row(
            f"{split.trainer_devices} + {split.engines * forecast.engine_devices}{told}",
            _s(split.step_s),
            f"{case.synchronous_step_s / split.step_s:.2f}x",
            f"{split.trainer_waits:.0%}",
            f"{split.engines_idle:.0%}",
        )
    return made


def _s(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.3f}"
