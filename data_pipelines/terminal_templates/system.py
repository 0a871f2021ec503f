"""Processes, and the logs that services leave."""

from __future__ import annotations

from collections import Counter

from jaxagent.data_pipelines.terminal_templates.draft import Draft, Draw, keep, lines
from jaxagent.data_pipelines.terminal_templates.program import call
from jaxagent.data_pipelines.terminal_templates.words import PEOPLE, SERVICES


def _started(services: list[str], seconds: list[int]) -> str:
    """Setup lines: every service is a long sleep whose process id stands in run/<service>.pid."""
    made = [
        f"sleep {s} </dev/null >/dev/null 2>&1 &\necho $! > run/{name}.pid"
        for name, s in zip(services, seconds, strict=True)
    ]
    return "\n".join(["mkdir -p run", *made])


def _sleeps(draw: Draw, number: int) -> list[int]:
    return draw.sample(range(70_000, 99_999), number)


def stop_process(draw: Draw) -> Draft:
    """kill one process by its pid file."""
    services = draw.sample(SERVICES, draw.number(2, 4))
    seconds = _sleeps(draw, len(services))
    return Draft(
        f"The process ids of running services stand in the files run/<service>.pid. Stop the service "
        f"{services[0]}, delete "
        "its .pid file, and leave the other services running.",
        (f"kill $(cat run/{services[0]}.pid)", f"rm run/{services[0]}.pid"),
        (
            call("processes", seconds[:1], seconds[1:]),
            call("names", "run", [f"{name}.pid" for name in services[1:]]),
        ),
        setup=_started(services, seconds),
        initial=(call("processes", [], seconds),),
    )


def stop_listed(draw: Draw) -> Draft:
    """kill what a table says."""
    services = draw.sample(SERVICES, draw.number(4, 6))
    seconds = _sleeps(draw, len(services))
    stale = sorted(draw.sample(range(len(services)), 2))
    a, b = draw.words(2)
    table = {f"{a}.txt": lines(f"{name} {'stale' if i in stale else 'fine'}" for i, name in enumerate(services))}
    loop = f"for s in $(awk '$2 == \"stale\" {{print $1}}' {a}.txt); do kill $(cat run/$s.pid) && echo $s; done"
    return Draft(
        f"{a}.txt has lines 'service state'. The process id of every service stands in run/<service>.pid. Stop all "
        f"services whose state is stale and no others, and write the names of those you stopped to {b}.txt, one "
        f"per line "
        "in alphabetical order.",
        (f"cat {a}.txt", f"{loop} | LC_ALL=C sort > {b}.txt", f"cat {b}.txt"),
        (
            call("content", f"{b}.txt", lines(sorted(services[i] for i in stale))),
            call("processes", [seconds[i] for i in stale], [s for i, s in enumerate(seconds) if i not in stale]),
            *keep(table),
        ),
        table,
        setup=_started(services, seconds),
        initial=(call("processes", [], seconds),),
    )


def which_run(draw: Draw) -> Draft:
    """kill -0: which of the pid files are of living processes."""
    services = draw.sample(SERVICES, draw.number(4, 6))
    seconds = _sleeps(draw, len(services))
    dead = draw.sample(range(len(services)), 2)
    (b,) = draw.words(1)
    report = lines(sorted(f"{name} {'dead' if i in dead else 'running'}" for i, name in enumerate(services)))
    alive = [i for i in range(len(services)) if i not in dead]
    gone = [f"echo 999999999 > run/{services[i]}.pid" for i in dead]  # above the largest id that Linux gives
    state = "kill -0 $(cat $f) 2>/dev/null && s=running || s=dead"
    loop = f'for f in run/*.pid; do {state}; echo "$(basename $f .pid) $s"; done'
    return Draft(
        "The folder run holds files <service>.pid with process ids. Write to "
        f"{b}.txt one line per service, in alphabetical order: its name, a space, and 'running' if a process with "
        f"this id "
        "exists, else 'dead'. Stop nothing.",
        (f"LC_ALL=C; {loop} > {b}.txt", f"cat {b}.txt"),
        (
            call("content", f"{b}.txt", report),
            call("processes", [], [seconds[i] for i in alive]),
        ),
        setup="\n".join([_started([services[i] for i in alive], [seconds[i] for i in alive]), *gone]),
        initial=(call("processes", [], [seconds[i] for i in alive]),),
    )


def _access_log(draw: Draw, number: int) -> list[tuple[str, str, str, int, int]]:
    """(minute, address, path, status, milliseconds), in the order of time."""
    paths = [f"/{word}" for word in draw.words(4)]
    addresses = [f"10.0.0.{n}" for n in draw.sample(range(2, 250), 4)]
    minutes = sorted(draw.sample(range(24 * 60), number))
    return [
        (
            f"{minute // 60:02d}:{minute % 60:02d}",
            draw.choice(addresses),
            draw.choice(paths),
            draw.choice((200, 200, 200, 301, 404, 500)),
            draw.number(1, 900),
        )
        for minute in minutes
    ]


def _log_text(rows: list[tuple[str, str, str, int, int]]) -> str:
    return lines(f"{time} {address} GET {path} {status} {ms}ms" for time, address, path, status, ms in rows)


_LOG = "has lines 'time address GET path status duration', such as '{}'"


