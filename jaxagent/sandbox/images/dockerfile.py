"""Text of a Dockerfile -> instructions, checked: what is not supported here is told before anything runs.

Lines, continuations, comments, parser directives and heredocs as in Docker's Dockerfile reference. Instructions that
change nothing in the file system are kept as "NOTE"; those that would, and are not supported, are errors.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping

from jaxagent.config import nearest

EXECUTED = ("FROM", "RUN", "COPY", "ADD", "WORKDIR", "ENV", "ARG", "USER", "SHELL")
HARMLESS = ("LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "HEALTHCHECK", "STOPSIGNAL", "MAINTAINER", "VOLUME")
REFUSED = {"ONBUILD": "acts in images built from this one, which is not supported"}
FLAGS = {"COPY": ("chown", "chmod", "link"), "ADD": ("chown", "chmod", "link"), "FROM": ("platform",), "RUN": ()}
_FLAG = re.compile(r"--([a-z][a-z-]*)(?:=(\S+))?\s+")
_HEREDOC = re.compile(r"""(?<!<)\d*<<(-?)(["']?)([A-Za-z_][A-Za-z0-9_.-]*)\2""")
_TOKEN = re.compile(r"""\\.|'[^']*'?|"|\$[A-Za-z_]\w*|\$\{|[^\\'"$]+|.""", re.DOTALL)
_PART = re.compile(
    r"""\\(?P<escaped>.)|'(?P<single>[^']*)'|"(?P<double>(?:\\.|[^"\\])*)"|(?P<blank>\s+)|(?P<plain>[^\\'"\s]+|\\\Z)""",
    re.DOTALL,
)
_OTHER_ESCAPE = re.compile(r"(?:#.*\n)*#\s*escape\s*=\s*(?!\\\s*\n)(.*)", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Heredoc:
    """A text that follows its line. `expand`: its word was not quoted, so COPY puts variables in."""

    name: str
    text: str
    expand: bool


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction, its lines joined."""

    name: str  # upper case; one of EXECUTED, or "NOTE"
    rest: str  # after the flags
    line: int
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    heredocs: tuple[Heredoc, ...] = ()
    words: tuple[str, ...] = ()  # of the JSON (exec) form

    @property
    def text(self) -> str:
        """As an error shows it."""
        flags = "".join(f"--{k}={v} " for k, v in self.flags.items())
        return f"{self.name} {flags}{self.rest}" + "".join(f"\n{h.text}" for h in self.heredocs)


def parse(text: str) -> list[Instruction]:
    """Every instruction of a Dockerfile.

    Raises:
      ValueError: malformed, or with something that is not supported; its line is named.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    if directive := _OTHER_ESCAPE.match(text):
        raise ValueError(f"the escape directive must be \\, got '{directive[1].strip()}'")
    instructions, at = [], 0
    while at < len(lines):
        start, joined = at, ""
        at += 1
        if not (line := lines[start].strip()) or line.startswith("#"):
            continue
        joined, more = _cut(lines[start].lstrip())
        while more and at < len(lines):
            following, at = lines[at], at + 1
            if not following.strip() or following.lstrip().startswith("#"):
                continue  # comments and blank lines inside a continued instruction are left out
            part, more = _cut(following)
            joined += part
        name = joined.split(None, 1)[0].upper()
        heredocs = []
        if name in ("RUN", "COPY", "ADD"):
            for dash, quote, word in _HEREDOC.findall(joined):
                body, at = _body(lines, at, word, bool(dash), start + 1)
                heredocs.append(Heredoc(word, body, not quote))
        instructions.append(_instruction(joined.strip(), start + 1, tuple(heredocs)))
    if not any(i.name == "FROM" for i in instructions):
        raise ValueError("has no FROM")
    first = next(i for i in instructions if i.name not in ("ARG", "NOTE"))
    if first.name != "FROM":
        raise ValueError(f"line {first.line}: {first.name} stands before the first FROM")
    return instructions


def expand(text: str, values: Mapping[str, str]) -> str:
    """Puts variables in: $name, ${name}, ${name:-word}, ${name:+word}; none inside single quotes or after an escape.

    Quotes and escapes stay. Raises ValueError for other forms.
    """
    out, at, quoted = [], 0, False
    while token := _TOKEN.match(text, at):
        piece, at = token[0], token.end()
        if piece[0] == "'" and quoted:  # it quotes nothing
            piece, at = "'", token.start() + 1
        elif piece == '"':
            quoted = not quoted
        elif piece == "${":
            inner, at = _braces(text, at)
            piece = _variable(inner, values)
        elif piece[0] == "$" and len(piece) > 1:
            piece = values.get(piece[1:], "")
        out.append(piece)
    return "".join(out)


def split(text: str, one_word: bool = False) -> list[str]:
    """Words of a line without quotes and escapes, as the Dockerfile's own words are cut (not a shell's).

    Raises ValueError for a quote that does not end. `one_word`: the line is one word, blanks included.
    """
    words: list[str] = []
    word, at = None, 0
    while at < len(text):
        part = _PART.match(text, at)
        if part is None:
            raise ValueError(f"the quote {text[at]} does not end")
        at = part.end()
        if part["blank"] and not one_word:
            words += [] if word is None else [word]
            word = None
        else:
            quoted = part["single"] if part["single"] is not None else re.sub(r"(?s)\\(.)", r"\1", part["double"] or "")
            word = (word or "") + (part["escaped"] or part["blank"] or part["plain"] or quoted)
    return words if word is None else [*words, word]


def pairs(rest: str, values: Mapping[str, str]) -> list[tuple[str, str]]:
    """What ENV sets: `a=b c="d e"`, or the older `name the rest of the line`. Raises ValueError."""
    head = rest.split(None, 1)
    if "=" not in head[0]:
        if len(head) != 2:
            raise ValueError(f"'{rest}' has no value")
        return [(head[0], "".join(split(expand(head[1], values), one_word=True)))]
    settings = []
    for word in split(expand(rest, values)):
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ValueError(f"'{word}' must be name=value")
        settings.append((name, value))
    return settings


def _cut(line: str) -> tuple[str, bool]:
    """A line without its continuation mark, and whether it had one."""
    stripped = line.rstrip()
    return (stripped[:-1], True) if stripped.endswith("\\") else (line, False)


def _body(lines: list[str], at: int, word: str, dash: bool, line: int) -> tuple[str, int]:
    body = []
    while at < len(lines):
        text = lines[at].lstrip("\t") if dash else lines[at]
        at += 1
        if text == word:
            return "".join(f"{part}\n" for part in body), at
        body.append(text)
    raise ValueError(f"line {line}: the heredoc '{word}' does not end")


def _instruction(joined: str, line: int, heredocs: tuple[Heredoc, ...]) -> Instruction:
    word, *after = joined.split(None, 1)
    name, rest = word.upper(), after[0].strip() if after else ""
    if name in HARMLESS:
        return Instruction("NOTE", joined, line)
    if name in REFUSED:
        raise ValueError(f"line {line}: {name} {REFUSED[name]}")
    if name not in EXECUTED:
        raise ValueError(f"line {line}: unknown instruction '{word}'. {nearest(name, (*EXECUTED, *HARMLESS))}")
    flags: dict[str, str] = {}
    while name in FLAGS and (flag_text := _FLAG.match(rest)):
        flags[flag_text[1]] = flag_text[2] or "true"
        rest = rest[flag_text.end() :]
    for flag in flags:
        if flag not in FLAGS[name]:
            raise ValueError(f"line {line}: {name} --{flag} is not supported")
    if not rest:
        raise ValueError(f"line {line}: {name} without arguments")
    words: tuple[str, ...] = ()
    if name in ("RUN", "COPY", "ADD", "SHELL") and rest.startswith("["):
        try:
            value = json.loads(rest)
        except ValueError:
            value = None
        if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
            words = tuple(value)
    if name == "SHELL" and not words:
        raise ValueError(f'line {line}: SHELL needs a JSON list, such as ["/bin/bash", "-c"]')
    return Instruction(name, rest, line, flags, heredocs, words)


def _braces(text: str, at: int) -> tuple[str, int]:
    depth, start = 1, at
    while at < len(text):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[start:at], at + 1
        at += 1
    raise ValueError(f"'${{{text[start:]}' does not end")


def _variable(inner: str, values: Mapping[str, str]) -> str:
    match = re.fullmatch(r"([A-Za-z_]\w*)(?:(:?[-+])(.*))?", inner, re.DOTALL)
    if match is None:
        raise ValueError(f"'${{{inner}}}' is not supported: only ${{name}}, ${{name:-word}} and ${{name:+word}}")
    name, how, word = match[1], match[2] or "", match[3] or ""
    there = name in values and (bool(values[name]) or not how.startswith(":"))
    if how.endswith("-"):
        return values[name] if there else expand(word, values)
    if how.endswith("+"):
        return expand(word, values) if there else ""
    return values.get(name, "")
