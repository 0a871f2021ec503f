"""Archives, compression, checksums and rotated logs."""

from __future__ import annotations

import hashlib

from jaxagent.data_pipelines.terminal_templates.draft import Draft, Draw, keep, lines, write_files
from jaxagent.data_pipelines.terminal_templates.program import call


def _tree(draw: Draw, folder: str, low: int = 2, high: int = 5) -> dict[str, str]:
    names = draw.words(draw.number(low, high), without=[folder])
    return {f"{folder}/{name}.txt": lines(draw.words(draw.number(1, 4))) for name in names}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def archive_folder(draw: Draw) -> Draft:
    """tar czf."""
    folder, b = draw.words(2)
    files = _tree(draw, folder)
    return Draft(
        f"Create the gzip-compressed tar archive {b}.tar.gz of the folder {folder}. The names in the archive must "
        f"begin "
        f"with {folder}/.",
        (f"tar czf {b}.tar.gz {folder}", f"tar tzf {b}.tar.gz | LC_ALL=C sort"),
        (call("tar", f"{b}.tar.gz", files), call("gzip_magic", f"{b}.tar.gz"), *keep(files)),
        files,
    )


def extract_archive(draw: Draw) -> Draft:
    """tar xzf -C."""
    folder, a, b = draw.words(3)
    files = _tree(draw, folder)
    setup = lines([*write_files(files), f"tar czf {a}.tar.gz {folder}", f"rm -r {folder}"])
    return Draft(
        f"Unpack the archive {a}.tar.gz into the new folder {b}, and leave the archive where it is.",
        (f"mkdir {b}", f"tar xzf {a}.tar.gz -C {b}"),
        (
            *(call("content", f"{b}/{path}", text) for path, text in files.items()),
            call("names", b, [folder]),
            call("tar", f"{a}.tar.gz", files),
        ),
        setup=setup,
        initial=(call("tar", f"{a}.tar.gz", files), call("absent", b), call("absent", folder)),
    )


def extract_one(draw: Draw) -> Draft:
    """One file of an archive."""
    folder, a, b = draw.words(3)
    files = _tree(draw, folder, 3, 5)
    wanted = draw.choice(sorted(files))
    return Draft(
        f"Write the content of the file {wanted} inside the archive {a}.tar.gz to {b}.txt. Do not unpack anything else "
        "into your home directory.",
        (f"tar xzf {a}.tar.gz -O {wanted} > {b}.txt",),
        (call("content", f"{b}.txt", files[wanted]), call("absent", folder), call("tar", f"{a}.tar.gz", files)),
        setup=lines([*write_files(files), f"tar czf {a}.tar.gz {folder}", f"rm -r {folder}"]),
        initial=(call("tar", f"{a}.tar.gz", files), call("absent", folder)),
    )


def compress_file(draw: Draw) -> Draft:
    """gzip."""
    a, *words = draw.words(draw.number(4, 9))
    return Draft(
        f"Compress the file {a}.log with gzip, so that only {a}.log.gz is left.",
        (f"gzip {a}.log",),
        (call("gzipped", f"{a}.log.gz", lines(words)), call("absent", f"{a}.log")),
        {f"{a}.log": lines(words)},
    )


def decompress_file(draw: Draw) -> Draft:
    """gunzip -c."""
    a, b, *words = draw.words(draw.number(5, 9))
    text = lines(words)
    return Draft(
        f"Write the decompressed text of {a}.txt.gz to {b}.txt, and keep {a}.txt.gz.",
        (f"gzip -dc {a}.txt.gz > {b}.txt",),
        (call("content", f"{b}.txt", text), call("gzipped", f"{a}.txt.gz", text)),
        setup=lines([*write_files({f"{a}.txt": text}), f"gzip {a}.txt"]),
        initial=(call("gzipped", f"{a}.txt.gz", text),),
    )


