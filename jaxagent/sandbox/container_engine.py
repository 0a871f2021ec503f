"""Back end (c): docker or podman, through their command line, which also follows DOCKER_HOST to another machine.

A container is created with our program as its process 1, and the attached start is the connection to it. Starting
takes a few hundred milliseconds, so use a warm pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import shutil
import subprocess
from pathlib import Path

from jaxagent.config import ConfigError
from jaxagent.sandbox.base import Sandbox, SandboxError, Spec
from jaxagent.sandbox.connection import OOM_SCORE
from jaxagent.sandbox.local import NO_TERMINAL_LIMIT, WRITABLE, LocalBackend
from jaxagent.sandbox.owner import LABEL, Owner
from jaxagent.sandbox.root import Roots

COMMAND_TIMEOUT_S = 120.0
# For root on hosts with both versions of control groups, where podman as it is configured fails.
CGROUPFS = ("podman", "--runtime", "runc", "--cgroup-manager", "cgroupfs", "--events-backend", "none")
PROGRAM = "/.jaxagent-init"
MOST_PROCESSES = 30_000  # of one user, over all containers
NO_ROOT = "would make user id 0 inside the host's root, without a user namespace between: set the spec's uid"


class ContainerEngine(LocalBackend):
    """Containers of one engine: of `Spec.image`, and podman's also of a root, given or made of the host's /usr.

    Args:
      command: of the engine, with global options.

    Raises:
      SandboxError: it is not installed or does not answer.
    """

    def __init__(self, owner: Owner, command: tuple[str, ...]):
        super().__init__(owner)
        self.name = command[0]
        if not shutil.which(command[0]):
            raise SandboxError(f"{command[0]} is not installed")
        self._command = command
        self._host_roots = functools.cache(self._make_roots)
        names = "{{.SecurityOptions}}" if self.name == "docker" else "{{.Host.Security.Rootless}}"
        security = self.call("info", "--format", names)
        self.own_users = any(word in security for word in ("rootless", "userns", "true"))
        owner.note("engines", ["\t".join(self._command)])
        self.missing = (
            "no limit on what is written to the container's root, nor on the number of files (one file is limited)",
            *([] if self.own_users else ["no user namespace: user ids inside are the host's (0 is refused)"]),
            "what sockets hold is limited in part only",
            f"{NO_TERMINAL_LIMIT}, and what the kernel counts per user (inotify, pipes, signals, queues)",
            "no snapshots",
        )

    def call(self, *words: str, timeout_s: float = COMMAND_TIMEOUT_S, both: bool = False) -> str:
        """Runs the engine's command; returns what it prints. Raises SandboxError.

        Args:
          both: an error also shows what it printed to standard output, which tells the step of a build.
        """
        try:
            process = subprocess.run(
                [*self._command, *words],
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=timeout_s,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.SubprocessError) as failure:
            raise SandboxError(f"{' '.join(self._command)} {words[0]}: {failure}") from failure
        if process.returncode != 0:
            message = f"{process.stdout}\n{process.stderr}"[-4000:] if both else " ".join(process.stderr.split())[-400:]
            raise SandboxError(f"{' '.join(self._command)} {words[0]}: {message}")
        return process.stdout.strip()

    def arguments(self, spec: Spec) -> list[str]:
        """The words of the engine's `create` command."""
        limits = spec.limits
        memory = str(limits.memory_bytes + limits.disk_bytes)  # /tmp and the home directory count as memory
        cores = 0 if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0 else 1  # see `local.resource_limits`
        words = ["create", "--interactive", "--label", f"{LABEL}={self.owner.id}", "--network", "none"]
        words += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", f"{spec.uid}:{spec.uid}"]
        words += ["--hostname", spec.hostname, "--workdir", "/", "--entrypoint", "", "--log-driver", "none"]
        words += ["--oom-score-adj", str(OOM_SCORE), "--pids-limit", str(limits.processes + 1)]
        words += ["--memory", memory, "--memory-swap", memory]
        words += ["--cpus", f"{limits.cpus:g}", "--shm-size", str(limits.disk_bytes // WRITABLE["/dev/shm"])]
        words += ["--ulimit", f"nofile={limits.open_files}:{limits.open_files}", "--ulimit", f"core={cores}:{cores}"]
        # Counted over all containers of a user, so not a limit of one: that is --pids-limit. It must be named, since
        # podman's own wish is more than root without CAP_SYS_RESOURCE may give.
        hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        processes = MOST_PROCESSES if hard == resource.RLIM_INFINITY else min(hard, MOST_PROCESSES)
        words += ["--ulimit", f"nproc={processes}:{processes}"]
        for path, parts in WRITABLE.items():
            if path == "/dev/shm":
                continue
            # Some runtimes keep the mode that the directory has in the image; podman cannot be told an owner.
            mode = "1777" if self.name == "podman" else f"1777,uid={spec.uid},gid={spec.uid}"
            words += ["--tmpfs", f"{path}:rw,exec,nosuid,nodev,size={limits.disk_bytes // parts},mode={mode}"]
        if self.name == "podman":  # always on this host; docker may be on another, so there it is copied in
            words += ["--volume", f"{self.public_program()}:{PROGRAM}:ro"]
        words += self._root(spec)
        return [*words, PROGRAM, "serve", self.owner.process_name]

    def _root(self, spec: Spec) -> list[str]:
        if spec.image:
            return [spec.image]
        root = self._host_roots(spec.uid).root(spec.root, (), spec.uid)
        # The tmpfs over it takes this mode (see `arguments`).
        Path(root.layers[0], "home/user").chmod(0o1777)
        volumes = [word for source, target in root.binds for word in ("--volume", f"{source}:{target}:ro")]
        return [*volumes, "--rootfs", f"{root.layers[-1]}:O"]

    def _make_roots(self, uid: int) -> Roots:
        """Base layers that belong to this user, as images do: programs own only what lies on a tmpfs."""
        directory = self.owner.path / f"engine-{uid}"
        directory.mkdir(mode=0o755, exist_ok=True)
        directory.chmod(0o755)
        return Roots(directory, os.geteuid())

    async def start(self, spec: Spec) -> Sandbox:
        """Creates a container, and attaches to it as it starts."""
        if spec.layers or (spec.image and spec.root) or (self.name == "docker" and not spec.image):
            fields = "'image'" if self.name == "docker" else "'image' or 'root', or the host's /usr"
            raise ConfigError(f"{self.name} starts sandboxes from a spec's {fields}, without layers")
        if spec.uid == 0 and not self.own_users:
            raise ConfigError(f"{self.name} {NO_ROOT}")
        container = await asyncio.to_thread(self._create, spec)

        def remove() -> None:
            with contextlib.suppress(SandboxError):
                self.call("rm", "--force", *(["--time", "0"] if self.name == "podman" else []), container)

        command = [*self._command, "start", "--attach", "--interactive", container]
        return await self.begin(
            spec,
            lambda: (command, self.describe_inside(spec, processes=False)),
            grouped=False,
            remove=remove,
            env=os.environ,  # the engine's client runs on this host; the container gets none of it
        )

    def _create(self, spec: Spec) -> str:
        container = self.call(*self.arguments(spec)).split()[-1]
        if self.name == "podman":
            return container
        try:
            self.call("cp", str(self.public_program()), f"{container}:{PROGRAM}")
        except SandboxError:
            with contextlib.suppress(SandboxError):
                self.call("rm", "--force", container)
            raise
        return container
