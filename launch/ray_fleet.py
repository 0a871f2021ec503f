"""Runs the processes of a run on a Ray cluster, until the trainer has ended. Ray places them, and holds no data.

    ray start --head && python -m launch.ray_fleet --config=configs/search_r1.py --engines=2
    python -m launch.ray_fleet --config=configs/search_r1.py:qwen2.5-3b --config.workdir=/shared/runs/a \\
        --trainer_resources=CPU=16,GPU=8 --engine_resources=CPU=8,GPU=1 --engines=16 --max_engines=64
    python -m launch.ray_fleet --config=configs/search_r1.py --engines=2 --print      # what it would start; no Ray

The coordinator and the trainers are a placement group; the workdir must be a folder that their nodes share. Engines are
placed one by one, spread over the nodes. --engines of them are asked for at any time: those without room are what an
autoscaler sees. More are started while there is room, up to --max_engines; a node that goes takes its engines with it.
A process that fails or hangs is started again; the trainers all at once. Exit codes are those of jaxagent.main. Ctrl-C
and SIGTERM let the trainer save.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import sys
from collections.abc import Sequence

from jaxagent.config import ConfigError
from jaxagent.config.command import count, exit_code, number, seconds
from jaxagent.config.ranges import at_least
from jaxagent.launch import processes

_UNITS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of the trainer, 2 for a user's mistake, 1 where too few engines are left."""
    return exit_code(lambda: _main(argv))


def arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The flags, and the overrides of the config."""
    parser = processes.parser("ray_fleet", __doc__)
    parser.add_argument("--config", required=True, help="FILE[:PRESET], as every node finds it")
    parser.add_argument("--address", default="auto", help="of the cluster (ray.init)")
    parser.add_argument("--engines", type=count, default=None, help="default: config.fleet.engines")
    parser.add_argument(
        "--min_engines", type=number(int, at_least(0)), default=1, help="with fewer the run waits, and ends"
    )
    parser.add_argument("--max_engines", type=count, default=None, help="default: --engines")
    parser.add_argument(
        "--patience_s", type=seconds, default=1800.0, help="with fewer than --min_engines, or without room"
    )
    parser.add_argument("--coordinator_resources", type=resources, default={"num_cpus": 1}, metavar="CPU=1,...")
    parser.add_argument("--trainer_resources", type=resources, default={"num_cpus": 1}, metavar="CPU=8,GPU=4,...")
    parser.add_argument("--engine_resources", type=resources, default={"num_cpus": 1}, metavar="CPU=8,GPU=1,...")
    parser.add_argument("--trainers_on", choices=("SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK"), default="SPREAD")
    parser.add_argument("--restarts", type=count, default=100, help="of the trainers, and of each engine")
    parser.add_argument("--grace_s", type=seconds, default=120.0, help="for the trainer to save")
    parser.add_argument("--join", default=processes.JOIN, help=argparse.SUPPRESS)  # what a test starts instead
    parser.add_argument("--print", action="store_true", help="say what would be started, and stop")
    return parser.parse_known_args(argv)


def _main(argv: Sequence[str] | None) -> int:
    args, overrides = arguments(argv)
    run, config = processes.read(args.config, overrides, args, args.join)
    assert config.fleet is not None
    args.engines = processes.engine_count(args.engines, config)
    args.max_engines = args.max_engines or args.engines
    if not args.min_engines <= args.engines <= args.max_engines:
        raise ConfigError("--min_engines <= --engines <= --max_engines does not hold.")
    needs_of = {role: getattr(args, f"{role}_resources") for role in ("trainer", "engine")}
    devices = {
        role: int(needs.get("num_gpus", 0) or needs.get("resources", {}).get("TPU", 0))
        for role, needs in needs_of.items()
    }
    processes.tell_idle_devices(config, devices)
    if args.print:
        print(shown(run, config.fleet.trainers, args))
        return 0
    try:
        from jaxagent.launch import ray_cluster
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError("Ray is not installed: pip install 'jaxagent[ray]'.") from error
    token = os.environ.get(processes.TOKEN) or secrets.token_hex(32)
    return ray_cluster.run(run, config, token, args)


def shown(run: processes.Run, trainers: int, args: argparse.Namespace) -> str:
    """What would be started, one process a line."""
    url = "http://COORDINATOR:PORT"
    rows = [("coordinator", run.coordinator("COORDINATOR:PORT"), args.coordinator_resources)]
    for k in range(trainers):
        rows.append((f"trainer-{k}", run.trainer(url, "NODE", k, trainers, "TRAINER0:PORT"), args.trainer_resources))
    rows += [
        (f"engine-{k}", run.engine(url, "NODE", f"engine-{k}"), args.engine_resources) for k in range(args.engines)
    ]
    return "\n".join(f"{name} {needs}: {processes.shown(command)}" for name, command, needs in rows)


def resources(text: str) -> dict[str, float]:
    """ "CPU=8,GPU=1,TPU=4" as Ray's actor options.

    Raises:
      ArgumentTypeError: it looks otherwise.
    """
    out: dict = {}
    for part in text.split(","):
        match = re.fullmatch(r"(\w[\w.:-]*)=(\d+(?:\.\d+)?)", part)
        if not match:
            raise argparse.ArgumentTypeError(f"must look like CPU=8,GPU=1, got '{text}'")
        if match[1] in _UNITS:
            out[_UNITS[match[1]]] = float(match[2])
        else:
            out.setdefault("resources", {})[match[1]] = float(match[2])
    return {"num_cpus": 1, **out}  # explicit: Ray's default differs between placing and running


if __name__ == "__main__":
    sys.exit(main())
