"""A task's repository in a sandbox: bringing it there, and taking an agent's change out as text.

git reads nothing here that an agent can have written but the objects and the files of the repository: the change is
taken with a git directory of our own, which has no hooks, no configuration, no attributes of its own and an index that
is made new, against the tree that was there before the agent came. Commits, branches, stashes and the index of the
agent's have no influence.
"""

from __future__ import annotations

import functools
import io
import secrets
import shlex
import tarfile
from collections.abc import Mapping
from pathlib import Path

from jaxagent.envs.coding.patches import BYTES, HARNESS
from jaxagent.envs.coding.task import CodingTask
from jaxagent.envs.terminal.verify import VerifierError, removal
from jaxagent.sandbox.base import CommandResult, FileError, Sandbox

STEP_TIMEOUT_S = 120.0  # of one command of git's, as slime has it
SETUP_TIMEOUT_S = 600.0  # of one command of the task's own
OUTPUT_BYTES = 20_000
_INDEX_BYTES = 2**26  # of git's index, which is a file that is written, too
ENV = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_AUTHOR_NAME": "nobody",
    "GIT_AUTHOR_EMAIL": "nobody@localhost",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00+0000",
    "GIT_COMMITTER_NAME": "nobody",
    "GIT_COMMITTER_EMAIL": "nobody@localhost",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00+0000",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}
_UNPACK = """
set -e
mkdir -p "$1"
for archive in $2; do tar -xf "$archive" -C "$1"; rm -f "$archive"; done
if [ "$3" ]; then
  to=$("$4" -s -c 'import site; print(site.getusersitepackages())')
  mkdir -p "$to"
  tar -xf "$3" -C "$to"
  rm -f "$3"
fi
cd "$1"
[ -e .git ] || { git -c init.defaultBranch=main init -q; git add -A -f .; git commit -q -m "The repository"; }
"""
# Takes paths out of the one commit that _UNPACK made, and its old self away. A history of the task's own stays.
_FORGET = """
set -e
git() { command git -c safe.directory='*' "$@"; }
[ "$(git log --all --format=%ae)" = "$GIT_AUTHOR_EMAIL" ] || exit 0
git rm -r -q --cached --ignore-unmatch -- "$@"
git commit -q --amend --no-edit --allow-empty
rm -rf .git/logs .git/ORIG_HEAD
git prune --expire=now
"""
# The tree of what is there, without a change of the index: prints its id, then where git keeps its objects.
_BASE = """
set -e
git() { command git -c safe.directory='*' "$@"; }
index=$(mktemp)
own=$(git rev-parse --git-path index)
[ ! -f "$own" ] || cp "$own" "$index"
GIT_INDEX_FILE=$index git add -A --ignore-errors . >/dev/null 2>&1 || true
GIT_INDEX_FILE=$index git write-tree
rm -f "$index"
cd "$(git rev-parse --git-path objects)" && pwd
"""
# $1 the repository, $2 the tree, $3 its objects, $4 a new folder, $5 the most blocks of 512 bytes of the output.
_CHANGE = """
set -e
ulimit -f "$5" 2>/dev/null || true  # what the sandbox allows may be less
mkdir -p "$4/git/objects/info" "$4/git/refs"
echo "$3" > "$4/git/objects/info/alternates"
echo "ref: refs/heads/none" > "$4/git/HEAD"
cat > "$4/git/config" <<END
[core]
	repositoryformatversion = 0
	bare = false
	quotePath = false
	untrackedCache = false
	fsmonitor = false
	bigFileThreshold = 4m
END
export GIT_DIR="$4/git" GIT_WORK_TREE="$1" HOME="$4" XDG_CONFIG_HOME="$4"
cd "$1"
chmod -R u+rwX . 2>/dev/null || true
git read-tree "$2"
git add -N --ignore-errors . >/dev/null 2>&1 || true
git diff --no-ext-diff --no-textconv --no-color --no-renames --ignore-submodules=all --full-index \
  --src-prefix=a/ --dst-prefix=b/ --output="$4/change.diff" "$2" -- . """


