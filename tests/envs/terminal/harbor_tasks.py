"""Small tasks in Harbor's format (task.toml 1.4), as their authors would write them: every feature that we honour."""

from pathlib import Path

from tests.envs.terminal.terminal_folders import write

DOCKERFILE = "FROM debian:12\nWORKDIR /app\n"
_TEST = "#!/bin/bash\nif {check}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"

# name -> instruction, what the image holds, the solution, and a condition of bash that the test looks at
PLAIN = {
    "hello": (
        "Write Hello, world! into hello.txt.",
        "",
        "echo 'Hello, world!' > hello.txt",
        "grep -qx 'Hello, world!' hello.txt",
    ),
    "count-lines": (
        "Write the number of lines of data.txt into count.",
        "seq 17 > data.txt",
        "wc -l < data.txt > count",
        "[ $(cat count) = 17 ]",
    ),
    "sort": (
        "Sort names.txt in place.",
        "printf 'c\\nb\\na\\n' > names.txt",
        "sort -o names.txt names.txt",
        "[ \"$(tr -d '\\n' < names.txt)\" = abc ]",
    ),
    "rename": (
        "Rename old.cfg to new.cfg.",
        "echo x > old.cfg",
        "mv old.cfg new.cfg",
        "[ -f new.cfg ] && [ ! -e old.cfg ]",
    ),
    "executable": (
        "Make run.sh executable.",
        "printf '#!/bin/sh\\necho ran\\n' > run.sh",
        "chmod +x run.sh",
        '[ "$(./run.sh)" = ran ]',
    ),
    "archive": (
        "Unpack box.tar.",
        "echo in > inner; tar cf box.tar inner; rm inner",
        "tar xf box.tar",
        "grep -qx in inner",
    ),
    "replace": (
        "Replace every cat in pets.txt by dog.",
        "echo cat cat > pets.txt",
        "sed -i s/cat/dog/g pets.txt",
        "grep -qx 'dog dog' pets.txt",
    ),
    "sum": (
        "Write the sum of numbers.txt into sum.",
        "seq 10 > numbers.txt",
        "awk '{s+=$1} END {print s}' numbers.txt > sum",
        "[ $(cat sum) = 55 ]",
    ),
    "largest": (
        "Write the name of the largest file of files/ into largest.",
        "mkdir files; seq 9 > files/a; seq 99 > files/b",
        "echo b > largest",
        "grep -qx b largest",
    ),
    "link": ("Make the symbolic link latest to v2.", "mkdir v1 v2", "ln -s v2 latest", '[ "$(readlink latest)" = v2 ]'),
    "json": (
        "Set port to 8080 in settings.json.",
        "echo '{\"port\": 1}' > settings.json",
        "echo '{\"port\": 8080}' > settings.json",
        "grep -q ':.*8080' settings.json",
    ),
    "csv": (
        "Write the second column of table.csv into column.",
        "printf 'a,1\\nb,2\\n' > table.csv",
        "cut -d, -f2 table.csv > column",
        "[ \"$(tr -d '\\n' < column)\" = 12 ]",
    ),
    "duplicates": (
        "Write words.txt without repeated lines into unique.",
        "printf 'a\\na\\nb\\n' > words.txt",
        "uniq words.txt > unique",
        "[ $(wc -l < unique) = 2 ]",
    ),
    "git": (
        "Commit file.txt in the repository repo.",
        "git init -q repo && echo x > repo/file.txt",
        "cd repo && git add . && git -c user.name=a -c user.email=a@b commit -qm one",
        '[ -n "$(git -C repo log --format=%H -- file.txt 2>/dev/null)" ]',
    ),
}
EASY = '[metadata]\ndifficulty = "easy"\nnobody_reads = [1, { this = "table" }]\n'


def make(
    folder: Path,
    instruction: str,
    image: str,
    solution: str,
    check: str,
    toml: str = "",
    dockerfile: str = DOCKERFILE,
) -> Path:
    write(folder / "task.toml", f'schema_version = "1.4"\n{toml or EASY}')
    write(folder / "instruction.md", f"{instruction}\n")
    write(folder / "environment" / "Dockerfile", dockerfile + (f"RUN {image}\n" if image else ""))
    write(folder / "tests" / "test.sh", _TEST.format(check=check))
    write(folder / "solution" / "solve.sh", f"#!/bin/bash\nset -e\n{solution}\n")
    return folder


