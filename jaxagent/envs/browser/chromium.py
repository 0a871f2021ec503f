"""`Browsers`: the Chromium processes of a run, driven by playwright over pipes, and gone with the run whatever happens.

One keeper (envs/keeper.py) is the parent of playwright's driver, and that of every Chromium, which has a process group
of its own. All they write lies in one temporary folder. When this process ends, also by kill -9, a pipe closes, and the
keeper kills them all and removes the folder. Nothing listens on a port.

An episode has a fresh context: cookies, storage, cache and a renderer process of its own. A Chromium serves so many,
some of them at once, and then goes; one that misbehaved is given no more, and is killed with its group.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.envs import keeper

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CLOSE_S, GONE_S = 4.0, 20.0  # for a context or browser to close, and for all processes to be gone
ARGUMENTS = (
    # No network: no name is resolved, addresses neither, every connection goes by a proxy that does not exist.
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--proxy-server=http://no-network.invalid:9",
    "--proxy-bypass-list=<-loopback>",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--dns-prefetch-disable",
    "--disable-quic",
    # One renderer process for a page and all its frames.
    "--disable-site-isolation-trials",
    # A picture is asked for when it is there, not when a frame is drawn that has it near.
    "--blink-settings=lazyLoadEnabled=false",
    # Nobody looks.
    "--disable-threaded-compositing",
    "--in-process-gpu",
    "--disable-software-rasterizer",
    "--mute-audio",
)
_DRIVER = "PLAYWRIGHT_NODEJS_PATH"  # the variable by which playwright is told of a program to run its driver


@dataclasses.dataclass
class _Chromium:
    browser: Any  # playwright's
    group: int  # of its processes
    episodes_begun: int = 0
    episodes_open: int = 0
    suspect: bool = False


class Browsers:
    """Opens browser contexts. Started, used and closed on one loop.

    Args:
      program: Chromium's path; "" = the first of `NAMES` on the path, or playwright's own.
      episodes: that one process serves.
      memory_mb: of each of its processes.
      start_s: until a process is there.

    Attributes:
      killed: processes that misbehaved.
    """

    def __init__(self, program: str, episodes: int, memory_mb: int, start_s: float) -> None:
        self._program, self._episodes, self._memory_mb, self._start_s = program, episodes, memory_mb, start_s
        self._folder: Path | None = None
        self._wanted = -1
        self._playwright: Any = None
        self._all: list[_Chromium] = []
        self._starting = asyncio.Lock()
        self.killed = 0

    async def start(self) -> str:
        """Starts playwright and a first process; returns Chromium's path and version.

        Raises:
          ConfigError: what is needed is not installed, or does not start.
        """
        try:
            from playwright.async_api import Error, async_playwright
        except ImportError:
            raise ConfigError("config.env=browser needs the package playwright: pip install playwright.") from None
        folder = self._folder = Path(tempfile.mkdtemp(prefix=f"jaxagent-browser-{os.getpid()}-"))
        (folder / "tmp").mkdir()
        os.mkfifo(folder / "wanted")
        self._wanted = os.open(folder / "wanted", os.O_RDWR)
        before = os.environ.get(_DRIVER)
        os.environ[_DRIVER] = str(self._write_driver(folder, before))
        try:
            async with asyncio.timeout(2 * self._start_s):
                self._playwright = await async_playwright().start()
                self._program = self._found()
                return f"{self._program}, {(await self._launch()).browser.version}"
        except (Error, OSError, TimeoutError) as error:  # playwright draws boxes around what it says
            lines = [line.strip(" ║═╔╗╚╝.") for line in str(error).splitlines()]
            why = next(filter(None, lines), type(error).__name__)
            raise ConfigError(f"config.env.chromium='{self._program}' does not start: {why}.") from None
        finally:
            os.environ.pop(_DRIVER)
            os.environ |= {} if before is None else {_DRIVER: before}

    def _write_driver(self, folder: Path, node: str | None) -> Path:
        """A program that runs playwright's driver under a keeper."""
        import playwright

        node = node or str(Path(str(playwright.__file__)).parent / "driver" / "node")
        words = (sys.executable, "-I", "-S", keeper.__file__, f"--while={folder}", node)
        limits = f"ulimit -c 0\nulimit -d {self._memory_mb * 1024}"
        path = folder / "driver"
        program = f'#!/bin/sh\nexport TMPDIR={shlex.quote(f"{folder}/tmp")}\n{limits}\nexec {shlex.join(words)} "$@"\n'
        path.write_text(program, encoding="utf-8")
        path.chmod(0o700)
        return path

    def _found(self) -> str:
        own = self._playwright.chromium.executable_path
        for name in (self._program,) if self._program else (*NAMES, own):
            if path := shutil.which(name):
                return path
        if self._program:
            raise ConfigError(f"config.env.chromium='{self._program}' is no program that can be run here.")
        raise ConfigError(
            "config.env=browser finds no Chromium on the PATH: install Debian's chromium-headless-shell or chromium, "
            "run 'playwright install --only-shell chromium', or name its program by config.env.chromium."
        )

    async def _launch(self) -> _Chromium:
        async with asyncio.timeout(self._start_s):
            browser = await self._playwright.chromium.launch(
                executable_path=self._program,
                args=[*ARGUMENTS, f"--js-flags=--max-old-space-size={self._memory_mb // 2}"],
                **dict.fromkeys(("handle_sigint", "handle_sigterm", "handle_sighup"), False),
            )
            session = await browser.new_browser_cdp_session()
            processes = (await session.send("SystemInfo.getProcessInfo"))["processInfo"]
            (pid,) = (process["id"] for process in processes if process["type"] == "browser")
        self._all.append(_Chromium(browser, os.getpgid(pid)))
        return self._all[-1]

    async def begin(self, **settings: Any) -> tuple[Any, Any]:
        """A fresh context of playwright, and the place that `leave` takes; settings of its `Browser.new_context`.

        Raises:
          Exception: playwright's; no Chromium can be started, or it does not answer.
        """
        async with self._starting:
            if not (chromium := next(filter(self._free, self._all), None)):
                chromium = await asyncio.shield(asyncio.ensure_future(self._started()))
            chromium.episodes_begun += 1
            chromium.episodes_open += 1
        try:
            return await asyncio.wait_for(chromium.browser.new_context(**settings), self._start_s), chromium
        except BaseException:
            await self.leave(None, chromium, suspect=True)
            raise

    async def _started(self) -> _Chromium:
        """Another Chromium. Where playwright's driver has died, so have all that there were: another one is started."""
        if self._driver_lives:
            return await self._launch()
        self.killed += 1
        await self.close()
        self._playwright = None
        try:
            await self.start()
        except ConfigError as failure:
            raise ConnectionError(str(failure)) from None
        return self._all[-1]

    @property
    def _driver_lives(self) -> bool:
        return self._folder is not None and self._folder.exists()  # its keeper removes it; playwright tells nobody

    def _free(self, chromium: _Chromium) -> bool:
        is_whole = not chromium.suspect and chromium.episodes_begun < self._episodes
        return is_whole and chromium.browser.is_connected() and self._driver_lives

    async def leave(self, context: Any, chromium: _Chromium, suspect: bool) -> None:
        """Closes a context. A Chromium that has served its episodes, or was suspected, goes with the last of them."""
        chromium.suspect |= suspect
        try:
            if context is not None:
                await asyncio.wait_for(context.close(), CLOSE_S)
        except Exception:  # it hangs, or has died
            chromium.suspect = True
        finally:
            chromium.episodes_open -= 1
            if not chromium.episodes_open and (chromium.suspect or chromium.episodes_begun >= self._episodes):
                await self._end(chromium)

    async def _end(self, chromium: _Chromium) -> None:
        if chromium not in self._all:  # it has ended with its driver
            return
        self._all.remove(chromium)
        with contextlib.suppress(Exception):
            if not chromium.suspect:
                return await asyncio.wait_for(chromium.browser.close(), CLOSE_S)
        self.killed += 1
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(chromium.group, signal.SIGKILL)

    async def close(self) -> None:
        """Ends every process and removes the folder. Raises RuntimeError: some do not go."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        await asyncio.gather(*map(self._end, list(self._all)))
        if self._playwright is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._playwright.stop(), CLOSE_S)
        os.close(self._wanted)
        if self._playwright is None:  # nobody else removes it
            shutil.rmtree(folder, ignore_errors=True)
        for _ in range(int(GONE_S / 0.02)):
            if not folder.exists():
                return
            await asyncio.sleep(0.02)
        raise RuntimeError(f"processes of {folder} do not end")
