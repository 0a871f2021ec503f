"""Executes recipes: a Dockerfile's instructions, and a definition's sections, as steps of `build.Steps`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import posixpath
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from jaxagent.config import ConfigError
from jaxagent.sandbox.images import definition, dockerfile
from jaxagent.sandbox.images.build import Steps
from jaxagent.sandbox.images.built import BuildError, Built
from jaxagent.sandbox.images.context import Context, Item
from jaxagent.sandbox.images.dockerfile import Instruction

_Recipe = TypeVar("_Recipe")
SHELL = ("/bin/sh", "-c")
APPTAINER_ENV = "/.singularity.d/env/91-environment.sh"  # %post may append to it
# Predefined build arguments, which need no ARG.
PROXIES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "FTP_PROXY", "ftp_proxy", "NO_PROXY", "no_proxy")


async def build_dockerfile(steps: Steps, path: Path, context: Path, args: Mapping[str, str] | None = None) -> Built:
    """Builds a Dockerfile's last stage and those it stands on.

    Args:
      context: the folder that COPY takes from.
      args: for ARG.

    Raises:
      BuildError: it cannot be built.
    """
    parsed = _parsed(dockerfile.parse, path, steps.image)
    return await _Dockerfile(steps, parsed, Context(context, _ignore(path, context)), args or {}).build()


async def build_definition(steps: Steps, path: Path, context: Path, directory: str = "/") -> Built:
    """Builds an apptainer definition. Its programs run as an ordinary user, as apptainer's do, in `directory`.

    Raises:
      BuildError: it cannot be built.
    """
    parsed = _parsed(definition.parse, path, steps.image)
    base = await steps.base("scratch" if parsed.bootstrap == "scratch" else parsed.source)
    built = dataclasses.replace(base, directory="/", user="root")  # apptainer takes neither WORKDIR nor USER over
    for pattern, target in parsed.files:
        text = f"%files {pattern} {target}"
        source = _relative(pattern, context)
        built = await _copy(steps, built, text, Context(context), (source,), target, cp=True)
    if parsed.post:
        variables = {"APPTAINER_ENVIRONMENT": APPTAINER_ENV, "SINGULARITY_ENVIRONMENT": APPTAINER_ENV}
        if "_ENVIRONMENT" in parsed.post:
            folder = posixpath.dirname(APPTAINER_ENV)
            built = await steps.workdir(built, f"the folder {folder}", folder)
            built = dataclasses.replace(built, directory="/")
        argv = (*parsed.shell, "-c", parsed.post)
        built = await steps.run(built, f"%post\n{parsed.post}", argv, variables)
    script = f"{parsed.environment}\n[ ! -f {APPTAINER_ENV} ] || . {APPTAINER_ENV}\n"
    if parsed.environment or "_ENVIRONMENT" in parsed.post:
        built = await steps.environment(built, f"%environment\n{parsed.environment}", script)
    built = await steps.workdir(built, f"the task's folder {directory}", directory)
    notes = tuple(f"{note} is not run" for note in parsed.notes)
    return dataclasses.replace(built, uid=1000, user="user", home="/home/user", notes=notes)


class _Dockerfile:
    """One build of a Dockerfile."""

    def __init__(self, steps: Steps, parsed: Sequence[Instruction], context: Context, args: Mapping[str, str]):
        self._steps, self._parsed, self._context, self._build_args = steps, parsed, context, args
        self._stages: dict[str, Built] = {}
        self._notes: list[str] = []

    async def build(self) -> Built:
        """The last stage."""
        globals_: dict[str, str] = {}
        stages: list[tuple[Instruction, list[Instruction]]] = []
        for instruction in self._parsed:
            if instruction.name == "FROM":
                stages.append((instruction, []))
            elif stages:
                stages[-1][1].append(instruction)
            elif instruction.name == "ARG":
                with self._at(instruction):
                    self._arguments(instruction, globals_, {}, {})
        froms = []  # what each stage stands on, and its own name or ""
        for start, _ in stages:
            with self._at(start):
                words = start.rest.split()
                if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
                    raise ValueError("must be FROM image, or FROM image AS name")
                froms.append((dockerfile.expand(words[0], globals_), words[-1].lower() if len(words) == 3 else ""))
        built, needed = None, _needed([(source.lower(), name) for source, name in froms])
        for number in sorted(needed):
            built = await self._stage(*stages[number], froms[number][0], globals_)
            self._stages[froms[number][1] or str(number)] = built
        assert built is not None  # the last one is always needed
        return dataclasses.replace(built, notes=tuple(dict.fromkeys(self._notes)))

    async def _stage(
        self, start: Instruction, instructions: list[Instruction], source: str, globals_: Mapping[str, str]
    ) -> Built:
        with self._at(start):
            if not source:
                raise ValueError("names no image: an ARG before FROM has no value")
        if "platform" in start.flags:
            note = f"--platform={start.flags['platform']} has no effect: an image is of this machine's processor"
            self._notes.append(f"line {start.line}: {note}")
        built = self._stages.get(source.lower()) or await self._steps.begin(source)
        args: dict[str, str] = {}
        shell: tuple[str, ...] = SHELL
        for instruction in instructions:
            with self._at(instruction):
                if instruction.name == "SHELL":
                    shell = instruction.words
                elif instruction.name == "ARG":
                    self._arguments(instruction, args, globals_, built.env)
                else:
                    built = await self._instruction(instruction, built, args, shell)
        return built

    @contextlib.contextmanager
    def _at(self, i: Instruction) -> Iterator[None]:
        """What is wrong with an instruction before it runs names its line."""
        try:
            yield
        except ConfigError:
            raise
        except ValueError as error:
            raise BuildError(self._steps.image, 0, "", f"line {i.line}: {i.name} {error}") from None

    async def _instruction(
        self, i: Instruction, built: Built, args: Mapping[str, str], shell: tuple[str, ...]
    ) -> Built:
        values = {**args, **built.env}
        if i.name == "NOTE":
            self._notes.append(f"line {i.line}: {i.rest.split()[0].upper()} has no effect here")
            return built
        if i.name == "ENV":
            return dataclasses.replace(built, env={**built.env, **dict(dockerfile.pairs(i.rest, values))})
        if i.name == "WORKDIR":
            path = "".join(dockerfile.split(dockerfile.expand(i.rest, values), one_word=True))
            return await self._steps.workdir(built, i.text, posixpath.normpath(posixpath.join(built.directory, path)))
        if i.name == "USER":
            user = "".join(dockerfile.split(dockerfile.expand(i.rest, values), one_word=True))
            return await self._steps.user(built, i.text, user)
        if i.name == "RUN":
            argv = i.words or (*shell, _script(i))
            if i.heredocs and not i.words and i.heredocs[0].text.startswith("#!") and _only_heredoc(i):
                argv = _with_interpreter(i.heredocs[0].text)
            return await self._steps.run(built, i.text, argv, {k: v for k, v in args.items() if k not in built.env})
        return await self._copy(i, built, values)

    async def _copy(self, i: Instruction, built: Built, values: Mapping[str, str]) -> Built:
        words = [dockerfile.expand(w, values) for w in i.words] or dockerfile.split(dockerfile.expand(i.rest, values))
        if len(words) < 2:
            raise ValueError("needs a source and a target")
        *sources, target = words
        heredocs = {f"<<{dash}{h.name}": h for h in i.heredocs for dash in ("", "-")}
        mode = i.flags.get("chmod")
        if mode is not None and not re.fullmatch(r"0?[0-7]{3,4}", mode):
            raise ValueError(f"--chmod={mode} is not supported: only octal modes")
        if "chown" in i.flags:
            self._notes.append(f"line {i.line}: --chown has no effect: all files belong to the sandbox's one user")
        if i.name == "ADD":
            for source in sources:
                if re.match(r"[a-z+]+://|git@", source):
                    raise ValueError(f"of {source} is not supported: only local files")
        documents = []
        for source in [s for s in sources if s in heredocs]:
            document = heredocs[source]
            text = dockerfile.expand(document.text, values) if document.expand else document.text
            documents.append((document.name, [Item("", "file", 0o644, data=text.encode())]))
        return await _copy(
            self._steps,
            built,
            i.text,
            self._context,
            [s for s in sources if s not in heredocs],
            posixpath.join(built.directory, target),
            mode=None if mode is None else int(mode, 8) & 0o1777,
            unpack=i.name == "ADD",
            documents=documents,
        )

    def _arguments(
        self, i: Instruction, args: dict[str, str], globals_: Mapping[str, str], env: Mapping[str, str]
    ) -> None:
        """ARG: what the caller gave, else the default, else what stands before FROM."""
        for word in dockerfile.split(dockerfile.expand(i.rest, {**args, **env})):
            name, equals, value = word.partition("=")
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ValueError(f"'{name}' is no name of a variable")
            if name in self._build_args:
                args[name] = self._build_args[name]
            elif equals:
                args[name] = value
            elif name in globals_:
                args[name] = globals_[name]
            elif name in PROXIES and name in os.environ and self._steps.backend.network:
                args[name] = os.environ[name]


def _needed(stages: Sequence[tuple[str, str]]) -> set[int]:
    """The last stage and, one by one, those that it stands on. `stages`: what each stands on, and its own name."""
    names = {name: number for number, (_, name) in enumerate(stages) if name}
    needed, number = set(), len(stages) - 1
    while number is not None and number not in needed:
        needed.add(number)
        source = stages[number][0]
        number = names.get(source) if names.get(source, number) < number else None
    return needed


async def _copy(
    steps: Steps,
    built: Built,
    text: str,
    context: Context,
    patterns: Sequence[str],
    target: str,
    mode: int | None = None,
    unpack: bool = False,
    documents: Sequence[tuple[str, list[Item]]] = (),
    cp: bool = False,
) -> Built:
    """COPY, ADD and %files: finds the sources, then puts them into the image.

    Args:
      unpack: archives are unpacked, as by ADD.
      documents: sources that are not in the context.
      cp: as `cp -rL` does it: links are followed, and a folder is put into `target` where that is one.
    """
    sources, archives = list(documents), []
    try:
        for pattern in patterns:
            for path in context.find(pattern):
                name = "" if context.is_directory(path) and not cp else path.name
                sources.append((name, context.items(path, follow=cp)))
                if unpack and name and tarfile.is_tarfile(context.folder / path):
                    archives.append(name)
    except ValueError as error:
        raise BuildError(steps.image, steps.number + 1, text, str(error)) from None
    into = target.endswith(("/", "/.")) and not cp
    if len(sources) > 1 and not target.endswith(("/", "/.")):
        raise BuildError(steps.image, steps.number + 1, text, "has several sources, so its target must end with '/'")
    return await steps.copy(built, text, sources, posixpath.normpath(target), into, mode, archives)


def _only_heredoc(i: Instruction) -> bool:
    return len(i.heredocs) == 1 and re.fullmatch(r"""<<-?["']?[\w.-]+["']?""", i.rest) is not None


def _script(i: Instruction) -> str:
    """What the shell of a RUN is given: its line and the heredocs below it; one that is all of RUN is the script."""
    if _only_heredoc(i):
        return i.heredocs[0].text
    return i.rest + "".join(f"\n{h.text}{h.name}" for h in i.heredocs) + ("\n" if i.heredocs else "")


def _with_interpreter(script: str) -> tuple[str, ...]:
    """A heredoc that names its interpreter: written to where no layer sees it, and run."""
    end, path = "END-OF-SCRIPT-c7", "/dev/shm/script"
    return ("/bin/sh", "-c", f"cat > {path} <<'{end}'\n{script}{end}\nchmod 755 {path} && exec {path}")


def _relative(source: str, context: Path) -> str:
    """A source of %files below the definition's folder."""
    path = Path(source)
    if path.is_absolute() and path.is_relative_to(context.resolve()):
        return str(path.relative_to(context.resolve()))
    if path.is_absolute():
        return f"../{source}"  # refused as what it is: outside
    return source


def _ignore(path: Path, context: Path) -> str:
    """Docker's order: a file beside the Dockerfile with its name, else the context's."""
    for ignored in (path.with_name(path.name + ".dockerignore"), context / ".dockerignore"):
        if ignored.is_file():
            return ignored.read_text("utf-8")
    return ""


def _parsed(parse: Callable[[str], _Recipe], path: Path, name: str) -> _Recipe:
    try:
        return parse(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BuildError(name, 0, "", f"cannot be read from {path}: {error}") from None
    except ValueError as error:
        raise BuildError(name, 0, "", str(error)) from None
