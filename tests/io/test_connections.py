"""Who may stay connected to a server, and what its log says of those who left: with real sockets."""

import asyncio
import contextlib
import logging
import socket

import pytest
from aiohttp import web

from jaxagent.io import connections

IDLE_S, WAIT_S = 0.3, 10.0
HEAD = b"POST %s HTTP/1.1\r\nHost: x\r\n"
SIZED, CHUNKED = HEAD + b"Content-Length: 1000\r\n\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@contextlib.asynccontextmanager
async def server(most=None, idle_s=IDLE_S):
    """A function that opens a connection and sends something; /read reads the body, /look does not, /wait neither."""
    released = asyncio.Event()

    async def read(request):
        return web.Response(text=str(len(await request.read())))

    async def slow(request):
        await asyncio.sleep(5 * IDLE_S)
        return await read(request)

    async def wait(request):
        await released.wait()
        return web.Response(text="done")

    async def stream(request):
        request.transport.abort()  # what a client's leaving does, a moment before the handler is cancelled
        await web.StreamResponse().prepare(request)

    app = web.Application(client_max_size=2**30)
    app.add_routes(
        [web.post("/read", read), web.post("/slow", slow), web.post("/wait", wait), web.post("/stream", stream)]
    )
    with socket.create_server(("127.0.0.1", 0)) as sock, contextlib.ExitStack() as opened:

        async def connect(sent=b""):
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            opened.callback(
                lambda: writer.transport.abort()
            )  # and holds the writer, whose end would be the connection's
            writer.write(sent)
            return reader, writer

        async with connections.serving(app, sock, most, idle_s):
            yield connect, released
            released.set()


async def is_closed(reader, within_s=WAIT_S):
    with contextlib.suppress(ConnectionError):
        try:
            async with asyncio.timeout(within_s):
                while await reader.read(2**16):
                    pass
        except TimeoutError:
            return False
    return True


HALF = {
    "nothing": b"",
    "half a head": HEAD % b"/read" + b"X-",
    "a body of which nothing comes": SIZED % b"/read",
    "half a body": SIZED % b"/read" + b"abc",
    "a chunk and no more": CHUNKED % b"/read" + b"3\r\nabc\r\n",
    "half a chunk": CHUNKED % b"/read" + b"300\r\nabc",
    "a body that nobody reads": SIZED % b"/wait" + b"abc",
    "a body for nobody": SIZED % b"/nowhere" + b"abc",
    "after an answer": HEAD % b"/read" + b"Content-Length: 3\r\n\r\nabc" + SIZED % b"/read" + b"abc",
}


def test_who_sends_half_a_request_is_cut_off():
    async def run():
        async with server() as (connect, _):
            clients = [await connect(sent) for sent in HALF.values()]
            closed = await asyncio.gather(*(is_closed(reader) for reader, _ in clients))
            assert dict(zip(HALF, closed, strict=True)) == dict.fromkeys(HALF, True)

    asyncio.run(run())


def test_who_sends_slowly_or_waits_for_its_answer_stays():
    async def run():
        async with server() as (connect, released):
            reader, writer = await connect(SIZED % b"/read")
            waiting, _ = await connect(HEAD % b"/wait" + b"Content-Length: 3\r\n\r\nabc")
            big, _ = await connect(HEAD % b"/slow" + b"Content-Length: 4000000\r\n\r\n" + bytes(4_000_000))
            for _ in range(10):
                writer.write(bytes(100))
                await asyncio.sleep(IDLE_S / 2)
            assert (await asyncio.wait_for(reader.read(2**16), WAIT_S)).endswith(b"1000")
            assert (await asyncio.wait_for(big.read(2**16), WAIT_S)).endswith(b"4000000")
            released.set()
            assert (await asyncio.wait_for(waiting.read(2**16), WAIT_S)).endswith(b"done")

    asyncio.run(run())


def test_above_the_limit_those_that_still_send_go_first(monkeypatch):
    monkeypatch.setattr(connections, "SWEEP_S", 0.05)

    async def run():
        whole = HEAD % b"/wait" + b"Content-Length: 0\r\n\r\n"
        async with server(most=4, idle_s=30.0) as (connect, released):
            first = [await connect(whole) for _ in range(3)]
            await asyncio.sleep(0.1)
            senders = [await connect(sent) for sent in (b"", *[SIZED % b"/read" + b"abc"] * 3)]
            assert all(await asyncio.gather(*(is_closed(reader) for reader, _ in senders[:3])))
            assert not await is_closed(senders[3][0], 0.1)
            late = [await connect(whole) for _ in range(3)]  # none that sends is left: the newest go
            gone = await asyncio.gather(*(is_closed(reader, 0.5) for reader, _ in late))
            assert sum(gone) == 2 and await is_closed(senders[3][0])
            released.set()
            for reader, _ in first:
                assert (await asyncio.wait_for(reader.read(2**16), WAIT_S)).endswith(b"done")

    asyncio.run(run())


@pytest.mark.parametrize(
    "sent",
    [
        HEAD % b"/read" + b"X: " + b"x" * 20_000 + b"\r\n\r\n",
        HEAD % b"/read" + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
)
def test_what_is_no_request_is_one_line(caplog, sent):
    async def run():
        async with server() as (connect, _):
            reader, _ = await connect(sent)
            assert (await asyncio.wait_for(reader.read(2**16), WAIT_S)).startswith(b"HTTP/1.0 400")

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert len(caplog.records) <= 1 and all(not r.exc_info and "\n" not in r.getMessage() for r in caplog.records)


def test_who_leaves_before_its_answer_is_one_line_of_debugging(caplog):
    async def run():
        async with server() as (connect, _):
            reader, _ = await connect(HEAD % b"/stream" + b"Content-Length: 0\r\n\r\n")
            assert await is_closed(reader)

    with caplog.at_level(logging.DEBUG, "jaxagent"):
        asyncio.run(run())
    assert not [r for r in caplog.records if r.levelno > logging.DEBUG], caplog.text
    assert sum("the client has left" in r.getMessage() for r in caplog.records) == 1


@pytest.mark.parametrize(
    ("sent", "right"),
    [("Bearer s\u00e9cret", True), ("s\u00e9cret", True), ("Bearer s", False), ("", False), ("Bearer \udcff", False)],
)
def test_a_bearer_token_is_compared_whatever_was_sent(sent, right):
    assert connections.has_token({"Authorization": sent}, "s\u00e9cret".encode()) is right
    assert not connections.has_token({}, b"x")
