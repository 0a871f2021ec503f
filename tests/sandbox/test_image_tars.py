"""Exported images: made here with tarfile, honest and hostile. Nothing outside of the tree is ever touched."""

import asyncio
import contextlib
import functools
import gzip
import hashlib
import io
import json
import os
import platform
import stat
import tarfile
import tempfile
import tracemalloc
from pathlib import Path

import pytest

from jaxagent.sandbox.images import oci
from jaxagent.sandbox.images.built import BuildError
from jaxagent.sandbox.images.store import Store
from jaxagent.sandbox.owner import sandbox_uid

FILE, LINK, HARD, FOLDER = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def layer(*entries) -> bytes:
    """A layer's tar of (name, kind, data, mode)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, kind, data, mode in ((*e, *(FILE, b"", 0o644)[len(e) - 1 :]) for e in entries):
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.mtime = kind, mode, 1_600_000_000
            if kind in (LINK, HARD):
                info.linkname, data = data, b""
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def pack(path, files):
    path.write_bytes(layer(*((name, FILE, data) for name, data in files.items())))
    return path


def config_of(layers, **config) -> bytes:
    about = {"architecture": ARCHITECTURE, "os": "linux", "config": config}
    return json.dumps({**about, "rootfs": {"type": "layers", "diff_ids": [digest(raw) for raw in layers]}}).encode()


def layout(path, *layers, spoil=None, names=("v1",), **config):
    """An OCI layout; every second layer compressed. `spoil` changes the table of blobs."""
    blobs, described = {}, []
    for number, raw in enumerate(layers):
        data = gzip.compress(raw) if number % 2 == 0 else raw
        blobs[digest(data)] = data
        described.append({"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": digest(data)})
    about = config_of(layers, **config)
    blobs[digest(about)] = about
    manifest = json.dumps({"config": {"digest": digest(about)}, "layers": described}).encode()
    blobs[digest(manifest)] = manifest
    named = [{"org.opencontainers.image.ref.name": name} for name in names]
    index = {"manifests": [{"digest": digest(manifest), "annotations": name} for name in named]}
    if spoil:
        spoil(blobs, index)
    files = {"oci-layout": b"{}", "index.json": json.dumps(index).encode()}
    return pack(path, files | {f"blobs/{k.replace(':', '/')}": v for k, v in blobs.items()})


def saved(path, *layers, tags=("thing:1",), **config):
    """What `docker save` of before OCI writes."""
    about = config_of(layers, **config)
    name = hashlib.sha256(about).hexdigest() + ".json"
    files = {f"{n}/layer.tar": raw for n, raw in enumerate(layers)}
    manifest = [{"Config": name, "RepoTags": list(tags), "Layers": list(files)}]
    return pack(path, {name: about, **files, "manifest.json": json.dumps(manifest).encode()})


@pytest.fixture
def store(open_folder):
    folder = Path(tempfile.mkdtemp(dir=open_folder))
    folder.chmod(0o711)
    return Store(folder / "images")


def load(store, path, **more):
    return asyncio.run(oci.load(store, path, **more))


def seen(tree):
    """{path: content, link target or None for a folder}."""

    def value(path):
        return f"-> {os.readlink(path)}" if path.is_symlink() else None if path.is_dir() else path.read_text()

    return {str(path.relative_to(tree)): value(path) for path in Path(tree).rglob("*")}


LAYERS = (
    layer(
        ("./", FOLDER, b"", 0o755),
        ("etc", FOLDER, b"", 0o755),
        ("etc/passwd", FILE, b"root"),
        ("bin", LINK, "usr/bin"),
        ("usr/bin/tool", FILE, b"v1", 0o4755),
        ("old/a", FILE, b"a"),
        ("old/b", FILE, b"b"),
        ("gone/deep/file", FILE, b"x"),
        ("turns", FILE, b"a file"),
        ("abs", LINK, "/etc/passwd"),
    ),
    layer(
        ("old/new", FILE, b"new"),
        ("old/.wh..wh..opq",),  # after an entry of its own layer: that one stays
        (".wh.gone",),
        ("turns", FOLDER, b"", 0o700),
        ("turns/into", FILE, b"a folder"),
        ("usr/bin/tool", FILE, b"v2", 0o4755),
        ("usr/bin/same", HARD, "usr/bin/tool"),
        (".wh.never-there",),
        ("dev/null", tarfile.CHRTYPE),
        ("pipe", tarfile.FIFOTYPE),
    ),
)
EXPECTED = {
    "etc": None,
    "etc/passwd": "root",
    "bin": "-> usr/bin",
    "usr": None,
    "usr/bin": None,
    "usr/bin/tool": "v2",
    "usr/bin/same": "v2",
    "old": None,
    "old/new": "new",
    "turns": None,
    "turns/into": "a folder",
    "abs": "-> /etc/passwd",
}


@pytest.mark.parametrize("make", [layout, saved])
def test_an_exported_image(make, store, tmp_path):
    path = make(tmp_path / "image.tar", *LAYERS, Env=["A=1", "P=/x=y"], WorkingDir="/old", User="root")
    record = load(store, path)
    assert seen(record["tree"]) == EXPECTED
    assert (record["env"], record["workdir"], record["user"]) == ({"A": "1", "P": "/x=y"}, "/old", "root")
    assert record["skipped"] == {"device": 1, "pipe": 1} and not record["cached"]
    tool = os.stat(f"{record['tree']}/usr/bin/tool")
    # The set-uid bit is dropped.
    assert stat.S_IMODE(tool.st_mode) == 0o755 and tool.st_uid == sandbox_uid() and tool.st_nlink == 2
    again = load(store, path)
    assert again["cached"] and again["key"] == record["key"] and os.listdir(store.folder / "work") == []
    assert [r["name"] for r in store.listing()] == [{layout: "v1", saved: "thing:1"}[make]]


HOSTILE = {
    "dots": (layer(("../escaped", FILE, b"x")), "leads out of the image"),
    "dots inside": (layer(("a/../../escaped", FILE, b"x")), "leads out of the image"),
    "through an absolute link": (layer(("a", LINK, "{outside}"), ("a/escaped", FILE, b"x")), "is a link or a file"),
    "through a relative link": (layer(("a", LINK, "../../.."), ("a/escaped", FILE, b"x")), "is a link or a file"),
    "a folder through a link": (layer(("a", LINK, "{outside}"), ("a/b", FOLDER)), "is a link or a file"),
    "a hard link out": (layer(("a", HARD, "../../victim")), "leads out of the image"),
    "a hard link through a link": (layer(("a", LINK, "{outside}"), ("b", HARD, "a/victim")), "is a link or a file"),
    "a hard link to nothing": (layer(("b", HARD, "nothing")), "which is not there"),
    "a hard link to itself": (layer(("b", FILE, b"x"), ("b", HARD, "./b")), "to itself"),
    "a whiteout out": (layer(("../.wh.victim",)), "leads out of the image"),
    "a whiteout of the parent": (layer(("a", FOLDER), ("a/.wh...",)), "is no whiteout"),
    "a whiteout of itself": (layer(("a", FOLDER), ("a/.wh..",)), "is no whiteout"),
    "a whiteout of nothing": (layer(("a", FOLDER), ("a/.wh.",)), "is no whiteout"),
    "a whiteout through a link": (layer(("a", LINK, "{outside}"), ("a/.wh.victim",)), "is a link or a file"),
    "an opaque mark through a link": (layer(("a", LINK, "{outside}"), ("a/.wh..wh..opq",)), "is a link or a file"),
    "a link as the root": (layer(("./", LINK, "{outside}")), "names the root"),
    "below a file": (layer(("a", FILE, b"x"), ("a/b", FILE, b"y")), "is a link or a file"),
    "too deep": (layer(("/".join(["d"] * 300), FILE, b"x")), "folders deep"),
    "a size that is not there": (layer(("a", FILE, b"x" * 2000))[:1024], "ends too early|unexpected end"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("apart", [False, True], ids=["one layer", "links in a lower layer"])
def test_hostile_layers(name, apart, store, tmp_path):
    raw, said = HOSTILE[name]
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_text("mine")
    raw = _with_outside(raw, str(outside))
    below = [layer(("a", LINK, str(outside)))] if apart and "link" in name and "hard link to" not in name else []
    with pytest.raises(BuildError, match=said):
        load(store, layout(tmp_path / "i.tar", *below, raw))
    assert {p.name for p in outside.iterdir()} == {"victim"} and (outside / "victim").read_text() == "mine"
    assert os.stat(outside / "victim").st_nlink == 1
    assert not [*tmp_path.rglob("escaped"), *store.folder.parent.rglob("escaped")]
    assert os.listdir(store.folder / "bases") == os.listdir(store.folder / "work") == []


def _with_outside(raw: bytes, outside: str) -> bytes:
    """Puts the real place into a layer's links."""
    if b"{outside}" not in raw:
        return raw
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        entries = [(m, archive.extractfile(m).read() if m.isreg() else b"") for m in archive]
    links = [m.linkname.format(outside=outside) for m, _ in entries]
    return layer(*((m.name, m.type, link or data, m.mode) for (m, data), link in zip(entries, links, strict=True)))