def step(
    task: Path, name: str, instruction: str, solution: str, check: str, workdir: dict[str, str] | None = None
) -> None:
    place = task / "steps" / name
    write(place / "instruction.md", f"{instruction}\n")
    write(place / "tests" / "test.sh", _TEST.format(check=check))
    write(place / "solution" / "solve.sh", f"{solution}\n")
    for file, text in (workdir or {}).items():
        write(place / "workdir" / file, text)


def of_steps(folder: Path, toml: str) -> Path:
    """Three steps: the second brings files along and its setup makes another, the third looks at the first's work."""
    write(folder / "task.toml", f'schema_version = "1.4"\n{toml}')
    write(folder / "environment" / "Dockerfile", DOCKERFILE)
    write(folder / "tests" / "lib.sh", 'holds() { grep -qx "$2" "$1"; }\n')
    step(folder, "first", "Write one into a.", "echo one > a", ". /tests/lib.sh; holds a one")
    step(
        folder,
        "second",
        "Write what given and made hold into b.",
        "cat given made > b",
        "[ \"$(tr -d '\\n' < b)\" = givenmade ]",
        {"given": "given\n", "setup.sh": '[ -z "$(ls -A /tests 2>&1)" ] && echo made > made\n'},
    )
    step(folder, "third", "Append three to a.", "echo three >> a", "[ \"$(tr -d '\\n' < a)\" = onethree ]")
    return folder


STEPS = '{strategy}[[steps]]\nname = "first"\n{first}[[steps]]\nname = "second"\n[[steps]]\nname = "third"\n'

