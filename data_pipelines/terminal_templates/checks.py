"""What the tests of generated tasks are made of: `program` copies the functions that a test calls into one script.

Each function looks at one thing and ends the program with status 1, saying why, when it is not so. They run with the
home directory as working directory, in `python3 -I`, and may import nothing but the standard library. Paths are those
of the task; a path is never followed through a link that stands in its last place, unless the function says so.
"""

import importlib
import io
import json
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib


def fail(why):
    """Ends the test: not done."""
    print("FAILED:", why)
    sys.exit(1)


def data(path):
    """Bytes of a regular file of at most a megabyte."""
    try:
        info = os.lstat(path)
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    if not stat.S_ISREG(info.st_mode):
        fail(f"{path} is not a regular file")
    if info.st_size > 1_000_000:
        fail(f"{path} is too large")
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        fail(f"{path}: {error.strerror}")


def text(path):
    """A file as text, without line ends at its end: whether the last line has one is not what tasks are about."""
    return data(path).decode("utf-8", "replace").rstrip("\n")


def unchanged(path, expected):
    """The file is exactly as it was given."""
    if data(path) != expected.encode():
        fail(f"{path} is not as it was given")


def content(path, expected):
    """The file says this, but for line ends at its end."""
    if text(path) != expected.rstrip("\n"):
        fail(f"{path} should say {expected[:200]!r}, but says {text(path)[:200]!r}")


def lines_in_any_order(path, expected):
    """The file has these lines and no others, in any order."""
    if sorted(text(path).split("\n")) != sorted(expected):
        fail(f"{path} should have the lines {sorted(expected)[:20]}, but has {sorted(text(path).split(chr(10)))[:20]}")


def count(path, expected, name):
    """The file says a number, perhaps followed by the name of the file that was counted, as wc does."""
    if text(path).split() not in ([str(expected)], [str(expected), name]):
        fail(f"{path} should say {expected}, but says {text(path)[:200]!r}")


def absent(path):
    """Nothing is there, not even a link."""
    if os.path.lexists(path):
        fail(f"{path} is still there")


def folder(path):
    """A directory, not a link to one."""
    if not os.path.isdir(path) or os.path.islink(path):
        fail(f"{path} is not a directory")


def names(path, expected):
    """The directory has exactly these entries, hidden ones left aside."""
    folder(path)
    found = sorted(name for name in os.listdir(path) if not name.startswith("."))
    if found != sorted(expected):
        fail(f"{path} should hold {sorted(expected)}, but holds {found}")


def mode(path, expected):
    """The permission bits."""
    try:
        found = stat.S_IMODE(os.lstat(path).st_mode)
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    if found != expected:
        fail(f"{path} should have mode {expected:o}, but has {found:o}")


def link(path, target):
    """A symbolic link that leads to the target, written in whatever way."""
    if not os.path.islink(path):
        fail(f"{path} is not a symbolic link")
    if os.path.realpath(path) != os.path.realpath(target):
        fail(f"{path} leads to {os.readlink(path)}, not to {target}")


def home(expected):
    """The home directory, hidden entries left aside, is exactly this: path -> ["file", text, mode or None],
    ["folder"] or ["link", target]. Folders that only lie on the way to another path need not be listed."""
    on_the_way = {path.rsplit("/", n)[0] for path in expected for n in range(1, path.count("/") + 1)}
    found = set()
    for top, folders, files in os.walk("."):
        folders[:] = [name for name in folders if not (top == "." and name.startswith("."))]
        for name in folders + [name for name in files if not (top == "." and name.startswith("."))]:
            found.add(os.path.join(top, name)[2:])
    if found != set(expected) | on_the_way:
        fail(f"not expected: {sorted(found - set(expected) - on_the_way)}; missing: {sorted(set(expected) - found)}")
    for path in on_the_way:
        folder(path)
    for path, (kind, *rest) in expected.items():
        if kind == "folder":
            folder(path)
        elif kind == "link":
            link(path, rest[0])
        else:
            content(path, rest[0])
            if rest[1] is not None:
                mode(path, rest[1])


def json_is(path, expected):
    """The file is JSON of this value, in whatever layout. Numbers may differ by rounding in the ninth digit."""

    def same(a, b):
        if isinstance(a, dict) and isinstance(b, dict):
            return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
        if isinstance(a, list) and isinstance(b, list):
            return len(a) == len(b) and all(map(same, a, b))
        if isinstance(a, float) or isinstance(b, float):
            numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (a, b))
            return numbers and abs(a - b) <= 1e-9 * max(1.0, abs(b))
        return type(a) is type(b) and a == b

    try:
        found = json.loads(text(path))
    except ValueError:
        fail(f"{path} is not JSON")
    if not same(found, expected):
        fail(f"{path} should hold {expected}, but holds {str(found)[:300]}")


def unpacked(packed, limit):
    """At most `limit` bytes of what is in something packed with gzip, bzip2 or xz; anything else is as it is."""
    found, whole = b"", packed
    while packed and len(found) < limit:
        if packed.startswith(b"\x1f\x8b"):
            unpacker = zlib.decompressobj(31)
        elif packed.startswith(b"BZh"):
            unpacker = importlib.import_module("bz2").BZ2Decompressor()
        elif packed.startswith(b"\xfd7zXZ"):
            unpacker = importlib.import_module("lzma").LZMADecompressor(memlimit=100_000_000)
        else:
            return packed[:limit] if packed is whole else found  # what follows the last packed part is padding
        found += unpacker.decompress(packed, limit - len(found))
        if not unpacker.eof and len(found) < limit:
            raise EOFError("it ends too early")
        packed = unpacker.unused_data
    return found