def test_devices_and_overlay_marks_are_never_made(store, tmp_path):
    """A device 0/0 would be a whiteout of overlayfs, and an attribute would make a folder opaque."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, kind in (("etc", tarfile.CHRTYPE), ("disk", tarfile.BLKTYPE)):
            info = tarfile.TarInfo(name)
            info.type = kind
            archive.addfile(info)
        info = tarfile.TarInfo("folder")
        info.type, info.mode = FOLDER, 0o755
        info.pax_headers = {"SCHILY.xattr.user.overlay.opaque": "y", "SCHILY.xattr.trusted.overlay.opaque": "y"}
        archive.addfile(info)
    record = load(store, layout(tmp_path / "i.tar", out.getvalue()))
    assert seen(record["tree"]) == {"folder": None} and record["skipped"] == {"device": 2}
    assert os.listxattr(f"{record['tree']}/folder") == []


def test_apt_is_told_without_following_links(store, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    hostile = layer(("etc/apt", FOLDER, b"", 0o755), ("etc/apt/apt.conf.d", LINK, str(outside)))
    load(store, layout(tmp_path / "i.tar", hostile))
    assert list(outside.iterdir()) == []
    honest = layer(("etc/apt/apt.conf.d", FOLDER, b"", 0o755))
    record = load(store, layout(tmp_path / "j.tar", honest))
    assert "APT::Sandbox::User" in Path(record["tree"], "etc/apt/apt.conf.d/99jaxagent").read_text()


def spoil_layer(blobs, index):
    key = next(k for k, v in blobs.items() if v[:2] == b"\x1f\x8b")
    blobs[key] = gzip.compress(layer(("other", FILE, b"x")))


def pack_again(blobs, index):
    """The same files, compressed by somebody else: only the layer's own digest tells."""
    key = next(k for k, v in blobs.items() if v[:2] == b"\x1f\x8b")
    blobs[key] = gzip.compress(gzip.decompress(blobs[key]), 1, mtime=7)


