"""What a test run said: a map test -> status, read from logs; and whether the tests that count have passed.

A name for which a log says several things has the worst of them, so that what a tested program prints can make a test
look worse, never better than the framework says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

PASSING = ("PASSED", "XFAIL")  # as SWE-bench counts
_WORST = ("PASSED", "XFAIL", "SKIPPED", "XPASS", "FAILED", "ERROR")
_ANSI = re.compile(r"\x1b\[[\d;]*m")
_SUMMARY = re.compile(r"^=+ *short test summary info *=+ *$", re.MULTILINE)
_PYTEST = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (\S.*)$")
_STATUS = r"(ok|OK|FAIL|ERROR|skipped\b.*|expected failure|unexpected success)"
_ENDED = re.compile(rf" \.\.\. +{_STATUS}$")  # on the test's own line
_ALONE = re.compile(rf"^{_STATUS}$")  # after what the test has written
_BEHIND = re.compile(r"(ok|FAIL|ERROR|skipped ('.*'|\".*\")|expected failure|unexpected success)$")  # on its last line
_PLACE = re.compile(r"[^\s()]+(?:\.[^()]*)?")  # module.Class, or from Python 3.11 on module.Class.method
_LINE_CHARS, _PARTS = 2_000, 6  # what is read of a line: a tested program may write any
_BLOCK = re.compile(r"^(FAIL|ERROR|UNEXPECTED SUCCESS): (\S.*)$")  # how what went wrong is told at the end
_WORDS = {"ok": "PASSED", "OK": "PASSED", "ERROR": "ERROR", "expected failure": "XFAIL"}  # others are "FAILED"


def required_passed(outcomes: Mapping[str, str], required: Sequence[str]) -> bool:
    """Whether there are required tests and all of them passed. A name that published lists cut at its first blank
    stands for all tests whose names begin so. Newer Pythons print "test_a (module.Class.test_a)": that is the same test
    as "test_a (module.Class)"."""
    by_full_name: dict[str, str] = {}
    by_first_word: dict[str, str] = {}
    for name, status in outcomes.items():
        _add(by_full_name, _without_method(name), status)
        if " " in name:
            _add(by_first_word, name.partition(" ")[0], status)
    return bool(required) and all(
        by_full_name.get(name, by_first_word.get(name, "")) in PASSING for name in map(_without_method, required)
    )


def _without_method(name: str) -> str:
    method, bracket, place = name.partition(" (")
    return f"{method} ({place.removesuffix(f'.{method})')})" if bracket and place.endswith(f".{method})") else name


def of_pytest(log: str) -> dict[str, str]:
    """Of `pytest -rA`: its short summary, or where it has no headline every line that begins with a status.

    PASSED stands before an id and nothing else. Behind the other ids is a message, after " - ": an id with brackets
    ends at the first "]" before it, others at the first " - " behind the path.
    """
    log = _ANSI.sub("", log)
    summary = _SUMMARY.search(log)
    outcomes: dict[str, str] = {}
    for line in log[summary.end() if summary else 0 :].splitlines():
        if (match := _PYTEST.match(line.strip())) is not None:
            _add(outcomes, match[2] if match[1] == "PASSED" else _without_message(match[2]), match[1])
    return outcomes


def _without_message(text: str) -> str:
    path, colons, test = text.partition("::")
    bracket, dash = test.find("["), test.find(" - ")
    if not colons or dash < 0:  # a file that could not be read, or no message
        return text if colons else text.partition(" - ")[0]
    if -1 < bracket < dash:
        bracket_end = test.find("] - ", bracket)
        dash = bracket_end + 1 if bracket_end >= 0 else len(test) if test.endswith("]") else dash
    return path + colons + test[:dash]


def of_unittest(log: str) -> dict[str, str]:
    """Of `unittest -v` and of Django's runner with verbosity 2.

    A test is named as it describes itself, "test_a (module.Class)", and by the first line of its docstring, which
    stands on the next line. Between "..." and the status comes whatever was written meanwhile. Before Python 3.11 a
    test whose subtests fail has no status, and the next one begins on its line: only the blocks at the end tell of it.
    """
    outcomes: dict[str, str] = {}
    names: set[str] = set()  # of the test that began last
    skipped: set[str] = set()  # tests of which a subtest was skipped
    before = last = of_block = ""  # the end of the line before; the last that the test has written; a block's status

    def end(status: str) -> None:
        for name in names:
            _add(outcomes, name, "SKIPPED" if status.startswith("skipped") else _WORDS.get(status, "FAILED"))

    for line in (line.strip() for line in _ANSI.sub("", log).splitlines()):
        if len(line) > _LINE_CHARS:
            line = line[: _LINE_CHARS // 2] + line[-_LINE_CHARS // 2 :]
        block = _BLOCK.match(line) if set(before) == {"="} or line.startswith("UNEXPECTED") else None
        if of_block and not block:  # the docstring of the test of which the block tells, or a line of dashes
            names = {line} if set(line) != {"-"} else set()
            end(of_block)
            names, of_block = set(), ""
            continue
        started = " ... " in line or line.endswith(" ...")
        status_match = _ENDED.search(line)
        text = line[: status_match.start()] if status_match else line.removesuffix(" ...")
        begins = started and any(map(_test_of, (before, *text.split(" ... "))))
        if (block or begins or set(line) == {"="} or _test_of(line)) and (behind := _BEHIND.search(last)):
            end(behind[1])
            names, last = set(), ""
        if block:
            names = {_test_of(block[2]) or block[2]}
            end(block[1])
            of_block = block[1]
        elif started and (begins or not names or status_match):
            texts = _names(text, before)
            names = texts | (set() if begins else names)
            last = "" if status_match else text.rpartition(" ... ")[2]
            has_subtests = any(_test_of(one) not in ("", one) for one in texts)
            if status_match and status_match[1].startswith("skipped") and has_subtests:
                skipped |= names  # newer Pythons say of the test itself that it is ok
            elif status_match:
                skipped -= names
                end(status_match[1])
        elif names and (alone := _ALONE.match(line)):
            end(alone[1])
        elif names and line:
            last = line
        before = line.rpartition(" ... ")[2]
    names = skipped
    end("skipped")
    return outcomes


def _names(text: str, before: str) -> set[str]:
    """What the test before " ... " is called, in a line that may hold an earlier test or what was written."""
    parts = text.split(" ... ")
    own = [place for place, part in enumerate(parts) if _test_of(part)]
    begin = own[-1] if own else 0
    texts = {" ... ".join(parts[begin:end]) for end in range(begin + 1, len(parts) + 1)[:_PARTS]} | {text}
    if begin == 0 and _test_of(before):  # the test's own name; this is its docstring
        texts.add(before)
    return texts | {_test_of(name) or name for name in texts}


def _test_of(text: str) -> str:
    """The test that a text describes, or of which it describes a subtest, "test_a (m.C) [message] (i=1)"; "" = none."""
    at = text.find(" (")
    end = text.find(")", at) + 1
    if at < 1 or not end or not _PLACE.fullmatch(text, at + 2, end - 1):
        return ""
    ends_there = end == len(text) or (text[end : end + 2] in (" [", " (") and text[-1] in "])")
    return text[:end] if ends_there else ""


def of_r2e(log: str) -> dict[str, str]:
    """As R2E-Gym reads pytest's short summary: PASSED, FAILED and ERROR, without the file's name, joined by dots."""
    log = _ANSI.sub("", log)
    if "short test summary info" not in log:
        return {}
    outcomes: dict[str, str] = {}
    for line in log.split("short test summary info")[1].strip().splitlines():
        status = next((word for word in ("PASSED", "FAILED", "ERROR") if word in line), "")
        if status:
            name = ".".join(line.split("::")[1:])
            _add(outcomes, name.split(" - ")[0] if status != "PASSED" else name, status)
    return outcomes


def same_map(outcomes: Mapping[str, str], expected: Mapping[str, str]) -> bool:
    """Equality as R2E-Gym has it, after its clean-up of names: no colours, and nothing behind " - ".

    A name that is empty, of a file that could not be read, counts for the number of tests and for nothing else.
    """
    statuses, expected_statuses = (
        {_ANSI.sub("", name).split(" - ")[0]: status for name, status in sorted(side.items())}
        for side in (outcomes, expected)
    )
    return len(statuses) == len(expected_statuses) and all(
        expected_statuses.get(name) == status for name, status in statuses.items() if name
    )


LOGS: dict[str, Callable[[str], dict[str, str]]] = {"pytest": of_pytest, "unittest": of_unittest}


def forged(outcomes: Mapping[str, str], exit_status: int) -> bool:
    """Whether a log without a failure comes from a run that ended with one: the tested program has printed it and ended
    the framework."""
    return (
        bool(outcomes)
        and exit_status != 0
        and not any(status in ("FAILED", "ERROR", "XPASS") for status in outcomes.values())
    )


def _add(outcomes: dict[str, str], name: str, status: str) -> None:
    outcomes[name] = max(outcomes.get(name, "PASSED"), status, key=_WORST.index)
