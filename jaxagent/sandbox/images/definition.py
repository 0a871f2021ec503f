"""Text of an apptainer definition file (.def) -> its header and sections, checked.

Executed: Bootstrap, From, %files, %post, %environment. Noted, since they change nothing in the file system that a task
sees: %runscript, %startscript, %test, %labels, %help. Everything else is refused by name.
"""

from __future__ import annotations

import dataclasses
import re
import shlex

from jaxagent.config import nearest

BOOTSTRAPS = ("docker", "localimage", "library", "oras", "docker-archive", "oci-archive", "debootstrap", "scratch")
HEADERS = ("bootstrap", "from", "osversion", "mirrorurl", "include")
IGNORED_HEADERS = ("registry", "namespace", "fingerprints")
EXECUTED = ("files", "post", "environment")
HARMLESS = ("runscript", "startscript", "test", "labels", "help")
SECTIONS = EXECUTED + HARMLESS


@dataclasses.dataclass(frozen=True)
class Definition:
    """A definition file."""

    bootstrap: str
    source: str  # From; for debootstrap, OSVersion
    files: tuple[tuple[str, str], ...] = ()  # source, target
    post: str = ""
    shell: tuple[str, ...] = ("/bin/sh", "-e")  # that runs %post
    environment: str = ""
    notes: tuple[str, ...] = ()


def parse(text: str) -> Definition:
    """A definition file.

    Raises:
      ValueError: malformed, or with something that is not supported; its line is named.
    """
    header: dict[str, str] = {}
    sections: dict[str, list[str]] = {}
    shell, notes, section = ("/bin/sh", "-e"), [], ""
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if heading := re.match(r"%([A-Za-z]\w*)\b\s*(.*)", line):
            section, rest = heading[1].lower(), heading[2].strip()
            if section in HARMLESS:
                notes.append(f"%{section}")
            elif section not in EXECUTED:
                raise ValueError(f"line {number}: %{section} is not supported. {nearest(section, SECTIONS)}")
            elif section == "post" and rest.startswith("-c "):
                shell = tuple(shlex.split(rest[3:]))
            elif rest and not rest.startswith("#"):
                raise ValueError(f"line {number}: '%{section} {rest}' is not supported")
            sections.setdefault(section, [])
        elif section:
            sections[section].append(line)
        elif line.strip() and not line.lstrip().startswith("#"):
            key, colon, value = line.partition(":")
            name = key.strip().lower()
            if not colon or name not in (*HEADERS, *IGNORED_HEADERS):
                raise ValueError(f"line {number}: unknown header '{key.strip()}'. {nearest(name, HEADERS)}")
            if name in header:
                raise ValueError(f"line {number}: a second '{key.strip()}': stages are not supported")
            header[name] = re.sub(r"\s+#.*", "", value).strip()
        if re.match(r"\s*bootstrap\s*:", line, re.IGNORECASE) and section and section != "help":
            raise ValueError(f"line {number}: a second Bootstrap: several stages are not supported")
    bootstrap = header.get("bootstrap", "").lower()
    if bootstrap not in BOOTSTRAPS:
        raise ValueError(f"Bootstrap '{bootstrap}' is not supported. {nearest(bootstrap, BOOTSTRAPS)}")
    source = header.get("osversion" if bootstrap == "debootstrap" else "from", "")
    if not source and bootstrap != "scratch":
        raise ValueError(f"Bootstrap '{bootstrap}' names no {'OSVersion' if bootstrap == 'debootstrap' else 'From'}")
    texts = {name: "\n".join(lines).strip("\n") for name, lines in sections.items()}
    if texts.get("post", "").startswith("#!"):
        shell = tuple(shlex.split(texts["post"].partition("\n")[0][2:]))
    for name in EXECUTED:
        if template := re.search(r"\{\{\s*\w+\s*\}\}", texts.get(name, "")):
            raise ValueError(f"%{name} has the template variable {template[0]}, which is not supported")
    return Definition(
        bootstrap,
        source,
        tuple(_files(texts.get("files", ""))),
        texts.get("post", ""),
        shell,
        texts.get("environment", ""),
        tuple(notes),
    )


def _files(text: str) -> list[tuple[str, str]]:
    pairs = []
    for line in text.split("\n"):
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if len(words) > 2:
            raise ValueError(f"%files: '{line.strip()}' must be a source and a target")
        if not words[-1].startswith("/"):
            raise ValueError(f"%files: '{line.strip()}' needs an absolute target")
        pairs.append((words[0], words[-1]))
    return pairs
