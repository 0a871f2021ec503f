"""Text processing: grep, sed, tr, sort, uniq, awk over files of words."""

from __future__ import annotations

from collections import Counter

from jaxagent.data_pipelines.terminal_templates.draft import Draft, Draw, keep, lines
from jaxagent.data_pipelines.terminal_templates.program import call


def count_lines(draw: Draw) -> Draft:
    """wc -l."""
    a, b, *words = draw.words(draw.number(5, 22))
    files = {a: lines(words)}
    return Draft(
        f"Write the number of lines of the file {a} to the file {b}.",
        (f"wc -l < {a} > {b}",),
        (call("count", b, len(words), a), *keep(files)),
        files,
    )


def matching_lines(draw: Draw) -> Draft:
    """grep word > file."""
    a, b, word, *others = draw.words(draw.number(10, 14))
    others = [other for other in others if word not in other]
    rows = [f"{draw.choice(others)} {draw.choice([word, *others[:1]])} {draw.number(1, 99)}" for _ in range(8)]
    rows += [f"{others[0]} {word} {draw.number(1, 99)}", f"{others[1]} {others[2]} {draw.number(1, 99)}"]
    draw.shuffle(rows)
    files = {a: lines(rows)}
    return Draft(
        f"Write the lines of {a} that contain the word {word} to {b}, in their order.",
        (f"grep {word} {a} > {b}",),
        (call("content", b, lines(row for row in rows if word in row)), *keep(files)),
        files,
    )


def upper_case(draw: Draw) -> Draft:
    """tr a-z A-Z."""
    a, b, *words = draw.words(draw.number(4, 9))
    files = {a: lines(words)}
    return Draft(
        f"Write the text of {a} in capital letters to {b}.",
        (f"tr a-z A-Z < {a} > {b}",),
        (call("content", b, lines(words).upper()), *keep(files)),
        files,
    )


def unique_sorted(draw: Draw) -> Draft:
    """sort -u."""
    a, b, *words = draw.words(draw.number(6, 10))
    rows = [*words, *draw.several(words, 3, 8)]
    draw.shuffle(rows)
    files = {f"{a}.txt": lines(rows)}
    return Draft(
        f"The file {a}.txt has one word per line, some of them several times. Write every different word once, in "
        f"alphabetical order, to {b}.txt.",
        (f"LC_ALL=C sort -u {a}.txt > {b}.txt",),
        (call("content", f"{b}.txt", lines(sorted(set(rows)))), *keep(files)),
        files,
    )


def word_frequency(draw: Draw) -> Draft:
    """sort | uniq -c | sort, as a report with a format of its own."""
    a, b, *words = draw.words(draw.number(6, 9))
    rows = [word for word in words for _ in range(draw.number(1, 6))]
    draw.shuffle(rows)
    files = {f"{a}.txt": lines(rows)}
    ranking = sorted(Counter(rows).items(), key=lambda item: (-item[1], item[0]))
    sort = "LC_ALL=C sort"
    count = "awk '{print $1, $2}'"
    return Draft(
        f"The file {a}.txt has one word per line. Write to {b}.txt how often each different word occurs: one line per "
        "word, the count first, then one space, then the word. Largest count first; words of equal count in "
        "alphabetical order. No other spaces.",
        (f"{sort} {a}.txt | uniq -c | {count} | {sort} -k1,1nr -k2,2 > {b}.txt", f"cat {b}.txt"),
        (call("content", f"{b}.txt", lines(f"{n} {word}" for word, n in ranking)), *keep(files)),
        files,
    )


def replace_word(draw: Draw) -> Draft:
    """sed -i, whole words only."""
    a, old, new, *others = draw.words(7)
    words = [*draw.several([old, *others], 8, 15), old, f"{old}s", f"{others[0]}{old}"]
    draw.shuffle(words)
    text = lines(" ".join(words[i : i + 3]) for i in range(0, len(words), 3))
    replaced = "\n".join(" ".join(new if w == old else w for w in line.split(" ")) for line in text.split("\n"))
    return Draft(
        f"In the file {a}.txt, replace every occurrence of the whole word {old} by {new}. Longer words that contain "
        f"{old} must stay as they are. Change the file in place.",
        (f"sed -i 's/\\b{old}\\b/{new}/g' {a}.txt",),
        (call("content", f"{a}.txt", replaced),),
        {f"{a}.txt": text},
    )


