"""Weights over HTTP: served, fetched from many, and never wrong, whatever a source or the way to it does."""

import contextlib
import errno
import http.client
import http.server
import itertools
import os
import pathlib
import socket
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

from jaxagent.fleet import manifest, weight_fetch, weights
from jaxagent.fleet.manifest import MismatchError, WeightsError
from jaxagent.fleet.weight_fetch import WeightFetcher, copy, order, responsible
from jaxagent.fleet.weight_reader import hold
from jaxagent.fleet.weight_server import WeightServer
from jaxagent.fleet.weights import publish
from jaxagent.fleet.wire import Sources
from jaxagent.io import files
from tests.fleet.served import until

TOKEN = "a secret of the run"
TREE = {("a",): np.arange(500, dtype=np.int16), ("b",): np.ones(3, np.float32)}
OTHER = {**TREE, ("b",): np.zeros(3, np.float32)}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK_BYTES", 64)  # 17 chunks
    monkeypatch.setattr("jaxagent.fleet.weight_server.LOOK_S", 0.01)
    for name, value in {"FIRST_PAUSE_S": 0.01, "MOST_PAUSE_S": 0.02, "CONNECT_S": 2.0, "AVOID_S": 0.05}.items():
        monkeypatch.setattr(weight_fetch, name, value)


@pytest.fixture
def trainer(tmp_path):
    """Serves version 3."""
    publish(tmp_path / "trainer", manifest.shares(TREE), "run", 3)
    with WeightServer([tmp_path / "trainer"], TOKEN) as server:
        yield server


def sources(*urls, version=3, lineage="run", tree=None):
    return Sources(version, manifest.digest(tree or TREE), lineage, urls)


def get(url, token=TOKEN, **headers):
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}", **headers})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def fetched(folder, *urls, deadline_s=0.0, fetcher=None, **more):
    fetcher = fetcher or WeightFetcher(folder, TOKEN)
    fetcher.fetch(lambda: sources(*urls, **more), deadline_s)
    with hold(folder, more.get("version", 3), more.get("lineage", "run")) as held:
        return held.read()


def equal(found, tree=TREE):
    return all(found[path].tobytes() == leaf.tobytes() for path, leaf in tree.items())


class Source(http.server.ThreadingHTTPServer):
    """A source that spoils every chunk, by `spoil(bytes) -> (declared length, bytes to send, seconds a byte)`."""

    def __init__(self, folder, spoil):
        server, real = self, WeightServer([folder], TOKEN)
        self.asked = 0

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                file = real.find(self.path)
                body = file.read() if file else b""
                length, sent = len(body), body
                if "/chunk/" in self.path:
                    server.asked += 1
                    length, sent = spoil(body)
                self.send_response(200 if length is not None else 404)
                self.send_header("Content-Length", str(length or 0))
                self.end_headers()
                self.wfile.write(sent)
                self.close_connection = True

            def log_message(self, *_):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


# ------------------------------------------------------------------------------------- the server


def test_what_is_served_and_to_whom(tmp_path, trainer):
    value = manifest.decode(get(f"{trainer.url}/v1/manifest/3")[1], "it")
    chunk = next(iter(value.chunks.values()))
    path = f"{trainer.url}/v1/chunk/{chunk.digest}"
    status, body = get(path)
    assert status == 200 and manifest.chunk_of(body) == chunk
    assert get(path, token="another")[0] == get(path, token="")[0] == 401
    (tmp_path / "trainer" / "other.json").write_text("not shared")
    wrong = ["/v1/manifest/4", f"/v1/chunk/{'0' * 64}", "/v1/chunk/../../x", "/v1/file/../x", "/", "/v1"]
    for path in (*wrong, "/v1/file/other.json", "/v1/file/probe.json"):
        assert get(trainer.url + path)[0] == 404, path
    (tmp_path / "trainer" / "probe.json").write_text("{}")
    assert get(f"{trainer.url}/v1/file/probe.json") == (200, b"{}")
    with WeightServer([tmp_path / "none"], TOKEN) as other:
        assert get(f"{other.url}/v1/manifest/3")[0] == 404


