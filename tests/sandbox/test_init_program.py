"""Where the program that serves a sandbox from inside comes from, and what is said where it comes from nowhere."""

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from jaxagent.config import ConfigError
from jaxagent.sandbox import __main__ as sandbox_command
from jaxagent.sandbox import choose, init_program, native
from jaxagent.sandbox.base import SandboxError, Spec
from jaxagent.sandbox.bubblewrap import Bubblewrap
from jaxagent.sandbox.namespaces import Namespaces
from jaxagent.sandbox.owner import Owner

COMPILER = next(filter(None, map(shutil.which, native.COMPILERS)), None)
NO_STATIC = f'for word; do [ "$word" != -static ] || exit 1; done; exec {COMPILER} "$@"'
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


def script(folder, text):
    """A compiler of our own."""
    (folder / "cc").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "cc").chmod(0o755)
    return str(folder / "cc")


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The package with the program, the user's cache, and a run's folder; no compiler but what a test names."""
    package, cache, run = tmp_path / "package", tmp_path / "cache/jaxagent", tmp_path / "run"
    shutil.copytree(native.FOLDER, package, ignore=shutil.ignore_patterns("*.bin"))
    run.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    monkeypatch.setattr(native, "FOLDER", package)
    monkeypatch.setattr(native, "COMPILERS", ())
    return package, cache, run


@pytest.mark.parametrize("first", range(3))
def test_it_is_taken_from_the_package_then_the_cache_then_the_run(places, first):
    for place in places[first:]:
        place.mkdir(parents=True, exist_ok=True)
        (place / native.file_name()).touch(0o755)
    assert init_program.find(places[2]) == places[first] / native.file_name()
    (places[first] / native.file_name()).chmod(0o644)  # as an installer leaves it that loses modes
    if first == 2:
        with pytest.raises(ConfigError):
            init_program.find(places[2])
    else:
        assert init_program.find(places[2]) == places[first + 1] / native.file_name()


def test_one_that_must_not_be_run_where_it_lies_is_copied_or_named(places, monkeypatch):
    package, cache, run = places
    packaged = package / native.file_name()
    packaged.write_text("#!/bin/sh\nexit 7\n")  # without its x bit, as some installers leave it
    assert init_program.find(run) == cache / native.file_name() and packaged.stat().st_mode & 0o111 == 0
    assert subprocess.run([cache / native.file_name()]).returncode == 7
    shutil.rmtree(cache)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # nothing may be run from anywhere
    with pytest.raises(ConfigError, match=rf"need {packaged}, which must not be run .*: programs must not run from"):
        init_program.find(run)


def test_one_of_other_sources_or_another_machine_is_not_taken(places, monkeypatch):
    package, _, run = places
    (package / native.file_name()).touch(0o755)
    uname = os.uname()
    for machine, source in ((f"{uname.machine}x", ""), (uname.machine, "/* changed */")):
        with monkeypatch.context() as elsewhere, (package / "wire.c").open("a") as file:
            elsewhere.setattr(os, "uname", lambda machine=machine: os.uname_result((*uname[:4], machine)))
            file.write(source)
            file.flush()
            with pytest.raises(ConfigError, match=f"does not bring for {machine} "):
                init_program.find(run)


@needs_compiler
@pytest.mark.parametrize("cache", ["can be written", "is a file", "nobody has a home", "programs must not run there"])
def test_it_is_compiled_once(places, monkeypatch, tmp_path, cache):
    _, folder, run = places
    if cache == "is a file":
        folder.parent.touch()
    elif cache == "nobody has a home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: Path("~nobody-of-this-name").expanduser())
    elif cache == "programs must not run there":
        usable = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: usable(path, mode) and Path(path).parent != folder)
    compiler = COMPILER
    if cache != "can be written":  # a second is too much to wait each time
        compiler = script(tmp_path, 'while [ "$1" != -o ]; do shift; done; printf "#!/bin/sh\\n" > "$2"')
    monkeypatch.setattr(native, "COMPILERS", (compiler,))
    path = init_program.find(run)
    assert path == (folder if cache == "can be written" else run) / native.file_name()
    assert not init_program.is_dynamic(path)
    assert subprocess.run([path, "serve"], stdin=subprocess.DEVNULL).returncode == 0
    monkeypatch.setattr(subprocess, "run", None)
    assert init_program.find(run) == path and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("fault", ["nothing", "a compiler that fails", "no folder that can be written"])
def test_where_it_cannot_be_had_one_sentence_says_what_to_install(places, monkeypatch, tmp_path, fault):
    run, why = places[2], "there is no C compiler"
    if fault != "nothing":
        compiler = script(tmp_path, "echo 'In file: error: stdio.h: No such file' >&2; exit 1")
        monkeypatch.setattr(native, "COMPILERS", (compiler,))
        why = "cc fails: In file: error: stdio.h: No such file"
    if fault == "no folder that can be written":
        for place in (tmp_path / "cache", tmp_path / "other"):
            place.touch()
        run, why = tmp_path / "other", f"{tmp_path}/other/dynamic.*: Not a directory|{tmp_path}/other: "
    with pytest.raises(ConfigError, match=why) as caught:
        init_program.find(run)
    said = str(caught.value)
    assert "install a C compiler" in said and "or the wheel of jaxagent for this platform" in said and "\n" not in said


def test_choosing_says_so_once_and_tries_no_back_end(places, monkeypatch, capsys):
    for name in choose.SAFE:
        monkeypatch.setitem(choose.SAFE, name, None)  # would fail with another error
    owner = Owner()
    try:
        with pytest.raises(ConfigError) as caught:
            asyncio.run(choose.choose_backend(owner))
        assert str(caught.value).count("install a C compiler") == 1
    finally:
        owner.close()
    assert sandbox_command.main([]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: sandboxes need a small program in C")


@needs_compiler
def test_a_dynamic_one_serves_and_an_image_with_another_library_is_told(places, monkeypatch, tmp_path, open_folder):
    monkeypatch.setattr(native, "COMPILERS", (script(tmp_path, NO_STATIC),))
    root = open_folder / "another library"
    for directory in ("bin", "proc", "dev", "tmp", "run", "var/tmp", "home/user"):
        (root / directory).mkdir(parents=True)
    owner = Owner()

    async def check(kind):
        backend = kind(owner)
        assert init_program.is_dynamic(backend.program) and backend.program.parent == owner.path
        async with await backend.start(Spec()) as sandbox:
            assert (await sandbox.run("echo on", 10, 100)).output == b"on\n"
        if kind is Namespaces:  # it was loaded on the host
            await (await backend.start(Spec(root=str(root)))).close()
        else:
            with pytest.raises(
                SandboxError, match=r"did not start: .*execvp.*install the C library for static programs"
            ):
                await backend.start(Spec(root=str(root)))

    try:
        for kind in (Namespaces, Bubblewrap):
            try:
                asyncio.run(choose.probe(choose.SAFE[kind.__name__.lower()], owner))
            except SandboxError as failure:
                pytest.skip(str(failure))
            asyncio.run(asyncio.wait_for(check(kind), 60))
    finally:
        owner.close()
