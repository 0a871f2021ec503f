"""Recipes that really run: over this machine's own /usr, in the namespaces back end. Each step once, then found."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import pytest

from jaxagent.sandbox import snapshot
from jaxagent.sandbox.base import Limits
from jaxagent.sandbox.images import __main__ as command
from jaxagent.sandbox.images import bases
from jaxagent.sandbox.images.build import Steps
from jaxagent.sandbox.images.build_backend import BuildBackend
from jaxagent.sandbox.images.built import BuildError
from jaxagent.sandbox.images.many import Images, TaskImage
from jaxagent.sandbox.images.recipes import build_definition, build_dockerfile
from jaxagent.sandbox.images.store import Store

ROOT = Path(__file__).resolve().parents[2]
TABLE = bases.parse(("debian:12=host", "ubuntu_22.04.sif=host"))


class Workshop:
    """Builds recipes, and looks at what came of them."""

    def __init__(self, backends):
        self.run, self.backend = backends.run, backends.backend("namespaces")
        self.build_backends = {n: BuildBackend(self.backend.owner, n, self.backend.roots) for n in (False, True)}
        self.said = []

    def write(self, name, text, mode=0o644):
        path = self.context / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        return path

    def steps(self, timeout_s=60.0, network=False, name="thing"):
        self.said.clear()
        store = Store(self.folder / "images")
        return Steps(self.build_backends[network], store, TABLE, name, timeout_s, self.said.append)

    def dockerfile(self, text, timeout_s=60.0, args=None, network=False):
        path = self.write("Dockerfile", text)
        return self.run(build_dockerfile(self.steps(timeout_s, network), path, self.context, args))

    def definition(self, text, directory="/home/user"):
        path = self.write("container.def", text)
        return self.run(build_definition(self.steps(), path, self.context, directory))

    def look(self, built, said):
        """The output of a command in a sandbox that starts from the image, as an agent would find it."""

        async def main():
            async with await self.backend.start(built.spec(Limits())) as sandbox:
                result = await sandbox.execute(("sh", "-c", said), 20.0, 100_000)
                assert result.exit_code == 0, result.output
                return result.output.decode()

        return self.run(main())


@pytest.fixture(scope="module")
def shared(backends):
    made = Workshop(backends)
    yield made
    for backend in made.build_backends.values():
        made.run(backend.close())


@pytest.fixture
def shop(shared, open_folder):
    shared.folder = Path(tempfile.mkdtemp(dir=open_folder))
    shared.folder.chmod(0o711)
    shared.context = shared.folder / "context"
    shared.context.mkdir()
    return shared


RECIPE = """\
ARG VERSION=12
FROM --platform=linux/arm64 debian:${VERSION} AS tools
ARG WORD=default
ENV A=1 GREETING="hello  world"
ENV OLD the rest $A
WORKDIR /app
WORKDIR in
RUN echo "$A|$GREETING|$OLD|$WORD|$(pwd)|$(id -u)|$HOME" > said \\
    # left out
    && printf x >> /etc/issue
SHELL ["/bin/bash", "-c"]
RUN [[ a == a ]] && rm /etc/hosts && chown nobody:nogroup said \\
    && python3 -c 'import os; os.setgroups([]); os.setuid(33)'