def test_chunks_of_a_version_that_is_being_copied_are_handed_on_and_its_manifest_is_not(tmp_path, trainer):
    stage = tmp_path / "engine" / ".copying-00000003-0123"
    stage.mkdir(parents=True)
    (tmp_path / "engine" / ".copying-00000003-0123" / ("a" * 64 + ".bin")).write_bytes(b"part")
    (stage / "manifest.json").write_bytes(b"{}")
    with WeightServer([tmp_path / "engine"], TOKEN) as server:
        assert get(f"{server.url}/v1/chunk/{'a' * 64}") == (200, b"part")
        assert get(f"{server.url}/v1/manifest/3")[0] == 404


@pytest.mark.parametrize("host", ["::1", "0.0.0.0"])
def test_weights_are_served_by_ipv6_and_fetched_from_an_address_in_brackets(tmp_path, host):
    try:
        with socket.socket(socket.AF_INET6) as line:
            line.bind(("::1", 0))
    except OSError as why:
        pytest.skip(f"this machine has no ::1: {why}")
    publish(tmp_path / "trainer", manifest.shares(TREE), "run", 3)
    with WeightServer([tmp_path / "trainer"], TOKEN, host, address="::1") as server:
        assert server.url.startswith("http://[::1]:") and equal(fetched(tmp_path / "engine", server.url))
        if host == "0.0.0.0":
            assert get(server.url.replace("[::1]", "127.0.0.1") + "/v1/manifest/3")[0] == 200


def test_more_readers_than_places_are_told_to_come_again(tmp_path, monkeypatch):
    publish(tmp_path / "trainer", manifest.shares(TREE), "run", 3)
    monkeypatch.setattr("jaxagent.fleet.weight_server.WAIT_S", 0.01)
    with WeightServer([tmp_path / "trainer"], TOKEN, most=1) as server, server.place():
        assert get(f"{server.url}/v1/manifest/3")[0] == 503
        assert server.numbers()["weights_busy"] == 1


def test_more_connections_than_there_may_be_are_closed_and_places_come_back(tmp_path, monkeypatch):
    publish(tmp_path / "trainer", manifest.shares(TREE), "run", 3)
    monkeypatch.setattr("jaxagent.fleet.weight_server.MOST_CONNECTIONS", 1)
    with WeightServer([tmp_path / "trainer"], TOKEN) as server:
        address = server.url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1])), timeout=30) as one:
            one.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert b"401" in one.recv(100)  # it is served, and then closed
        with socket.create_connection((address[0], int(address[1])), timeout=30) as holds:
            until(lambda: not served(server))  # the first one's place may be free only a moment later
            assert holds.fileno() > 0
        until(lambda: served(server))


def served(server):
    try:
        return get(f"{server.url}/v1/manifest/3")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


# ------------------------------------------------------------------------------------- fetching


def test_a_version_comes_whole_and_then_nothing_is_asked_for_again(tmp_path, trainer):
    fetcher = WeightFetcher(tmp_path / "engine", TOKEN)
    assert equal(fetched(tmp_path / "engine", trainer.url, fetcher=fetcher))
    assert fetcher.numbers() == {"weights_got_bytes": 1012.0, "weights_attempts_failed": 0.0}
    assert equal(fetched(tmp_path / "engine", trainer.url, fetcher=fetcher))
    assert fetcher.numbers()["weights_got_bytes"] == 1012.0


