"""Configuration: ini, environment files, crontabs, hosts, JSON settings."""

from __future__ import annotations

import json

from jaxagent.data_pipelines.terminal_templates.draft import Draft, Draw, keep, lines
from jaxagent.data_pipelines.terminal_templates.program import call
from jaxagent.data_pipelines.terminal_templates.words import PEOPLE, SERVICES


def _ini(sections: dict[str, dict[str, str]]) -> str:
    return "\n".join(lines([f"[{name}]", *(f"{k} = {v}" for k, v in keys.items())]) for name, keys in sections.items())


def _sections(draw: Draw) -> dict[str, dict[str, str]]:
    keys = draw.sample(("port", "timeout", "retries", "workers", "limit", "level"), 3)
    return {name: {key: str(draw.number(1, 9000)) for key in keys} for name in draw.sample(SERVICES, 3)}


def set_ini_key(draw: Draw) -> Draft:
    """sed within one section: the same key stands in all of them."""
    (a,) = draw.words(1)
    sections = _sections(draw)
    name = draw.choice(list(sections))
    key = draw.choice(list(sections[name]))
    value = str(int(sections[name][key]) + draw.number(1, 99))
    after = {s: {k: value if (s, k) == (name, key) else v for k, v in keys.items()} for s, keys in sections.items()}
    return Draft(
        f"In {a}.ini, set the key {key} of the section [{name}] to {value}. Change nothing else.",
        (f"cat {a}.ini", f"sed -i '/^\\[{name}\\]/,/^\\[/ s/^{key} = .*/{key} = {value}/' {a}.ini"),
        (call("content", f"{a}.ini", _ini(after)),),
        {f"{a}.ini": _ini(sections)},
    )


def ini_to_json(draw: Draw) -> Draft:
    """configparser."""
    a, b = draw.words(2)
    sections = _sections(draw)
    files = {f"{a}.ini": _ini(sections)}
    program = (
        f"import configparser, json; c = configparser.ConfigParser(); c.read('{a}.ini'); "
        f"json.dump({{s: dict(c[s]) for s in c.sections()}}, open('{b}.json', 'w'))"
    )
    return Draft(
        f"Convert {a}.ini to JSON in {b}.json: an object with one object per section, whose keys are those of the "
        "section. All values must be strings.",
        (f"cat {a}.ini", f'python3 -c "{program}"'),
        (call("json_is", f"{b}.json", sections), *keep(files)),
        files,
    )


def set_json_key(draw: Draw) -> Draft:
    """A nested key of a JSON file."""
    (a,) = draw.words(1)
    sections = {name: {k: int(v) for k, v in keys.items()} for name, keys in _sections(draw).items()}
    name = draw.choice(list(sections))
    key = draw.choice(list(sections[name]))
    value = sections[name][key] + draw.number(1, 99)
    after = {s: {k: value if (s, k) == (name, key) else v for k, v in keys.items()} for s, keys in sections.items()}
    program = (
        f"import json; c = json.load(open('{a}.json')); c['{name}']['{key}'] = {value}; "
        f"json.dump(c, open('{a}.json', 'w'), indent=2)"
    )
    return Draft(
        f"In {a}.json, set '{key}' of the object '{name}' to the number {value}. All other values must stay as "
        f"they are.",
        (f'python3 -c "{program}"',),
        (call("json_is", f"{a}.json", after),),
        {f"{a}.json": json.dumps(sections, indent=2) + "\n"},
    )


def set_variable(draw: Draw) -> Draft:
    """A line of an environment file."""
    names = [word.upper() for word in draw.words(draw.number(4, 6))]
    values = [draw.words(1)[0] for _ in names]
    at = draw.randrange(1, len(names))
    value = draw.words(1, without=values)[0]
    before = [f"{n}={v}" for n, v in zip(names, values, strict=True)]
    before.insert(0, f"# {names[at]}={values[at]} is the default")
    after = [f"{names[at]}={value}" if line.startswith(f"{names[at]}=") else line for line in before]
    return Draft(
        f"In settings.env, change the value of the variable {names[at]} to {value}. Change nothing else, comments "
        "included.",
        ("cat settings.env", f"sed -i 's/^{names[at]}=.*/{names[at]}={value}/' settings.env"),
        (call("content", "settings.env", lines(after)),),
        {"settings.env": lines(before)},
    )


def merge_variables(draw: Draw) -> Draft:
    """Two environment files, the second one wins."""
    a, b, c = draw.words(3)
    names = [word.upper() for word in draw.words(7, without=[a, b, c])]
    first = {name: draw.words(1)[0] for name in names[:5]}
    second = {name: draw.words(1, without=list(first.values()))[0] for name in names[3:]}
    files = {
        f"{a}.env": lines(f"{k}={v}" for k, v in first.items()),
        f"{b}.env": lines(f"{k}={v}" for k, v in second.items()),
    }
    merged = lines(f"{k}={v}" for k, v in sorted({**first, **second}.items()))
    awk = "awk -F= '{v[$1] = $0} END {for (n in v) print v[n]}'"
    return Draft(
        f"Merge the environment files {a}.env and {b}.env (lines NAME=value) into {c}.env: every variable once, in "
        f"alphabetical order. Where both files set a variable, the value of {b}.env counts.",
        (f"{awk} {a}.env {b}.env | LC_ALL=C sort > {c}.env", f"cat {c}.env"),
        (call("content", f"{c}.env", merged), *keep(files)),
        files,
    )


