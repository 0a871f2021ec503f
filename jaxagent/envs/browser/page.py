"""`BrowserPage`: the one tab of an attempt. It answers requests, carries out actions and reads what is shown.

Playwright's session of the DevTools protocol does it: its Fetch domain pauses every request, of redirects too, before
anything of it leaves the browser. Every wait has its deadline.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import inspect
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jaxagent.envs.browser import tree
from jaxagent.envs.browser.actions import Action
from jaxagent.envs.browser.requests import form_of, site_of
from jaxagent.envs.browser.sites import Response, Visit

WORLD, TREE, HANDS = (Path(__file__).with_name(f"{name}.js").read_text("utf-8") for name in ("world", "tree", "hands"))
START_MS = 1_704_110_400_000  # of a page's clock: noon of 1 January 2024, UTC
TICK_MS = 1_000  # that pass on the page's clock after each action
MOST_LOOKED, MOST_NOTES, MOST_HOPS = 50_000, 6, 10  # nodes of a page; notes of a turn; pages that follow by themselves
KEYED_CHARS = 100  # typed key by key; a longer text is put in at once


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of one page."""

    elements: int
    chars: int
    load_s: float  # until a page has loaded, or is read as it is
    step_s: float  # for one answer of the page


class BrowserPage:
    """One tab. `open` first.

    Attributes:
      refused: requests that no site answered.
      broken: whether the page has crashed or does not answer.
      seen: what the last `look` has shown.
    """

    def __init__(self, visit: Visit, limits: Limits, seed: int) -> None:
        self._visit, self._limits, self._seed = visit, limits, seed
        self._origin = site_of(visit.url)
        self._page: Any = None
        self._session: Any = None
        self._frame = ""
        self._still, self._moved = asyncio.Event(), asyncio.Event()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failure: BaseException | None = None  # of the site
        self._hops: dict[str, int] = {}  # of the chains of redirects
        self._tasks: set[asyncio.Task[None]] = set()
        self._notes: list[str] = []
        self._numbered: list[int] = []
        self._lines: list[str] = []
        self.refused, self.broken = 0, False
        self.seen = ""

    @property
    def url(self) -> str:
        """The page's address."""
        return self._page.url

    async def open(self, context: Any) -> None:
        """Opens the site's first page in a fresh context.

        Raises:
          TimeoutError, ConnectionError: it does not come.
        """
        self._page = await context.new_page()
        self._session = await context.new_cdp_session(self._page)
        on = self._page.on
        on("dialog", lambda dialog: self._begin(self._close_dialog(dialog)))
        on("popup", lambda popup: self._begin(self._wait(popup.close())))
        on("download", lambda download: self._note("A download was refused."))
        on("filechooser", lambda chooser: self._note("The page asked for a file: there is none."))
        on("websocket", lambda socket: self._refuse(socket.url))
        on("crash", lambda page: self._end("the page has crashed"))
        on("close", lambda page: self._end("the page is closed"))
        for name, handler in (
            ("Fetch.requestPaused", lambda event: self._begin(self._answer(event))),
            ("Page.frameStartedLoading", lambda event: self._moves(event, True)),
            ("Page.frameStartedNavigating", lambda event: self._moves(event, True)),
            ("Page.frameStoppedLoading", lambda event: self._moves(event, False)),
            ("Page.windowOpen", lambda event: self._note("A new tab was refused: pages open in this one.")),
            ("Page.navigatedWithinDocument", lambda event: self._moved.set()),
        ):
            self._session.on(name, handler)
        world = WORLD.replace("(START, SEED)\n", f"({START_MS}, {self._seed})\n")
        *_, frames = await asyncio.gather(
            self._send("Page.enable"),
            self._send("Fetch.enable", patterns=[{"urlPattern": "*"}]),
            self._send("Page.addScriptToEvaluateOnNewDocument", source=world),
            self._send("Page.getFrameTree"),
        )
        self._frame = frames["frameTree"]["frame"]["id"]
        self._still.clear()
        self._begin(self._send("Page.navigate", url=self._visit.url))  # its answer comes with the page
        await self._settle()
        if self._page.url == "about:blank":
            why = " ".join(self._notes)
            raise self._failure or ConnectionError(f"the site's first page {self._visit.url} does not come: {why}")

    async def act(self, action: Action) -> str:
        """Does it; what was wrong with it, or ""."""
        self._notes.clear()
        if action.kind in ("click", "type", "select"):
            if not 0 < action.number <= len(self._numbered):
                return f"there is no element {action.number}"
            problem = await self._on_element(action)
        elif action.kind == "scroll":
            moved = await self._in_tree(f"({HANDS})({json.dumps({'act': 'scroll', 'text': action.text})})")
            problem = "" if moved else f"the page does not scroll further {action.text}"
        elif action.kind == "back":
            problem = await self._back()
        else:
            await self._wait(self._page.keyboard.press(action.text))
            problem = ""
        if not problem:
            await self._settle()
        return problem

    async def look(self) -> str:
        """What is shown: what happened since the last action, and the page.

        Raises:
          TimeoutError, ConnectionError: the page does not answer, or has crashed.
          Exception: what the site has raised.
        """
        for attempt in range(MOST_HOPS):
            limits = {"most": self._limits.elements + 1, "look": MOST_LOOKED}
            try:
                view = await self._in_tree(f"({TREE})({json.dumps(limits)})")
                break
            except _Gone:  # it has just gone on to another page
                if attempt == MOST_HOPS - 1:
                    raise TimeoutError("the page never stays") from None
                await self._settle()
        if self._failure is not None:
            raise self._failure
        elements = [tree.Element(*item) for item in view["items"]]
        text, self._numbered = tree.page_text(
            view["title"],
            view["address"],
            elements,
            view["above"],
            view["below"],
            view["left"],
            self._limits.elements,
            self._limits.chars,
        )
        self._lines = [tree.line(element) for element in elements]
        notes = [*self._notes, *(["The page is longer than what was read of it."] if view["cut"] else [])]
        self._notes.clear()
        self.seen = "\n".join([*notes, text])
        return self.seen

    async def evaluate(self, script: str) -> Any:
        """The JSON value of an expression among the page's own scripts."""
        return await self._evaluate(script)

    async def _on_element(self, action: Action) -> str:
        place = self._numbered[action.number - 1]
        arguments = {"index": place, "act": action.kind, "text": action.text}
        try:
            there = await self._in_tree(f"({HANDS})({json.dumps(arguments)})")
        except _Gone:
            there = {"problem": "is no longer on the page"}
        if "problem" in there:
            by = there.get("by")
            inner = by and (self._lines[by["place"]] if by["place"] >= 0 else f'"{tree.clean(by["text"], 60)}"')
            return f"element {action.number} {there['problem']}{f' by {inner}' if inner else ''}"
        if "x" not in there:  # done
            return ""
        if action.kind == "click":
            await self._wait(self._page.mouse.click(there["x"], there["y"]))
            return ""
        keyboard = self._page.keyboard
        await self._wait(keyboard.press("Delete"))  # of what is selected
        if len(action.text) <= KEYED_CHARS:
            await self._wait(keyboard.type(action.text))
        else:
            await self._wait(keyboard.insert_text(action.text))
        return ""

    async def _back(self) -> str:
        history = await self._send("Page.getNavigationHistory")
        at, entries = history["currentIndex"], history["entries"]
        if at < 1 or entries[at - 1]["url"] == "about:blank":
            return "there is no page to go back to"
        self._moved.clear()
        await self._send("Page.navigateToHistoryEntry", entryId=entries[at - 1]["id"])
        try:
            async with asyncio.timeout(self._limits.load_s):
                await self._moved.wait()
        except TimeoutError:
            self._note("The page did not go back.")
        return ""

    async def _settle(self) -> None:
        """Waits until the page has loaded and done what it does of itself, on its own clock."""
        for _ in range(MOST_HOPS):
            try:
                async with asyncio.timeout(self._limits.load_s):
                    await self._still.wait()
            except TimeoutError:
                self._note(f"The page has not finished loading in {self._limits.load_s:g} s.")
                await self._send("Page.stopLoading")
                self._still.set()
            try:
                await self._evaluate(f"window.__advance?.({TICK_MS}, {int(self._limits.load_s * 1e3)})")
            except _Gone:
                self._moved.clear()
                await asyncio.sleep(0)  # the events of the next page are on their way
                continue
            if self._still.is_set():
                return
        self._note("The page goes on to further pages without end: it was stopped.")
        await self._send("Page.stopLoading")
        self._still.set()

    async def _answer(self, event: dict[str, Any]) -> None:
        """Has the site answer a paused request."""
        request = event["request"]
        is_page = event["resourceType"] == "Document" and event["frameId"] == self._frame
        try:
            hops = self._hops[event["requestId"]] = self._hops.pop(event.get("redirectedRequestId", ""), -1) + 1
            response = None
            if site_of(request["url"]) == self._origin and hops <= MOST_HOPS:
                method, path, form = form_of(request)
                response = self._visit.respond(method, path, form)
                if inspect.isawaitable(response):
                    response = await response
        except Exception as error:
            self._failure, response = error, None
        if response is None:
            if hops > MOST_HOPS:
                self._note("The page redirects without end.")
            self._refuse(request["url"], is_page)
            # A page that is not there leaves the present one.
            reason = "Aborted" if is_page else "BlockedByClient"
            await self._send("Fetch.failRequest", requestId=event["requestId"], errorReason=reason)
            return
        await self._send("Fetch.fulfillRequest", requestId=event["requestId"], **_fulfilled(response))

    def _refuse(self, url: str, is_page: bool = False) -> None:
        self.refused += 1
        parts = urlsplit(url)
        if site_of(url) != self._origin:
            self._note(
                f'The page asked for "{tree.clean(f"{parts.scheme}://{parts.netloc}", 60)}": there is no network.'
            )
        elif is_page:
            self._note(f'There is no page "{tree.clean(parts.path, 60)}".')

    async def _close_dialog(self, dialog: Any) -> None:
        accepted = dialog.type != "prompt"
        if dialog.type != "beforeunload":
            done = "It was accepted." if accepted else "It was dismissed."
            self._note(f'The page opened a dialog ({dialog.type}): "{tree.clean(dialog.message)}". {done}')
        await self._wait(dialog.accept() if accepted else dialog.dismiss())

    def _note(self, text: str) -> None:
        if text not in self._notes and len(self._notes) < MOST_NOTES:
            self._notes.append(text)

    def _moves(self, event: dict[str, Any], away: bool) -> None:
        if event["frameId"] != self._frame:
            return
        if away:
            self._still.clear()
            self._moved.set()
        else:
            self._still.set()

    def _end(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_exception(ConnectionError(reason))
            self._ended.exception()  # looked at

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Begins what an event asks for. A failure of it shows in what the page does then."""

        async def safely() -> None:
            with contextlib.suppress(Exception):  # the page has gone on, or is closed
                await coroutine

        task = asyncio.get_running_loop().create_task(safely())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _in_tree(self, script: str) -> Any:
        """Evaluates in the tree's world of the main frame."""
        world = await self._send("Page.createIsolatedWorld", frameId=self._frame, worldName="tree")
        return await self._evaluate(script, contextId=world["executionContextId"])

    async def _evaluate(self, script: str, **where: Any) -> Any:
        answer = await self._send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True, **where
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise RuntimeError(f"{details.get('exception', {}).get('description', details['text'])[:300]}")
        return answer["result"].get("value")

    async def _send(self, method: str, **parameters: Any) -> Any:
        return await self._wait(self._session.send(method, parameters))

    async def _wait(self, answer: Coroutine[Any, Any, Any]) -> Any:
        """The answer of playwright, in time."""
        from playwright.async_api import Error

        task = asyncio.ensure_future(answer)
        try:
            await asyncio.wait((task, self._ended), timeout=self._limits.step_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            self.broken = True
            if self._ended.done():
                self._ended.result()
            raise TimeoutError(f"the page does not answer in {self._limits.step_s:g} s")
        except Error as error:
            if self._ended.done():
                self.broken = True
                self._ended.result()
            words = str(error)
            if any(sign in words for sign in _Gone.SIGNS):
                raise _Gone from None
            raise ConnectionError(words.splitlines()[0]) from None
        finally:
            if not task.done():
                task.cancel()
            elif not task.cancelled():
                task.exception()  # looked at


class _Gone(Exception):
    """The document in which something was to happen is no longer there."""

    SIGNS = ("context was destroyed", "Cannot find context", "navigated or closed", "Promise was collected")


def _fulfilled(response: Response) -> dict[str, Any]:
    body = response.body.encode() if isinstance(response.body, str) else response.body
    headers = {"content-type": response.content_type, "cache-control": "no-store"}
    if response.location:
        headers["location"] = response.location
    return {
        "responseCode": response.status,
        "responseHeaders": [{"name": name, "value": value} for name, value in headers.items()],
        "body": base64.b64encode(body).decode(),
    }
