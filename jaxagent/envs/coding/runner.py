"""Runs tests inside the sandbox and writes what came of each: `python3 -s -B runner.py settings.json`.

Python 3.6 or later and, for pytest's tests, pytest; nothing of this package is there. The statuses go into a file whose
place only the settings say, together with a word that only they hold; both are removed before any tested code is
loaded. What that code prints is never read. A test that must fail, under a random name, runs among the others: where
that one passes, somebody has changed what passing means.
"""

import json
import os
import sys
import unittest


def main():
    """Runs what the settings name."""
    with open(sys.argv[1], encoding="utf-8") as file:
        settings = json.load(file)
    os.unlink(sys.argv[1])
    os.unlink(sys.argv[0])
    folder, secret, place = settings["folder"], settings.pop("secret"), settings.pop("results")
    os.chdir(folder)
    sys.path[:] = sys.path[1:] + settings["packages"]
    run = run_pytest if settings["framework"] == "pytest" else run_unittest
    outcomes, messages, canary = run(settings, [folder, folder + "/src"])
    with open(place, "w", encoding="utf-8") as file:
        json.dump({"secret": secret, "outcomes": outcomes, "messages": messages, "canary": canary}, file)
    sys.stdout.flush()
    os._exit(0)  # threads that a test has left would wait for ever


def make_importable(folders, packages):
    """The repository as `python -m pytest` finds it, for this process and those that tests start."""
    sys.path[:0] = folders
    os.environ["PYTHONPATH"] = os.pathsep.join(folders + packages)


def run_pytest(settings, folders):
    """Statuses and messages by node id, and the status of the test that must fail."""
    import pytest  # before the repository can be imported: it cannot stand in its place

    name = settings["canary"]
    first = (settings["files"] or ["."])[0]
    canary = os.path.join(os.path.dirname(first), name + ".py")
    with open(canary, "w", encoding="utf-8") as file:
        file.write("def " + name + "():\n    raise AssertionError()\n")
    make_importable(folders, settings["packages"])
    recorder = Recorder()
    files = [path for path in settings["files"] if os.path.exists(path)]
    arguments = ["-q", "--tb=short", "-p", "no:cacheprovider", "-o", "addopts=", "--continue-on-collection-errors"]
    arguments += ["-p", "no:randomly", "-p", "no:xdist", "--rootdir=."]
    pytest.main(arguments + files + [canary], plugins=[recorder])
    os.unlink(canary)
    return told(recorder, name)


def note(record, name, status, message=None):
    """Keeps the worst status of a test, and what its first failure says."""
    order = ["PASSED", "XFAIL", "SKIPPED", "XPASS", "FAILED", "ERROR"]
    record.outcomes[name] = max(record.outcomes.get(name, "PASSED"), status, key=order.index)
    if message is not None and status in ("FAILED", "ERROR"):
        record.messages.setdefault(name, message[:2000])


def told(record, canary):
    """The statuses and messages without those of the test that must fail, and its status."""
    outcomes = record.outcomes
    canary_statuses = [outcomes.pop(key) for key in list(outcomes) if canary in key]
    messages = {key: text for key, text in record.messages.items() if canary not in key}
    return outcomes, messages, canary_statuses[0] if len(canary_statuses) == 1 else ""


class Recorder:
    """A plugin of pytest's that keeps the worst status of each test."""

    def __init__(self):
        self.outcomes, self.messages = {}, {}

    def pytest_collectreport(self, report):
        """Notes a file that cannot be imported."""
        if report.failed:
            self._add(report.nodeid, "ERROR", report)

    def pytest_runtest_logreport(self, report):
        """Notes how a phase of a test ended: its setup, the test itself, or its end."""
        if hasattr(report, "wasxfail") and "xfail" not in report.keywords:
            self._add(report.nodeid, "FAILED", report)  # pytest.xfail(), which the tested code can call as well
        elif hasattr(report, "wasxfail"):
            self._add(report.nodeid, "XPASS" if report.passed else "XFAIL", report)
        elif report.failed:
            self._add(report.nodeid, "FAILED" if report.when == "call" else "ERROR", report)
        elif report.skipped:
            self._add(report.nodeid, "SKIPPED", report)
        elif report.when == "call":
            self._add(report.nodeid, "PASSED", report)

    def _add(self, name, status, report):
        crash = getattr(getattr(report, "longrepr", None), "reprcrash", None)
        note(self, name, status, str(getattr(crash, "message", "")))


def run_unittest(settings, folders):
    """The same, by the names that tests give themselves."""
    make_importable(folders, settings["packages"])
    loader = unittest.TestLoader()
    suite = unittest.TestSuite()
    result = RecordingResult()
    for name in settings["names"]:
        try:
            suite.addTests(loader.loadTestsFromName(name))
        except Exception as error:  # the loader itself catches only ImportError
            note(result, name, "ERROR", failure_text((type(error), error)))
    canary = settings["canary"]

    def fails(self):
        self.fail()

    suite.addTest(type("Canary", (unittest.TestCase,), {canary: fails})(canary))
    suite.run(result)
    return told(result, canary)


def failure_text(error):
    """What (type, exception, ...) says."""
    return error[0].__name__ + ": " + str(error[1])


def noting(status):
    """A method that notes a test, with its error if it has one that is no other's affair."""

    def add(self, test, error=None):
        note(self, test.id(), status, failure_text(error) if status in ("FAILED", "ERROR") and error else None)

    return add


class RecordingResult(unittest.TestResult):
    """A result of unittest's that keeps the worst status of each test."""

    addSuccess, addSkip, addExpectedFailure = noting("PASSED"), noting("SKIPPED"), noting("XFAIL")
    addFailure, addError, addUnexpectedSuccess = noting("FAILED"), noting("ERROR"), noting("FAILED")

    def __init__(self):
        unittest.TestResult.__init__(self)
        self.outcomes, self.messages = {}, {}

    def addSubTest(self, test, subtest, err):
        """Notes a subtest that did not pass; those that passed say nothing of their test."""
        if err is not None:
            self.addFailure(test, err)


if __name__ == "__main__":
    main()