def _crontab(draw: Draw, jobs: list[str]) -> list[str]:
    return [f"{draw.number(0, 59)} {draw.number(0, 23)} * * * run-{job}" for job in jobs]


def add_cron_job(draw: Draw) -> Draft:
    """A schedule in words -> a crontab line at the end."""
    jobs = draw.words(draw.number(3, 6))
    *old, new = jobs
    before = ["# minute hour day month weekday command", *_crontab(draw, old)]
    minute, hour = draw.number(0, 59), draw.number(0, 23)
    days = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
    day = draw.number(1, 6)
    when, line = draw.choice(
        (
            (f"every day at {hour:02d}:{minute:02d}", f"{minute} {hour} * * * run-{new}"),
            (f"every {days[day - 1]} at {hour:02d}:{minute:02d}", f"{minute} {hour} * * {day} run-{new}"),
            (f"on the first day of every month at {hour:02d}:{minute:02d}", f"{minute} {hour} 1 * * run-{new}"),
        )
    )
    return Draft(
        f"The file crontab.txt has the form of a crontab. Append one line that runs the command run-{new} {when}. Use "
        "plain numbers without leading zeros, * for every other field, and single spaces.",
        ("cat crontab.txt", f"echo '{line}' >> crontab.txt"),
        (call("content", "crontab.txt", lines([*before, line])),),
        {"crontab.txt": lines(before)},
    )


def disable_cron_jobs(draw: Draw) -> Draft:
    """Comment lines out."""
    jobs = draw.words(draw.number(5, 8))
    stopped = draw.choice(SERVICES)
    rows = _crontab(draw, jobs)
    rows = [f"{row} {stopped if i in (1, 3) else draw.choice(PEOPLE)}" for i, row in enumerate(rows)]
    before = ["# minute hour day month weekday command owner", f"# jobs of {stopped} need the network", *rows]
    after = [f"#{row}" if row in rows and row.endswith(f" {stopped}") else row for row in before]
    return Draft(
        f"In crontab.txt, disable every job whose last word is {stopped} by putting a # directly before its line. "
        f"Lines "
        "that are comments already and all other jobs must stay as they are.",
        ("cat crontab.txt", f"sed -i '/^[^#].* {stopped}$/ s/^/#/' crontab.txt"),
        (call("content", "crontab.txt", lines(after)),),
        {"crontab.txt": lines(before)},
    )


def change_host(draw: Draw) -> Draft:
    """The address of one name in a hosts file."""
    names = draw.words(draw.number(4, 7))
    addresses = [f"10.0.{draw.number(0, 9)}.{n}" for n in draw.sample(range(2, 250), len(names) + 1)]
    *old, new = addresses
    at = draw.randrange(len(names))
    before = ["127.0.0.1 localhost", *(f"{ip} {name}.example {name}" for ip, name in zip(old, names, strict=True))]
    after = [f"{new} {names[at]}.example {names[at]}" if row.endswith(f" {names[at]}") else row for row in before]
    escaped = names[at]
    return Draft(
        f"In hosts.txt, which has the form of /etc/hosts, change the address of {names[at]}.example to {new}. Keep the "
        "order of the lines and everything else.",
        (f"sed -i 's/^[0-9.]* {escaped}\\.example /{new} {escaped}.example /' hosts.txt", f"grep {escaped} hosts.txt"),
        (call("content", "hosts.txt", lines(after)),),
        {"hosts.txt": lines(before)},
    )


def users_with_shell(draw: Draw) -> Draft:
    """A passwd-like file."""
    a, b = draw.words(2)
    shells = ("/bin/bash", "/bin/sh", "/usr/sbin/nologin", "/bin/false")
    shell = draw.choice(shells[:2])
    people = draw.sample(PEOPLE, draw.number(6, 9))
    rows = [f"{p}:x:{1000 + i}:100:{p.title()}:/home/{p}:{draw.choice(shells)}" for i, p in enumerate(people)]
    rows[0] = rows[0].rpartition(":")[0] + f":{shell}"
    rows.append(f"backup:x:34:34:uses {shell}:/var:/usr/sbin/nologin")
    files = {f"{a}.txt": lines(rows)}
    found = sorted(row.split(":")[0] for row in rows if row.endswith(f":{shell}"))
    return Draft(
        f"{a}.txt has the form of /etc/passwd. Write the names of all users whose shell is {shell} to {b}.txt, one per "
        "line in alphabetical order.",
        (f"awk -F: '$7 == \"{shell}\" {{print $1}}' {a}.txt | LC_ALL=C sort > {b}.txt", f"cat {b}.txt"),
        (call("content", f"{b}.txt", lines(found)), *keep(files)),
        files,
    )
