"""A change as text: what `git diff` printed, cut into files, without those that an agent has no business with."""

from __future__ import annotations

import codecs
import dataclasses
import difflib
import itertools
import re
import sys
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Literal

Ladder = Literal["slime", "swebench"]

# What steers a test run from inside a repository: a change of these is left out before the tests run.
STEERS = (
    *("conftest.py", "*/conftest.py", "sitecustomize.py", "*/sitecustomize.py", "usercustomize.py", "*.pth"),
    *("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml"),
    *("*/pytest.ini", "*/.pytest.ini", "*/tox.ini", "*/setup.cfg", "*/pyproject.toml"),
    *("*/pytest.toml", "*/.pytest.toml", "*.egg-info/*", "*.dist-info/*"),  # the latter name plugins of pytest's
    *("pytest.py", "pytest/*", "_pytest/*", "unittest.py", "unittest/*", "pluggy/*", ".gitattributes"),
    *("*/usercustomize.py", "*.egg-link", "*/egg-info/*", "src/pytest.py", "src/unittest.py"),
    "*/.gitattributes",
)
# Not part of a change: what the harness itself puts beside the repository's files.
HARNESS = ("PROBLEM_STATEMENT.md", ".harness/*")
# How a change is applied: the first command that succeeds counts.
LADDERS: dict[Ladder, tuple[str, ...]] = {
    "slime": (
        "git apply --3way --whitespace=nowarn {patch}",
        "git apply --whitespace=nowarn {patch}",
        "patch --batch -p1 --no-backup-if-mismatch -i {patch}",
    ),
    "swebench": (
        "git apply --verbose {patch}",
        "git apply --verbose --reject {patch}",
        "patch --batch --fuzz=5 -p1 -i {patch}",
    ),
}
BYTES = ("utf-8", "surrogateescape")  # how a patch is text: a file in another encoding comes through as it is
_BEGIN = "diff --git "
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)$")
# All that `git diff --no-renames` writes above a file's hunks.
_HEADER = re.compile(
    r"(old|new|new file|deleted file) mode \d{6}|index [0-9a-f]+\.\.[0-9a-f]+( \d{6})?|(---|\+\+\+) .+|Binary files .+"
)
_SPECIAL_MODES = ("120000", "160000")  # links and submodules
_QUOTED = {
    "\\": "\\\\",
    '"': '\\"',
    "\a": "\\a",
    "\b": "\\b",
    "\t": "\\t",
    "\n": "\\n",
    "\v": "\\v",
    "\f": "\\f",
    "\r": "\\r",
}
_TEST_FILE = re.compile(r"(^|/)(test_[^/]*|[^/]*_test|tests|conftest)\.py$")
_TEST_FOLDER = re.compile(r"(^|/)(tests?|testing)/")
# What a new module of a repository would hide from the tests and what runs them, where the repository comes first.
_IMPORTABLE = sys.stdlib_module_names | {
    "pytest",
    "_pytest",
    "pluggy",
    "iniconfig",
    "packaging",
    "pygments",
    "exceptiongroup",
}


@dataclasses.dataclass(frozen=True)
class FileChange:
    """The part of a patch that is about one file."""

    path: str
    text: str  # from "diff --git" to the end of the last hunk
    is_binary: bool = False
    is_special: bool = False  # makes a link or a submodule
    is_new: bool = False

    @property
    def hunks(self) -> str:
        """The hunks as SWE-RL compares them: without the file's header, each stripped, lengths always written."""
        hunks: list[list[str]] = []
        for line in self.text.splitlines():
            if (head := _HUNK.match(line)) is not None:
                old, new = f"{head[1]},{head[2] or 1}", f"{head[3]},{head[4] or 1}"
                hunks.append([f"@@ -{old} +{new} @@{head[5]}"])
            elif hunks:
                hunks[-1].append(line)
        return "\n".join("\n".join(lines).strip() for lines in hunks).strip()


def split(patch: str) -> list[FileChange]:
    """The files of a patch. What stands before the first one is left out."""
    starts = [match.start() for match in re.finditer(f"^{_BEGIN}", patch, re.MULTILINE)]
    return [_change(patch[start:end]) for start, end in itertools.pairwise([*starts, len(patch)])]


def _change(text: str) -> FileChange:
    header = text.partition("\n@@ ")[0].rstrip("\n").split("\n")
    modes = [line.rpartition(" ")[2] for line in header if line.startswith(("new mode ", "new file mode "))]
    modes += [line.rpartition(" ")[2] for line in header if line.startswith("index ")]
    names = [line[4:] for line in header if line.startswith(("--- ", "+++ "))]
    path = _title(header[0][len(_BEGIN) :]) or ""
    end = "\t" if " " in path else ""
    if not {*names} <= {"/dev/null", *(_as_git_writes(f"{side}/{path}") + end for side in "ab")}:
        path = ""  # nothing that `git diff --no-renames` prints
    binary = "\0" in text or any(line.startswith(("Binary files ", "GIT binary patch")) for line in header)
    is_new = "/dev/null" in names[:1] or "\n@@ -0,0 " in text
    is_new = is_new or any(line.startswith("new file mode ") for line in header)
    return FileChange(path, text, binary, any(mode in _SPECIAL_MODES for mode in modes), is_new)