def write_checksums(draw: Draw) -> Draft:
    """sha256sum."""
    folder, b = draw.words(2)
    files = _tree(draw, folder, 3, 5)
    report = [f"{_sha256(text)}  {path}" for path, text in files.items()]
    return Draft(
        f"Write the SHA-256 checksums of all files in the folder {folder} to {b}.sha256 in your home directory, as "
        f"sha256sum prints them when it is run in the home directory with paths such as {min(files)}.",
        (f"sha256sum {folder}/* > {b}.sha256", f"sha256sum -c {b}.sha256"),
        (call("lines_in_any_order", f"{b}.sha256", report), *keep(files)),
        files,
    )


def find_corrupted(draw: Draw) -> Draft:
    """sha256sum -c, and what fails is moved away."""
    folder, away, b = draw.words(3)
    original = _tree(draw, folder, 4, 6)
    damaged = sorted(draw.sample(sorted(original), 2))
    files = {path: text + ("x\n" if path in damaged else "") for path, text in original.items()}
    sums = {f"{b}.sha256": lines(f"{_sha256(text)}  {path}" for path, text in original.items())}
    find = f"sha256sum --quiet -c {b}.sha256 2>/dev/null | cut -d: -f1"
    return Draft(
        f"The file {b}.sha256 lists SHA-256 checksums of the files in the folder {folder}. Some files no longer match. "
        f"Move exactly those into the new folder {away}, under their names.",
        (find, f'mkdir {away}; {find} | while read -r f; do mv "$f" {away}; done'),
        (
            call("names", away, [path.split("/")[1] for path in damaged]),
            call("names", folder, [path.split("/")[1] for path in files if path not in damaged]),
            *(
                call("unchanged", path.replace(folder, away, 1) if path in damaged else path, files[path])
                for path in files
            ),
        ),
        {**files, **sums},
    )


def rotate_logs(draw: Draw) -> Draft:
    """mv in the right order, and a compressed oldest one."""
    a, *words = draw.words(9)
    now, one, two = lines(words[:3]), lines(words[3:6]), lines(words[6:])
    return Draft(
        f"Rotate the log files: {a}.log.2 must be compressed with gzip as {a}.log.3.gz, {a}.log.1 becomes {a}.log.2, "
        f"{a}.log becomes {a}.log.1, and {a}.log must then be a new empty file.",
        (f"gzip -c {a}.log.2 > {a}.log.3.gz && mv {a}.log.1 {a}.log.2 && mv {a}.log {a}.log.1 && touch {a}.log", "ls"),
        (
            call("gzipped", f"{a}.log.3.gz", two),
            call("content", f"{a}.log.2", one),
            call("content", f"{a}.log.1", now),
            call("content", f"{a}.log", ""),
            call("absent", f"{a}.log.2.gz"),
        ),
        {f"{a}.log": now, f"{a}.log.1": one, f"{a}.log.2": two},
    )


def backup_with_manifest(draw: Draw) -> Draft:
    """An archive of some files, and a list of what is in it."""
    folder, b, suffix_word = draw.words(3)
    keepers = {
        f"{folder}/{name}.conf": lines(draw.words(2)) for name in draw.words(draw.number(2, 4), without=[folder])
    }
    others = {f"{folder}/{name}.tmp": lines([suffix_word]) for name in draw.words(2, without=[folder])}
    names = lines(sorted(keepers))
    return Draft(
        f"Create the gzip-compressed tar archive {b}.tar.gz of the .conf files in the folder {folder}, and of no other "
        f"files; their names in the archive must begin with {folder}/. Then write these names, one per line in "
        f"alphabetical order, to {b}.list.",
        (f"tar czf {b}.tar.gz {folder}/*.conf", f"tar tzf {b}.tar.gz | LC_ALL=C sort > {b}.list", f"cat {b}.list"),
        (
            call("tar", f"{b}.tar.gz", keepers),
            call("gzip_magic", f"{b}.tar.gz"),
            call("content", f"{b}.list", names),
            *keep({**keepers, **others}),
        ),
        {**keepers, **others},
    )
