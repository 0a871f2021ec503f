"""Files and folders: find, renaming, permissions, links, sizes, duplicates."""

from __future__ import annotations

from jaxagent.data_pipelines.terminal_templates.draft import Draft, Draw, keep, lines
from jaxagent.data_pipelines.terminal_templates.program import call


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def rename_suffix(draw: Draw) -> Draft:
    """A loop of mv."""
    folder, *names = draw.words(draw.number(5, 8))
    old, new = draw.sample(("txt", "md", "log", "dat", "text"), 2)
    split = draw.number(2, len(names) - 1)
    files = {f"{folder}/{n}.{old if i < split else 'csv'}": lines([n]) for i, n in enumerate(names)}
    after = {path.replace(f".{old}", f".{new}"): text for path, text in files.items()}
    return Draft(
        f"Rename all files in the folder {folder} that end in .{old} so that they end in .{new}. Leave other "
        f"files alone.",
        (f'for f in {folder}/*.{old}; do mv "$f" "${{f%.{old}}}.{new}"; done', f"ls {folder}"),
        (call("names", folder, [_name(path) for path in after]), *keep(after)),
        files,
    )


def list_by_suffix(draw: Draw) -> Draft:
    """find -name over a tree."""
    top, b, *names = draw.words(draw.number(9, 12))
    suffix = draw.choice(("py", "sh", "cfg", "sql"))
    files = {}
    for i, name in enumerate(names[2:]):
        folder = draw.choice((top, f"{top}/{names[0]}", f"{top}/{names[0]}/{names[1]}"))
        files[f"{folder}/{name}.{suffix if i < 3 else draw.choice((suffix, 'txt'))}"] = lines([name])
    files[f"{top}/{names[1]}.{suffix}.bak"] = "old\n"
    found = sorted(path for path in files if path.endswith(f".{suffix}"))
    return Draft(
        f"Write the paths of all files below the folder {top} whose names end in .{suffix} to {b}.txt: one per "
        f"line, in "
        f"alphabetical order, each beginning with {top}/.",
        (f"find {top} -type f -name '*.{suffix}' | LC_ALL=C sort > {b}.txt", f"cat {b}.txt"),
        (call("content", f"{b}.txt", lines(found)), *keep(files)),
        files,
    )


def delete_empty(draw: Draw) -> Draft:
    """find -empty -delete."""
    top, inner, *names = draw.words(draw.number(7, 10))
    files = {}
    for i, name in enumerate(names):
        folder = draw.choice((top, f"{top}/{inner}"))
        files[f"{folder}/{name}.txt"] = "" if i < 2 else draw.choice(("", lines([name])))
    files[f"{top}/{inner}/{names[0]}.log"] = "x\n"
    kept = {path: text for path, text in files.items() if text}
    return Draft(
        f"Delete all empty files below the folder {top}. Keep the folders and all other files.",
        (f"find {top} -type f -empty -delete",),
        (*(call("absent", path) for path in files if path not in kept), call("folder", f"{top}/{inner}"), *keep(kept)),
        files,
    )


def scripts_executable(draw: Draw) -> Draft:
    """chmod on some of the files."""
    top, inner, *names = draw.words(draw.number(6, 9))
    files = {}
    for i, name in enumerate(names):
        folder = draw.choice((top, f"{top}/{inner}"))
        files[f"{folder}/{name}.{'sh' if i < 2 else draw.choice(('sh', 'txt'))}"] = "echo hello\n"
    files[f"{top}/{inner}/{names[0]}.md"] = "x\n"
    return Draft(
        f"Give every .sh file below the folder {top} the mode 755. The modes of other files must not change.",
        (f"find {top} -name '*.sh' -exec chmod 755 {{}} +",),
        (*(call("mode", path, 0o755 if path.endswith(".sh") else 0o644) for path in files), *keep(files)),
        files,
        setup=lines(f"chmod 644 {path}" for path in files),
    )