def errors_of_service(draw: Draw) -> Draft:
    """grep with two conditions."""
    a, b, *words = draw.words(8)
    services = draw.sample(SERVICES, 3)
    rows = [
        f"{draw.choice(('INFO', 'WARN', 'ERROR'))} {draw.choice(services)}: {draw.choice(words)} {draw.number(1, 99)}"
        for _ in range(draw.number(9, 14))
    ]
    rows += [f"ERROR {services[0]}: {words[0]} 7", f"INFO {services[1]}: ERROR {services[0]} was seen"]
    draw.shuffle(rows)
    files = {f"{a}.log": lines(rows)}
    found = [row for row in rows if row.startswith(f"ERROR {services[0]}:")]
    return Draft(
        f"Lines of {a}.log begin with a level, a space, and the name of a service with a colon. Write all lines "
        f"of level "
        f"ERROR of the service {services[0]} to {b}.txt, in their order.",
        (f"grep '^ERROR {services[0]}:' {a}.log > {b}.txt", f"cat {b}.txt"),
        (call("content", f"{b}.txt", lines(found)), *keep(files)),
        files,
    )


def status_counts(draw: Draw) -> Draft:
    """Counts of a column of an access log."""
    a, b = draw.words(2)
    rows = _access_log(draw, draw.number(12, 24))
    files = {f"{a}.log": _log_text(rows)}
    report = lines(f"{status} {n}" for status, n in sorted(Counter(row[3] for row in rows).items()))
    awk = "awk '{n[$5]++} END {for (s in n) print s, n[s]}'"
    return Draft(
        f"{a}.log {_LOG.format(_log_text(rows[:1]).strip())}. Write how often each status occurs to {b}.txt: lines "
        "'status count', the smallest status first.",
        (f"{awk} {a}.log | sort -n > {b}.txt", f"cat {b}.txt"),
        (call("content", f"{b}.txt", report), *keep(files)),
        files,
    )


def busiest_address(draw: Draw) -> Draft:
    """The address with the most requests."""
    a, b = draw.words(2)
    rows = _access_log(draw, draw.number(12, 20))
    counts = Counter(row[1] for row in rows)
    (top, n), *others = counts.most_common()
    extra = 1 + max([m for _, m in others], default=0) - n  # no tie
    rows += [(f"23:{59 - i:02d}", top, "/", 200, 1) for i in range(max(extra, 0))][::-1]
    n = sum(row[1] == top for row in rows)
    files = {f"{a}.log": _log_text(rows)}
    return Draft(
        f"{a}.log {_LOG.format(_log_text(rows[:1]).strip())}. Write the address with the most requests to "
        f"{b}.txt, as one "
        "line 'address count'.",
        (
            f"cut -d' ' -f2 {a}.log | sort | uniq -c | sort -rn | awk 'NR == 1 {{print $2, $1}}' > {b}.txt",
            f"cat {b}.txt",
        ),
        (call("content", f"{b}.txt", f"{top} {n}"), *keep(files)),
        files,
    )


def slow_requests(draw: Draw) -> Draft:
    """Two conditions, one of them on a number with a unit."""
    a, b = draw.words(2)
    rows = _access_log(draw, draw.number(14, 22))
    limit = sorted(row[4] for row in rows)[len(rows) // 2]
    files = {f"{a}.log": _log_text(rows)}
    found = [row for row in rows if row[4] >= limit and row[3] == 200]
    return Draft(
        f"{a}.log {_LOG.format(_log_text(rows[:1]).strip())}. Write the lines with status 200 whose duration is "
        f"{limit} ms "
        f"or more to {b}.txt, in their order. Then write the number of these lines to {b}.count.",
        (f"awk '$5 == 200 && $6 + 0 >= {limit}' {a}.log > {b}.txt", f"wc -l < {b}.txt > {b}.count"),
        (
            call("content", f"{b}.txt", _log_text(found)),
            call("count", f"{b}.count", len(found), f"{b}.txt"),
            *keep(files),
        ),
        files,
    )


def time_window(draw: Draw) -> Draft:
    """Comparison of times as text."""
    a, b = draw.words(2)
    rows = _access_log(draw, draw.number(14, 22))
    first, last = rows[3][0], rows[draw.number(6, 10)][0]
    files = {f"{a}.log": _log_text(rows)}
    found = [row for row in rows if first <= row[0] <= last]
    return Draft(
        f"{a}.log {_LOG.format(_log_text(rows[:1]).strip())}. Write the lines from {first} to {last}, both "
        f"included, to "
        f"{b}.txt, in their order.",
        (f'awk \'$1 >= "{first}" && $1 <= "{last}"\' {a}.log > {b}.txt', f"cat {b}.txt"),
        (call("content", f"{b}.txt", _log_text(found)), *keep(files)),
        files,
    )


def last_logins(draw: Draw) -> Draft:
    """The last line per user."""
    a, b = draw.words(2)
    people = draw.sample(PEOPLE, draw.number(3, 5))
    days = sorted(draw.sample(range(1, 29), draw.number(8, 12)))
    rows = [(f"2024-03-{day:02d}", draw.choice(people), draw.choice(("login", "login", "logout"))) for day in days]
    rows.append(("2024-03-29", people[0], "login"))
    files = {f"{a}.log": lines(" ".join(row) for row in rows)}
    last = {person: day for day, person, what in rows if what == "login"}
    awk = "awk '$3 == \"login\" {d[$2] = $1} END {for (u in d) print u, d[u]}'"
    return Draft(
        f"{a}.log has lines 'date user event' in the order of time; an event is login or logout. Write to {b}.txt "
        f"the date "
        "of the last login of every user who has logged in: lines 'user date', in alphabetical order.",
        (f"cat {a}.log", f"{awk} {a}.log | LC_ALL=C sort > {b}.txt", f"cat {b}.txt"),
        (call("content", f"{b}.txt", lines(f"{u} {d}" for u, d in sorted(last.items()))), *keep(files)),
        files,
    )
