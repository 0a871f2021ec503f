"""Tables: CSV, JSON, JSON lines, joins and sums."""

from __future__ import annotations

import json
from collections.abc import Sequence

from jaxagent.data_pipelines.terminal_templates.draft import Draft, Draw, keep, lines
from jaxagent.data_pipelines.terminal_templates.program import call
from jaxagent.data_pipelines.terminal_templates.words import CITIES, PEOPLE


def _csv(header: str, rows: Sequence[Sequence[object]]) -> str:
    return lines([header, *(",".join(map(str, row)) for row in rows)])


def _sales(draw: Draw, low: int = 8, high: int = 14) -> list[tuple[str, str, int]]:
    """(city, item, amount); at least two cities."""
    cities, items = draw.sample(CITIES, 4), draw.words(5)
    rows = [(draw.choice(cities), draw.choice(items), draw.number(1, 99)) for _ in range(draw.number(low, high))]
    return [(cities[0], items[0], draw.number(1, 99)), (cities[1], items[1], draw.number(1, 99)), *rows]


def csv_column(draw: Draw) -> Draft:
    """cut -d, without the header."""
    a, b = draw.words(2)
    rows = _sales(draw)
    column = draw.number(1, 3)
    name = ("city", "item", "amount")[column - 1]
    files = {f"{a}.csv": _csv("city,item,amount", rows)}
    return Draft(
        f"Write the values of the column '{name}' of {a}.csv, without the header, to {b}.txt: one per line, in order.",
        (f"head -n 2 {a}.csv", f"tail -n +2 {a}.csv | cut -d, -f{column} > {b}.txt"),
        (call("content", f"{b}.txt", lines(row[column - 1] for row in rows)), *keep(files)),
        files,
    )


