"""Level 1: one short command. Each operation changes a picture of the home directory, which is then the final test.

A picture is path -> ("file", text, mode or None), ("folder",) or ("link", target). Since the whole home directory must
look like the picture, neither doing nothing nor doing too much passes: `mkdir *`, `rm *` and copies of everything fail.
The same operations, in fewer words and sometimes two in sequence, are the laptop's tasks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from jaxagent.data_pipelines.terminal_templates.draft import Draft, Draw, lines
from jaxagent.data_pipelines.terminal_templates.program import call

Picture = Mapping[str, tuple]


@dataclasses.dataclass(frozen=True)
class Operation:
    """One thing to do: how to say it, how to do it, and the home directory before and after."""

    instruction: str
    commands: Sequence[str]
    before: Picture
    after: Picture


def make_folder(draw: Draw) -> Operation:
    """mkdir."""
    a, b = draw.words(2)
    path = draw.choice((a, f"{a}/{b}"))
    return Operation(f"Create the folder {path}.", (f"mkdir -p {path}",), {}, {path: ("folder",)})


def write_word(draw: Draw) -> Operation:
    """echo > file."""
    word, path = draw.words(2)
    command = f"echo {word} > {path}"
    return Operation(f"Write the word {word} to the file {path}.", (command,), {}, {path: ("file", word, None)})


def append_word(draw: Draw) -> Operation:
    """echo >> file."""
    path, word, *rest = draw.words(draw.number(3, 5))
    before, after = ("file", lines(rest), None), ("file", lines([*rest, word]), None)
    command = f"echo {word} >> {path}"
    return Operation(f"Append the word {word} to the file {path}.", (command,), {path: before}, {path: after})


def empty_file(draw: Draw) -> Operation:
    """touch."""
    (path,) = draw.words(1)
    return Operation(f"Create the empty file {path}.", (f"touch {path}",), {}, {path: ("file", "", None)})


def rename_file(draw: Draw) -> Operation:
    """mv a b."""
    a, b, word = draw.words(3)
    file = ("file", word, None)
    return Operation(f"Rename the file {a} to {b}.", (f"mv {a} {b}",), {a: file}, {b: file})


def copy_file(draw: Draw) -> Operation:
    """cp a b."""
    a, b, word = draw.words(3)
    file = ("file", word, None)
    return Operation(f"Copy the file {a} to {b}.", (f"cp {a} {b}",), {a: file}, {a: file, b: file})


def remove_file(draw: Draw) -> Operation:
    """rm, with others to be left alone."""
    a, *others = draw.words(draw.number(2, 3))
    rest = {name: ("file", name, None) for name in others}
    return Operation(f"Delete the file {a}.", (f"rm {a}",), {a: ("file", a, None), **rest}, rest)


def move_into_folder(draw: Draw) -> Operation:
    """mv a b/."""
    a, b, word = draw.words(3)
    file = ("file", word, None)
    moved = {f"{b}/{a}": file}
    return Operation(f"Move the file {a} into the folder {b}.", (f"mv {a} {b}",), {a: file, b: ("folder",)}, moved)


def set_mode(draw: Draw) -> Operation:
    """chmod."""
    a, word = draw.words(2)
    mode = draw.choice((0o600, 0o640, 0o700, 0o755, 0o444))
    before, after = {a: ("file", word, 0o644)}, {a: ("file", word, mode)}
    return Operation(f"Set the mode of the file {a} to {mode:o}.", (f"chmod {mode:o} {a}",), before, after)


def make_link(draw: Draw) -> Operation:
    """ln -s."""
    a, b, word = draw.words(3)
    file = ("file", word, None)
    command = f"ln -s {a} {b}"
    return Operation(f"Create the symbolic link {b} to {a}.", (command,), {a: file}, {a: file, b: ("link", a)})


def sort_lines(draw: Draw) -> Operation:
    """sort a > b."""
    a, b, *words = draw.words(draw.number(5, 7))
    if words == sorted(words):
        words.reverse()
    file = ("file", lines(words), None)
    after = {a: file, b: ("file", lines(sorted(words)), None)}
    return Operation(f"Sort the lines of {a} into {b}.", (f"sort {a} > {b}",), {a: file}, after)


def first_lines(draw: Draw) -> Operation:
    """head -n."""
    a, b, *words = draw.words(draw.number(6, 8))
    n = draw.number(1, 3)
    file = ("file", lines(words), None)
    after = {a: file, b: ("file", lines(words[:n]), None)}
    said = f"Write the first {n} lines of {a} to {b}." if n > 1 else f"Write the first line of {a} to {b}."
    return Operation(said, (f"head -n {n} {a} > {b}",), {a: file}, after)


def join_files(draw: Draw) -> Operation:
    """cat a b > c."""
    a, b, c, u, v = draw.words(5)
    before = {a: ("file", lines([u]), None), b: ("file", lines([v]), None)}
    after = {**before, c: ("file", lines([u, v]), None)}
    return Operation(f"Write the files {a} and {b}, in this order, to {c}.", (f"cat {a} {b} > {c}",), before, after)


def rename_to_content(draw: Draw) -> Operation:
    """cat a, then mv a to what it says: what was read must be used."""
    a, word = draw.words(2)
    file = ("file", lines([word]), None)
    commands = (f"cat {a}", f"mv {a} {word}")
    return Operation(f"Rename the file {a} to the word in it.", commands, {a: file}, {word: file})


OPERATIONS: Mapping[str, Callable[[Draw], Operation]] = {
    "make_folder": make_folder,
    "write_word": write_word,
    "append_word": append_word,
    "empty_file": empty_file,
    "rename_file": rename_file,
    "copy_file": copy_file,
    "remove_file": remove_file,
    "move_into_folder": move_into_folder,
    "set_mode": set_mode,
    "make_link": make_link,
    "sort_lines": sort_lines,
    "first_lines": first_lines,
    "join_files": join_files,
    "rename_to_content": rename_to_content,
}
LAPTOP = (
    *("make_folder", "write_word", "rename_file", "copy_file", "remove_file"),
    *("move_into_folder", "set_mode", "make_link", "sort_lines", "rename_to_content"),
)


def single(operation: Callable[[Draw], Operation]) -> Callable[[Draw], Draft]:
    """The template of one operation."""
    return lambda draw: draft([operation(draw)])


def sequence(operation: Callable[[Draw], Operation]) -> Callable[[Draw], Draft]:
    """The template of two operations: this one, followed by another one of the laptop's."""

    def make(draw: Draw) -> Draft:
        first = operation(draw)
        while True:  # until the second one has names of its own
            second = OPERATIONS[draw.choice(LAPTOP)](draw)
            if not _names(first) & _names(second):
                return draft([first, second])

    return make


def draft(operations: Sequence[Operation]) -> Draft:
    """A task that asks for the operations in order; they must not touch each other's paths."""
    said = [op.instruction if i == 0 else f"Then {_lower(op.instruction)}" for i, op in enumerate(operations)]
    before = {path: entry for op in operations for path, entry in op.before.items()}
    after = {path: list(entry) for op in operations for path, entry in op.after.items()}
    setup = [f"mkdir {path}" for path, (kind, *_) in before.items() if kind == "folder"]
    setup += [f"chmod {e[2]:o} {path}" for path, e in before.items() if e[0] == "file" and e[2] is not None]
    return Draft(
        instruction=" ".join(said),
        commands=tuple(command for op in operations for command in op.commands),
        final=(call("home", after),),
        files={path: entry[1] for path, entry in before.items() if entry[0] == "file"},
        setup="\n".join(setup),
        initial=(call("home", {path: list(entry) for path, entry in before.items()}),),
        first_commands=len(operations[0].commands) if len(operations) > 1 else 0,
    )


def _names(operation: Operation) -> set[str]:
    return {part for path in (*operation.before, *operation.after) for part in path.split("/")}


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
