"""What is left of a run's browsers: no process, no profile, no port, no file, whatever became of the run."""

import asyncio
import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

from jaxagent.config import ConfigError
from jaxagent.envs.base import Opening
from jaxagent.envs.browser.chromium import Browsers
from jaxagent.envs.browser.environment import Browser, BrowserAttempt
from jaxagent.rollout.workers import Workers
from jaxagent.types import Task
from tests.envs.browser.conftest import program
from tests.envs.browser.playing import Pages, until

ROOT = pathlib.Path(__file__).resolve().parents[3]
PAGES = {
    "/": "<input aria-label=Find><a href=/next>Next</a><button onclick='for(;;);'>Hang</button>"
    "<script>localStorage.a = document.cookie = 'a=1'; new Worker(URL.createObjectURL(new Blob(['1'])))</script>",
    "/next": "<p>There.</p>",
}


GROUPS: dict[pathlib.Path, set[int]] = {}


def processes(folder):
    """Those that have a run's folder as their place for temporary files, and all that were ever of their groups.

    (What Chromium's zygote has forked writes its title over its variables.)
    """
    groups, now = GROUPS.setdefault(folder, set()), {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            now[int(name)] = os.getpgid(int(name))
            if f"TMPDIR={folder}/".encode() in pathlib.Path(f"/proc/{name}/environ").read_bytes():
                groups.add(now[int(name)])
        except OSError:
            pass
    return {pid for pid, group in now.items() if group in groups - {os.getpgrp()}}


def ports(pids):
    """Sockets on which one of the processes listens."""
    listening = set()
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                listening.add(f"socket:[{fields[9]}]")
    there = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            there |= {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")} & listening
    return there


def leftovers():
    """Folders of this process's browsers. (Other runs of this machine have theirs.)"""
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith(f"jaxagent-browser-{os.getpid()}-")}


def opened(pages, browsers_of=None, **settings):
    """A run's environment, as `Environment.open` has it."""
    environment = Browser(site=Pages(pages), chromium=program(), **settings)
    workers = Workers(64)
    return environment, workers


async def episode(attempt, actions):
    try:
        shown = [(await attempt.start())[0].content]
        for action in actions:
            step = await attempt.step(f"<action>{action}</action>")
            shown.append(step.observation.text if step.observation else "")
        return (await attempt.verify(None)).reward, tuple(shown)
    finally:
        await attempt.close()


@pytest.mark.slow
def test_200_episodes_at_32_at_once_leave_nothing(browsers):
    before, folders = leftovers(), set()
    environment, workers = opened(PAGES, step_timeout_s=20.0)
    with workers:
        opening = Opening(None, [], workers.run, lambda line: None)
        with environment.open(opening) as attempt_at:
            (name,) = leftovers() - before
            folder = pathlib.Path(tempfile.gettempdir(), name)
            folders.add(folder)
            most = []

            async def play():
                places = asyncio.Semaphore(32)

                async def one(i):
                    actions = ("type 1 red mug", "click 2", "back", "answer right")
                    async with places:
                        try:
                            attempt = attempt_at(Task(str(i), "Look.", ()))
                            return await episode(attempt, ("click 3",) if i % 50 == 7 else actions)
                        except (TimeoutError, ConnectionError) as failure:
                            return type(failure)

                async def watch():
                    while True:
                        most.append((len(pids := processes(folder)), len(ports(pids))))
                        await asyncio.sleep(0.5)

                watching = asyncio.create_task(watch())
                try:
                    return await asyncio.gather(*map(one, range(200)))
                finally:
                    watching.cancel()

            results = workers.run(play(), 500)
            played = [result for result in results if isinstance(result, tuple)]
            assert len(played) == 196 and results.count(TimeoutError) == 4, results
            assert len(set(played)) == 1 and played[0][0] == 1.0  # all saw the same, whoever else played
            assert max(count for count, _ in most) > 32 and max(count for _, count in most) == 0
            profiles = [path for path in (folder / "tmp").iterdir() if "profile" in path.name]
            assert len(profiles) <= 2
    assert leftovers() == before and not any(processes(folder) for folder in folders)


def test_one_episode_in_each_process(browsers):
    """With `episodes_per_browser=1`; what was killed is replaced."""
    with Workers(8) as workers:
        own = Browsers(program(), 1, 2_048, 60.0)
        workers.run(own.start(), 100)
        folder = own._folder

        async def play():
            (first, one), (second, other) = await own.begin(), await own.begin()
            assert one.group != other.group
            os.killpg(one.group, 9)
            await own.leave(first, one, suspect=False)
            assert own.killed == 1 and other in own._all
            await own.leave(second, other, suspect=False)
            third, last = await own.begin()
            await own.leave(third, last, suspect=False)
            assert not own._all

        try:
            workers.run(play(), 100)
        finally:
            workers.run(own.close(), 60)
        assert not folder.exists() and not processes(folder)


RUN = """
import asyncio, sys
from jaxagent.envs.browser.chromium import Browsers
from tests.envs.browser.playing import Pages
from tests.envs.browser.test_browser_processes import PAGES
from jaxagent.envs.browser.environment import Browser, BrowserAttempt
from jaxagent.types import Task

async def play():
    config = Browser(site=Pages(PAGES), chromium=sys.argv[1])
    browsers = Browsers(config.chromium, 2, 2048, 60)
    await browsers.start()
    print(browsers._folder, flush=True)
    async def one(i):
        attempt = BrowserAttempt(Task(str(i), "Look.", ()), config, browsers)
        await attempt.start()
        print("open", flush=True)
        while True:
            await attempt.step("<action>click 3</action>" if i == 0 else "<action>type 1 x</action>")
            await asyncio.sleep(0)
    await asyncio.gather(*map(one, range(4)))

asyncio.run(play())
"""


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["the run", "the run and its keeper", "the driver"])
def test_kill_9_in_the_middle_leaves_nothing(browsers, whom):
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, program()], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    folder = pathlib.Path(run.stdout.readline().strip())
    for _ in range(4):
        assert run.stdout.readline() == "open\n"
    there = processes(folder)
    assert len(there) >= 6
    keeper = next(pid for pid in there if f"--while={folder}" in _words(pid))
    if whom == "the run and its keeper":  # nobody is left who could kill: all that can end by itself does
        os.kill(run.pid, 9)
        os.kill(keeper, 9)
        until(lambda: not processes(folder), 40)  # a page's endless loop, too
        subprocess.run(["rm", "-r", folder], check=False)
    elif whom == "the driver":
        os.kill(next(pid for pid in there if "run-driver" in _words(pid) and pid != keeper), 9)
        until(lambda: not processes(folder) and not folder.exists())
        run.kill()
    else:
        os.kill(run.pid, 9)
        until(lambda: not processes(folder) and not folder.exists())
    run.wait(20)


