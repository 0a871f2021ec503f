"""Builds images and lists what is kept.

    python -m jaxagent.sandbox.images build DIR/Dockerfile --base 'debian:12=debootstrap:bookworm' [--network]
    python -m jaxagent.sandbox.images build task/container.def --base 'ubuntu_22.04.sif=/srv/jammy'
    python -m jaxagent.sandbox.images build --oci image.tar
    python -m jaxagent.sandbox.images build --debootstrap bookworm
    python -m jaxagent.sandbox.images list

Bases: NAME=host (this machine's /usr), NAME=debootstrap:SUITE[@MIRROR], NAME=/folder, NAME=/file.tar. See the section
"Images" of docs/sandboxes.md. Exit status: 0; 1 when a build fails; 2 for a mistake in the arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from jaxagent.config import ConfigError
from jaxagent.io.files import cache_directory
from jaxagent.sandbox import choose
from jaxagent.sandbox.base import SandboxError
from jaxagent.sandbox.images import bases, debootstrap, oci
from jaxagent.sandbox.images.build import Steps
from jaxagent.sandbox.images.build_backend import BuildBackend
from jaxagent.sandbox.images.built import BuildError, Built
from jaxagent.sandbox.images.recipes import build_definition, build_dockerfile
from jaxagent.sandbox.images.store import Store
from jaxagent.sandbox.owner import Owner


def default_folder() -> Path:
    """Where images are kept: a folder that the sandboxes' user can reach."""
    return Path("/var/cache/jaxagent/images") if os.geteuid() == 0 else cache_directory() / "images"


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        if args.action == "list":
            return _list(Store(args.store))
        if sum(map(bool, (args.path, args.oci, args.debootstrap))) != 1:
            raise ConfigError("build takes one of: a path, --oci, --debootstrap.")
        built = asyncio.run(_build(args))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (BuildError, SandboxError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for note in built.notes:
        print(f"note: {note}")
    steps = f"; {built.built} steps run, {built.cached} found" if built.built + built.cached else ""
    print(f"image {built.key}{steps}")
    layers, env = "".join(f"\n  {layer}" for layer in built.layers), " ".join(f"{k}={v}" for k, v in built.env.items())
    fields = {"root": built.root or "this machine's /usr", "layers": layers, "directory": built.directory}
    print("\n".join(f"{k}: {v}" for k, v in (fields | {"user": built.user, "env": env}).items() if v))
    return 0


async def _build(args: argparse.Namespace) -> Built:
    table, store, timeout_s = bases.parse(args.base), Store(args.store), args.timeout_s or 3600.0
    if args.debootstrap or args.oci:
        record = await (
            oci.load(store, args.oci, args.name)
            if args.oci
            else debootstrap.make(store, args.debootstrap, args.mirror, timeout_s, print, args.include)
        )
        print(_line(record))
        return bases.loaded(record) if args.oci else Built(record["key"], record["tree"])
    path, context = _recipe(args)
    owner = Owner()
    try:
        probed = await choose.choose_backend(owner, ("namespaces",))
        await probed.close()
        backend = BuildBackend(owner, args.network, probed.roots)
        steps = Steps(backend, store, table, path.resolve().parent.name, timeout_s, print)
        if path.suffix == ".def":
            return await build_definition(steps, path, context)
        return await build_dockerfile(steps, path, context, dict(arg.partition("=")[::2] for arg in args.arg))
    finally:
        owner.close()


def _recipe(args: argparse.Namespace) -> tuple[Path, Path]:
    """The recipe's file and its context."""
    path = args.path
    if path.is_dir():
        path = next((p for p in (path / "Dockerfile", path / "container.def") if p.is_file()), None)
        if path is None:
            raise ConfigError(f"{args.path} has neither a Dockerfile nor a container.def.")
    if not path.is_file():
        raise ConfigError(f"{path} is not there.")
    return path, args.context or path.parent


def _list(store: Store) -> int:
    records = store.listing()
    for record in records:
        print(_line(record))
    print(f"{len(records)} in {store.folder}: {sum(r['bytes'] for r in records) / 2**20:.1f} MiB")
    return 0


def _line(record: dict) -> str:
    size = f"{record['bytes'] / 2**20:9.1f} MiB {record['files']:7d} files {record['seconds']:7.1f} s"
    return f"{record['key']}  {record['made']} {size}  {record['name']}: {' '.join(record['step'].split())[:80]}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m jaxagent.sandbox.images", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    build = actions.add_parser("build", help="build or import one image")
    build.add_argument("path", type=Path, nargs="?", help="a Dockerfile, a .def, or a folder with one")
    build.add_argument("--oci", type=Path, help="a tar: OCI layout or `docker save`")
    build.add_argument("--name", default="", help="which image of a tar that holds several")
    build.add_argument("--debootstrap", default="", metavar="SUITE", help="a Debian or Ubuntu release")
    build.add_argument("--mirror", default="", help="URL of debootstrap's packages")
    build.add_argument("--include", default="", help="further packages for debootstrap, separated by commas")
    build.add_argument("--context", type=Path, help="folder that COPY takes from; without it, the recipe's own")
    build.add_argument("--base", action="append", default=[], metavar="NAME=SOURCE", help="what FROM may name")
    build.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="for the Dockerfile's ARG")
    build.add_argument("--network", action="store_true", help="steps have this machine's network")
    build.add_argument("--timeout_s", type=float, default=0.0, help="of the whole build; without it, an hour")
    listing = actions.add_parser("list", help="what is kept")
    for action in (build, listing):
        action.add_argument("--store", type=Path, default=default_folder(), help="folder (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
