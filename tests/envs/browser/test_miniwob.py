"""MiniWoB++'s own pages, of the package miniwob: MINIWOB names its folder html where the package is not installed."""

import collections
import os

import pytest

from jaxagent.config import ConfigError
from jaxagent.data import sources
from jaxagent.data_pipelines.environment_tasks import SiteTasks
from jaxagent.envs.base import Transcript
from jaxagent.envs.browser.environment import Browser, BrowserAttempt
from jaxagent.envs.browser.miniwob import LEFT_OUT, SOLUTIONS, MiniWob
from jaxagent.types import StopReason, Task
from tests.envs.browser.playing import gather

SITE = MiniWob(folder=os.environ.get("MINIWOB", ""))
IDLE = Transcript("", ())


@pytest.fixture(scope="module")
def names():
    try:
        return SITE.names()
    except ConfigError as missing:
        pytest.skip(str(missing))


def task(name, seed):
    return Task(f"{name}-{seed}", name, (), name, {"seed": seed})


async def solved(browsers, name, seed):
    """(whether the steps ended the attempt, its reward, the reward of one that does nothing)."""
    attempt, idle = (BrowserAttempt(task(name, seed), Browser(site=SITE), browsers) for _ in range(2))
    try:
        await attempt.start()
        await idle.start()
        return await attempt.solve(), (await attempt.verify(IDLE)).reward, (await idle.verify(IDLE)).reward
    finally:
        await attempt.close()
        await idle.close()


@pytest.mark.slow
def test_real_clicks_earn_1_and_nothing_earns_0(browsers, names):
    opened, workers = browsers
    assert len(SOLUTIONS) >= 12 and set(SOLUTIONS) <= set(names)
    for name in SOLUTIONS:
        results = workers.run(gather(*(solved(opened, name, seed) for seed in range(2))), 100)
        assert results == [(True, 1.0, 0.0)] * 2, name


@pytest.mark.slow
def test_every_page_opens_and_is_the_same_again(browsers, names):
    opened, workers = browsers

    async def opens(name):
        shown = []
        for seed in (5, 5):
            attempt = BrowserAttempt(task(name, seed), Browser(site=SITE, max_turns=3), opened)
            try:
                (message,) = await attempt.start()
                step = await attempt.step("<action>click 1</action>")
                shown.append((message.content, step))
            finally:
                await attempt.close()
        return name, *shown

    for begin in range(0, len(names), 4):
        for name, first, again in workers.run(gather(*map(opens, names[begin : begin + 4])), 200):
            assert first == again, name
            assert "[1]" in first[0] and len(first[0]) < 9_000, name
            assert "there is no network" not in first[0], name


def test_a_wrong_click_is_paid_as_the_page_pays(browsers, names):
    opened, workers = browsers

    async def wrong():
        attempt = BrowserAttempt(task("click-test-2", 1), Browser(site=SITE), opened)
        try:
            await attempt.start()
            number = 2 if '[1] button "ONE"' in attempt._page.seen else 1
            step = await attempt.step(f"<action>click {number}</action>")
            return step.stop_reason, await attempt.verify(IDLE)
        finally:
            await attempt.close()

    reason, verdict = workers.run(wrong(), 60)
    assert reason == StopReason.ANSWER and verdict.reward == -1.0 and verdict.components["solved"] == 0.0


def test_which_pages_are_left_out_is_said(names):
    there = {path.stem for path in (SITE.root / "miniwob").glob("*.html")}
    assert set(LEFT_OUT) <= there and len(names) == len(there) - len(LEFT_OUT) >= 85
    assert all(LEFT_OUT.values())
    with pytest.raises(ConfigError, match="no page 'no-such-page'"):
        MiniWob(pages=("no-such-page",), folder=SITE.folder).names()
    for prompt in ("../../etc/passwd", "no-such-page", ""):
        with pytest.raises(ConfigError, match="has a page as its prompt"):
            SITE.visit(Task("t", prompt, (), "", {"seed": 1}))


def test_only_files_of_the_package_are_answered(names):
    visit = SITE.visit(task("click-test", 1))
    assert visit.respond("GET", "/core/core.js", {}).content_type.endswith("javascript")
    for method, path in (("POST", "/core/core.js"), ("GET", "/../../../etc/passwd"), ("GET", "//etc/passwd")):
        assert visit.respond(method, path, {}) is None
    assert visit.respond("GET", "/core", {}) is None


def test_tasks_are_pages_and_seeds(names, tmp_path):
    env = Browser(site=SITE)
    folder = SiteTasks(num_train=300, num_heldout=100).folder(str(tmp_path), 0, env, lambda line: None)
    read = {split: sources.load_tasks(folder, split, need_answers=False) for split in ("train", "heldout")}
    assert len(read["train"]) == 300 and len(read["heldout"]) == 100
    assert all(SITE.visit(one).url.endswith(f"/{one.kind}.html") for split in read.values() for one in split)
    tasks = SITE.tasks(0, 300, 100)
    seeds = [row["metadata"]["seed"] for split in tasks.values() for row in split]
    assert len(set(seeds)) == 400 and tasks == SITE.tasks(0, 300, 100) != SITE.tasks(1, 300, 100)
    assert set(collections.Counter(row["prompt"] for row in tasks["heldout"]).values()) <= {1, 2}