@pytest.mark.slow
def test_a_driver_that_dies_costs_its_episodes_and_is_started_again(browsers):
    """A page that posts 100 MB has it use up its memory."""
    before, pages = leftovers(), Pages(PAGES)
    with Workers(2) as workers:
        opened = Browsers(program(), 100, 2_048, 60.0)
        workers.run(opened.start(), 100)
        try:
            first = BrowserAttempt(Task("t", "", (), "", {"seed": 1}), Browser(site=pages), opened)
            workers.run(first.start(), 60)
            there = processes(opened._folder)
            os.kill(next(p for p in there if "run-driver" in _words(p) and "--while=" not in _words(p)), 9)
            until(lambda: not opened._folder.exists())
            both = [BrowserAttempt(Task("t", "", (), "", {"seed": 1}), Browser(site=pages), opened) for _ in range(2)]
            workers.run(_all(first.close(), *(episode(attempt, ["click 2"]) for attempt in both)), 60)
            assert opened.killed == 1
        finally:
            workers.run(opened.close(), 60)
    assert leftovers() == before and not any(map(processes, GROUPS))


async def _all(*coroutines):
    return await asyncio.gather(*coroutines)


def _words(pid):
    return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"program": "/no/such/chromium"}, "config.env.chromium='/no/such/chromium' is no program"),
        ({"program": "/bin/false"}, "config.env.chromium='/bin/false' does not start: BrowserType.launch"),
    ],
)
def test_what_is_missing_is_told_at_the_start(browsers, settings, words):
    before = leftovers()
    with Workers(2) as workers:
        own = Browsers(settings["program"], 1, 2_048, 20.0)
        with pytest.raises(ConfigError, match=words):
            workers.run(own.start(), 60)
        workers.run(own.close(), 60)
    assert leftovers() == before


def test_a_machine_without_any_is_told_what_to_install(browsers, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with Workers(2) as workers:
        own = Browsers("", 1, 2_048, 20.0)
        with pytest.raises(ConfigError, match="install Debian's chromium-headless-shell"):
            workers.run(own.start(), 60)
        workers.run(own.close(), 60)


def test_without_playwright_one_sentence_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "playwright.async_api", None)
    with pytest.raises(ConfigError, match="pip install playwright"):
        asyncio.run(Browsers("", 1, 2_048, 20.0).start())
