"""A site of pages that a test writes, and attempts at it."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

from jaxagent.envs.base import Verdict
from jaxagent.envs.browser.environment import Browser, BrowserAttempt
from jaxagent.envs.browser.sites import Response
from jaxagent.types import Task

FAST = {"load_timeout_s": 2.0, "step_timeout_s": 6.0}  # for pages that do not answer


@dataclasses.dataclass(frozen=True)
class Pages:
    """Path -> a page's body, a Response, or a function of (method, form) that gives one."""

    pages: Any = None
    url: str = "http://site.test/"

    def visit(self, task):
        return PagesVisit(self)


class PagesVisit:
    def __init__(self, site):
        self.url, self._pages = site.url, site.pages
        self.asked = []

    def respond(self, method, path, form):
        self.asked.append((method, path, dict(form)))
        page = self._pages.get(path)
        if callable(page):
            page = page(method, form)
        return Response(page) if isinstance(page, (str, bytes)) else page

    async def goal(self, page):
        return "Look."

    async def over(self, page):
        return False

    async def judge(self, page, answer):
        return Verdict(float(answer == "right"), {"solved": float(answer == "right")})

    async def solve(self, page, shown):
        return None


class Play:
    """An attempt, step by step from a test. Closed at the end of `with`."""

    def __init__(self, browsers, pages, url="http://site.test/", seed=7, **settings):
        opened, self._workers = browsers
        pages = pages if isinstance(pages, dict) else {"/": pages}
        self.config = Browser(site=Pages(pages, url), **settings)
        self.attempt = BrowserAttempt(Task("t", "Look.", (), "", {"seed": seed}), self.config, opened)

    def run(self, coroutine, timeout_s=60):
        return self._workers.run(coroutine, timeout_s)

    def __enter__(self):
        try:
            (message,) = self.run(self.attempt.start())
        except BaseException:
            self.run(self.attempt.close())
            raise
        self.first = message.content.split("Look.\n\n", 1)[1].rstrip("\n")
        return self

    def __exit__(self, *error):
        self.run(self.attempt.close())

    def act(self, action):
        """What is shown after an action; the stop reason where the episode is over."""
        step = self.run(self.attempt.step(f"<action>{action}</action>"))
        return step.stop_reason or step.observation.text.strip("\n")

    def js(self, script):
        return self.run(self.attempt._page.evaluate(script))

    @property
    def asked(self):
        return self.attempt._visit.asked

    @property
    def refused(self):
        return self.attempt._page.refused


async def gather(*coroutines):
    return await asyncio.gather(*coroutines)


def until(true, seconds=20.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.05)