def spoil_config(blobs, index):
    key = next(k for k, v in blobs.items() if b"rootfs" in v)
    blobs[key] = blobs[key].replace(b"linux", b"LINUX")


def spoil_path(blobs, index):
    index["manifests"][0]["digest"] = "sha256:../../../etc/passwd"


def malform(change, blobs, index):
    """Changes the manifest and its digest."""
    digests = index["manifests"][0]
    digests["digest"] = digest(blob := change(blobs.pop(digests["digest"])))
    blobs[digests["digest"]] = blob


MALFORMED = [
    (lambda _: b"[" * 10**5, "its JSON is malformed: RecursionError"),
    (lambda _: b"\xff", "its JSON is malformed: UnicodeDecodeError"),
    (lambda _: b"[]", "its JSON is malformed: TypeError"),
    (lambda _: b"{}", "its JSON is malformed: KeyError 'config'"),
    (
        lambda manifest: manifest.replace(b'"layers": [', b'"layers": [{"digest": 7}, '),
        "its JSON is malformed: TypeError",
    ),
    (lambda manifest: manifest.replace(b'"layers": [', b'"layers": [], "x": ['), "names 2 layers, and it has 0"),
]


def lose(blobs, index):
    del blobs[next(k for k, v in blobs.items() if v[:2] == b"\x1f\x8b")]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (spoil_layer, "does not have the digest"),
        (pack_again, "does not have the digest"),
        (spoil_config, "does not have the digest"),
        (spoil_path, "is not a digest"),
        *((functools.partial(malform, kind), said) for kind, said in MALFORMED),
        (lose, "is not in it"),
    ],
)
def test_spoilt_blobs(spoil, said, store, tmp_path):
    with pytest.raises(BuildError, match=said):
        load(store, layout(tmp_path / "i.tar", *LAYERS, spoil=spoil))
    assert os.listdir(store.folder / "bases") == []


