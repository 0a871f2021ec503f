"""A site in a real browser: the policy reads a page as a tree of elements (`tree`) and acts on it by their numbers.

    --config.env=browser --config.env.site=miniwob --config.data.source=site

Each attempt has a browser context of its own in a Chromium that serves several (`chromium`), and a `Visit` of
`env.site` that answers all requests of its pages in this process (`sites`): there is no network. Pages have a clock
that goes only when the policy acts, chance that the task decides, and no motion, so the same actions are answered the
same. An action that cannot be done costs a turn and is answered by what is wrong with it. A page that hangs or crashes
is a failed episode.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

from jaxagent.config.choice import Choice
from jaxagent.config.ranges import PositiveInt, Seconds, between
from jaxagent.envs.base import Attempt, Environment, Message, Observation, Opening, Step, Transcript, Verdict
from jaxagent.envs.browser import actions, tree
from jaxagent.envs.browser.chromium import GONE_S, Browsers
from jaxagent.envs.browser.miniwob import MiniWob
from jaxagent.envs.browser.page import BrowserPage
from jaxagent.envs.seeds import seed_of
from jaxagent.types import StopReason, Task, TokenKind

INSTRUCTIONS = f"You use a web browser. Write one action a turn, <action>...</action>, with one of: {actions.WORDS}."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Browser(Environment):
    """A site of `sites.SITES`, seen through Chromium."""

    site: Annotated[Any, Choice("jaxagent.envs.browser.sites:SITES")] = dataclasses.field(default_factory=MiniWob)
    chromium: str = ""  # its program; "" = chromium-headless-shell or another one on the PATH
    episodes_per_browser: PositiveInt = 32  # that one process serves, in contexts of their own; 1 = a process each
    memory_mb: Annotated[int, between(512, 1 << 20)] = 2_048  # of each process of Chromium
    width: Annotated[int, between(100, 10_000)] = 1_280  # of the window, in pixels
    height: Annotated[int, between(100, 10_000)] = 1_024
    elements: PositiveInt = 200  # of a page that are shown at most
    chars: PositiveInt = 8_000  # likewise
    instructions: str = INSTRUCTIONS  # the beginning of every prompt
    start_timeout_s: Seconds = 60.0  # until a Chromium is there
    load_timeout_s: Seconds = 10.0  # until a page has loaded; it is then shown as it is
    step_timeout_s: Seconds = 30.0  # for each answer of a page
    max_turns: PositiveInt = 20
    turn_tokens: PositiveInt = 256
    observation_tokens: PositiveInt = 2_048
    context_tokens: PositiveInt = 16_384

    score = "solved"
    calls = "actions"
    observation_role = "user"
    stop_strings = ("</action>",)
    tokens = ("<action>", "</action>", *tree.MARKS)
    solves = True

    def messages(self, text: str) -> tuple[Message, ...]:
        """The prompt: the goal and the first page are its text."""
        return (Message("user", f"{self.instructions}\n\n{text}\n".lstrip("\n")),)

    def observation(self, action: str, text: str) -> Observation:
        """What is shown after an action."""
        return Observation(((f"\n{text}\n", TokenKind.OBSERVATION),), self.observation_role)

    @property
    def new_task(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The site's; None where it makes no tasks."""
        return getattr(self.site, "new_task", None)

    @contextlib.contextmanager
    def open(self, opening: Opening) -> Iterator[Callable[[Task], BrowserAttempt]]:
        """Starts a Chromium, and looks at the tasks."""
        opening.check(self.site.visit)
        browsers = Browsers(self.chromium, self.episodes_per_browser, self.memory_mb, self.start_timeout_s)
        try:
            program = opening.run(browsers.start(), 3 * self.start_timeout_s)
            opening.note(f"browser: {program}, without its own sandbox; {self.episodes_per_browser} episodes each")
            yield lambda task: BrowserAttempt(task, self, browsers)
            if browsers.killed:
                opening.note(f"browser: {browsers.killed} processes of Chromium crashed or hung and were replaced")
        finally:
            opening.run(browsers.close(), 2 * GONE_S)


class BrowserAttempt(Attempt):
    """One attempt at one task, in a fresh context."""

    stop_strings: Sequence[str] = Browser.stop_strings

    def __init__(self, task: Task, config: Browser, browsers: Browsers) -> None:
        self._task, self._config, self._browsers = task, config, browsers
        self._visit = config.site.visit(task)
        self._page: BrowserPage | None = None
        self._place: tuple[Any, Any] | None = None
        self._prompt = ""
        self._answer: str | None = None
        self._turns = 0
        self.counters: dict[str, float] = {"actions": 0.0, "invalid_actions": 0.0, "refused_requests": 0.0}

    async def start(self) -> Sequence[Message]:
        """Opens the first page, which ends the prompt."""
        config = self._config
        size = {"width": config.width, "height": config.height}
        same = {"locale": "en-US", "timezone_id": "UTC", "reduced_motion": "reduce"}
        refused = {"accept_downloads": False, "service_workers": "block"}
        self._place = await self._browsers.begin(viewport=size, **same, **refused)
        self._page = BrowserPage(self._visit, config, seed_of(self._task))
        await self._page.open(self._place[0])
        goal = await self._visit.goal(self._page)
        self._prompt = f"{goal}\n\n{await self._page.look()}"
        return config.messages(self._prompt)

    async def step(self, action: str) -> Step:
        """Does the action of a reply."""
        page = self._page
        assert page is not None
        self._turns += 1
        done, problem = actions.read(action)
        if done is not None and done.kind == "answer":
            self._answer = done.text
            return Step(stop_reason=StopReason.ANSWER)
        if done is not None:
            problem = await page.act(done)
            self.counters["refused_requests"] = float(page.refused)
        self.counters["invalid_actions" if problem else "actions"] += 1
        if not problem and await self._visit.over(page):
            return Step(stop_reason=StopReason.ANSWER)
        if self._turns >= self._config.max_turns:
            return Step(stop_reason=StopReason.TURN_LIMIT)
        before = page.seen
        text = await page.look() if done is not None else before
        if not problem:
            return Step(self._config.observation(action, text))
        advice = "" if done is not None else f" Write <action>...</action> with one of: {actions.WORDS}."
        parts = [(f"\nNo action: {problem}.{advice}\n", TokenKind.WARNING)]
        parts += [(f"{text}\n", TokenKind.OBSERVATION)] if text != before else []  # it has changed by itself
        return Step(Observation(tuple(parts), self._config.observation_role))

    async def verify(self, transcript: Transcript) -> Verdict:
        """As the site judges."""
        assert self._page is not None
        return await self._visit.judge(self._page, self._answer)

    async def solve(self) -> bool:
        """Plays what the site knows to be the solution."""
        assert self._page is not None
        shown = self._prompt
        while (action := await self._visit.solve(self._page, shown)) is not None:
            step = await self.step(f"<action>{action}</action>")
            if step.observation is None:
                return True
            shown = step.observation.text
        return False

    async def close(self) -> None:
        """Closes the context."""
        if self._page is not None:
            await self._page.close()
        if self._place is not None:
            await self._browsers.leave(*self._place, suspect=self._page is None or self._page.broken)