SERVER = """
import json, sys

TOOLS = [{"name": "secret", "description": "Says the word of a door.", "inputSchema": {
    "type": "object", "properties": {"door": {"type": "string"}}, "required": ["door"]}}]
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    method = asked["method"]
    if method == "initialize":
        result = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "doors", "version": "1"}}
    elif method == "tools/list":
        result = {"tools": TOOLS}
    elif method == "tools/call":
        door = asked["params"]["arguments"]["door"]
        result = {"content": [{"type": "text", "text": f"{door}-{open('/app/.word').read().strip()}"}]}
    else:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": {"code": -32601, "message": "no"}}), flush=True)
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""
SERVERS = (
    '[[environment.mcp_servers]]\nname = "doors"\ntransport = "stdio"\ncommand = "python3"\nargs = ["/srv/server.py"]\n'
)


def with_server(folder: Path) -> Path:
    make(
        folder,
        "Ask for the word of the door red and write it into word.",
        "echo sesame > .word",
        "echo red-sesame > word",
        "grep -qx red-sesame word",
        SERVERS,
        DOCKERFILE + "COPY server.py /srv/server.py\n",
    )
    write(folder / "environment" / "server.py", SERVER)
    return folder


def with_user(folder: Path) -> Path:
    """The image has a user of its own, whom both agent and verifier are."""
    return make(
        folder,
        "Write who you are into me.",
        "echo 'worker:x:1234:1234::/app:/bin/bash' >> /etc/passwd",
        "id -un > me",
        '[ "$(cat me)" = worker ] && [ $(id -u) = 1234 ]',
        '[agent]\nuser = "worker"\n[verifier]\nuser = 1234\n',
    )


def with_skills(folder: Path) -> Path:
    make(
        folder,
        "Say the greeting as the skill has it, into said.",
        "",
        "echo moin > said",
        "grep -qx moin said",
        '[environment]\nskills_dir = "/skills"\n',
        DOCKERFILE + "COPY skills /skills\n",
    )
    about = "---\nname: greet\ndescription: How to greet <here>.\n---\nSay moin.\n"
    write(folder / "environment" / "skills" / "greet" / "SKILL.md", about)
    write(folder / "environment" / "skills" / "broken" / "SKILL.md", "no head\n")
    return folder


def with_healthcheck(folder: Path) -> Path:
    """It fails twice, and is well the third time."""
    return make(
        folder,
        "Write ready into state.",
        "",
        "echo ready > state",
        "grep -qx ready state && [ $(wc -l < tries) = 3 ]",
        '[environment.healthcheck]\ncommand = "echo try >> /app/tries; [ $(wc -l < /app/tries) -ge 3 ]"\n'
        "interval_sec = 0.1\nretries = 3\n",
    )


def with_own_verifier(folder: Path) -> Path:
    """Its image brings the tests along; it gets what the agent has published, and one folder but for its logs."""
    solution = "mkdir -p /logs/artifacts out\necho 42 > /logs/artifacts/answer\necho 7 > out/seven"
    toml = 'artifacts = [{ source = "out", exclude = ["*.log"] }]\n[verifier]\nenvironment_mode = "separate"\n'
    make(
        folder,
        "Write 42 into /logs/artifacts/answer and 7 into out/seven.",
        "",
        f"{solution}\necho no > out/x.log\necho no > /app/hidden",
        "true",
        f'{toml}[verifier.env]\nWANTED = "${{NOT_SET:-42}}"\n',
    )
    write(folder / "tests" / "Dockerfile", "FROM debian:12\nWORKDIR /app\nCOPY . /tests/\nRUN touch /verifiers-own\n")
    check = "[ -e /verifiers-own ] && [ ! -e /app/hidden ] && [ ! -e out/x.log ] && grep -qx 7 out/seven"
    write(folder / "tests" / "test.sh", _TEST.format(check=f"{check} && grep -qx $WANTED /logs/artifacts/answer"))
    return folder


def with_collected_state(folder: Path) -> Path:
    """A verifier in a fresh copy of the environment sees what the collect command has written of the agent's."""
    return make(
        folder,
        "Set the mode to fast.",
        "echo slow > mode",
        "echo fast > mode",
        "grep -qx slow mode && grep -qx fast /logs/artifacts/state",
        '[verifier]\nenvironment_mode = "separate"\n[[verifier.collect]]\n'
        'command = "mkdir -p /logs/artifacts; cat /app/mode > /logs/artifacts/state"\n',
    )


def with_numbers(folder: Path) -> Path:
    make(folder, "Write x into a.", "", "echo x > a", "true", '[environment.env]\nGIVEN = "yes"\n')
    write(
        folder / "tests" / "test.sh",
        'r=0; [ "$GIVEN" = yes ] && grep -qx x a && r=1\n'
        'echo "{\\"reward\\": $r, \\"speed\\": 0.5}" > /logs/verifier/reward.json\n',
    )
    return folder


SPECIAL = {
    "steps-mean": lambda folder: of_steps(folder, STEPS.format(strategy="", first="")),
    "steps-final": lambda folder: of_steps(
        folder, STEPS.format(strategy='multi_step_reward_strategy = "final"\n', first="min_reward = 0.5\n")
    ),
    "server": with_server,
    "user": with_user,
    "skills": with_skills,
    "healthcheck": with_healthcheck,
    "own-verifier": with_own_verifier,
    "collect": with_collected_state,
    "numbers": with_numbers,
}


def silent(folder: Path) -> Path:
    """Its test says no reward."""
    make(folder, "Do nothing.", "", "true", "true")
    write(folder / "tests" / "test.sh", "exit 0\n")
    return folder


def write_one(folder: Path, name: str) -> Path:
    """Writes the task of a name into a folder's folder; its environment is the machine's, without an image."""
    (silent if name == "silent" else SPECIAL.get(name) or (lambda place: make(place, *PLAIN[name])))(folder / name)
    return folder / name


def write_all(folder: Path, names: frozenset[str] = frozenset()) -> list[str]:
    """Writes all tasks, or those named; gives their names."""
    for name, about in PLAIN.items():
        if not names or name in names:
            make(folder / name, *about)
    for name, write_one in SPECIAL.items():
        if not names or name in names:
            write_one(folder / name)
    return sorted(path.name for path in folder.iterdir())