def _title(names: str) -> str | None:
    """X of `a/X b/X`; None where it is anything else, or written in another way than git's."""
    half = (len(names) - 1) // 2
    first = names[:half]
    path = _unquoted(first)[2:]
    return path if names == f"{_as_git_writes(f'a/{path}')} {_as_git_writes(f'b/{path}')}" else None


def _as_git_writes(name: str) -> str:
    """As git writes it. Programs that apply patches disagree about every other way."""
    quoted = "".join(_QUOTED.get(c, f"\\{ord(c):03o}" if c < " " or c == "\x7f" else c) for c in name)
    return name if quoted == name else f'"{quoted}"'


def _unquoted(name: str) -> str:
    if name[:1] != '"':
        return name
    try:
        return codecs.escape_decode(name[1:-1].encode(*BYTES))[0].decode(*BYTES)  # type: ignore[attr-defined]
    except ValueError:
        return ""


def is_test(path: str) -> bool:
    """Whether a file belongs to the tests, by its name or its folder's."""
    return bool(_TEST_FILE.search(path) or _TEST_FOLDER.search(path))


def test_folder(path: str) -> str:
    """The outermost folder of tests above a file; "" where there is none."""
    for pattern in (r"((.*?/)?tests?)/", r"((.*?/)?testing)/"):
        if (match := re.match(pattern, path, re.IGNORECASE)) is not None:
            return match[1]
    return ""


def keep(patch: str, protected: Sequence[str], patterns: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """Leaves out changes that would decide the judgement, or that no text can carry.

    Args:
      patch: of an agent.
      protected: paths that may not be changed, nor what is below them, nor the folders above them replaced.
      patterns: more such files, as fnmatch patterns (`*` also matches "/").

    Returns:
      The patch without them, and the paths of what was left out.
    """
    guarded = {part for path in protected for part in itertools.accumulate(key(path).split("/"), "{}/{}".format)}
    below = tuple(f"{key(path).rstrip('/')}/" for path in protected)
    pattern_keys = tuple(map(key, patterns))
    kept_changes, dropped = [], []
    for change in split(patch):
        path = key(change.path)
        bad = not path or _leads_out(path) or change.is_binary or change.is_special
        bad = bad or not _is_gits(change.text) or path.startswith(below) or (change.is_new and _hides(path, guarded))
        bad = bad or path in guarded or any(fnmatchcase(path, pattern) for pattern in pattern_keys)
        (dropped if bad else kept_changes).append(change)
    text = "".join(change.text if change.text.endswith("\n") else change.text + "\n" for change in kept_changes)
    paths = (change.path for change in dropped)
    return text, tuple(path for path in paths if not any(fnmatchcase(path, pattern) for pattern in HARNESS))


def key(path: str) -> str:
    """What paths are compared by: importlib.metadata, some file systems and Python's names take these for equal."""
    return unicodedata.normalize("NFKC", path).casefold()


def _hides(path: str, guarded: Collection[str]) -> bool:
    """Whether a new file would be imported in the place of a guarded module, or of one that everybody can import."""
    module = path.removesuffix(".py").removesuffix("/__init__")
    of_all = path.endswith(".py") and module.removeprefix("src/") in _IMPORTABLE
    return of_all or (path == f"{module}/__init__.py" and f"{module}.py" in guarded)


def _is_gits(text: str) -> bool:
    """Whether git can have printed it. Who owns the agent's sandbox can have put another program into git's place, and
    what applies a patch reads more than we do: renames, a second file behind the last hunk."""
    lines = text.removesuffix("\n").split("\n")[1:]
    at = next((i for i, line in enumerate(lines) if line.startswith("@@ ")), len(lines))
    if not all(_HEADER.fullmatch(line) for line in lines[:at]):
        return False
    old = new = 0  # lines that are left of the hunk
    for line in lines[at:]:
        if not old and not new and (head := _HUNK.match(line)) is not None:
            old, new = int(head[2] or 1), int(head[4] or 1)
        elif not line.startswith("\\"):  # "\ No newline at end of file"
            old -= line[:1] in (" ", "-", "")
            new -= line[:1] in (" ", "+", "")
            if min(old, new) < 0 or line[:1] not in (" ", "-", "+", ""):
                return False
    return not old and not new


def _leads_out(path: str) -> bool:
    parts = path.split("/")
    return any(part in ("", ".", "..", ".git") for part in parts)


WRONG_FORMAT = -1.0  # SWE-RL's reward (arXiv 2502.18449) of an answer that is no change
MAX_CHARS = 20_000  # of one file's change: difflib takes quadratic time; what is longer counts as unlike


def likeness(patch: str, oracle: str) -> float:
    """SWE-RL's reward of a change, in [0, 1], which runs no tests: the mean over files of difflib's ratio.

    A file that only one of the patches changes counts 0; two empty patches are 1, as SWE-RL's own function has it. Its
    policy writes search/replace blocks; an agent here leaves a patch.
    """
    ours, theirs = ({c.path: c.hunks for c in split(text) if not c.is_binary} for text in (patch, oracle))
    paths = sorted({*ours, *theirs})
    return sum(_ratio(ours.get(path, ""), theirs.get(path, "")) for path in paths) / len(paths) if paths else 1.0


def _ratio(hunks: str, oracle: str) -> float:
    if not hunks or not oracle or max(len(hunks), len(oracle)) > MAX_CHARS:
        return 0.0
    return difflib.SequenceMatcher(None, hunks, oracle, autojunk=False).ratio()
