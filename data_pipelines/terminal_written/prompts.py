"""What the writing model is asked, and how its replies are read. Pure text; the words are ours, the steps published.

Endless Terminals (arXiv 2601.16443) draws category x complexity x scenario, 62 x 6 x 54 of them; its lists are its own.
"""

from __future__ import annotations

import dataclasses
import random
import re

CATEGORIES = (
    "finding files by name, size or age", "renaming many files", "cleaning a CSV file", "joining two tables",
    "counting and ranking words", "summing columns with awk", "editing configuration with sed",
    "rewriting paths in scripts", "INI files", "JSON reports", "YAML files", "XML and HTML snippets",
    "log analysis", "log rotation", "web server access logs", "parsing timestamps", "time zones and dates",
    "tar archives", "zip and gzip", "checksums and manifests", "file permissions", "symbolic and hard links",
    "directory trees", "disk usage reports", "duplicate files", "text encodings and line ends", "regular expressions",
    "sorting and merging", "diff and patch", "git history", "git branches and merges", "git bisect and blame",
    "shell functions and scripts", "environment variables", "cron-like schedules", "processes and signals",
    "background jobs", "pipes and named pipes", "exit codes and error handling", "Makefiles", "Python scripts",
    "Python virtual environments without a network", "SQLite databases", "CSV to SQL", "hash tables in awk",
    "matrix and number crunching", "random samples with a fixed seed", "text templates", "Markdown documents",
    "small static web sites", "local HTTP servers", "user accounts as text files", "backup and restore",
    "incremental synchronisation", "file locking", "quotas", "binary files with xxd and od", "base64 and hex",
    "encryption with openssl", "finding a needle in many files", "repairing a broken script", "profiling a slow script",
)  # fmt: skip
COMPLEXITIES = (
    "one command with the right options", "two or three commands in a row", "a short pipeline with a condition",
    "several files that must agree with each other", "a small script with error handling",
    "an investigation first, then a repair",
)  # fmt: skip
SCENARIOS = (
    "a new colleague's first day", "a server that is out of disk space", "a laboratory's measurements",
    "a library's catalogue", "a bakery's orders", "a school's timetable", "a hospital's anonymised records",
    "a small web shop", "a game's save files", "an astronomer's observations", "a choir's sheet music",
    "a newspaper's archive", "a city's bus lines", "a weather station", "a museum's inventory", "a bicycle workshop",
    "a translation project", "a research group's paper", "a podcast's episodes", "a photographer's pictures",
    "a farm's sensors", "a bank's statements", "a theatre's tickets", "a hiking club's routes", "a chess club",
    "a code review", "a release of a program", "a broken nightly job", "a migration to another server",
    "an audit", "a lost configuration", "an intern's mistakes", "a data set for machine learning",
    "a build that fails", "a security review", "a court's documents", "a recipe collection", "an airline's manifest",
    "a warehouse", "an election's results", "a survey's answers", "a radio's playlist", "a zoo's feeding plan",
    "a genealogist's notes", "a water company's meters", "a marathon's timings", "a film's subtitles",
    "a printer's queue", "a mailing list", "a telescope's nights", "a ship's log book", "a coral reef's census",
    "a puzzle among friends", "a home server",
)  # fmt: skip


class ReplyError(ValueError):
    """A reply that cannot be used; the message says why, in one line."""


@dataclasses.dataclass(frozen=True)
class Idea:
    """What a task is to be about."""

    category: str
    complexity: str
    scenario: str


def draw(seed: int, index: int) -> Idea:
    """The idea of task `index`: the same in every call."""
    at = random.Random(f"{seed}/{index}")
    return Idea(at.choice(CATEGORIES), at.choice(COMPLEXITIES), at.choice(SCENARIOS))


WORLD = (
    "The task is done in a Linux container: bash, coreutils, python3 and the programs that the container's definition "
    "installs; no root rights, no network, home and working directory /home/user."
)