SPOILS = {
    "a flipped byte": lambda body: (len(body), bytes([body[0] ^ 1]) + body[1:]),
    "a chunk cut off": lambda body: (len(body), body[:-1]),
    "a shorter chunk": lambda body: (len(body) - 1, body[:-1]),
    "a longer chunk": lambda body: (len(body) + 1, body + b"x"),
    "nothing": lambda body: (0, b""),
    "404": lambda body: (None, b""),
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_what_a_source_spoils_comes_from_another_one_and_alone_it_gives_nothing(tmp_path, trainer, spoil):
    with Source(tmp_path / "trainer", SPOILS[spoil]) as bad:
        with pytest.raises(WeightsError, match="cannot be had from 1 sources") as told:
            fetched(tmp_path / "alone", bad.url)
        assert bad.url in str(told.value) and weights.versions(tmp_path / "alone") == []
        assert equal(fetched(tmp_path / "engine", bad.url, trainer.url))
        assert bad.asked > 1


def test_another_lineage_digest_or_version_is_refused(tmp_path, trainer):
    with pytest.raises(MismatchError, match="lineage 'rerun', and its lineage is 'run'"):
        fetched(tmp_path / "engine", trainer.url, lineage="rerun")
    with pytest.raises(MismatchError, match="was published"):
        fetched(tmp_path / "engine", trainer.url, tree=OTHER)
    with pytest.raises(WeightsError, match="answered 404"):
        fetched(tmp_path / "engine", trainer.url, version=4)
    assert not (tmp_path / "engine").exists() or weights.versions(tmp_path / "engine") == []


def test_what_lies_here_of_another_history_gives_way(tmp_path, trainer):
    publish(tmp_path / "engine", manifest.shares(OTHER), "before", 3)
    assert equal(fetched(tmp_path / "engine", trainer.url, deadline_s=5))


def test_a_server_that_is_killed_in_the_middle_costs_what_had_not_come(tmp_path, monkeypatch):
    publish(tmp_path / "trainer", manifest.shares(TREE), "run", 3)
    monkeypatch.setattr(weights, "THREADS", 1)
    served = []

    def dies(body):
        served.append(body)
        if len(served) > 6:
            raise ConnectionAbortedError  # in the handler: the connection is closed without an answer
        return len(body), body

    monkeypatch.setattr(Source, "handle_error", lambda *_: None)
    with Source(tmp_path / "trainer", dies) as source, pytest.raises(WeightsError, match=r"RemoteDisconnected|Reset"):
        fetched(tmp_path / "engine", source.url)
    assert weights.versions(tmp_path / "engine") == []
    (stage,) = (tmp_path / "engine").iterdir()
    kept = sorted(stage.iterdir())
    kept[0].write_bytes(b"\0" * 64)  # a chunk that went bad meanwhile
    kept[1].write_bytes(b"")
    (stage / ".x.bin.1.2").write_bytes(b"of a process that was killed")
    with WeightServer([tmp_path / "trainer"], TOKEN) as again:
        fetcher = WeightFetcher(tmp_path / "engine", TOKEN)
        assert equal(fetched(tmp_path / "engine", again.url, fetcher=fetcher))
        assert fetcher.numbers()["weights_got_bytes"] == 1012 - (6 - 2) * 64
    assert os.listdir(tmp_path / "engine") == ["00000003"]
    assert len(os.listdir(tmp_path / "engine/00000003")) == 18


@pytest.mark.parametrize("locks", [True, False])
def test_one_of_two_copies_into_one_folder_is_sent_away_or_does_the_work_twice(tmp_path, trainer, monkeypatch, locks):
    """Two workers of a host, on a file system that has locks, or none."""
    value = manifest.decode(get(f"{trainer.url}/v1/manifest/3")[1], "it")
    chunks, folder = list(value.chunks.values()), tmp_path / "there"
    if not locks:
        monkeypatch.setattr(
            files, "try_lock", lambda *of, **how: (_ for _ in ()).throw(OSError(errno.ENOLCK, "No locks"))
        )
    others, gate = [], threading.Lock()

    def source(chunk):
        return weights.file_of(tmp_path / "trainer/00000003", chunk).read_bytes()

    def read(chunk):
        with gate:
            if not others:
                others.append(1)
                with contextlib.nullcontext() if not locks else pytest.raises(WeightsError, match="will be there soon"):
                    copy(value, source, folder, chunks)
        return source(chunk)

    with contextlib.nullcontext() if locks else contextlib.suppress(FileNotFoundError):  # both filled the folder
        copy(value, read, folder, chunks)
    with hold(folder, 3, "run") as held:
        assert equal(held.read())
    copy(value, pytest.fail, folder, chunks)


def test_it_waits_for_a_trainer_that_is_away(tmp_path):
    publish(tmp_path / "trainer", manifest.shares(TREE), "run", 3)
    with contextlib.ExitStack() as opened:
        asked = []

        def ask():
            asked.append(1)
            if len(asked) == 1:
                with socket.socket() as free:
                    free.bind(("127.0.0.1", 0))
                    return sources(f"http://127.0.0.1:{free.getsockname()[1]}")
            return sources(opened.enter_context(WeightServer([tmp_path / "trainer"], TOKEN)).url)

        WeightFetcher(tmp_path / "engine", TOKEN).fetch(ask, 10.0)
    assert weights.versions(tmp_path / "engine") == [3]


def test_a_slow_link_is_waited_for_and_one_that_is_too_slow_is_left(tmp_path, trainer, monkeypatch):
    def slow(body):
        time.sleep(0.02)
        return len(body), body

    with Source(tmp_path / "trainer", slow) as source:
        assert equal(fetched(tmp_path / "engine", source.url))
    monkeypatch.setattr(weight_fetch, "CONNECT_S", 0.05)

    def stuck(body):
        time.sleep(0.3)
        return len(body), body

    with Source(tmp_path / "trainer", stuck) as source:
        with pytest.raises(WeightsError, match="TimeoutError"):
            fetched(tmp_path / "other", source.url)
        assert equal(fetched(tmp_path / "other", source.url, trainer.url))


def test_a_full_disk_is_told_and_leaves_no_version(tmp_path, trainer, monkeypatch):
    real, room = files.replace, [5]

    def replace(path, content):
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, content)

    monkeypatch.setattr(files, "replace", replace)
    with pytest.raises(OSError, match="No space left"):
        fetched(tmp_path / "engine", trainer.url)
    assert weights.versions(tmp_path / "engine") == []
    room[0] = 1000
    assert equal(fetched(tmp_path / "engine", trainer.url))