RUN ["sh", "-c", "echo $0 \\"two words\\" > exec", "zero"]
RUN <<EOF
set -e
echo from a heredoc > heredoc
EOF
RUN <<EOF
#!/usr/bin/env python3
open("python", "w").write("3")
EOF
RUN cat <<ONE >two && cat <<TWO >>two
$A one
ONE
two
TWO
FROM ignored:1 AS unused
RUN false
FROM tools
COPY a.txt sub ./
COPY a.txt renamed
COPY --chmod=750 a.txt /deep/er/
COPY [ "a.txt", "with space" ]
COPY a.txt /tmp
COPY <<EOF <<"RAW" /docs/
value $A
EOF
value $A
RAW
ADD data.tar.gz /unpacked
USER nobody
LABEL x=y
EXPOSE 80
CMD ["sh"]
"""


def test_a_dockerfile(shop):
    shop.write("a.txt", "A\n", 0o640)
    shop.write("sub/b.sh", "B\n", 0o755)
    (shop.context / "sub/empty").mkdir()
    (shop.context / "sub/link").symlink_to("b.sh")
    with tarfile.open(shop.context / "data.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("inner/file")
        info.size = 4
        archive.addfile(info, io.BytesIO(b"data"))
    built = shop.dockerfile(RECIPE, args={"WORD": "given"})
    assert built.cached == 0 and built.root == "" and dict(built.env)["GREETING"] == "hello  world"
    assert (built.directory, built.user, built.uid) == ("/app/in", "nobody", 65534)
    platform, *nothing = built.notes
    assert platform.startswith("line 2: --platform=linux/arm64 has no effect")
    assert nothing == [f"line {n}: {w} has no effect here" for n, w in ((43, "LABEL"), (44, "EXPOSE"), (45, "CMD"))]
    files = "cat said exec heredoc python; echo; cat two renamed 'with space' /deep/er/a.txt"
    said = "1|hello  world|the rest 1|given|/app/in|0|/root\nzero two words\nfrom a heredoc\n3\n1 one\ntwo\nA\nA\nA\n"
    assert shop.look(built, f"pwd; id -u; {files}") == f"/app/in\n65534\n{said}"
    copied = "cat a.txt /tmp/a.txt b.sh link; stat -c %a a.txt b.sh /deep/er/a.txt; ls -d empty"
    assert shop.look(built, copied).split() == ["A", "A", "B", "B", "640", "755", "750", "empty"]
    documents = "cat /docs/EOF /docs/RAW /unpacked/inner/file; tail -c 1 /etc/issue"
    assert shop.look(built, documents) == "value 1\nvalue $A\ndatax"
    removed = "test ! -e /etc/hosts; ls /dev/shm; echo $A $GREETING $HOME $USER"
    assert shop.look(built, removed).split() == ["1", "hello", "world", "/nonexistent", "nobody"]


def test_a_second_build_finds_every_step(shop):
    shop.write("a", "1")
    text = "FROM debian:12\nARG V=1\nRUN echo $V > /v\nCOPY a /a\nWORKDIR /w\nUSER nobody\nRUN cat /a > f\n"
    first = shop.dockerfile(text)
    assert (first.built, first.cached) == (5, 0) and len(shop.said) == 5
    again = shop.dockerfile(text)
    assert (again.built, again.cached, again.key, again.layers) == (0, 5, first.key, first.layers) and shop.said == []
    assert again.uid == first.uid == 65534
    shop.write("a", "2")  # the content of a copied file counts, and what stands on it
    changed = shop.dockerfile(text)
    assert (changed.built, changed.cached) == (4, 1) and shop.look(changed, "cat /a f") == "22"
    assert shop.look(first, "cat /a f") == "11"
    assert shop.dockerfile(text, args={"V": "3"}).cached == 0  # so do arguments
    assert shop.dockerfile(text, network=True).cached == 0  # and the network
    shop.write("b", "not copied")
    assert shop.dockerfile(text).built == 0
    tree = Path(first.layers[0])
    tree.rename(tree.with_name("lost"))  # a record without its files is no layer
    assert shop.dockerfile(text, args={"V": "3"}).built == 0
    shop.write("a", "1")
    assert shop.dockerfile(text).built == 1 and tree.is_dir()


@pytest.mark.parametrize(
    ("text", "number", "step", "said"),
    [
        ("RUN echo one\nRUN echo be; echo why >&2; exit 3\n", 2, "RUN echo be", r"status 3\. It printed: be\nwhy$"),
        ("RUN sleep 100\n", 1, "RUN sleep", r"ran past the build's deadline"),
        ("USER ghost\n", 1, "USER ghost", r"names the user 'ghost', who is not in /etc/passwd"),
        ("COPY nothing /x\n", 1, "COPY nothing", r"'nothing' is not in the folder"),
        ("COPY ../x /x\n", 1, "COPY ../x", r"leads out of the folder"),
        ("COPY a b /x\n", 1, "COPY a b /x", r"several sources, so its target must end"),
        ("ADD https://h/x /x\n", 0, "", r"line 2: ADD of https://h/x is not supported"),
        ("ENV A\n", 0, "", r"line 2: ENV 'A' has no value"),
        ("RUN echo x > /usr/x\n", 1, "RUN echo", r"the base 'host' is this machine's own /usr, which is read-only"),
        ("RUN ls /nowhere\n", 1, "RUN ls", r"ended with status 2\. It printed"),
        (
            "RUN python3 -c 'import socket; socket.getaddrinfo(\"deb.debian.org\", 80)'\n",
            *(1, "RUN python3"),
            r"it seems for lack of the network, which builds have only where it is switched on \(build_network\)",
        ),
        ("FROM nothing:1\nRUN true\n", 0, "", r"is FROM nothing:1, which the bases do not have"),
    ],
)
def test_a_failure_is_named(text, number, step, said, shop):
    shop.write("a", "1")
    shop.write("b", "1")
    with pytest.raises(BuildError, match=said) as failure:
        shop.dockerfile(f"FROM debian:12\n{text}", timeout_s=3.0)
    error = failure.value
    assert (error.image, error.number) == ("thing", number) and error.step.startswith(step)
    store = Store(shop.folder / "images")
    assert os.listdir(store.folder / "work") == []
    assert len(store.listing()) == max(number - 1, 0)  # the steps before it are kept, it is not


def test_a_step_is_not_kept_beyond_the_deadline(shop, monkeypatch):
    """Copying a step's files counts, too."""
    save = snapshot.save

    def slow(fd, directory, most, stop):
        stop.wait(60)
        return save(fd, directory, most, stop)

    monkeypatch.setattr(snapshot, "save", slow)
    with pytest.raises(BuildError, match=r"step 1 .* ran past the build's deadline while what it changed was kept"):
        shop.dockerfile("FROM debian:12\nRUN echo x > /tmp/x\n", timeout_s=3.0)
    images = shop.folder / "images"
    assert os.listdir(images / "layers") == [] and os.listdir(images / "work") == []


