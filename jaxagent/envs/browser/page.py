"""`BrowserPage`: the one tab of an attempt. It answers requests, carries out actions and reads what is shown.

Playwright's session of the DevTools protocol does it: its Fetch domain pauses every request, of redirects too, before
anything of it leaves the browser. Every wait has its deadline.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import inspect
import json
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from jaxagent.envs.browser import tree
from jaxagent.envs.browser.actions import Action
from jaxagent.envs.browser.sites import Visit

if TYPE_CHECKING:
    from jaxagent.envs.browser.environment import Browser

WORLD, TREE, HANDS = (Path(__file__).with_name(f"{name}.js").read_text("utf-8") for name in ("world", "tree", "hands"))
START_MS = 1_704_110_400_000  # of a page's clock: noon of 1 January 2024, UTC
TICK_MS = 1_000  # that pass on the page's clock after each action
MOST_LOOKED, MOST_NOTES, MOST_HOPS = 50_000, 6, 10  # nodes of a page; notes of a turn; pages that follow by themselves
KEYED_CHARS = 100  # typed key by key; a longer text is put in at once


class BrowserPage:
    """One tab. `open` first, `close` last.

    Attributes:
      refused: requests that no site answered.
      broken: whether the page has crashed or does not answer.
      seen: what the last `look` has shown.
    """

    def __init__(self, visit: Visit, config: Browser, seed: int) -> None:
        self._visit, self._config, self._seed = visit, config, seed
        self._page: Any = None
        self._session: Any = None
        self._frame = ""
        self._still, self._moved = asyncio.Event(), asyncio.Event()
        self._loading: set[str] = set()  # frames
        self._fetching: set[str] = set()  # requests for what changes where elements are
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failure: Exception | None = None  # of the site
        self._hops: dict[str, int] = {}  # request -> redirects before it
        self._tasks: set[asyncio.Future[Any]] = set()
        self._notes: list[str] = []
        self._hosts: set[str] = set()  # that were asked for in vain
        self._numbered: list[int] = []
        self._actions = 0
        self.refused, self.broken, self.seen = 0, False, ""

    async def open(self, context: Any) -> None:
        """Opens the site's first page in a fresh context. Raises ConnectionError: it does not come."""
        page = self._page = await self._wait(context.new_page())
        self._session = await self._wait(context.new_cdp_session(page))
        for on, name, handler in (
            (page.on, "dialog", lambda dialog: self._begin(self._close_dialog(dialog))),
            (page.on, "popup", lambda popup: self._begin(self._wait(popup.close()))),
            (page.on, "download", lambda download: self._note("A download was refused.")),
            (page.on, "filechooser", lambda chooser: self._note("The page asked for a file: there is none.")),
            (page.on, "websocket", lambda socket: self._refuse(socket.url)),
            (page.on, "crash", lambda page: self._end("the page has crashed")),
            (page.on, "close", lambda page: self._end("the page is closed")),
            (self._session.on, "Fetch.requestPaused", lambda event: self._begin(self._answer(event))),
            (self._session.on, "Page.frameStartedLoading", lambda event: self._moves(event, False)),
            (self._session.on, "Page.frameStartedNavigating", lambda event: self._moves(event, False)),
            (self._session.on, "Page.frameStoppedLoading", lambda event: self._moves(event, True)),
            (
                self._session.on,
                "Page.frameDetached",
                lambda event: event["reason"] == "remove" and self._moves(event, True),
            ),
            (self._session.on, "Page.frameNavigated", lambda event: self._drop_fetched(event["frame"])),
            (self._session.on, "Network.requestWillBeSent", lambda event: self._fetches(event, False)),
            (self._session.on, "Network.loadingFinished", lambda event: self._fetches(event, True)),
            (self._session.on, "Network.loadingFailed", lambda event: self._fetches(event, True)),
            (self._session.on, "Page.navigatedWithinDocument", lambda event: self._moved.set()),
            (self._session.on, "Page.windowOpen", lambda event: self._note("A new tab was refused: there is one.")),
        ):
            # What a handler gives back playwright would wait for, and fail with.
            on(name, lambda event, handler=handler: handler(event) and None)
        world = WORLD.replace("(START, SEED)\n", f"({START_MS}, {self._seed})\n")
        *_, frames = await asyncio.gather(
            self._send("Page.enable"),
            self._send("Network.enable", maxTotalBufferSize=0, maxResourceBufferSize=0),
            self._send("Fetch.enable", patterns=[{"urlPattern": "*"}]),
            self._send("Page.addScriptToEvaluateOnNewDocument", source=world),
            self._send("Page.getFrameTree"),
        )
        self._frame = frames["frameTree"]["frame"]["id"]
        self._moves({"frameId": self._frame}, False)
        self._begin(self._send("Page.navigate", url=self._visit.url))  # its answer comes with the page
        await self._settle()
        if page.url == "about:blank":
            why = " ".join(self._notes)
            raise self._failure or ConnectionError(f"the site's first page {self._visit.url} does not come: {why}")

    async def act(self, action: Action) -> str:
        """Does it; what was wrong with it, or ""."""
        self._notes.clear()
        self._actions += 1
        problem = ""
        if action.kind in ("click", "type", "select"):
            problem = await self._on_element(action)
        elif action.kind == "scroll":
            if not await self._in_tree(HANDS, act="scroll", text=action.text):
                problem = f"the page does not scroll further {action.text}"
        elif action.kind == "back":
            problem = await self._back()
        else:
            await self._wait(self._page.keyboard.press(action.text))
        if not problem:
            await self._settle()
        return problem

    async def look(self) -> str:
        """What is shown: what happened since the last action, and the page.

        Raises:
          TimeoutError, ConnectionError: the page does not answer, or has crashed.
          Exception: what the site has raised.
        """
        view = None
        for _ in range(MOST_HOPS):
            with contextlib.suppress(_Gone):
                view = await self._in_tree(TREE, most=self._config.elements + 1, look=MOST_LOOKED)
                if not self._fetching:  # reading lays the page out, and that asks for its pictures
                    break
            await self._settle()  # it has just gone on to another page, or pictures are on their way
        if self._failure is not None:
            raise self._failure
        if view is None:
            raise TimeoutError("the page never stays")
        elements = [tree.Element(*item) for item in view["items"]]
        shown = {name: view[name] for name in ("title", "address", "above", "below", "left")}
        most, chars = self._config.elements, self._config.chars
        text, self._numbered = tree.page_text(elements=elements, most_elements=most, most_chars=chars, **shown)
        if self._hosts:
            hosts = ", ".join(f'"{tree.clean(host, 60)}"' for host in sorted(self._hosts)[:MOST_NOTES])
            self._notes.append(f"The page asked for {hosts}: there is no network.")
        if view["cut"]:
            self._notes.append("The page is longer than what was read of it.")
        self.seen = "\n".join([*self._notes, text])
        self._notes.clear()
        self._hosts.clear()
        return self.seen

    async def close(self) -> None:
        """Ends what it waits for. The context is closed by whoever has opened it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _on_element(self, action: Action) -> str:
        if not 0 < action.number <= len(self._numbered):
            return f"there is no element {action.number}"
        there: Any = {"problem": "is no longer on the page"}
        with contextlib.suppress(_Gone):
            index = self._numbered[action.number - 1]
            there = await self._in_tree(HANDS, index=index, act=action.kind, text=action.text)
        if "problem" in there:
            by = f" by {tree.line(tree.Element(*there['by']))}" if there.get("by") else ""
            return f"element {action.number} {there['problem']}{by}"
        keyboard, mouse = self._page.keyboard, self._page.mouse
        if "x" in there and action.kind == "click":
            await self._wait(mouse.click(there["x"], there["y"]))
        elif "x" in there:
            await self._wait(keyboard.press("Delete"))  # of what is selected
            typing = keyboard.type if len(action.text) <= KEYED_CHARS else keyboard.insert_text
            await self._wait(typing(action.text))
        return ""

    async def _back(self) -> str:
        history = await self._send("Page.getNavigationHistory")
        at, entries = history["currentIndex"], history["entries"]
        if at < 1 or entries[at - 1]["url"] == "about:blank":
            return "there is no page to go back to"
        self._moved.clear()
        await self._send("Page.navigateToHistoryEntry", entryId=entries[at - 1]["id"])
        with contextlib.suppress(TimeoutError):  # then it is where it was, and shown so
            await asyncio.wait_for(self._moved.wait(), self._config.load_timeout_s)
        return ""

    async def _settle(self) -> None:
        """Waits until the page has loaded and done what it does of itself, on its own clock."""
        patience_s = self._config.load_timeout_s
        late = f"The page has not finished loading in {patience_s:g} s."
        for _ in range(MOST_HOPS):
            try:
                await asyncio.wait_for(self._still.wait(), patience_s)
            except TimeoutError:
                await self._stop(late)
            arguments = json.dumps([self._actions, TICK_MS, patience_s * 1e3, late in self._notes])
            going = self._begin(self.evaluate(f"window.__advance?.(...{arguments})"))
            await asyncio.wait((going,), timeout=patience_s)
            if not going.done() and not self._still.is_set():  # until the next page is there, this one may not answer
                await self._stop(late)
            with contextlib.suppress(_Gone):
                await going
                if self._still.is_set():
                    return
        await self._stop("The page goes on to further pages without end: it was stopped.")

    async def _stop(self, why: str) -> None:
        self._note(why)
        with contextlib.suppress(_Gone):
            await self._send("Page.stopLoading")
        self._loading.clear()
        self._fetching.clear()
        self._still.set()

    async def _answer(self, event: dict[str, Any]) -> None:
        """Has the site answer a paused request."""
        url, number, response = event["request"]["url"], event["requestId"], None
        hops = self._hops[number] = self._hops.pop(event.get("redirectedRequestId", ""), -1) + 1
        if hops > MOST_HOPS:
            self._note("The page redirects without end.")
        elif site_of(url) == site_of(self._visit.url):
            try:
                response = self._visit.respond(*form_of(event["request"]))
                if inspect.isawaitable(response):
                    response = await response
            except Exception as error:
                self._failure = error
        if response is None:
            if urlsplit(url).path == "/favicon.ico":  # which a Chromium with a window's parts asks for by itself
                return await self._send("Fetch.failRequest", requestId=number, errorReason="Aborted")
            is_page = event["resourceType"] == "Document" and event["frameId"] == self._frame
            self._refuse(url, is_page)
            reason = "Aborted" if is_page else "BlockedByClient"  # a page that is not there leaves the present one
            await self._send("Fetch.failRequest", requestId=number, errorReason=reason)
            return
        headers = {"content-type": response.content_type, "cache-control": "no-store"}
        headers |= {"location": response.location} if response.location else {}
        body = response.body.encode() if isinstance(response.body, str) else response.body
        await self._send(
            "Fetch.fulfillRequest",
            requestId=number,
            responseCode=response.status,
            responseHeaders=[{"name": name, "value": value} for name, value in headers.items()],
            body=base64.b64encode(body).decode(),
        )

    def _refuse(self, url: str, is_page: bool = False) -> None:
        self.refused += 1
        if site_of(url) != site_of(self._visit.url):
            self._hosts.add(site_of(url))
        elif is_page:
            self._note(f'There is no page "{tree.clean(urlsplit(url).path, 60)}".')

    async def _close_dialog(self, dialog: Any) -> None:
        accepted = dialog.type != "prompt"
        if dialog.type != "beforeunload":
            done = "It was accepted." if accepted else "It was dismissed."
            self._note(f'The page opened a dialog ({dialog.type}): "{tree.clean(dialog.message)}". {done}')
        await self._wait(dialog.accept() if accepted else dialog.dismiss())

    def _note(self, text: str) -> None:
        if text not in self._notes and len(self._notes) < MOST_NOTES:
            self._notes.append(text)

    def _moves(self, event: dict[str, Any], still: bool) -> None:
        """Notes that a frame has begun to load, or has ended or gone."""
        if event["frameId"] == self._frame:
            self._moved.set()
        self._loading.discard(event["frameId"]) if still else self._loading.add(event["frameId"])
        self._update_still()

    def _fetches(self, event: dict[str, Any], still: bool) -> None:
        """Notes that a picture, a sheet or a font is asked for, or has come or will not come."""
        if still:
            self._fetching.discard(event["requestId"])
        elif event.get("type") in ("Image", "Stylesheet", "Font"):
            self._fetching.add(event["requestId"])
        self._update_still()

    def _drop_fetched(self, frame: dict[str, Any]) -> None:
        """Forgets what the page before has asked for: nobody may say any more that it came."""
        if frame["id"] == self._frame:
            self._fetching.clear()
            self._update_still()

    def _update_still(self) -> None:
        self._still.clear() if self._loading or self._fetching else self._still.set()

    def _end(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_exception(ConnectionError(reason))
            self._ended.exception()  # looked at

    def _begin(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        """Begins what an event asks for. A failure of it (the page has gone on) shows in what the page does then."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(lambda task: (self._tasks.discard(task), task.cancelled() or task.exception()))
        return task

    async def _in_tree(self, function: str, **arguments: Any) -> Any:
        """Calls a function in the tree's world of the main frame."""
        world = await self._send("Page.createIsolatedWorld", frameId=self._frame, worldName="tree")
        return await self.evaluate(f"({function})({json.dumps(arguments)})", contextId=world["executionContextId"])

    async def evaluate(self, script: str, **where: Any) -> Any:
        """The JSON value of an expression, among the page's own scripts or elsewhere."""
        where |= {"returnByValue": True, "awaitPromise": True, "userGesture": True}
        answer = await self._send("Runtime.evaluate", expression=script, **where)
        if details := answer.get("exceptionDetails"):
            raise RuntimeError(details.get("exception", {}).get("description", details["text"])[:300])
        return answer["result"].get("value")

    async def _send(self, method: str, **parameters: Any) -> Any:
        return await self._wait(self._session.send(method, parameters))

    async def _wait(self, answer: Coroutine[Any, Any, Any]) -> Any:
        """The answer of playwright, in time."""
        from playwright.async_api import Error

        task, patience_s = asyncio.ensure_future(answer), self._config.step_timeout_s
        try:
            await asyncio.wait((task, self._ended), timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            failure = task.exception() if task.done() else TimeoutError(f"the page does not answer in {patience_s:g} s")
        finally:
            task.cancel()
        if failure is None:
            return task.result()
        if self._ended.done():
            failure = self._ended.exception() or failure
        elif isinstance(failure, Error) and any(sign in str(failure) for sign in _Gone.SIGNS):
            raise _Gone from None
        self.broken = True
        raise ConnectionError(str(failure).splitlines()[0]) if isinstance(failure, Error) else failure from None


class _Gone(Exception):
    """The document in which something was to happen is no longer there."""

    SIGNS = ("context was destroyed", "Cannot find context", "navigated or closed", "was collected", "Not attached to")


def site_of(url: str) -> str:
    """The scheme and host of an address."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def form_of(request: Mapping[str, Any]) -> tuple[str, str, dict[str, str]]:
    """Method, path and fields of a request of the DevTools protocol.

    A body that is no such form (JSON, multipart) is the field "".
    """
    parts = urlsplit(request["url"])
    form = dict(parse_qsl(parts.query, keep_blank_values=True))
    body = b"".join(base64.b64decode(entry.get("bytes", "")) for entry in request.get("postDataEntries", ()))
    if request.get("hasPostData"):
        headers = {name.lower(): value for name, value in request["headers"].items()}
        if headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
            form |= parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True)
        else:
            form[""] = body.decode("utf-8", "replace")
    return request["method"], unquote(parts.path) or "/", form