def test_a_saved_layer_that_is_another(store, tmp_path):
    path = saved(tmp_path / "i.tar", LAYERS[0])
    with tarfile.open(path) as archive:
        files = {m.name: archive.extractfile(m).read() for m in archive}
    with pytest.raises(BuildError, match="does not have the digest"):
        load(store, pack(path, files | {"0/layer.tar": layer(("other", FILE, b"x"))}))


def test_which_image(store, tmp_path):
    path = tmp_path / "i.tar"
    assert load(store, layout(path, LAYERS[0], names=("a", "b")))["name"] == "a"  # one image by two names
    with pytest.raises(BuildError, match=r"has no image 'c'\. Valid: a, b"):
        load(store, path, name="c")
    with pytest.raises(BuildError, match=r"neither index\.json"):
        load(store, pack(path, {"x": b""}))
    path.write_bytes(b"no tar")
    with pytest.raises(BuildError, match="cannot be imported"):
        load(store, path)

    def other(blobs, index):
        index["manifests"][0]["platform"] = {"architecture": "s390x", "os": "linux"}

    with pytest.raises(BuildError, match="it has 0 images"):
        load(store, layout(path, LAYERS[0], spoil=other))


def test_one_process_makes_a_layer(store):
    """A second one waits; when it gives up, what the first has made so far stays."""

    async def main():
        begun, gate = asyncio.Event(), asyncio.Event()

        async def make(work):
            assert os.listdir(work) == []
            (work / "half").write_text("x")
            begun.set()
            await gate.wait()
            (work / "tree").mkdir()
            return {"step": "s"}

        async def never(work):
            raise AssertionError("two at once")

        first = asyncio.create_task(store.get("layers", "key", "box", 5.0, make))
        await begun.wait()
        gone, second = (asyncio.create_task(store.get("layers", "key", "box", 5.0, never)) for _ in range(2))
        await asyncio.sleep(0.2)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        with pytest.raises(BuildError, match="image box: waited 0 s for another process that makes the same"):
            await store.get("layers", "key", "box", 0.1, never)
        assert gone.cancelled() and (store.folder / "work/key/half").is_file() and store.find("layers", "key") is None
        gate.set()
        made = store.find("layers", "key") if await first else None
        assert await first == {**made, "cached": False} and await second == {**made, "cached": True}
        assert made["layer"] and os.listdir(store.folder / "work") == []

    asyncio.run(main())


