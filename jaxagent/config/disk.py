"""Whether an error means a full disk: libraries report one in different ways."""

from __future__ import annotations

import errno
import os

CODES = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: BaseException | None) -> bool:
    """Whether the error, or one that it was raised from, says that a disk or a quota is full.

    tensorstore raises a ValueError, safetensors an error of its own; both errors carry the operating system's message.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            if error.errno in CODES:
                return True
        elif any(os.strerror(code) in str(error) for code in CODES):
            return True
        error = error.__cause__ or error.__context__
    return False
