"""A mistake of the user's, and the nearest valid name. On the lowest floor: every room raises these."""

from __future__ import annotations

import difflib
import os
import signal
import textwrap
import traceback
import typing


class ConfigError(ValueError):
    """A user's mistake, told in one line. `main` prints it and exits with code 2."""


class WaitedInVainError(RuntimeError):
    """What was waited for did not come in its time: one line that says who waited for what, and for how long.

    It is nobody's mistake that could be mended in a config: whoever started the process starts it again. Commands end
    with exit code `WAITED`.
    """


WAITED = 75  # as in sysexits.h: a failure for now


def nearest(name: str, valid: typing.Iterable[str]) -> str:
    """ " Did you mean 'x'?" for the closest valid name, or a list of all of them."""
    valid = list(valid) or ["none"]
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"Did you mean '{close[0]}'?" if close else f"Valid: {', '.join(valid)}."


def failure_line(error: BaseException) -> str:
    """One line of what code of the user's raised, with the last line of it that was on the way there."""
    ours = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(os.__file__) + os.sep, "<")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    frames = [f for f in frames if f"{os.sep}site-packages{os.sep}" not in f.filename] or frames
    place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 400, placeholder=' ...')}{place}"


EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}  # as the shell has them
NAMES = {signal.SIGINT: "interrupted", signal.SIGTERM: "SIGTERM"}


class Stopped(SystemExit):
    """Ends a run with the signal's exit code. `str` is the line that `main` prints."""

    def __init__(self, signum: signal.Signals, text: str):
        super().__init__(EXIT_CODES[signum])
        self.exit_code = EXIT_CODES[signum]
        self._text = f"{NAMES[signum]}{text}"

    def __str__(self) -> str:
        return self._text