async def bring(sandbox: Sandbox, task: CodingTask) -> None:
    """Brings the repository into its initial state. Raises VerifierError: some part of it failed. Says nothing about an
    agent."""
    archives = [_bytes_of(task.archive)] if task.archive is not None else []
    archives += [_packed(task.files)] if task.files else []  # unpacked on top
    packed = {f"/tmp/{i}.tar": data for i, data in enumerate(archives)}
    for path, data in packed.items():
        await sandbox.write(path, data)
    tools = ""
    if task.tools is not None:
        tools = "/tmp/tools.tar"
        await sandbox.write(tools, _bytes_of(task.tools))
    argv = ("sh", "-c", _UNPACK, "sh", task.workdir, " ".join(packed), tools, task.python)
    _check_result(task, "the repository", await sandbox.execute(argv, SETUP_TIMEOUT_S, OUTPUT_BYTES, ENV, "/"))
    for command in task.setup:
        argv = ("bash", "-c", f"set -e\n{command}")
        result = await sandbox.execute(argv, SETUP_TIMEOUT_S, OUTPUT_BYTES, ENV, task.workdir)
        _check_result(task, "setup", result)


async def bring_for_agent(sandbox: Sandbox, task: CodingTask) -> tuple[str, str]:
    """The same, without what the agent must not see. Returns what it will be compared with: git's id of the tree, and
    the folder in the sandbox that has its objects.

    Raises as `bring`, also where no change could be taken: later that would look like the agent's doing.
    """
    await bring(sandbox, task)
    if task.hidden:
        paths = " ".join(map(shlex.quote, task.hidden))
        result = await sandbox.execute(("sh", "-c", f"rm -rf {paths}"), STEP_TIMEOUT_S, OUTPUT_BYTES, ENV, task.workdir)
        _check_result(task, "hiding the tests", result)
        inside = tuple(path for path in task.hidden if not path.startswith("/"))
        argv = ("sh", "-c", _FORGET, "sh", *inside)
        result = await sandbox.execute(argv, STEP_TIMEOUT_S, OUTPUT_BYTES, ENV, task.workdir)
        _check_result(task, "hiding the tests", result)
    result = await sandbox.execute(("sh", "-c", _BASE), STEP_TIMEOUT_S, OUTPUT_BYTES, ENV, task.workdir)
    _check_result(task, "git's tree", result)
    lines = result.output.decode("utf-8", "replace").splitlines()
    if len(lines) != 2:
        raise VerifierError(f"{task.id}: git's tree cannot be told from {lines!r:.200}")
    base = (lines[0], lines[1])
    try:
        already = await change(sandbox, task, base, OUTPUT_BYTES)
    except FileError as failure:
        raise VerifierError(f"{task.id}: no change can be taken: {failure}") from None
    if already:
        raise VerifierError(f"{task.id}: git sees a change before the agent came: {already[:200]}")
    return base


async def change(sandbox: Sandbox, task: CodingTask, base: tuple[str, str], max_bytes: int) -> str:
    """What the agent changed, as a patch against what was there: new files included that .gitignore does not name,
    without what the harness put there. All processes must have been stopped.

    Raises:
      FileError: no change can be taken: the repository is gone, or there is too much of it. It is the agent's doing:
        the same commands have worked before it came.
      SandboxError: the sandbox is gone.
    """
    place = f"/tmp/.change-{secrets.token_hex(8)}"
    excluded = " ".join(shlex.quote(f":(exclude){path.removesuffix('*')}") for path in HARNESS)
    blocks = str((_INDEX_BYTES + max_bytes) // 512)
    commands = "; ".join(removal(f"{folder}/{secrets.token_hex(8)}") for folder in ("/tmp", task.workdir))
    commands += f"; mkdir -p /tmp {shlex.quote(task.workdir)}"  # whatever the agent closed, or put into their place
    argv = ("sh", "-c", commands + _CHANGE + excluded, "sh", task.workdir, *base, place, blocks)
    result = await sandbox.execute(argv, STEP_TIMEOUT_S, OUTPUT_BYTES, ENV, "/")
    if result.exit_code != 0 or result.timed_out:
        raise FileError(f"git cannot tell it: {_tail(result)}")
    return (await sandbox.read(f"{place}/change.diff", max_bytes)).decode(*BYTES)


def _packed(files: Mapping[str, str]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for path, content in files.items():
            data = content.encode()
            about = tarfile.TarInfo(path)
            about.size, about.mode = len(data), 0o644
            archive.addfile(about, io.BytesIO(data))
    return target.getvalue()


@functools.lru_cache(maxsize=16)
def _bytes_of(path: Path) -> bytes:
    """A file that many attempts need; the files of a data set do not change during a run."""
    return path.read_bytes()


def _check_result(task: CodingTask, what: str, result: CommandResult) -> None:
    if result.exit_code != 0 or result.timed_out:
        raise VerifierError(f"{task.id}: {what} failed in a fresh sandbox: {_tail(result)}")


def _tail(result: CommandResult) -> str:
    how = "past its deadline" if result.timed_out else f"status {result.exit_code}"
    return f"{how}. {result.output.decode('utf-8', 'replace').strip()[-300:]}".strip()