def header(kind, size, name="h"):
    """One block."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def padded(data):
    return data + bytes(-len(data) % 512)


def pax(kind, **records):
    body = b""
    for key, value in records.items():
        record = f" {key.replace('_', '.')}={value}\n"
        size = next(n for n in range(len(record), 10**7) if len(str(n)) + len(record) == n)
        body += f"{size}{record}".encode()
    return header(kind, len(body)) + padded(body)


BIG, END, CARRIERS = "y" * 600_000, bytes(1024), (b"x", b"g", b"L", b"K", b"X")
ONE = header(FILE, 1, "one") + padded(b"1")
LARGE = padded(b"x" * (2**20 + 1)) + ONE
BOMBS = {
    **{f"a large {kind!r}": (header(kind, 2**20 + 1) + LARGE, "headers of more than") for kind in CARRIERS},
    "two before one entry": ((pax(b"x", comment=BIG) * 2) + ONE, "headers of more than"),
    "globals that add up": (pax(b"g", a=BIG) + ONE + pax(b"g", b=BIG) + ONE, "headers of more than"),
    "many before one entry": (header(b"L", 0) * 2000 + ONE, "too many headers"),
    "a negative size": (pax(b"x", size="-512") + ONE, "has the size -512"),
    "a number without end": (pax(b"x", GNU_sparse_map="9" * 5000) + ONE, "a header is malformed|invalid header"),
    "an old sparse file": (header(tarfile.GNUTYPE_SPARSE, 0) + ONE, "is a sparse file"),
    "a new sparse file": (pax(b"x", GNU_sparse_major=1, GNU_sparse_minor=0) + ONE, "is a sparse file"),
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("where", ["layer", "image"])
def test_headers_that_fill_the_memory(name, where, store, tmp_path):
    raw, said = BOMBS[name]
    with tarfile.open(fileobj=io.BytesIO(raw)) if name == "a negative size" else contextlib.nullcontext() as archive:
        if archive is not None and archive.next() is None:
            pytest.skip("this Python's tarfile takes such a header for the end")
    path = tmp_path / "i.tar"
    if where == "layer":
        layout(path, raw + END)
    else:
        path.write_bytes(gzip.compress(raw + layout(path, LAYERS[0]).read_bytes()))
    with pytest.raises(BuildError, match=said):
        load(store, path)
    assert os.listdir(store.folder / "work") == os.listdir(store.folder / "bases") == []


def test_entries_are_not_kept_in_memory(store, tmp_path):
    """Each header is as large as allowed, and there are many: 60 MB from a layer of less than 100 KB."""
    raw = (pax(b"x", comment=BIG) + ONE) * 100 + END
    path = layout(tmp_path / "i.tar", raw)
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    try:
        assert seen(load(store, path)["tree"]) == {"one": "1"}
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_an_images_tar_of_many_entries(store, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxagent.sandbox.images.tars.MAX_MEMBERS", 4)
    with pytest.raises(BuildError, match="more than 4 entries"):
        load(store, layout(tmp_path / "i.tar", LAYERS[0]))
    with pytest.raises(BuildError, match="name of more than 4096 bytes"):
        load(store, pack(tmp_path / "i.tar", {"x" * 5000: b""}))


def test_an_image_that_is_too_large(store, tmp_path):
    with pytest.raises(BuildError, match="larger than allowed"):
        load(store, layout(tmp_path / "i.tar", layer(("a", FILE, b"x" * 600), ("b", FILE, b"x" * 600))), max_bytes=1000)
    bomb = layer(("a", FILE, b"x")) + bytes(5_000_000)  # after the end of the tar, where no entry counts it
    with pytest.raises(BuildError, match="a layer is larger than allowed"):
        load(store, layout(tmp_path / "i.tar", bomb), max_bytes=1000)