def repoint_link(draw: Draw) -> Draft:
    """ln -sfn."""
    top, old, new = draw.words(3)
    files = {f"{top}/{old}/version": "1\n", f"{top}/{new}/version": "2\n"}
    return Draft(
        f"{top}/current is a symbolic link to the folder {top}/{old}. Make it lead to the folder {top}/{new} instead.",
        (f"ln -sfn {new} {top}/current",),
        (call("link", f"{top}/current", f"{top}/{new}"), call("names", f"{top}/{old}", ["version"]), *keep(files)),
        files,
        setup=f"ln -s {old} {top}/current",
        initial=(call("link", f"{top}/current", f"{top}/{old}"),),
    )


def containing_word(draw: Draw) -> Draft:
    """grep -rl."""
    top, inner, b, word, *names = draw.words(draw.number(9, 12))
    others = [w for w in draw.words(12, without=[word]) if word not in w]
    files = {}
    for i, name in enumerate(names):
        said = draw.sample(others, 3)
        if i < 2 or draw.random() < 0.3:
            said.insert(draw.number(0, 3), word)
        files[f"{draw.choice((top, f'{top}/{inner}'))}/{name}.txt"] = " ".join(said) + "\n"
    files[f"{top}/{inner}/{word}.log"] = "nothing\n"
    found = sorted(path for path, text in files.items() if word in text)
    return Draft(
        f"Write the paths of all files below the folder {top} that contain the word {word} to {b}.txt: one per "
        f"line, in "
        f"alphabetical order, each beginning with {top}/.",
        (f"grep -rl {word} {top} | LC_ALL=C sort > {b}.txt", f"cat {b}.txt"),
        (call("content", f"{b}.txt", lines(found)), *keep(files)),
        files,
    )


def move_by_word(draw: Draw) -> Draft:
    """Look first, then move what was found."""
    top, away, word, *names = draw.words(draw.number(7, 9))
    others = [w for w in draw.words(9, without=[word]) if word not in w]
    texts = {name: lines(draw.sample(others, 3)) for name in names}
    wanted = draw.choice(names)
    texts[wanted] += f"{word}\n"
    files = {f"{top}/{name}": text for name, text in texts.items()}
    return Draft(
        f"One file in the folder {top} contains the word {word}. Move it into the new folder {away}, under its name.",
        (f"grep -l {word} {top}/*", f"mkdir {away} && mv {top}/{wanted} {away}/"),
        (
            call("names", away, [wanted]),
            call("names", top, [name for name in names if name != wanted]),
            *(call("unchanged", f"{away if name == wanted else top}/{name}", text) for name, text in texts.items()),
        ),
        files,
    )


def broken_links(draw: Draw) -> Draft:
    """find -xtype l."""
    top, b, *names = draw.words(draw.number(9, 12))
    real, links = names[:3], names[3:]
    files = {f"{top}/{name}": lines([name]) for name in real}
    broken = sorted(draw.sample(links, 2))
    good = {link: draw.choice(real) for link in links if link not in broken}
    make = [f"ln -s {target} {top}/{link}" for link, target in good.items()]
    make += [f"ln -s gone/{link} {top}/{link}" for link in broken]
    return Draft(
        f"Some symbolic links in the folder {top} lead nowhere. Write their names, without the folder, to {b}.txt, one "
        "per line in alphabetical order, and delete these links. Leave everything else as it is.",
        (
            f"find {top} -xtype l -printf '%f\\n' | LC_ALL=C sort > {b}.txt",
            f"find {top} -xtype l -delete",
            f"cat {b}.txt",
        ),
        (
            call("content", f"{b}.txt", lines(broken)),
            *(call("absent", f"{top}/{link}") for link in broken),
            *(call("link", f"{top}/{link}", f"{top}/{target}") for link, target in good.items()),
            *keep(files),
        ),
        files,
        setup=lines(make),
    )


