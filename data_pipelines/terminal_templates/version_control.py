"""Git: repositories that setup makes with fixed authors and dates, so that nothing depends on the day."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence

from jaxagent.data_pipelines.terminal_templates.draft import Draft, Draw, lines, write_files
from jaxagent.data_pipelines.terminal_templates.program import call
from jaxagent.data_pipelines.terminal_templates.words import PEOPLE

_QUIET = "export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1"


class _History:
    """Shell lines that make a repository, commit by commit."""

    def __init__(self, repository: str):
        self.repository = repository
        self.lines = [_QUIET, f"git init -q -b main {repository}"]
        self.run("config user.name agent")
        self.run("config user.email agent@example.com")
        self._commits = 0

    def run(self, command: str) -> None:
        self.lines.append(f"git -C {self.repository} {command}")

    def commit(self, message: str, files: Mapping[str, str], author: str = "agent", delete: Sequence[str] = ()) -> None:
        """Writes the files, deletes others, and commits all of it at the next full hour."""
        self._commits += 1
        self.lines += write_files({f"{self.repository}/{path}": text for path, text in files.items()})
        self.lines += [f"rm {self.repository}/{path}" for path in delete]
        self.run("add -A")
        date = f"2024-01-01T{self._commits:02d}:00:00Z"
        who = shlex.quote(f"{author} <{author}@example.com>")
        self.lines.append(
            f"GIT_AUTHOR_DATE={date} GIT_COMMITTER_DATE={date} "
            f"git -C {self.repository} commit -q --author={who} -m {shlex.quote(message)}"
        )

    @property
    def script(self) -> str:
        return "\n".join(self.lines)


def first_commit(draw: Draw) -> Draft:
    """git init, add, commit."""
    top, *names = draw.words(draw.number(4, 6))
    person = draw.choice(PEOPLE)
    message = f"add {names[0]} and {names[1]}"
    files = {f"{top}/{name}.txt": lines([name]) for name in names}
    who = f"-c user.name={person} -c user.email={person}@example.com"
    return Draft(
        f"Make the folder {top} a git repository and commit all files in it with the message '{message}'. The author "
        f"must be {person} with the mail address {person}@example.com.",
        (f"cd {top} && git init -q && git add -A && git {who} commit -q -m '{message}'", "git status --short"),
        (
            call("git_says", top, ["log", "--format=%an|%ae|%s"], f"{person}|{person}@example.com|{message}"),
            call(
                "git_says", top, ["ls-tree", "-r", "--name-only", "HEAD"], "\n".join(sorted(f"{n}.txt" for n in names))
            ),
            call("git_says", top, ["status", "--porcelain"], ""),
            *(call("git_says", top, ["show", f"HEAD:{name}.txt"], name) for name in names),
        ),
        files,
    )


def commit_change(draw: Draw) -> Draft:
    """Stage one of two changes."""
    top, a, b, word, other = draw.words(5)
    history = _History(top)
    history.commit(f"add {a} and {b}", {f"{a}.txt": "one\n", f"{b}.txt": "one\n"})
    message = f"change {a}"
    setup = [history.script, *write_files({f"{top}/{a}.txt": f"{word}\n", f"{top}/{b}.txt": f"{other}\n"})]
    return Draft(
        f"In the git repository {top} the files {a}.txt and {b}.txt were changed. Commit only the change of "
        f"{a}.txt, with "
        f"the message '{message}'. The change of {b}.txt must stay in the working tree, uncommitted.",
        (f"git -C {top} commit -q -m '{message}' {a}.txt", f"git -C {top} status --short"),
        (
            call("git_says", top, ["log", "--format=%s"], f"{message}\nadd {a} and {b}"),
            call("git_says", top, ["show", f"HEAD:{a}.txt"], word),
            call("git_says", top, ["show", f"HEAD:{b}.txt"], "one"),
            call("content", f"{top}/{b}.txt", other),
        ),
        setup=lines(setup),
        initial=(call("git_says", top, ["status", "--porcelain"], "\n".join(f" M {n}.txt" for n in sorted((a, b)))),),
    )


def branch_and_tag(draw: Draw) -> Draft:
    """git branch and git tag at given commits."""
    top, branch, tag, *names = draw.words(draw.number(6, 8))
    history = _History(top)
    for name in names:
        history.commit(f"add {name}", {f"{name}.txt": lines([name])})
    at = draw.number(1, len(names) - 2)
    back = len(names) - 1 - at
    return Draft(
        f"In the git repository {top}, create the branch {branch} and the tag {tag}. Both must point at the "
        f"commit with "
        f"the message 'add {names[at]}'. Stay on the branch main.",
        (
            f"git -C {top} log --oneline --format=%s",
            f"cd {top} && git branch {branch} HEAD~{back} && git tag {tag} {branch}",
        ),
        (
            call("git_says", top, ["log", "-1", "--format=%s", f"refs/heads/{branch}"], f"add {names[at]}"),
            call("git_says", top, ["log", "-1", "--format=%s", f"refs/tags/{tag}"], f"add {names[at]}"),
            call("git_says", top, ["rev-parse", "--abbrev-ref", "HEAD"], "main"),
            call("git_says", top, ["log", "-1", "--format=%s", "refs/heads/main"], f"add {names[-1]}"),
        ),
        setup=history.script,
        initial=(call("git_says", top, ["log", "-1", "--format=%s"], f"add {names[-1]}"),),
    )


def ignore_files(draw: Draw) -> Draft:
    """.gitignore and a clean status."""
    top, a, b, c = draw.words(4)
    suffix = draw.choice(("log", "tmp", "bak", "swp"))
    history = _History(top)
    history.commit(f"add {a}", {f"{a}.txt": f"{a}\n"})
    extra = {f"{top}/{b}.{suffix}": "x\n", f"{top}/{c}/{b}.{suffix}": "x\n"}
    message = f"ignore {suffix} files"
    return Draft(
        f"In the git repository {top}, make git ignore all files that end in .{suffix}, in every folder, by a "
        f".gitignore "
        f"file with this one rule. Commit it with the message '{message}'. Do not delete any file.",
        (f"cd {top} && echo '*.{suffix}' > .gitignore && git add .gitignore && git commit -q -m '{message}'",),
        (
            call("git_says", top, ["log", "--format=%s"], f"{message}\nadd {a}"),
            call("git_says", top, ["status", "--porcelain"], ""),
            call("git_says", top, ["ls-tree", "-r", "--name-only", "HEAD"], f".gitignore\n{a}.txt"),
            call("content", f"{top}/.gitignore", f"*.{suffix}"),
            *(call("unchanged", path, text) for path, text in extra.items()),
        ),
        setup=lines([history.script, *write_files(extra)]),
    )


def restore_deleted(draw: Draw) -> Draft:
    """A file that an earlier commit deleted."""
    top, wanted, *names = draw.words(draw.number(6, 8))
    text = lines(draw.words(3))
    history = _History(top)
    history.commit(f"add {wanted}", {f"{wanted}.txt": "draft\n"})
    history.commit(f"finish {wanted}", {f"{wanted}.txt": text, f"{names[0]}.txt": "1\n"})
    history.commit("clean up", {f"{names[1]}.txt": "1\n"}, delete=[f"{wanted}.txt"])
    for name in names[2:]:
        history.commit(f"add {name}", {f"{name}.txt": lines([name])})
    find = f"git log -1 --format=%h --diff-filter=D -- {wanted}.txt"
    return Draft(
        f"In the git repository {top} the file {wanted}.txt was deleted by some commit. Bring it back into the working "
        "tree with the content that it had just before, and commit it with the message "
        f"'restore {wanted}'. History must not be rewritten.",
        (
            f"cd {top} && git log --format=%s -- {wanted}.txt",
            f"git checkout -q $({find})~1 -- {wanted}.txt && git commit -q -m 'restore {wanted}'",
        ),
        (
            call("content", f"{top}/{wanted}.txt", text),
            call("git_says", top, ["show", f"HEAD:{wanted}.txt"], text.rstrip("\n")),
            call("git_says", top, ["log", "-2", "--format=%s"], f"restore {wanted}\nadd {names[-1]}"),
            call("git_says", top, ["rev-list", "--count", "HEAD"], str(4 + len(names[2:]))),
        ),
        setup=history.script,
        initial=(call("absent", f"{top}/{wanted}.txt"),),
    )


def commits_by_author(draw: Draw) -> Draft:
    """git shortlog as a report."""
    top, b, *names = draw.words(draw.number(8, 13))
    people = draw.sample(PEOPLE, 3)
    authors = [*people, *draw.choices(people, k=len(names) - 3)]
    draw.shuffle(authors)
    history = _History(top)
    for name, author in zip(names, authors, strict=True):
        history.commit(f"add {name}", {f"{name}.txt": lines([name])}, author)
    report = lines(f"{person} {n}" for person, n in sorted(Counter(authors).items()))
    awk = "awk '{print $2, $1}'"
    return Draft(
        f"Write to {b}.txt in your home directory how many commits each author has made in the git repository {top}: "
        "lines 'author count', in alphabetical order of the authors.",
        (f"git -C {top} log --format=%an | LC_ALL=C sort | uniq -c | {awk} > {b}.txt", f"cat {b}.txt"),
        (call("content", f"{b}.txt", report), call("git_says", top, ["rev-list", "--count", "HEAD"], str(len(names)))),
        setup=history.script,
    )


def merge_branch(draw: Draw) -> Draft:
    """git merge --no-ff, then delete the branch."""
    top, branch, a, b, c = draw.words(5)
    history = _History(top)
    history.commit(f"add {a}", {f"{a}.txt": f"{a}\n"})
    history.run(f"checkout -q -b {branch}")
    history.commit(f"add {b}", {f"{b}.txt": f"{b}\n"})
    history.run("checkout -q main")
    history.commit(f"add {c}", {f"{c}.txt": f"{c}\n"})
    message, main = f"merge {branch}", "refs/heads/main"  # "main" alone could be a tag
    return Draft(
        f"In the git repository {top}, merge the branch {branch} into main with a merge commit whose message is "
        f"'{message}', and then delete the branch {branch}.",
        (
            f"cd {top} && git merge -q --no-ff -m '{message}' {branch} && git branch -q -d {branch}",
            "git log --format=%s",
        ),
        (
            call("git_says", top, ["log", "-1", "--format=%s", main], message),
            call("git_says", top, ["log", "--format=%s", f"{main}^1"], f"add {c}\nadd {a}"),
            call("git_says", top, ["log", "-1", "--format=%s", f"{main}^2"], f"add {b}"),
            call("git_says", top, ["for-each-ref", "--format=%(refname)", "refs/heads"], main),
            *(call("git_says", top, ["show", f"{main}:{name}.txt"], name) for name in (a, b, c)),
        ),
        setup=history.script,
        initial=(call("git_says", top, ["log", "-1", "--format=%s", branch], f"add {b}"),),
    )


def revert_commit(draw: Draw) -> Draft:
    """git revert of a commit in the middle."""
    top, *names = draw.words(draw.number(5, 7))
    history = _History(top)
    for name in names:
        history.commit(f"add {name}", {f"{name}.txt": lines([name])})
    bad = draw.choice(names[1:-1])
    left = [name for name in names if name != bad]
    find = f"git log --format=%h --grep='add {bad}$'"
    return Draft(
        f"In the git repository {top}, undo the commit with the message 'add {bad}' by a new commit (git revert), "
        f"without "
        "changing any other file and without rewriting history.",
        (f"cd {top} && git log --format=%s", f"git revert --no-edit $({find}) >/dev/null && git status --short"),
        (
            call(
                "git_says", top, ["ls-tree", "-r", "--name-only", "HEAD"], "\n".join(sorted(f"{n}.txt" for n in left))
            ),
            call("git_says", top, ["rev-list", "--count", "HEAD"], str(len(names) + 1)),
            call("git_says", top, ["log", "-1", "--format=%s", "HEAD^"], f"add {names[-1]}"),
            call("absent", f"{top}/{bad}.txt"),
            *(call("git_says", top, ["show", f"HEAD:{name}.txt"], name) for name in left),
        ),
        setup=history.script,
    )