def ask_task(idea: Idea) -> str:
    """The first request."""
    return (
        "Write one task for an agent that works in a terminal.\n"
        f"Subject: {idea.category}. Difficulty: {idea.complexity}. Setting: {idea.scenario}.\n"
        f"{WORLD}\n"
        "What the agent is to leave behind must be checkable by a program: name every path, format and rule that the "
        "check will look at, and leave out how to do it. There must be exactly one right result.\n"
        "Answer with what the agent is told, and with what only the author of the tests knows (the files that exist at "
        "the beginning with their contents, and the exact right result):\n"
        "<task>...</task>\n<truth>...</truth>"
    )


def ask_initial_test(task: str, truth: str) -> str:
    """The second request."""
    return (
        f"A terminal task:\n<task>{task}</task>\n<truth>{truth}</truth>\n{WORLD}\n"
        "Write a pytest file that checks the state before the agent begins: what the task presupposes is there. It "
        "must not look at anything that the agent is to make, not even at its absence. Standard library and pytest "
        "only. Answer with the file in one ```python block."
    )


def ask_final_test(task: str, truth: str, initial_test: str) -> str:
    """The third request."""
    return (
        f"A terminal task:\n<task>{task}</task>\n<truth>{truth}</truth>\n{WORLD}\n"
        f"This checks the state before the agent begins:\n```python\n{initial_test}\n```\n"
        "Write a pytest file that checks the state after the agent has finished: it passes exactly when the task was "
        "done, whatever way the agent took, and fails on the initial state. Standard library and pytest only. Answer "
        "with the file in one ```python block."
    )


def ask_definition(task: str, truth: str, initial_test: str, base: str) -> str:
    """The fourth request."""
    return (
        f"A terminal task:\n<task>{task}</task>\n<truth>{truth}</truth>\n{WORLD}\n"
        f"This must pass in the container:\n```python\n{initial_test}\n```\n"
        f"Write the container's apptainer definition. It begins with\nBootstrap: localimage\nFrom: {base}\n"
        "and has a %post section that makes the initial state below /home/user, as root. python3 and pytest are "
        "installed already. Do not make anything that the agent is to make. Answer with the file in one ``` block."
    )


def read_task(reply: str) -> tuple[str, str]:
    """(what the agent is told, what only the author knows).

    Raises:
      ReplyError: one of the two is missing or empty.
    """
    found = [re.search(rf"<{tag}>(.*?)</{tag}>", reply, re.DOTALL) for tag in ("task", "truth")]
    parts = [match[1].strip() if match else "" for match in found]
    if not all(parts):
        raise ReplyError("the reply has no <task>...</task> with text, or no <truth>...</truth>")
    return parts[0], parts[1]


def read_test(reply: str) -> str:
    """A pytest file that compiles and holds a test.

    Raises:
      ReplyError: it does not.
    """
    code = read_block(reply)
    try:
        compile(code, "test.py", "exec")
    except (SyntaxError, ValueError) as error:
        raise ReplyError(f"the test does not compile: {error}") from None
    if not re.search(r"^\s*(async )?def test", code, re.MULTILINE):
        raise ReplyError("the test file holds no function test_...")
    return code


def read_definition(reply: str, base: str) -> str:
    """The definition, over `base` whatever it says, and with a home directory that the agent may enter.

    Raises:
      ReplyError: no %post section.
    """
    text = read_block(reply)
    _, section, rest = text.partition("%post")
    if not section:
        raise ReplyError("the definition has no %post section")
    body, *others = re.split(r"^(?=%)", rest.partition("\n")[2], flags=re.MULTILINE)
    end = "    mkdir -p /home/user\n    chmod 755 /home/user\n"
    return f"Bootstrap: localimage\nFrom: {base}\n\n%post\n{body.rstrip()}\n{end}\n{''.join(others)}".rstrip() + "\n"


def read_block(reply: str) -> str:
    """The last fenced block of a reply, or all of a reply without one.

    Raises:
      ReplyError: it is empty.
    """
    blocks = re.findall(r"^```[\w-]*[ \t]*\n(.*?)^```", reply, re.DOTALL | re.MULTILINE)
    text = (blocks[-1] if blocks else reply).strip()
    if not text:
        raise ReplyError("the reply is empty")
    return text + "\n"
