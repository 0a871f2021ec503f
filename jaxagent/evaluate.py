"""pass@k of a policy on held-out tasks, estimated without bias, of any recipe.

    python -m jaxagent.evaluate --config.workdir=runs/search_r1                       # the newest checkpoint
    python -m jaxagent.evaluate --config.workdir=runs/search_r1 --checkpoint=671 --samples=16 --k=1,4,16
    python -m jaxagent.evaluate --config.workdir=runs/search_r1 --greedy              # one attempt per task
    python -m jaxagent.evaluate --config=configs/search_r1.py:qwen2.5-3b --checkpoint=DIR --tasks=100

The config is the run's own (config.json in its workdir) unless --config names another; fields are overridden as in
`python -m jaxagent.main`. Results go to WORKDIR/evaluations/<policy>_<split>_<temperature>_<seed>, or --out:
evaluation.json (all numbers), attempts.jsonl (every attempt, to be read) and evaluation.html (the curve). The last line
of stdout is one JSON object.

The same command again plays only what is missing, and more --samples or --tasks add to what is there: an attempt
depends on seed, task and its number alone. Attempts that fail for reasons outside the policy (a timeout, a dead search
engine) are counted, and left out. Exit codes are those of jaxagent.main, and 1 when the engine or every attempt fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import Config, ConfigError, FleetConfig, flags, modern, parse
from jaxagent.config.command import Parser, count, exit_code, number, quiet_libraries
from jaxagent.config.model import RateConfig, RowsConfig
from jaxagent.config.parse import missing_fields
from jaxagent.config.ranges import Range, at_least, between
from jaxagent.observe.files import CONFIG_FILE
from jaxagent.runs import devices


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code. `argv[0]` is the program's name."""
    argv = list(sys.argv if argv is None else argv)
    if flags.wants_help(argv):
        print(parser().format_help())
        return 0
    return exit_code(lambda: _run(argv))


def _run(argv: Sequence[str]) -> int:
    options, rest = parser().parse_known_args(argv[1:])
    config = read_config([argv[0], *rest])
    quiet_libraries()
    config = devices.provide_for(config)
    # Late imports: what they name loads jax, which costs seconds.
    from jaxagent.engine.requests import EngineError
    from jaxagent.runs.evaluation import run

    try:
        results = run.run(config, run.Options(**vars(options)))
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(results))
    if results["failed"] == results["attempts"]:
        print(
            f"error: all {results['failed']} attempts failed, most of them: {results['failure']}. Mend this and run "
            "the same command with --retry_failed.",
            file=sys.stderr,
        )
        return 1
    return 0


def read_config(argv: Sequence[str]) -> Config:
    """The config of `--config` and overrides; without `--config` that of the run in `--config.workdir`.

    Raises:
      ConfigError: as `flags.parse_config`; also a flag that is none of this program's.
    """
    return flags.parse_config(argv, vars(parser().parse_args([])), stored_config)


def stored_config(workdir: str) -> Mapping[str, Any]:
    """The config that a run wrote to its workdir."""
    if not workdir:
        raise ConfigError("No run: say --config.workdir=RUN, or --config=FILE[:PRESET].")
    path = Path(workdir) / CONFIG_FILE
    if not Path(workdir).is_dir():
        raise ConfigError(f"There is no run in '{workdir}': no such folder.")
    if not path.is_file():
        raise ConfigError(f"There is no run in '{workdir}': it has no {CONFIG_FILE}. Say --config=FILE[:PRESET].")
    try:
        run_config = json.loads(path.read_text(encoding="utf-8"))
        run_config = modern(run_config | {"stages": tuple(run_config["stages"])})
        # What these said of who plays, and of how the warm start trained, does not matter to whoever reads the run.
        if fleet := run_config.get("fleet"):
            run_config["fleet"] = _without(fleet, FleetConfig.removed)
        if warm := run_config.get("warm_start"):
            parts = {"optimizer": RateConfig, "batch": RowsConfig}
            run_config["warm_start"] = warm | {name: _without(warm[name], cls.removed) for name, cls in parts.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no run's config ({type(error).__name__}: {error}).") from error
    try:
        parse(run_config)
    except ConfigError as error:
        if isinstance(error.__cause__, ImportError):  # a module of the user's own
            raise ConfigError(f"{path}: {error}") from error
        lacks = f" and lacks {', '.join(missing)}" if (missing := missing_fields(run_config)) else ""
        raise ConfigError(
            f"{path} was written by another version of this code{lacks}: {error} Say --config=FILE[:PRESET] and what "
            "the run overrode."
        ) from error
    return run_config


def _without(section: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in section.items() if name not in names}


def parser() -> argparse.ArgumentParser:
    """The flags of this program alone."""
    out = Parser(
        prog="python -m jaxagent.evaluate",
        usage="%(prog)s --config.workdir=RUN [--config=FILE[:PRESET]] [--config.SECTION.FIELD=VALUE ...] [flags]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    out.add_argument(
        "--checkpoint", default="latest", help="'latest'; the number of a folder in RUN/checkpoints; or a Hugging Face "
        "folder, such as RUN/policy (default: latest)",
    )  # fmt: skip
    out.add_argument("--split", choices=("held_out", "train"), default="held_out", help="default: held_out")
    out.add_argument(
        "--tasks",
        type=count,
        help="so many, spread evenly over kinds; more tasks hold the fewer (default: data.num_eval)",
    )
    out.add_argument("--samples", type=count, help="attempts per task (default: 8; greedy: 1)")
    out.add_argument("--k", type=counts, help="of pass@k, with commas (default: 1,2,4,... up to the samples)")
    out.add_argument(
        "--temperature", type=number(float, at_least(0)), help="0 = greedy (default: rl.sampling.temperature)"
    )
    out.add_argument("--greedy", action="store_true", help="the same as --temperature=0")
    out.add_argument("--seed", type=number(int, between(0, 2**32 - 1)), help="of sampling (default: the config's seed)")
    out.add_argument(
        "--min_score",
        type=number(float, Range()),
        default=1.0,
        help="score from which an attempt passes, e.g. of 'em' or 'solved' (default: 1)",
    )
    out.add_argument("--retry_failed", action="store_true", help="play attempts again that failed in an earlier call")
    out.add_argument("--out", help="folder of the results")
    return out


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 on, with commas."""
    return tuple(count(part) for part in text.split(","))


if __name__ == "__main__":
    devices.use_huge_pages()
    sys.exit(main())