def test_the_making_of_a_base_is_not_of_the_builds_time(shop, monkeypatch):
    resolve = bases.resolve

    async def slow(*arguments):
        await asyncio.sleep(2.2)
        return await resolve(*arguments)

    monkeypatch.setattr(bases, "resolve", slow)
    assert shop.dockerfile("FROM debian:12\nRUN true\n", timeout_s=2.0).built == 1


@pytest.mark.parametrize("network", [False, True])
def test_the_network_is_off_unless_asked_for(network, shop):
    own = os.stat("/proc/self/ns/net").st_ino
    step = "RUN readlink /proc/self/ns/net > /ns; cat /etc/resolv.conf > /names"
    built, names = shop.dockerfile(f"FROM debian:12\n{step}\n", network=network), Path("/etc/resolv.conf").read_text()
    assert (f"net:[{own}]" in shop.look(built, "cat /ns")) is network
    assert (shop.look(built, "cat /names") == names) is network or not names
    assert shop.look(built, "cat /etc/resolv.conf") == ""  # it is lent, not kept
    assert f"net:[{own}]" not in shop.look(built, "readlink /proc/self/ns/net")


def test_changes_of_owner_are_pretended_while_building_only(shop):
    built = shop.dockerfile("FROM debian:12\nRUN echo x > /f && chown 12:34 /f && stat -c %u /f > /g\n")
    assert shop.look(built, "cat /g; chown 12:34 /f 2>/dev/null || echo refused") == "0\nrefused\n"


