"""What might become a task: a state of a repository, files of it in a broken form, and the patch that mends them."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxagent.data_pipelines.bugs import mutate
from jaxagent.data_pipelines.bugs.repositories import Repository, from_git, git, is_test

MAX_LINES = 200  # of a fix that is taken back


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One bug."""

    repository: Repository
    kind: str  # of mutation, or "commit"
    module: str  # the file, or the first of them
    broken: Mapping[str, str]  # path -> text with the bug
    patch: str  # takes the bug out again
    tests: tuple[str, ...]  # files to run

    @property
    def id(self) -> str:
        """Unique, and the same in every run."""
        digest = hashlib.blake2b(self.patch.encode(), digest_size=5).hexdigest()
        return f"{self.repository.name}-{self.repository.version}-{digest}"


def of_mutations(repository: Repository, seed: int) -> Iterator[Candidate]:
    """All mutations of a repository's sources: shuffled by the seed, modules and kinds by turns."""
    sources = repository.sources
    lines: dict[tuple[str, str], list[mutate.Mutation]] = {}
    for path, source in sources.items():
        try:
            found = mutate.mutations(source)
        except (SyntaxError, ValueError, RecursionError):
            continue  # Python of another version, or a template
        for mutation in found:
            lines.setdefault((path, mutation.kind), []).append(mutation)
    rng = random.Random(f"bugs/{seed}/{repository.name}/{repository.version}")
    for key in sorted(lines):
        rng.shuffle(lines[key])
    order = sorted(lines)
    rng.shuffle(order)
    for turn in range(max(map(len, lines.values()), default=0)):
        for path, kind in order:
            if turn < len(lines[path, kind]):
                broken = lines[path, kind][turn].apply(sources[path])
                patch = diff(path, broken, sources[path])
                yield Candidate(repository, kind, path, {path: broken}, patch, repository.tests)


def of_commits(path: Path, last: int) -> Iterator[Candidate]:
    """Commits that change sources and tests: the sources go back to what they were before. Newest first."""
    for sha in git(path, "log", "--no-merges", "--format=%H", f"-n{last}").decode().split():
        changed = git(path, "diff-tree", "--no-commit-id", "--name-status", "--no-renames", "-r", sha).decode()
        states = dict(reversed(line.split("\t", 1)) for line in changed.splitlines())
        tests = [name for name in states if is_test(name) and name.endswith(".py") and states[name] != "D"]
        sources = [name for name in states if name.endswith(".py") and not is_test(name)]
        if not tests or not sources or any(states[name] != "M" for name in sources):
            continue
        repository = from_git(path, sha)
        try:
            broken = {name: git(path, "show", f"{sha}^:{name}").decode() for name in sorted(sources)}
            patch = "".join(diff(name, broken[name], repository.files[name].decode()) for name in broken)
        except (UnicodeDecodeError, KeyError):
            continue
        runnable = tuple(name for name in repository.tests if name in tests)
        if runnable and len(patch.splitlines()) <= MAX_LINES:
            yield Candidate(repository, "commit", min(sources), broken, patch, runnable)


def diff(path: str, old: str, new: str) -> str:
    """One file's part of a patch, as git writes it."""
    lines = difflib.unified_diff(_lines(old), _lines(new), f"a/{path}", f"b/{path}", n=3)
    body = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return f"diff --git a/{path} b/{path}\n{body}"


def _lines(text: str) -> list[str]:
    """As git counts them: only "\\n" ends one."""
    *lines, last = text.split("\n")
    return [f"{line}\n" for line in lines] + ([last] if last else [])
