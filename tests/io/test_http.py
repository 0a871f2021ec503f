"""The HTTP client against servers on loopback that are slow, busy, wrong, too talkative or gone."""

import asyncio
import contextlib
import datetime
import email.utils
import gzip
import time

import pytest
from aiohttp import web

from jaxagent.io import http
from jaxagent.io.http import HttpClient, HttpError, HttpStatus, HttpTimeout, HttpUnreachable

MAX_BYTES = 100


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(http, "FIRST_PAUSE_S", 0.001)


@contextlib.asynccontextmanager
async def serving(answer):
    """The address of a server that answers its i-th request with `answer(i, request)`."""
    seen = []

    async def handle(request):
        seen.append(request)
        return await answer(len(seen) - 1, request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/x", seen
    finally:
        await runner.cleanup()


def ask(answer, retries=2, timeout_s=30.0, method="POST", busy_s=0.0, **content):
    """(the body, or the HttpError; the requests that the server saw)."""

    async def run():
        async with (
            serving(answer) as (url, seen),
            HttpClient(timeout_s, MAX_BYTES, retries, {"Authorization": "Bearer secret"}, busy_s=busy_s) as client,
        ):
            try:
                return await client.request(method, url, **content), seen
            except HttpError as failure:
                assert "\n" not in str(failure)
                return failure, seen

    return asyncio.run(run())


def always(status=200, body=b"", **headers):
    async def answer(i, request):
        return web.Response(status=status, body=body, headers=headers)

    return answer


def test_what_is_sent_arrives_and_the_answer_comes_back_as_bytes():
    async def answer(i, request):
        assert request.headers["Authorization"] == "Bearer secret" and request.query["a"] == "b"
        return web.Response(body=request.method.encode() + await request.read())

    assert ask(answer, method="PUT", params={"a": "b"}, data=b"\xff")[0] == b"PUT\xff"
    assert ask(answer, params={"a": "b"}, json={"c": 1})[0] == b'POST{"c": 1}'


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_busy_server_is_asked_again_a_bounded_number_of_times(status):
    async def answer(i, request):
        return web.Response(status=status) if i < 2 else web.Response(body=b"good")

    assert ask(answer)[0] == b"good"
    failure, seen = ask(always(status, b"come  back\nlater"))
    assert isinstance(failure, HttpStatus) and failure.status == status and len(seen) == 3
    assert str(failure).endswith(f"/x answered {status}: come back later")


@pytest.mark.parametrize("status", [201, 400, 401, 404])
def test_any_other_status_fails_at_once(status):
    failure, seen = ask(always(status, b'{"error": "no"}'))
    assert isinstance(failure, HttpStatus) and failure.body == b'{"error": "no"}' and len(seen) == 1


def test_a_redirect_is_not_followed_and_the_error_says_where_to():
    failure, seen = ask(always(307, Location="/elsewhere"))
    assert "answered 307: a redirect to /elsewhere, which is not followed" in str(failure) and len(seen) == 1


def test_a_slow_answer_is_a_timeout_and_the_next_attempt_may_be_faster():
    async def slow_once(i, request):
        await asyncio.sleep(60 if i == 0 else 0)
        return web.Response(body=b"good")

    async def slow_in_the_middle(i, request):
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"begun")
        await asyncio.sleep(60)

    assert ask(slow_once, timeout_s=0.5)[0] == b"good"
    failure, seen = ask(slow_in_the_middle, retries=1, timeout_s=0.2)
    assert isinstance(failure, HttpTimeout) and "did not answer in 0.2 s" in str(failure) and len(seen) == 2
    assert isinstance(ask(slow_in_the_middle, retries=0, timeout_s=0.2)[0], HttpTimeout)


def test_a_connection_that_breaks_off_is_tried_again():
    async def broken_once(i, request):
        if i == 0:
            request.transport.abort()
        return web.Response(body=b"good")

    assert ask(broken_once)[0] == b"good"


def test_nobody_listens():
    async def run():
        async with serving(always()) as (url, _):
            pass
        async with HttpClient(5.0, MAX_BYTES) as client:
            with pytest.raises(HttpUnreachable, match=r"/x is not reached: .*127\.0\.0\.1"):
                await client.request("GET", url)
            with pytest.raises(HttpError, match="'no address' is not a URL"):
                await client.request("GET", "no address")

    asyncio.run(run())


def test_an_answer_that_is_too_long_is_not_read_to_its_end():
    async def endless(i, request):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 1000)

    failure, seen = ask(endless)
    assert str(failure).endswith("sent more than 100 bytes") and len(seen) == 1
    assert ask(always(body=b"x" * MAX_BYTES))[0] == b"x" * MAX_BYTES
    assert isinstance(ask(always(body=b"x" * (MAX_BYTES + 1)))[0], HttpError)
    assert ask(always(body=b"x" * (MAX_BYTES + 1)), max_bytes=MAX_BYTES + 1)[0] == b"x" * (MAX_BYTES + 1)


def test_a_compressed_answer_does_not_grow():
    packed = gzip.compress(b"0" * 10_000)
    answer, seen = ask(always(body=packed, **{"Content-Encoding": "gzip"}))
    assert answer == packed and seen[0].headers["Accept-Encoding"] == "identity"