DEFINITION = """\
Bootstrap: localimage
From: ./ubuntu_22.04.sif

%files
    data /srv
    data/one /opt/renamed

%post
    mkdir -p /home/user/work
    echo "$(id -u) $(pwd)" > /home/user/work/who
    echo 'export LATE="from post"' >> $APPTAINER_ENVIRONMENT
    chmod 755 /home/user

%environment
    export A=1
    export PATH=/opt/bin:$PATH

%runscript
    exec nothing
"""


def test_a_definition(shop):
    shop.write("data/one", "1\n")
    (shop.context / "data/link").symlink_to("one")
    built = shop.definition(DEFINITION)
    assert dict(built.env)["LATE"] == "from post" and built.notes == ("%runscript is not run",)
    files = "cat work/who; cat /srv/data/one /srv/data/link /opt/renamed; echo $A; echo $PATH; touch work/new"
    lines = shop.look(built, f"pwd; id -u; {files}")
    assert lines.startswith("/home/user\n1000\n0 /\n1\n1\n1\n1\n/opt/bin:/usr/local/sbin:")
    assert shop.look(built, "test -L /srv/data/link || echo followed") == "followed\n"
    assert shop.definition(DEFINITION).built == 0
    with pytest.raises(BuildError, match=r"step 1 \(%files /etc/passwd /x\) '\.\./+etc/passwd' leads out of the fol"):
        shop.definition(DEFINITION.replace("data /srv", "/etc/passwd /x"))
    with pytest.raises(BuildError, match=r"step 4 \(%post .*ended with status 1"):
        shop.definition(DEFINITION.replace("    chmod 755", "    false\n    chmod 755"))


def test_scratch_and_a_folder_as_base(shop):
    shop.write("a", "1")
    built = shop.dockerfile("FROM scratch\nCOPY a /a\n")
    assert [p.name for p in Path(built.layers[0]).iterdir()] == ["a"] and Path(built.root).is_dir()
    with pytest.raises(BuildError, match=r"sh: No such file or directory"):
        shop.dockerfile("FROM scratch\nCOPY a /a\nRUN true\n")
    folder = shop.folder / "closed"
    (folder / "root").mkdir(parents=True)
    folder.chmod(0o700)
    if os.getuid() == 0:
        with pytest.raises(Exception, match="is closed to others"):
            shop.run(bases.resolve(bases.parse((f"x={folder / 'root'}",)), "x", "i", Store(shop.folder / "images")))


def test_too_many_layers_are_told(shop, monkeypatch):
    monkeypatch.setattr("jaxagent.sandbox.images.build.MAX_LAYERS_TEXT", 200)
    with pytest.raises(BuildError, match=r"step \d \(RUN echo .*is one layer too many \(\d\): join steps"):
        shop.dockerfile("FROM debian:12\n" + "".join(f"RUN echo {n} > /{n}\n" for n in range(9)))


def test_a_killed_build_leaves_no_layer(shop):
    """kill -9 in the middle of a step: the step before is kept, the half one is not found, the next build cleans up."""
    steps = "RUN echo one > /one; touch /wait\nRUN echo half > /half; sleep 0.5; [ ! -e /wait ] || sleep 60\n"
    path = shop.write("Dockerfile", f"FROM debian:12\n{steps}")
    store = Store(shop.folder / "images")
    argv = ["build", str(path), "--base=debian:12=host", f"--store={store.folder}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxagent.sandbox.images", *argv], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    try:
        end = time.monotonic() + 60
        while not (len(os.listdir(store.folder / "layers")) == 1 and os.listdir(store.folder / "work")):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        (half,) = os.listdir(store.folder / "work")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(store.listing()) == 1 and os.listdir(store.folder / "work") == [half]
    (store.folder / "work" / half / "tree").mkdir()  # as if it had been killed while the tree was copied
    (store.folder / "work" / half / "tree" / "rubbish").write_text("x")
    with pytest.raises(BuildError, match=r"step 2 .* ran past the build's deadline"):
        shop.dockerfile(path.read_text(), timeout_s=2.0)
    assert os.listdir(store.folder / "work") == [] and len(store.listing()) == 1
    (store.folder / "work" / half / "tree").mkdir(parents=True)
    (store.folder / "work" / half / "tree" / "rubbish").write_text("x")
    wait = next(Path(store.folder, "layers").glob("*/tree/wait"))
    wait.unlink()
    built = shop.dockerfile(path.read_text())
    assert (built.built, built.cached) == (1, 1)
    assert sorted(os.listdir(built.layers[1])) == ["half"]


