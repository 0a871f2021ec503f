"""Writes the Kubernetes objects of a run of many processes, as one JSON list that `kubectl apply -f FILE` takes.

    python -m launch.kubernetes --config=configs/search_r1.py:qwen2.5-3b --config.workdir=/runs/a --name=a \\
        --image=registry.example/jaxagent:1 --pvc=runs --gpus=8 --engines=4 --engine_gpus=1
    ... --tpu=tpu-v5p-slice:2x2x4:4 --config.fleet.trainers=4    # the trainers on a TPU slice of four hosts
    ... --out=a.json && kubectl apply -f a.json
    kubectl delete jobset,statefulset,deployment,job,service,secret -l jaxagent/run=a

The trainers are a JobSet, restarted as one; the coordinator is a StatefulSet of one; engines are a Deployment, or an
indexed Job whose pods end by themselves with the run. config.workdir is where the claim is mounted for coordinator and
trainers; engines have an empty folder there and fetch weights over HTTP. The image holds jaxagent, and the config under
the same name. The secret of the run is new at every call, unless --secret names one that is there.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import re
import secrets
import sys
from collections.abc import Sequence
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.command import count, exit_code, number, port
from jaxagent.config.ranges import at_least
from jaxagent.launch import manifests, processes

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?([KMGTPE]i?|m)?")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 printed, 2 a user's mistake."""
    return exit_code(lambda: _write(*listing(argv)))


def _write(objects: dict[str, Any], out: pathlib.Path | None) -> None:
    text = json.dumps(objects, indent=2) + "\n"
    if out is None:
        sys.stdout.write(text)
        return
    out.touch(mode=0o600)  # a secret is in it
    out.chmod(0o600)
    out.write_text(text, encoding="utf-8")