# ------------------------------------------------------------------------------------- handing on


def test_engines_share_the_work_by_a_function_of_chunk_and_address():
    chunks = [manifest.chunk_of(str(i).encode()) for i in range(400)]
    urls = [f"http://engine-{i}" for i in range(4)]
    first = [responsible(chunk, urls)[0] for chunk in chunks]
    assert all(70 <= first.count(url) <= 130 for url in urls)
    assert [responsible(chunk, urls[::-1])[0] for chunk in chunks] == first, "whoever asks"
    for own in urls:
        others = [url for url in urls if url != own]
        ordered = order(chunks, others, own)
        mine = first.count(own)
        assert {responsible(chunk, urls)[0] for chunk in ordered[:mine]} == {own}
        assert sorted(ordered, key=str) == sorted(chunks, key=str)


def test_the_processes_of_a_trainer_share_what_they_send_and_stand_in_for_each_other(tmp_path, trainer):
    with WeightServer([tmp_path / "trainer"], TOKEN) as other:
        urls = trainer.url, other.url
        of = Sources(3, manifest.digest(TREE), "run", urls, trainers=2)
        assert not of.engines and Sources(3, "", "run", ("http://e", *urls), trainers=2).engines == ("http://e",)
        WeightFetcher(tmp_path / "engine", TOKEN).fetch(lambda: of, 0.0)
        sent = [server.numbers()["weights_sent_bytes"] for server in (trainer, other)]
        content = (tmp_path / "engine" / "00000003" / "manifest.json").read_bytes()
        chunks = manifest.decode(content, "here").chunks.values()
        asked = [sum(chunk.size for chunk in chunks if responsible(chunk, urls)[0] == url) for url in urls]
        assert sent == [asked[0] + len(content), asked[1]]
    WeightFetcher(tmp_path / "later", TOKEN).fetch(lambda: of, 0.0)  # one of them is gone
    with hold(tmp_path / "later", 3, "run") as held:
        assert equal(held.read())


def test_who_has_a_version_may_change_between_two_chunks_and_between_two_lines(tmp_path, trainer, monkeypatch):
    """An engine that comes or goes shifts where the trainer's processes stand."""
    digest = manifest.digest(TREE)
    answers = itertools.cycle([Sources(3, digest, "run", ("http://127.0.0.1:9", trainer.url)), sources(trainer.url)])
    monkeypatch.setattr(weights, "THREADS", 1)
    monkeypatch.setattr(weight_fetch, "_asking_again", lambda *of: contextlib.nullcontext(lambda: next(answers)))
    assert equal(fetched(tmp_path / "engine", trainer.url))


def test_several_engines_relieve_the_trainer(tmp_path, trainer):
    """One after the other here, so that the count does not depend on time."""
    folders = [tmp_path / f"engine-{i}" for i in range(3)]
    with contextlib.ExitStack() as opened:
        engines = [opened.enter_context(WeightServer([folder], TOKEN)) for folder in folders]
        for i, folder in enumerate(folders):
            others = [engine.url for engine in engines if engine is not engines[i]]
            fetcher = WeightFetcher(folder, TOKEN, engines[i].url)
            assert equal(fetched(folder, *others, trainer.url, fetcher=fetcher))
    sent = [server.numbers()["weights_sent_bytes"] for server in (trainer, *engines)]
    manifests = 3 * pathlib.Path(folders[0] / "00000003" / "manifest.json").stat().st_size
    assert sum(sent) == 3 * 1012 + manifests
    assert sent[0] < 2 * 1012 + manifests, "the later ones got theirs from the earlier ones"