def test_two_builds_at_once_share_the_work(shop):
    path = shop.write("Dockerfile", "FROM debian:12\nRUN sleep 0.3; cat /proc/sys/kernel/random/uuid > /once\n")

    async def both():
        return await asyncio.gather(*(build_dockerfile(shop.steps(name=n), path, shop.context) for n in "ab"))

    first, second = shop.run(both())
    assert first.layers == second.layers and len(shop.folder.joinpath("images/layers").iterdir().__next__().name) == 24


def test_the_images_of_a_dataset(shop):
    """A failure is named and counted, and the rest is built."""
    good = shop.write("good/Dockerfile", "FROM debian:12\nRUN echo good > /srv/word\n")
    bad = shop.write("bad/Dockerfile", "FROM debian:12\nRUN echo oh no; false\n")
    lost = shop.write("lost/Dockerfile", "FROM python:3.12\n")
    definition = shop.write("def/container.def", "Bootstrap: localimage\nFrom: /images/ubuntu_22.04.sif\n%post\ntrue\n")
    wanted = [
        TaskImage("good", dockerfile=good, context=good.parent),
        TaskImage("bad", dockerfile=bad, context=bad.parent),
        TaskImage("lost", dockerfile=lost, context=lost.parent),
        TaskImage("def", definition=definition, context=definition.parent, directory="/home/user"),
        TaskImage("named", name="debian:12"),
        TaskImage("unknown", name="alpine:3"),
    ]

    async def main():
        images = Images(shop.backend, Store(shop.folder / "images"), TABLE, network=False)
        try:
            line = await images.get_all(wanted)
            with pytest.raises(BuildError, match="oh no"):
                await images.get(wanted[1])
            return line, images.failed, await images.get(wanted[0])
        finally:
            await images.close()

    line, failed, built = shop.run(main())
    first, *named = line.split("\n  ")
    assert first == "images of 6 tasks: 2 built, 1 found, 3 failed"
    assert [text.partition(":")[0] for text in named] == ["image bad", "image lost", "image unknown"]
    assert failed["bad"] == "image bad: step 1 (RUN echo oh no; false) ended with status 1. It printed: oh no"
    assert set(failed) == {"bad", "lost", "unknown"} and shop.look(built, "cat /srv/word") == "good\n"


def test_the_command(shop, capsys):
    path = shop.write("Dockerfile", "FROM debian:12\nARG V\nRUN echo $V\nLABEL a=b\n")
    store = f"--store={shop.folder / 'images'}"
    assert command.main(["build", str(shop.context), "--base=debian:12=host", "--arg=V=7", store]) == 0
    out = capsys.readouterr().out
    assert "context: step 1: RUN echo $V" in out and "1 steps run, 0 found" in out and "note: line 4: LABEL" in out
    assert command.main(["list", store]) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2 and out[0].endswith("context: RUN echo $V") and out[1].startswith("1 in ")
    assert command.main(["build", str(path), store]) == 1
    assert "is FROM debian:12, which the bases do not have (there is no registry). No bases" in capsys.readouterr().err
    for argv in (["build", store], ["build", "nowhere", store], ["build", str(path), "--base=x", store]):
        assert command.main(argv) == 2 and "error: " in capsys.readouterr().err


def test_a_back_end_without_layers(shop):
    class Other:
        name = "other"

    async def main():
        images = Images(Other(), Store(shop.folder / "images"), TABLE, network=False)
        try:
            return await images.get_all([TaskImage("t", name="debian:12")])
        finally:
            await images.close()

    assert "image t: cannot be built: sandboxes of other take no layers" in shop.run(main())
