"""What the tests of generated tasks are made of: `program` copies the functions that a test calls into one script.

Each function looks at one thing and ends the program with status 1, saying why, when it is not so. They run with the
home directory as working directory, in `python3 -I`, and may import nothing but the standard library. Paths are those
of the task; a path is never followed through a link that stands in its last place, unless the function says so.
"""

import json
import os
import stat
import subprocess
import sys
import tarfile
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


def tar(path, expected):
    """A tar archive, compressed or not, with exactly these files: name -> text. Directory entries are free."""
    data(path)
    try:
        with tarfile.open(path) as archive:
            found = {os.path.normpath(m.name): archive.extractfile(m).read() for m in archive if m.isfile()}
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        fail(f"{path} is no tar archive: {error}")
    if found != {name: value.encode() for name, value in expected.items()}:
        fail(f"{path} should hold {sorted(expected)} as given, but holds {sorted(found)}")


def gzipped(path, expected):
    """A gzip file with this content."""
    try:
        found = zlib.decompress(data(path), 31)
    except zlib.error as error:
        fail(f"{path} is no gzip file: {error}")
    if found != expected.encode():
        fail(f"{path} does not hold what it should")


def gzip_magic(path):
    """Compressed with gzip, whatever is inside."""
    if data(path)[:2] != b"\x1f\x8b":
        fail(f"{path} is not compressed with gzip")


def git(repository, *arguments):
    """What a git command prints, without the last line end. No hooks, no monitor, no configuration but the repo's."""
    folder(repository)
    safe = ["git", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "safe.directory=*"]
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run([*safe, "-C", repository, *arguments], capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        fail(f"git {' '.join(arguments)} in {repository}: {done.stderr.strip()[:200]}")
    return done.stdout.rstrip("\n")


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
