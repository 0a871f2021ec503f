"""run.json: with which code, on what and when a workdir's run was started and went on. Not among the metrics.

{"checkpointed": whether a bundle was ever complete, "starts": [{"time", "command", "resumed_at", "commit", ...}, ...]}
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.runs import devices

PACKAGES = ("jaxagent", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tokenizers", "numpy")
# Sections that decide no number of a step; "log_episodes" is one of earlier versions, whose digests are in records.
UNREAD = ("workdir", "eval", "checkpoint", "resume", "episodes", "track", "log_episodes", "fleet")
GIT_TIMEOUT_S = 10.0
_TRUE = ("1", "on", "t", "true", "y", "yes")  # as jax reads its variables
# Flags of XLA on which no bit of a result hangs: how many virtual devices a CPU has is the mesh's business, and the
# others only write down what is compiled (--xla_dump_to, --xla_gpu_dump_llvmir, ...).
_NO_NUMBERS = re.compile(
    r"--xla_(force_host_platform_device_count|((cpu|gpu|tpu)_)?(enable_)?dump\w*|detailed_logging)"
)
_JAX_SETTINGS = ("JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION")


def start(used_devices: Sequence[Any], resumed_at: Mapping[str, Any] | None, own: Mapping[str, str]) -> dict[str, Any]:
    """One entry of "starts"."""
    kinds = [device.device_kind for device in used_devices]
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "resumed_at": resumed_at,
        "command": shlex.join([sys.executable, *sys.argv]),
        **commit(Path(__file__).parent),
        "code": code_digest(),
        "own_code": dict(own),
        **machine(),
        "host": platform.node(),
        "devices": [f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)],
    }


def machine() -> dict[str, Any]:
    """What numbers can depend on beside config, data and code."""
    return {
        "python": platform.python_version(),
        "packages": packages(),
        "platform": platform.platform(),
        "processor": processor(),
        "cpu_features": devices.processor(),
        "threads": devices.threads(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "jax_settings": " ".join(f"{name}={os.environ[name]}" for name in _JAX_SETTINGS if os.environ.get(name)),
        "few_optimizations": "1" if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS", "").lower() in _TRUE else "",
    }


def rounding(device: Any) -> dict[str, Any]:
    """What of a machine decides how the bits of a run come out, but for the mesh, which the config says.

    How many threads the virtual devices of a CPU get is the mesh's business, too.
    """
    this_machine = machine()
    facts = {name: this_machine["packages"][name] for name in ("jax", "jaxlib")} | {"device": device.device_kind}
    facts["xla_flags"] = deciding_flags(this_machine["xla_flags"])
    of_cpu = ("cpu_features", *(["threads"] if devices.threads(explicit=True) == this_machine["threads"] else ()))
    names = ("few_optimizations", "jax_settings", *(of_cpu if device.platform == "cpu" else ()))
    return facts | {name: this_machine[name] for name in names}


def deciding_flags(xla_flags: str) -> str:
    """Those of XLA_FLAGS that may change numbers, sorted; where it names a file of flags, that name."""
    flags = (flag for flag in xla_flags.split() if not _NO_NUMBERS.fullmatch(flag.partition("=")[0]))
    return " ".join(sorted(flags))


def accepted(starts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where a run went on with other bits than those of one machine: "rl, from step 5 on: threads 4 -> 1"."""
    at = [(start["resumed_at"], start["other_rounding"]) for start in starts if start.get("other_rounding")]
    return [f"{where['stage']}, from step {where['step']} on: {what}" for where, what in at]


def packages() -> dict[str, str | None]:
    """The installed versions of what a run uses."""
    return {name: _version(name) for name in PACKAGES}