def sort_into_folders(draw: Draw) -> Draft:
    """A folder per suffix."""
    top, *names = draw.words(draw.number(7, 10))
    suffixes = draw.sample(("txt", "csv", "log", "md", "cfg"), 3)
    files = {
        f"{top}/{n}.{suffixes[i % 3] if i < 3 else draw.choice(suffixes)}": lines([n]) for i, n in enumerate(names)
    }
    after = {f"{top}/{path.rpartition('.')[2]}/{_name(path)}": text for path, text in files.items()}
    return Draft(
        f"Sort the files in the folder {top} into folders inside {top} that are called like their suffixes without the "
        f"dot: a file a.{suffixes[0]} must become {top}/{suffixes[0]}/a.{suffixes[0]}.",
        (f"ls {top}", f'for f in {top}/*.*; do d={top}/"${{f##*.}}"; mkdir -p "$d"; mv "$f" "$d"; done'),
        (call("names", top, suffixes), *keep(after)),
        files,
    )


def close_private_files(draw: Draw) -> Draft:
    """find -perm."""
    top, inner, *names = draw.words(draw.number(7, 10))
    paths = [f"{draw.choice((top, f'{top}/{inner}'))}/{name}.key" for name in names]
    modes = dict.fromkeys(paths, 0o600) | {path: draw.choice((0o644, 0o640, 0o604)) for path in draw.sample(paths, 3)}
    other = f"{top}/{inner}/{names[0]}.pub"
    files = {path: "secret\n" for path in paths} | {other: "public\n"}
    return Draft(
        f"Every .key file below the folder {top} must have the mode 600. Set it where it is different. Then write the "
        f"number of files that had a different mode to fixed.txt in your home directory. Other files must not change.",
        (
            f"find {top} -name '*.key' ! -perm 600 | wc -l > fixed.txt; cat fixed.txt",
            f"find {top} -name '*.key' -exec chmod 600 {{}} +",
        ),
        (
            call("count", "fixed.txt", 3, ""),
            *(call("mode", path, 0o600) for path in paths),
            call("mode", other, 0o644),
            *keep(files),
        ),
        files,
        setup=lines([f"chmod {mode:o} {path}" for path, mode in modes.items()] + [f"chmod 644 {other}"]),
    )


def folder_sizes(draw: Draw) -> Draft:
    """Bytes per folder, largest first."""
    top, b, *names = draw.words(draw.number(6, 8))
    folders = names[:3]
    sizes = dict(zip(folders, draw.sample(range(20, 400), 3), strict=True))
    files = {}
    for folder, size in sizes.items():
        first = draw.number(1, size - 1)
        files[f"{top}/{folder}/{names[3]}.dat"] = "x" * first
        files[f"{top}/{folder}/{names[-1]}.{'bin'}"] = "y" * (size - first)
    report = lines(f"{size} {folder}" for folder, size in sorted(sizes.items(), key=lambda item: -item[1]))
    loop = f'for d in {top}/*/; do echo "$(cat "$d"* | wc -c) $(basename "$d")"; done'
    return Draft(
        f"The folder {top} holds folders with files. Write to {b}.txt one line per folder: the sum of the sizes of its "
        "files in bytes, a space, and the name of the folder. Largest sum first.",
        (f"{loop} | sort -rn > {b}.txt", f"cat {b}.txt"),
        (call("content", f"{b}.txt", report), *keep(files)),
        files,
    )


def remove_duplicates(draw: Draw) -> Draft:
    """Files of equal content: keep the first by name."""
    top, *names = draw.words(draw.number(8, 11))
    texts = [lines(draw.words(3)) for _ in range(3)]
    files = {f"{top}/{name}": texts[i] if i < 3 else draw.choice(texts) for i, name in enumerate(names)}
    kept: dict[str, str] = {}
    for path in sorted(files):
        if files[path] not in kept.values():
            kept[path] = files[path]
    awk = "awk 'seen[$1]++ {print $2}'"
    return Draft(
        f"Some files in the folder {top} have exactly the same content. Of all files with the same content, keep only "
        "the one whose name is first in alphabetical order, and delete the others.",
        (f"(export LC_ALL=C; sha256sum {top}/* | {awk} | xargs -r rm)", f"ls {top}"),
        (call("names", top, [_name(path) for path in kept]), *keep(kept)),
        files,
    )