def line_range(draw: Draw) -> Draft:
    """sed -n."""
    a, b, *words = draw.words(draw.number(14, 22))
    first = draw.number(3, 6)
    last = first + draw.number(1, 5)
    files = {f"{a}.txt": lines(words)}
    return Draft(
        f"Write lines {first} to {last} of {a}.txt, both included, to {b}.txt.",
        (f"sed -n '{first},{last}p' {a}.txt > {b}.txt",),
        (call("content", f"{b}.txt", lines(words[first - 1 : last])), *keep(files)),
        files,
    )


def first_occurrences(draw: Draw) -> Draft:
    """awk '!seen[$0]++'."""
    a, b, *words = draw.words(draw.number(6, 9))
    rows = [*words, *draw.several(words, 4, 9)]
    draw.shuffle(rows)
    files = {f"{a}.txt": lines(rows)}
    return Draft(
        f"Write the lines of {a}.txt to {b}.txt, but each different line only once: where it occurs first. Keep the "
        "order otherwise.",
        (f"awk '!seen[$0]++' {a}.txt > {b}.txt",),
        (call("content", f"{b}.txt", lines(dict.fromkeys(rows))), *keep(files)),
        files,
    )


def reverse_lines(draw: Draw) -> Draft:
    """tac."""
    a, b, *words = draw.words(draw.number(5, 12))
    files = {f"{a}.txt": lines(words)}
    return Draft(
        f"Write the lines of {a}.txt to {b}.txt in reverse order, the last line first.",
        (f"tac {a}.txt > {b}.txt",),
        (call("content", f"{b}.txt", lines(reversed(words))), *keep(files)),
        files,
    )


def longest_line(draw: Draw) -> Draft:
    """awk with a running maximum."""
    a, b, *words = draw.words(draw.number(12, 24))
    rows = [" ".join(words[i : i + 2]) for i in range(0, len(words), 2)]
    at = draw.randrange(len(rows))
    rows[at] = f"{rows[at]} {max(rows, key=len)} x"  # longer than any other
    files = {f"{a}.txt": lines(rows)}
    return Draft(
        f"Write the longest line of {a}.txt to {b}.txt.",
        (f"awk 'length > n {{n = length; line = $0}} END {{print line}}' {a}.txt > {b}.txt",),
        (call("content", f"{b}.txt", rows[at]), *keep(files)),
        files,
    )


def count_in_each(draw: Draw) -> Draft:
    """A count per file."""
    folder, word, b, *names = draw.words(draw.number(6, 8))
    others = draw.words(5, without=[word])
    texts = {name: draw.several([word, *others], 4, 12) for name in names}
    files = {f"{folder}/{name}.txt": lines(words) for name, words in texts.items()}
    report = lines(f"{name}.txt {words.count(word)}" for name, words in sorted(texts.items()))
    loop = f'for f in *.txt; do echo "$f $(grep -cx {word} "$f")"; done'
    return Draft(
        f"The folder {folder} holds .txt files with one word per line. Write to {b}.txt in your home directory, for "
        f"every file in alphabetical order, its name, a space, and the number of its lines that are {word} (also "
        "when that is 0).",
        (f"ls {folder}", f"(cd {folder} && LC_ALL=C; {loop}) > {b}.txt"),
        (call("content", f"{b}.txt", report), *keep(files)),
        files,
    )


def mail_addresses(draw: Draw) -> Draft:
    """grep -o over prose."""
    a, b, *words = draw.words(15)
    mails = [f"{words[i]}@{words[i + 1]}.example" for i in range(0, 8, 2)]
    rows = [
        f"{draw.choice(words)} wrote to {m} about {draw.choice(words)}" for m in [*mails, *draw.several(mails, 2, 4)]
    ]
    rows += [f"{words[9]} at {words[10]}.example was away", f"ask {words[11]}, not {words[12]}"]
    draw.shuffle(rows)
    files = {f"{a}.txt": lines(rows)}
    return Draft(
        f"The file {a}.txt contains mail addresses, all of which end in .example. Write every different address, one "
        f"per line in alphabetical order, to {b}.txt.",
        (f"grep -oE '[a-z]+@[a-z]+\\.example' {a}.txt | LC_ALL=C sort -u > {b}.txt", f"cat {b}.txt"),
        (call("content", f"{b}.txt", lines(sorted(mails))), *keep(files)),
        files,
    )
