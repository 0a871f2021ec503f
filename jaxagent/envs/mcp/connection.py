"""`Connection`: one session with one MCP server, which any task may open, use and close.

The SDK's contexts must be left by the task that entered them, and an attempt's start, steps and end may run in
different ones. So a task of the connection's own enters them, waits, and leaves them. Each call is a task too: whoever
waits for one stops at its deadline, whatever the SDK is doing.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import mcp
import mcp_types

from jaxagent.config.errors import failure_line
from jaxagent.envs.mcp.pipes import Pipes
from jaxagent.tools.calls import Tool

CLOSE_S = 6.0  # to end a session in good manners
CANCEL_S = 2.0  # and then without
PAGES = 100  # of a list of tools
MAX_CHARS = 200_000  # of a result: what comes behind is left out before it is encoded
FAILED = "The call failed.\n"
LOST = (mcp_types.CONNECTION_CLOSED,)


class Connection:
    """A session with a server.

    Args:
      server: a command, as a shell would split it, or an http(s) URL.
      pipes: how to reach one that is neither; `server` is its name then.

    Attributes:
      server: as given.
      tools: what it offers, once it is open.
    """

    def __init__(self, server: str, pipes: Pipes | None = None) -> None:
        self.server = server
        self.tools: Sequence[Tool] = ()
        url = server.startswith(("http://", "https://"))
        self._pipes = pipes or (None if url else Pipes(shlex.split(server)))
        self._client: mcp.Client | None = None
        self._ready, self._closing = asyncio.Event(), asyncio.Event()
        self._owner: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[Any]] = set()

    async def open(self, timeout_s: float) -> None:
        """Starts or reaches the server and asks for its tools.

        Raises:
          RuntimeError: it cannot be used; says why.
          TimeoutError: it takes longer than `timeout_s`.
        """
        self._owner = asyncio.create_task(self._own())
        until_ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait({self._owner, until_ready}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            until_ready.cancel()
        if self._owner.done():
            raise self._failed("does not start", None if self._owner.cancelled() else self._owner.exception())
        if not self._ready.is_set():
            raise TimeoutError(self._about_server(f"did not say its tools within {timeout_s:g} s"))

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> mcp_types.CallToolResult:
        """Calls a tool. What the server itself answers as an error is a result.

        Raises:
          RuntimeError: the server is gone.
          TimeoutError: no result after `timeout_s`.
        """
        try:
            return await self._asked(
                lambda client: client.call_tool(name, dict(arguments)), f"a call of {name}", timeout_s
            )
        except mcp.MCPError as error:
            text = mcp_types.TextContent(type="text", text=str(error))
            return mcp_types.CallToolResult(content=[text], is_error=True)

    async def list_again(self, timeout_s: float) -> Sequence[Tool]:
        """What it offers now. Raises as `call`, and RuntimeError where it refuses to say."""
        try:
            return await self._asked(_tools, "the list of its tools", timeout_s)
        except mcp.MCPError as error:
            raise self._failed("does not say its tools any more", error) from error

    async def _asked(self, ask: Callable[[mcp.Client], Coroutine[Any, Any, Any]], what: str, timeout_s: float) -> Any:
        if self._client is None or self._owner is None or self._owner.done():
            raise self._failed("is gone", None)
        call = asyncio.create_task(ask(self._client))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        call.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may wait for it any more
        try:
            await asyncio.wait({call, self._owner}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not call.done() and self._owner.done():
                raise self._failed("is gone", None)
            if not call.done():
                raise TimeoutError(self._about_server(f"did not answer {what} within {timeout_s:g} s"))
            return call.result()
        except mcp.MCPError as error:
            if error.code in LOST:
                raise self._failed(f"was lost in {what}", error) from error
            raise
        finally:
            call.cancel()

    async def close(self) -> None:
        """Ends the session, and the server's process group. Takes seconds at most; may be called twice."""
        owner, self._client = self._owner, None
        if owner is None:
            return
        try:
            for call in self._calls:
                call.cancel()
            self._closing.set()
            if not self._ready.is_set():
                owner.cancel()
            await asyncio.wait({owner}, timeout=CLOSE_S)
            if not owner.done():
                owner.cancel()
                await asyncio.wait({owner}, timeout=CANCEL_S)
        finally:  # also where our own caller is cancelled
            owner.cancel()
            if self._pipes is not None:
                self._pipes.kill()
            if owner.done() and not owner.cancelled():
                owner.exception()  # read: the session's end has no one to tell

    async def _own(self) -> None:
        async with mcp.Client(self._pipes or self.server) as client:
            self._client = client
            self.tools = await _tools(client)
            self._ready.set()
            await self._closing.wait()

    def _failed(self, what: str, error: BaseException | None) -> RuntimeError:
        while isinstance(error, BaseExceptionGroup):  # of the SDK's task groups
            error = error.exceptions[0]
        return RuntimeError(self._about_server(f"{what}: {failure_line(error)}" if error is not None else what))

    def _about_server(self, what: str) -> str:
        words = self._pipes.last_words if self._pipes is not None else ""
        return f"the MCP server '{self.server}' {what}" + (f" ({words})" if words else "")


async def _tools(client: mcp.Client) -> list[Tool]:
    tools: list[Tool] = []
    cursor = None
    for _ in range(PAGES):
        page = await client.list_tools(cursor=cursor, cache_mode="bypass")
        tools += [Tool(tool.name, tool.description or "", tool.input_schema) for tool in page.tools]
        cursor = page.next_cursor
        if not cursor:
            return tools
    raise RuntimeError(f"its list of tools has more than {PAGES} pages")


def as_text(result: mcp_types.CallToolResult) -> str:
    """Texts, one per line; pictures and the like by their names; structured content where there is nothing else.

    A server that gives structured content says the same in a text for clients that do not know it, so the text counts.
    """
    parts = [_part(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts) or "(nothing)"
    if len(text) > MAX_CHARS:
        text = f"{text[:MAX_CHARS]}\n[{len(text) - MAX_CHARS} more characters]"
    return FAILED + text if result.is_error else text


def _part(block: mcp_types.ContentBlock) -> str:
    if isinstance(block, mcp_types.TextContent):
        return block.text
    if isinstance(block, mcp_types.EmbeddedResource):
        resource = block.resource
        if isinstance(resource, mcp_types.TextResourceContents):
            return resource.text
        return f"[resource {resource.uri}]"
    if isinstance(block, mcp_types.ResourceLink):
        return f"[resource {block.uri}]"
    return f"[{block.type} of type {block.mime_type}]"
