"""What a program printed, as text that a policy is shown."""

from __future__ import annotations

import re

_ANSI = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])")


def clean(output: bytes) -> str:
    """What a terminal printed as text: no escape sequences, no carriage returns, no blanks at the end."""
    return _ANSI.sub("", output.decode("utf-8", "replace")).replace("\r", "").rstrip()
