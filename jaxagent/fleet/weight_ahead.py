"""A version fetched before it is asked for, while episodes go on under another one: one at a time, in the background.

    ahead.expect(7)              # returns at once
    with ahead.instead(7):       # it is needed now: waits for it, or gives up fetching another one
        ...

What comes lies where a fetch for use puts it, so who needs it finds it, or the chunks of it that came. A failure is no
news: the version is fetched when it is needed, and what is wrong is told then.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)
NONE = -1


class Ahead:
    """Fetches what will probably be needed next.

    Args:
      fetch: called in a thread with a version and with what says whether it is still wanted; does nothing for a version
        that is here; raises where it cannot be had, at once, since somebody may wait for its end.
    """

    def __init__(self, fetch: Callable[[int, Callable[[], bool]], object]):
        self._fetch = fetch
        self._changed = threading.Condition()
        self._version, self._wanted = NONE, True  # what is being fetched
        self._needed = 0  # versions that are needed now: nothing else is begun

    def expect(self, version: int) -> None:
        """A version will be needed. Forgotten where another one is under way: who expects it says so again."""
        with self._changed:
            if self._version != NONE or self._needed:
                return
            self._version, self._wanted = version, True
        threading.Thread(target=self._run, args=(version,), name="weights ahead", daemon=True).start()

    @contextlib.contextmanager
    def instead(self, version: int) -> Iterator[None]:
        """While this is open, the version is needed: what is fetched of it has come, and nothing else is fetched."""
        with self._changed:
            self._needed += 1
            self._wanted = self._version == version
            self._changed.wait_for(lambda: self._version != version)
        try:
            yield
        finally:
            with self._changed:
                self._needed -= 1

    def _run(self, version: int) -> None:
        try:
            self._fetch(version, lambda: self._wanted)
        except Exception as failure:  # whatever it is, it shows again where the version is needed
            logger.info("Version %d does not come ahead of time: %s", version, failure)
        finally:
            with self._changed:
                self._version = NONE
                self._changed.notify_all()