def listing(argv: Sequence[str] | None) -> tuple[dict[str, Any], pathlib.Path | None]:
    """The list of objects that a command line asks for, and the file that they shall go to.

    Raises:
      ConfigError: a flag or a config that cannot be.
    """
    parser = processes.parser("kubernetes", __doc__)
    quantity, claim = _matching(_QUANTITY, "a quantity such as 64Gi"), _matching(_NAME, "a name such as run-1")
    parser.add_argument("--config", required=True, help="FILE[:PRESET], as the image finds it")
    parser.add_argument("--name", required=True, type=claim, help="what the objects' names begin with")
    parser.add_argument("--namespace", default="default", type=claim)
    parser.add_argument("--image", required=True)
    parser.add_argument(
        "--pvc", default="", metavar="CLAIM", help="a claim for the workdir that several nodes may write"
    )
    parser.add_argument(
        "--storage", default="100Gi", type=quantity, help="size of the claim that is made without --pvc"
    )
    parser.add_argument("--storage_class", default="", help="its class; '' = the cluster's default")
    parser.add_argument("--mount", action="append", default=[], metavar="CLAIM:/PATH", help="read only, in every pod")
    parser.add_argument("--secret", default="", metavar="NAME", help="has the key 'token'; '' = made here")
    parser.add_argument("--gpus", type=number(int, at_least(0)), default=0, help="of each trainer pod")
    parser.add_argument("--tpu", type=_tpu, metavar="TYPE:TOPOLOGY:CHIPS", help="trainers' slice; chips of a host")
    parser.add_argument("--engines", type=count, default=None, help="default: config.fleet.engines")
    parser.add_argument("--engine_gpus", type=number(int, at_least(0)), default=0)
    parser.add_argument("--engine_tpu", type=_tpu, metavar="TYPE:TOPOLOGY:CHIPS", help="one host: an engine is one pod")
    parser.add_argument("--engines_kind", choices=("deployment", "job"), default="deployment", help="job: they end")
    parser.add_argument("--cpus", type=quantity, default="8", help="of each trainer and engine pod")
    parser.add_argument("--memory", type=quantity, default="32Gi", help="of each trainer and engine pod")
    parser.add_argument("--port", type=port, default=8500, help="of the coordinator")
    parser.add_argument("--restarts", type=count, default=100, help="of the trainers, and of each engine of a job")
    parser.add_argument("--start_s", type=count, default=1800, help="until a process first shows progress")
    parser.add_argument(
        "--pod_spec", action="append", default=[], metavar="[ROLE:]FILE", help="JSON merged into the spec of its pods"
    )
    parser.add_argument("--out", type=pathlib.Path, default=None, metavar="FILE", help="default: standard output")
    args, overrides = parser.parse_known_args(argv)
    run, config = processes.read(args.config, overrides, args)
    assert config.fleet is not None
    if not pathlib.PurePosixPath(config.workdir).is_absolute():
        raise ConfigError(f"config.workdir ('{config.workdir}') must be an absolute path: the claim is mounted there.")
    engines = processes.engine_count(args.engines, config)
    for tpu, gpus, hosts, flags in (
        (args.tpu, args.gpus, config.fleet.trainers, ("--tpu", "--gpus", "config.fleet.trainers")),
        (args.engine_tpu, args.engine_gpus, 1, ("--engine_tpu", "--engine_gpus", "an engine's one host")),
    ):
        if tpu and gpus:
            raise ConfigError(f"{flags[0]} and {flags[1]} exclude each other.")
        if tpu and tpu.hosts != hosts:
            raise ConfigError(f"{flags[0]}: this slice has {tpu.hosts} hosts, which is not {flags[2]} ({hosts}).")
    chips = {"trainer": args.gpus or (args.tpu.chips if args.tpu else 0)}
    chips["engine"] = args.engine_gpus or (args.engine_tpu.chips if args.engine_tpu else 0)
    processes.tell_idle_devices(config, chips)
    if not (args.pvc or args.storage_class):
        told = (
            "several nodes write to the workdir's claim (ReadWriteMany), which many a default storage class cannot have"
        )
        print(f"{told}: its pods then stay Pending. --storage_class or --pvc names one that can.", file=sys.stderr)
    pods = manifests.Pods(
        name=args.name,
        namespace=args.namespace,
        image=args.image,
        run=run,
        workdir=str(config.workdir),
        claim=args.pvc or f"{args.name}-workdir",
        mounts=tuple(_mount(text) for text in args.mount),
        secret=args.secret or f"{args.name}-token",
        port=args.port,
        cpus=args.cpus,
        memory=args.memory,
        start_s=args.start_s,
        more=_more(args.pod_spec),
    )
    objects = [] if args.secret else [manifests.secret(pods, secrets.token_hex(32))]
    if not args.pvc:
        objects.append(manifests.claim(pods, args.storage, args.storage_class))
    trainer, engine = manifests.Devices(args.gpus, args.tpu), manifests.Devices(args.engine_gpus, args.engine_tpu)
    objects += [manifests.service(pods), manifests.coordinator(pods)]
    objects.append(manifests.trainers(pods, config.fleet.trainers, trainer, args.restarts))
    kind = manifests.engine_job if args.engines_kind == "job" else manifests.engine_deployment
    objects.append(kind(pods, engines, engine, args.restarts))
    return {"apiVersion": "v1", "kind": "List", "items": objects}, args.out


def _matching(pattern: re.Pattern[str], wanted: str):
    def read(text: str) -> str:
        if not pattern.fullmatch(text):
            raise argparse.ArgumentTypeError(f"must be {wanted}, got '{text}'")
        return text

    return read


def _tpu(text: str) -> manifests.Tpu:
    if match := re.fullmatch(r"([a-z0-9-]+):(\d+(?:x\d+)+):(\d+)", text):
        chips = math.prod(int(side) for side in match[2].split("x"))
        if int(match[3]) and chips % int(match[3]) == 0:
            return manifests.Tpu(match[1], match[2], int(match[3]), chips // int(match[3]))
    raise argparse.ArgumentTypeError(
        f"must be type, topology, and chips of a host that divide it, such as tpu-v5p-slice:2x2x4:4, got '{text}'"
    )


def _more(words: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The objects that --pod_spec names, by role; "" for all."""
    out: dict[str, list[dict[str, Any]]] = {}
    for word in words:
        role, colon, path = word.partition(":")
        role, path = (role, path) if colon and role in ("coordinator", "trainer", "engine") else ("", word)
        try:
            spec = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"--pod_spec={word}: {path} is no JSON: {error}.") from error
        if not isinstance(spec, dict):
            raise ConfigError(f"--pod_spec={word}: {path} must have an object, such as {{'hostNetwork': true}}.")
        out.setdefault(role, []).append(spec)
    return out


def _mount(text: str) -> tuple[str, str]:
    claim, _, path = text.partition(":")
    if not _NAME.fullmatch(claim) or not path.startswith("/"):
        raise ConfigError(f"--mount={text} must look like CLAIM:/PATH.")
    return claim, path


if __name__ == "__main__":
    sys.exit(main())