def processor() -> str:
    """The name of this machine's processor, as far as it is known."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@functools.cache
def code_digest() -> str:
    """SHA-256 over every file of this package, by name and content; what is compiled or cached is left out."""
    package, digest, left_out = Path(__file__).parents[1], hashlib.sha256(), (".pyc", ".so", ".bin")
    for path in sorted(path for path in package.rglob("*") if path.is_file() and path.suffix not in left_out):
        name, content = path.relative_to(package).as_posix().encode(), path.read_bytes()
        digest.update(b"%d %s %d " % (len(name), name, len(content)) + content)
    return digest.hexdigest()


def own_code(section: Any) -> dict[str, str]:
    """Digests of the code of a user's own that a config, or a part of it, names by import paths: SHA-256 by file.

    Of every class and function that it names or holds outside of this package, and of the bases of classes: its file,
    and from there on every Python file that an import statement names, wherever in the code, and that lies under the
    same folder of Python's path, as modules beside it and in its package do. Of a package that is installed and that a
    config names, the files of that package alone. Files are named from that folder on, "game/nim.py"; an archive is one
    file. What is read in other ways is part of nothing here.
    """
    digests: dict[str, str] = {}
    for module, is_choice in _own_modules(section):
        if (path := _file_of(module)) is None:
            continue
        is_archive = path.suffix not in (".py", ".so", ".pyd")
        root = path.parents[0 if is_archive else module.count(".") + (path.name == "__init__.py")]
        only = module.partition(".")[0] if root.name in ("site-packages", "dist-packages") else ""
        pending = [path] if is_choice or not only else []
        while pending:
            path = pending.pop()
            name, content = path.relative_to(root).as_posix(), path.read_bytes()
            if name not in digests:
                digests[name] = hashlib.sha256(content).hexdigest()
                pending += _imported(content, path, root, only) if path.suffix == ".py" else ()
    return dict(sorted(digests.items()))


def without_file(section: Any) -> list[str]:
    """The modules that `own_code` has nothing of: those of a notebook, say; not what a package makes as it loads."""
    modules = {module for module, _ in _own_modules(section)}
    return sorted(module for module in modules if not (_file_of(module) or _file_of(module.partition(".")[0])))


def code_changes(saved: Mapping[str, str] | None, now: Mapping[str, str]) -> list[str]:
    """ "code of game.nim (game/nim.py)" of every file that is not as it was; of a run that did not keep it nothing."""
    changed = [] if saved is None else [file for file in sorted({*saved, *now}) if saved.get(file) != now.get(file)]
    modules = (file.rpartition(".")[0].removesuffix("/__init__").replace("/", ".") for file in changed)
    return [f"code of {module} ({file})" for module, file in zip(modules, changed, strict=True)]


def _own_modules(section: Any) -> list[tuple[str, bool]]:
    ours = ("jaxagent", *sys.stdlib_module_names)
    return [each for each in dict.fromkeys(_named(section)) if each[0].partition(".")[0] not in ours]


def _named(value: Any) -> Iterator[tuple[str, bool]]:
    """The modules of all that a config holds or texts like "my_package.my_module:name" name, and if it is a choice."""
    if isinstance(value, str):
        names = re.findall(r"^([A-Za-z_][\w.]*):[A-Za-z_][\w.]*$", value)
        yield from ((module, True) for module in names if _file_of(module))
    elif isinstance(value, (Mapping, tuple, list, set, frozenset)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _named(inner)
    elif isinstance(value, (functools.partial, types.MethodType)):
        yield from _named((value.func, value.args, value.keywords) if hasattr(value, "func") else value.__self__)
    else:
        is_choice = dataclasses.is_dataclass(value) and not isinstance(value, type)
        yield str(getattr(value, "__module__", "builtins")), is_choice  # of a function, also a jitted one, its own
        yield from ((base.__module__, False) for base in (value if isinstance(value, type) else type(value)).__mro__)
        fields = [field.name for field in dataclasses.fields(value)] if is_choice else []
        yield from _named(tuple(getattr(value, name, "") for name in ("rollout", *fields)))  # an environment's is none


def _file_of(module: str) -> Path | None:
    """Where a module lies, which need not be loaded yet; of one in an archive the archive."""
    with contextlib.suppress(Exception):  # what a package raises that a text names by chance
        loaded = sys.modules.get(module)
        origin = loaded.__dict__.get("__file__") if loaded else getattr(importlib.util.find_spec(module), "origin", "")
        path = Path(origin or "").resolve()
        return next((part for part in (path, *path.parents) if part.is_file()), None)
    return None


def _imported(content: bytes, path: Path, root: Path, only: str) -> Iterator[Path]:
    """The files under `root` that a Python file imports; of the package `only` where that is not ""."""
    folders = path.relative_to(root).parts
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # of another Python, or none: nobody has to load it
        return
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom):
            base = ".".join((*(folders[: -node.level] if node.level else ()), *filter(None, (node.module,))))
            names = [f"{base}.{name}" for name in names]
        for parts in (name.split(".") for name in names):
            for end in range(1, len(parts) + 1):  # to import a.b is to run a as well
                if parts[0] != "jaxagent" and only in ("", parts[0]):
                    module = root.joinpath(*parts[:end])
                    yield from filter(Path.is_file, (module.with_suffix(".py"), module / "__init__.py"))


def config_digest(config: Mapping[str, Any]) -> str:
    """SHA-256 of what in a config decides the numbers of a step: not where it runs, nor what it writes down."""
    deciding = {name: value for name, value in config.items() if name not in UNREAD}
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def commit(folder: Path) -> dict[str, Any]:
    """The git commit that this code is of, and whether tracked files differ from it; None where it is of none.

    A copy installed inside somebody else's checkout is not tracked there, and has none.
    """
    head = _git(folder, "ls-files", "--error-unmatch", "__init__.py") and _git(folder, "rev-parse", "HEAD")
    if not head:
        return {"commit": None, "dirty": None}
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": head, "dirty": None if changed is None else bool(changed)}


def read(path: Path) -> dict[str, Any]:
    """What the file holds; an empty record where there is none.

    Raises:
      ConfigError: it is damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {"checkpointed": bool(content["checkpointed"]), "starts": list(content["starts"])}
    except FileNotFoundError:
        return {"checkpointed": False, "starts": []}
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"{path} is damaged: it only says how the run was started. Delete it to go on.") from None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(folder: Path, *words: str) -> str | None:
    """What git prints; None where it fails, or there is none."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        process = subprocess.run(
            ["git", "-C", folder, *words], capture_output=True, encoding="utf-8", timeout=GIT_TIMEOUT_S, env=environment
        )
    except (OSError, UnicodeError, subprocess.SubprocessError):
        return None
    return process.stdout.strip() if process.returncode == 0 else None
