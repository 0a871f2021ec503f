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
_UNITTEST = re.compile(r"^(\S+ \([\w.]+\)) \.\.\. (ok|FAIL|ERROR|skipped\b.*|expected failure|unexpected success)$")
_WORDS = {"ok": "PASSED", "FAIL": "FAILED", "ERROR": "ERROR", "expected failure": "XFAIL"}


def required_passed(outcomes: Mapping[str, str], required: Sequence[str]) -> bool:
    """Whether there are required tests and all of them passed. A name that published lists cut at its first blank
    stands for all tests whose names begin so. Newer Pythons print "test_a (module.Class.test_a)": that is the same test
    as "test_a (module.Class)"."""
    outcomes = {_without_method(name): status for name, status in outcomes.items()}
    cut: dict[str, str] = {}
    for name, status in outcomes.items():
        if " " in name:
            _add(cut, name.partition(" ")[0], status)
    return bool(required) and all(
        outcomes.get(name, cut.get(name, "")) in PASSING for name in map(_without_method, required)
    )


def _without_method(name: str) -> str:
    method, found, place = name.partition(" (")
    return f"{method} ({place.removesuffix(f'.{method})')})" if found and place.endswith(f".{method})") else name


def of_pytest(log: str) -> dict[str, str]:
    """Of `pytest -rA`: its short summary, or where it has no headline every line that begins with a status."""
    log = _ANSI.sub("", log)
    found = _SUMMARY.search(log)
    outcomes: dict[str, str] = {}
    for line in log[found.end() if found else 0 :].splitlines():
        if (match := _PYTEST.match(line.strip())) is not None:
            _add(outcomes, match[2].split(" - ")[0].strip(), match[1])
    return outcomes


def of_unittest(log: str) -> dict[str, str]:
    """Of `unittest -v` and of Django's runner with verbosity 2; names as they print them, "test_a (module.Class)"."""
    outcomes: dict[str, str] = {}
    for line in _ANSI.sub("", log).splitlines():
        if (match := _UNITTEST.match(line.strip())) is not None:
            status = "SKIPPED" if match[2].startswith("skipped") else _WORDS.get(match[2], "FAILED")
            _add(outcomes, match[1], status)
    return outcomes


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
    """Exact equality, after R2E-Gym's clean-up of names: no colours, nothing behind " - ", no empty name."""
    found, wanted = (
        {clean: status for name, status in side.items() if (clean := _ANSI.sub("", name).split(" - ")[0])}
        for side in (outcomes, expected)
    )
    return found == wanted


LOGS: dict[str, Callable[[str], dict[str, str]]] = {"pytest": of_pytest, "unittest": of_unittest}


def forged(outcomes: Mapping[str, str], exit_status: int) -> bool:
    """Whether a log without a failure comes from a run that ended with one: the tested program has printed it and ended
    the framework."""
    return exit_status != 0 and not any(status in ("FAILED", "ERROR", "XPASS") for status in outcomes.values())


def _add(outcomes: dict[str, str], name: str, status: str) -> None:
    outcomes[name] = max(outcomes.get(name, "PASSED"), status, key=_WORST.index)
