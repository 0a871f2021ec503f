"""What do failures and weights cost a run of many hosts? Arithmetic on stated constants; nothing is measured here.

    python -m benchmarks.cluster_model [--devices=64,256,1024] [--staleness=2] [--step_s=60] [--weights_gb=16]

Goodput is the share of device-hours that is not lost to failures, beside whatever the run's balance of roles wastes. A
failure takes a host. `whole job` restarts everything from the last checkpoint, as most systems do. `by role` restarts
what died: an engine's host costs its running episodes, a trainer's host the trainers' time, and engines go on until the
steps that they were given are played. `hangs` is the same where a tenth of the failures are hangs that a watchdog finds
after `hang_s`.

Weights: how long a new version takes to all engines that want it, from one trainer host (star), from all trainer hosts
(spread), and at best when engines hand on what they have (relay). With rule `pinned` an engine wants every (S + 1)-th
version.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math

LLAMA_3 = 419 / (54 * 24 * 16_384)  # unexpected interruptions per device-hour (arXiv 2407.21783)
TIMES = (1, 10, 100)  # of that rate


@dataclasses.dataclass(frozen=True)
class Constants:
    """What a failure costs, and what a link carries. Seconds, unless said otherwise."""

    host_devices: int = 8
    trainer_share: float = 3 / 8  # of the devices
    full_restart_s: float = 1200.0  # of a whole job
    checkpoint_s: float = 1800.0  # between two checkpoints of a whole job
    restart_s: float = 120.0  # of one role: the process, its weights, compiled programs from the cache
    replay_s: float = 120.0  # updates since the last bundle, made again from the ledger
    episode_s: float = 120.0  # of an episode, on average
    hang_s: float = 900.0  # until a hang is found
    link_gb_s: float = 3.125  # of a host: 25 Gb/s
    chunk_gb: float = 0.064


def goodput(lost_device_s: float, failures_per_device_hour: float) -> float:
    """The useful share, when each failure loses so many device-seconds."""
    return 1 / (1 + failures_per_device_hour * lost_device_s / 3600)


def whole_job_s(devices: int, of: Constants) -> float:
    """Device-seconds that a failure costs where all start again."""
    return devices * (of.full_restart_s + of.checkpoint_s / 2)


def by_role_s(devices: int, staleness: int, step_s: float, of: Constants, found_s: float = 0.0) -> float:
    """Device-seconds that a failure costs where only its role starts again, on average over hosts.

    Args:
      devices: of the run.
      staleness: S; engines have work for so many steps beyond the one that is trained.
      step_s: of a step.
      of: the constants.
      found_s: until the failure is seen.
    """
    trainers = of.trainer_share * devices
    outage = found_s + of.restart_s + of.replay_s
    idle = max(0.0, outage - staleness * step_s)  # of engines that have played all that they may
    engine = of.host_devices * (found_s + of.restart_s + of.episode_s / 2)
    return of.trainer_share * (trainers * outage + (devices - trainers) * idle) + (1 - of.trainer_share) * engine


def engines(devices: int, of: Constants) -> int:
    """Hosts that play."""
    return round((1 - of.trainer_share) * devices / of.host_devices)


def weights_s(gb: float, devices: int, staleness: int, of: Constants) -> dict[str, float]:
    """Seconds until every engine that wants a version has it, by who sends."""
    wanting = math.ceil(engines(devices, of) / (staleness + 1))
    once = gb / of.link_gb_s
    hosts = max(1, devices // of.host_devices - engines(devices, of))
    relay = once + math.ceil(math.log2(wanting + 1)) * of.chunk_gb / of.link_gb_s
    return {"star": wanting * once, "spread": max(1.0, wanting / hosts) * once, "relay": relay}


def main() -> None:
    """Parses the flags, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="64,256,1024", help="with commas")
    parser.add_argument("--staleness", type=int, default=2, help="versions")
    parser.add_argument("--step_s", type=float, default=60.0)
    parser.add_argument("--weights_gb", type=float, default=16.0, help="of a version: 16 is 8B parameters in bfloat16")
    options = parser.parse_args()
    of = Constants()
    figures: dict[str, object] = dataclasses.asdict(of)
    for devices in [int(word) for word in options.devices.split(",")]:
        rows: dict[str, float] = {}
        for times in TIMES:
            rate = times * LLAMA_3
            lost = {
                "whole job": whole_job_s(devices, of),
                "by role": by_role_s(devices, options.staleness, options.step_s, of),
            }
            hang = by_role_s(devices, options.staleness, options.step_s, of, of.hang_s)
            lost["hangs"] = 0.9 * lost["by role"] + 0.1 * hang
            rows |= {f"{name} x{times}": round(goodput(each, rate), 5) for name, each in lost.items()}
            shown = "  ".join(f"{name} {goodput(each, rate):.2%}" for name, each in lost.items())
            print(f"{devices:5} devices, a failure every {1 / (rate * devices):7.1f} h:  {shown}")
        times_s = weights_s(options.weights_gb, devices, options.staleness, of)
        shown = "  ".join(f"{name} {each:.1f} s" for name, each in times_s.items())
        print(f"{devices:5} devices, {engines(devices, of)} engine hosts:  {shown}")
        figures[str(devices)] = {"goodput": rows, "weights_s": {name: round(s, 2) for name, s in times_s.items()}}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