def tar(path, expected):
    """A tar archive, compressed or not, with exactly these files: name -> text. Directory entries are free. Of what is
    packed into it a few megabytes are looked at, so that no archive can need more memory than there is."""
    packed, limit, size, found = data(path), 8_000_000, 0, {}
    try:
        raw = unpacked(packed, limit)
        if len(raw) == limit:
            fail(f"{path} is too large")
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as archive:
            for member in archive:
                size += member.size
                if member.size < 0 or size > limit:
                    fail(f"{path} is too large")
                if member.isfile():
                    found[os.path.normpath(member.name)] = archive.extractfile(member).read()
    except Exception as error:  # of four modules
        fail(f"{path} is no tar archive: {error}")
    if found != {name: value.encode() for name, value in expected.items()}:
        fail(f"{path} should hold {sorted(expected)} as given, but holds {sorted(found)[:20]}")


def gzipped(path, expected):
    """A gzip file with this content, in one part or several. No more of it is unpacked."""
    gzip_magic(path)
    try:
        found = unpacked(data(path), len(expected.encode()) + 1)
    except Exception as error:  # of three modules
        fail(f"{path} is no gzip file: {error}")
    if found != expected.encode():
        fail(f"{path} does not hold what it should")


def gzip_magic(path):
    """Compressed with gzip, whatever is inside."""
    if data(path)[:2] != b"\x1f\x8b":
        fail(f"{path} is not compressed with gzip")


def repository_copy(repository, place):
    """Copies what a repository consists of (objects, references, index) and makes a configuration for it, in `place`.

    Not copied, since they can name programs that git runs or change what it reads: configuration, hooks, attributes,
    excludes, alternates, grafts, replaced objects, derived indices, links.
    """
    source = f"{repository}/.git"
    folder(source)
    waiting = ["HEAD", "packed-refs", "index", "refs", "reftable", "objects"]
    left, things = 32_000_000, 2_000
    while waiting:
        path = waiting.pop()
        try:
            info = os.lstat(f"{source}/{path}")
        except FileNotFoundError:
            continue
        left, things = left - info.st_size, things - 1
        if min(left, things) < 0:
            fail(f"{repository} is too large")
        if stat.S_ISDIR(info.st_mode):
            os.makedirs(f"{place}/{path}")
            inside = {f"{path}/{name}" for name in os.listdir(f"{source}/{path}")}
            waiting += inside - {"objects/info"}
        elif stat.S_ISREG(info.st_mode):
            shutil.copy2(f"{source}/{path}", f"{place}/{path}")  # the index's own time says what git must look at
    formats = {}
    if os.path.lexists(f"{source}/config"):
        for name, value in re.findall(r"(?im)^\s*(objectformat|refstorage)\s*=\s*(\w+)\s*$", text(f"{source}/config")):
            formats[name.lower()] = value
    lines = ["[core]", f"repositoryformatversion = {int(bool(formats))}", "bare = false", "untrackedCache = false"]
    lines += ["multiPackIndex = false", "bigFileThreshold = 1m", "[extensions]"]  # larger files are read in pieces
    with open(os.path.join(place, "config"), "w", encoding="utf-8") as file:
        file.write("\n".join([*lines, *(f"{name} = {value}" for name, value in formats.items())]) + "\n")


def git(repository, *arguments):
    """What a git command prints, without the last line end. It looks at a copy of the repository that has a
    configuration of our own (see `repository_copy`), in which nothing of the agent's runs; it ends soon, and prints no
    more than a megabyte. Repositories inside the repository are not looked at."""
    folder(repository)
    with tempfile.TemporaryDirectory() as place:
        copy = os.path.join(place, "git")
        try:
            os.mkdir(copy)
            repository_copy(repository, copy)
        except OSError as error:
            fail(f"{repository} cannot be read: {error.strerror}")
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": place,  # not a name that an agent could know: git reads .gitconfig there
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_DIR": copy,
            "GIT_WORK_TREE": os.path.abspath(repository),
        }
        command, *rest = arguments
        rest = ["--ignore-submodules=all", *rest] if command == "status" else rest
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            try:
                done = subprocess.run(
                    ["git", command, *rest],
                    cwd=repository,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    timeout=15,
                    preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000)),
                )
            except subprocess.TimeoutExpired:
                fail(f"git {' '.join(arguments)} in {repository} does not end")
            output.seek(0), errors.seek(0)
            if done.returncode != 0:
                fail(f"git {' '.join(arguments)} in {repository}: {errors.read(200).decode('utf-8', 'replace')}")
            return output.read().decode("utf-8", "replace").rstrip("\n")


def git_says(repository, arguments, expected):
    """A git command prints exactly this."""
    found = git(repository, *arguments)
    if found != expected:
        fail(f"git {' '.join(arguments)} should print {expected!r}, but prints {found[:300]!r}")


def asleep(seconds):
    """True when a process `sleep <seconds>` runs that was started in this home directory. Looks at the process
    table, since a file with a process id could have been changed."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if file.read() != f"sleep\0{seconds}\0".encode():
                    continue
            if os.readlink(f"/proc/{pid}/cwd") == os.getcwd():
                return True
        except OSError:  # it has ended meanwhile, or is somebody else's
            continue
    return False


def processes(ended, alive):
    """Of the processes that setup started, told apart by how long they sleep, these have ended and those run."""
    deadline = time.monotonic() + 3  # a shell that has just been forked is not `sleep` yet
    while missing := [seconds for seconds in alive if not asleep(seconds)]:
        if time.monotonic() > deadline:
            fail(f"the process sleep {missing[0]} does not run")
        time.sleep(0.02)
    deadline = time.monotonic() + 3
    while any(asleep(seconds) for seconds in ended):
        if time.monotonic() > deadline:
            fail(f"one of the processes sleep {ended} still runs")
        time.sleep(0.02)