def csv_filter(draw: Draw) -> Draft:
    """awk -F, with a number."""
    a, b = draw.words(2)
    rows = _sales(draw)
    limit = sorted(row[2] for row in rows)[len(rows) // 2]
    files = {f"{a}.csv": _csv("city,item,amount", rows)}
    kept = [row for row in rows if row[2] > limit]
    return Draft(
        f"Copy {a}.csv to {b}.csv, but keep only the header and the rows whose amount is greater than {limit}.",
        (f"awk -F, 'NR == 1 || $3 > {limit}' {a}.csv > {b}.csv",),
        (call("content", f"{b}.csv", _csv("city,item,amount", kept)), *keep(files)),
        files,
    )


def csv_sum(draw: Draw) -> Draft:
    """awk with a sum."""
    a, b = draw.words(2)
    rows = _sales(draw)
    city = rows[0][0]
    files = {f"{a}.csv": _csv("city,item,amount", rows)}
    total = sum(row[2] for row in rows if row[0] == city)
    return Draft(
        f"{a}.csv has the columns city, item and amount. Write the sum of the amounts of the city {city} to {b}.txt.",
        (f"awk -F, '$1 == \"{city}\" {{s += $3}} END {{print s}}' {a}.csv > {b}.txt", f"cat {b}.txt"),
        (call("content", f"{b}.txt", str(total)), *keep(files)),
        files,
    )


def largest_rows(draw: Draw) -> Draft:
    """sort -t, -k3,3nr | head."""
    a, b = draw.words(2)
    amounts = draw.sample(range(1, 999), draw.number(8, 14))
    words = draw.words(len(amounts))
    rows = [(word, draw.choice(CITIES), amount) for word, amount in zip(words, amounts, strict=True)]
    n = draw.number(2, 4)
    files = {f"{a}.csv": _csv("item,city,amount", rows)}
    best = sorted(rows, key=lambda row: -row[2])[:n]
    return Draft(
        f"{a}.csv has the columns item, city and amount. Write the items of the {n} rows with the largest amounts to "
        f"{b}.txt, one per line, the largest amount first.",
        (f"tail -n +2 {a}.csv | sort -t, -k3,3nr | head -n {n} | cut -d, -f1 > {b}.txt", f"cat {b}.txt"),
        (call("content", f"{b}.txt", lines(row[0] for row in best)), *keep(files)),
        files,
    )


def missing_lines(draw: Draw) -> Draft:
    """comm -23."""
    a, b, c, *words = draw.words(draw.number(13, 20))
    inside = draw.sample(words, len(words) - draw.number(2, 5))
    other = [*draw.sample(inside, len(inside) - 2), *draw.words(2, without=words)]
    draw.shuffle(other)
    files = {f"{a}.txt": lines(inside), f"{b}.txt": lines(other)}
    left = sorted(set(inside) - set(other))
    sort = "LC_ALL=C sort"
    return Draft(
        f"{a}.txt and {b}.txt have one word per line, in no order. Write the words that are in {a}.txt but not in "
        f"{b}.txt to {c}.txt, in alphabetical order.",
        (f"{sort} {a}.txt > .a; {sort} {b}.txt > .b; LC_ALL=C comm -23 .a .b > {c}.txt", f"cat {c}.txt"),
        (call("content", f"{c}.txt", lines(left)), *keep(files)),
        files,
    )


def join_tables(draw: Draw) -> Draft:
    """join on the first column."""
    a, b, c = draw.words(3)
    people = sorted(draw.sample(PEOPLE, draw.number(5, 8)))
    cities = {person: draw.choice(CITIES) for person in people[:-1]}  # the last one has no city,
    ages = {person: draw.number(18, 80) for person in people[1:]}  # the first one no age
    left, right = list(cities.items()), list(ages.items())
    draw.shuffle(left)
    draw.shuffle(right)
    files = {f"{a}.txt": lines(f"{p} {v}" for p, v in left), f"{b}.txt": lines(f"{p} {v}" for p, v in right)}
    both = lines(f"{p} {cities[p]} {ages[p]}" for p in people if p in cities and p in ages)
    sort = "LC_ALL=C sort"
    return Draft(
        f"{a}.txt has lines 'name city' and {b}.txt lines 'name age'. Write to {c}.txt a line 'name city age' for "
        f"every "
        "name that is in both, in alphabetical order of the names.",
        (f"{sort} {a}.txt > .a; {sort} {b}.txt > .b; LC_ALL=C join .a .b > {c}.txt", f"cat {c}.txt"),
        (call("content", f"{c}.txt", both), *keep(files)),
        files,
    )


def csv_to_json(draw: Draw) -> Draft:
    """A CSV table as a JSON list."""
    a, b = draw.words(2)
    rows = _sales(draw, 2, 6)
    files = {f"{a}.csv": _csv("city,item,amount", rows)}
    value = [{"city": city, "item": item, "amount": amount} for city, item, amount in rows]
    program = (
        f"import csv, json; rows = [dict(r, amount=int(r['amount'])) for r in csv.DictReader(open('{a}.csv'))]; "
        f"json.dump(rows, open('{b}.json', 'w'))"
    )
    return Draft(
        f"Convert {a}.csv to JSON in {b}.json: a list with one object per row, in order, whose keys are the names "
        f"in the "
        "header. The amounts must be numbers, the other values strings.",
        (f"cat {a}.csv", f'python3 -c "{program}"'),
        (call("json_is", f"{b}.json", value), *keep(files)),
        files,
    )


def totals_by_city(draw: Draw) -> Draft:
    """A JSON report of a CSV table."""
    a, b = draw.words(2)
    rows = _sales(draw)
    files = {f"{a}.csv": _csv("city,item,amount", rows)}
    totals = {c: sum(row[2] for row in rows if row[0] == c) for c in {row[0] for row in rows}}
    value = {"rows": len(rows), "total": sum(totals.values()), "by_city": totals}
    program = lines(
        [
            f"python3 - <<'END'\nimport csv, json\nrows = list(csv.DictReader(open('{a}.csv')))",
            "totals = {}",
            "for row in rows:",
            "    totals[row['city']] = totals.get(row['city'], 0) + int(row['amount'])",
            "report = {'rows': len(rows), 'total': sum(totals.values()), 'by_city': totals}",
            f"json.dump(report, open('{b}.json', 'w'), indent=2)\nEND",
        ]
    ).rstrip("\n")
    return Draft(
        f"Write a report on {a}.csv (columns city, item, amount) to {b}.json: a JSON object with the keys 'rows' "
        f"(number "
        "of rows without the header), 'total' (sum of all amounts) and 'by_city' (an object: city -> sum of its "
        "amounts).",
        (f"head -n 3 {a}.csv", program),
        (call("json_is", f"{b}.json", value), *keep(files)),
        files,
    )


def json_lines_filter(draw: Draw) -> Draft:
    """JSON lines -> sorted names."""
    a, b = draw.words(2)
    state = draw.choice(("active", "locked", "expired"))
    people = draw.sample(PEOPLE, draw.number(6, 10))
    rows = [
        {"user": p, "state": draw.choice(("active", "locked", "expired")), "id": draw.number(1, 999)} for p in people
    ]
    rows[0]["state"], rows[1]["state"] = state, "deleted"
    files = {f"{a}.jsonl": lines(json.dumps(row) for row in rows)}
    found = sorted(row["user"] for row in rows if row["state"] == state)
    program = (
        f"import json; rows = map(json.loads, open('{a}.jsonl')); "
        f"print(*sorted(r['user'] for r in rows if r['state'] == '{state}'), sep='\\n')"
    )
    return Draft(
        f"Every line of {a}.jsonl is a JSON object. Write the 'user' of every object whose 'state' is \"{state}\" to "
        f"{b}.txt, one per line in alphabetical order.",
        (f'python3 -c "{program}" > {b}.txt', f"cat {b}.txt"),
        (call("content", f"{b}.txt", lines(found)), *keep(files)),
        files,
    )


def average_by_item(draw: Draw) -> Draft:
    """awk with arrays and a fixed number of decimals."""
    a, b = draw.words(2)
    rows = _sales(draw, 10, 16)
    files = {f"{a}.csv": _csv("city,item,amount", rows)}
    amounts: dict[str, list[int]] = {}
    for _, item, amount in rows:
        amounts.setdefault(item, []).append(amount)
    # In hundredths, rounded half to even only where printf of the exact quotient would be too.
    report = lines(f"{item},{sum(v) / len(v):.2f}" for item, v in sorted(amounts.items()))
    awk = '{s[$2] += $3; n[$2]++} END {for (i in s) printf "%s,%.2f\\n", i, s[i] / n[i]}'
    return Draft(
        f"{a}.csv has the columns city, item and amount. Write the mean amount of every item to {b}.csv: lines "
        "'item,mean' with exactly two decimals, in alphabetical order of the items, no header.",
        (f"tail -n +2 {a}.csv | awk -F, '{awk}' | LC_ALL=C sort > {b}.csv", f"cat {b}.csv"),
        (call("content", f"{b}.csv", report), *keep(files)),
        files,
    )