def test_a_client_that_is_closed_serves_another_loop_afresh():
    client = HttpClient(5.0, MAX_BYTES)

    async def run():
        async with serving(always(body=b"good")) as (url, _), client:
            return await client.request("GET", url)

    assert [asyncio.run(run()) for _ in range(2)] == [b"good"] * 2


@pytest.mark.parametrize("url", ["", "x", "http://", "http://a:99999/", "http://a..b/", "http://\ud800/"])
def test_what_is_no_url_is_not_tried(url):
    async def run():
        async with HttpClient(30.0, MAX_BYTES, retries=2) as client:
            await client.request("GET", url)

    with pytest.raises(HttpError, match="is not a URL") as error:
        asyncio.run(run())
    assert not error.value.passing and str(error.value).encode()


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"\x00\x01 nothing of the kind\r\n\r\n", "is not reached: 400"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", "is not reached: 400"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", "is not reached: 400"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhi", "is not reached: Response payload is not completed"),
        (b"HTTP/1.1 302 F\r\nLocation: http://a\x7f\xff\r\nContent-Length: 0\r\n\r\n", "a redirect to http://a??,"),
    ],
)
def test_a_server_that_lies_is_one_line_that_can_be_logged(reply, message):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()
        writer.close()

    async def run():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, HttpClient(30.0, MAX_BYTES) as client:
            await client.request("GET", f"http://127.0.0.1:{port}/")

    with pytest.raises(HttpError, match=message.replace("?", "[?]")) as error:
        asyncio.run(run())
    assert str(error.value).isprintable() and len(str(error.value)) < 400


def test_a_cookie_is_not_sent_back():
    async def run():
        async with serving(always(200, b"", **{"Set-Cookie": "a=b"})) as (url, seen), HttpClient(30.0, 100) as client:
            name = url.replace("127.0.0.1", "localhost")  # a jar takes none of an address
            for _ in range(2):
                await client.request("GET", name)
            return [request.headers.get("Cookie") for request in seen]

    assert asyncio.run(run()) == [None, None]


NOW = datetime.datetime(2026, 7, 14, 12, 0, 0, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0.0),
        (" 17 ", 17.0),
        ("1.5", 1.5),
        ("Tue, 14 Jul 2026 12:01:00 GMT", 60.0),
        ("Tue, 14 Jul 2026 13:01:00 +0200", 0.0),
        ("Mon, 13 Jul 2026 12:00:00 GMT", 0.0),
        *((hostile, None) for hostile in (None, "", "-5", "inf", "nan", "1e9", "9" * 5000, "soon", "\u0661", "\0",
                                          "Tue, 99 Jul 2026 12:01:00 GMT", "Tue, 14 Jul 99999 12:01:00 GMT",
                                          ", ,", "Tue, 14 Jul 2026 12:01:00 +99999999")),
    ],
)  # fmt: skip
def test_what_a_retry_after_says(value, seconds):
    assert http.retry_after_s(value, NOW) == seconds


def waits(answer, retries=2, busy_s=30.0, **content):
    """(the body, or the HttpError; the requests that the server saw; seconds)"""
    began = time.monotonic()
    found, seen = ask(answer, retries, busy_s=busy_s, **content)
    return found, len(seen), time.monotonic() - began


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_when_it_says(status):
    def once(value):
        async def answer(i, request):
            return web.Response(status=status, headers={"Retry-After": value}) if i == 0 else web.Response(body=b"good")

        return answer

    found, asked, seconds = waits(once("0.4"))
    assert (found, asked) == (b"good", 2) and seconds >= 0.4
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=2)  # dates have whole seconds
    found, asked, seconds = waits(once(email.utils.format_datetime(soon, usegmt=True)))
    assert (found, asked) == (b"good", 2) and seconds >= 0.5


@pytest.mark.parametrize("value", ["3600", "999999999", "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_a_server_that_wants_more_time_than_is_left_is_not_waited_for(value):
    failure, asked, seconds = waits(always(429, **{"Retry-After": value}))
    assert failure.status == 429 and asked == 1 and seconds < 10


def test_pauses_of_a_busy_server_grow_are_longer_and_differ_from_request_to_request(monkeypatch):
    paused, sleep = [], asyncio.sleep

    async def noted(seconds):
        paused.extend([seconds] if seconds else [])  # the server on this loop sleeps, too: for no time
        await sleep(0)

    monkeypatch.setattr(http, "FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr(http.asyncio, "sleep", noted)
    for content in ({"a": 1}, {"a": 1}, {"a": 2}):
        assert waits(always(429), 3, 100.0, json=content)[1] == 4
    first, again, other = paused[:3], paused[3:6], paused[6:]
    for pauses in (first, other):
        assert all(low <= pause <= 1.5 * low for pause, low in zip(pauses, (1.0, 2.0, 4.0), strict=True))
    assert first == again != other
    del paused[:]
    assert waits(always(500), 3, 100.0)[1] == waits(always(429), 3, 0.0)[1] == 4
    assert paused == [0.1, 0.2, 0.4] * 2  # no busy server, and a client that has no time for one
    assert waits(always(429), 3, 2.0, json={"a": 1})[1] == 2  # the second pause would go beyond its time
