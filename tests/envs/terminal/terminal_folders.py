"""Hand-built task folders, one of each format, as their authors would write them."""

from pathlib import Path

HARBOR_1 = """\
version = "1.0"

[metadata]
author_name = "somebody"
difficulty = "easy"
category = "programming"
tags = ["trivial"]

[verifier]
timeout_sec = 120.0

[agent]
timeout_sec = 120.0

[environment]
build_timeout_sec = 300.0
cpus = 1
memory = "1G"
storage = "2G"
allow_internet = false
"""
HARBOR_2 = """\
schema_version = "2.0"
artifacts = []

[task]
name = "somewhere/hello"
authors = [{ name = "somebody", email = "somebody@example.com" }]

[metadata]
difficulty = "hard"

[verifier]
timeout_sec = 60.0
env = { STRICT = "yes" }

[agent]
timeout_sec = 90

[environment]
build_timeout_sec = 300.0
cpus = 2
memory_mb = 1024
storage_mb = 2048
gpus = 0
network_mode = "no-network"
"""
TEST_TXT = """\
#!/bin/bash
echo 0 > /logs/verifier/reward.txt
[ "$(cat /app/hello.txt)" = "Hello, world!" ] && echo 1 > /logs/verifier/reward.txt
exit 0
"""
TEST_JSON = """\
#!/bin/bash
[ "$STRICT" = yes ] || exit 1
python3 - <<'END'
import json, pathlib
path = pathlib.Path("/app/hello.txt")
done = path.is_file() and path.read_text().strip() == "Hello, world!"
json.dump({"reward": float(done), "seconds": 0.1}, open("/logs/verifier/reward.json", "w"))
END
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path


def harbor(folder: Path, toml: str = HARBOR_1, test: str = TEST_TXT) -> Path:
    write(folder / "task.toml", toml)
    write(folder / "instruction.md", "Create /app/hello.txt containing: Hello, world!\n")
    write(folder / "environment" / "Dockerfile", "# tiny\nFROM debian:12\nWORKDIR /app\nCOPY greeting.txt ./\n")
    write(folder / "environment" / "greeting.txt", "Hello, world!\n")
    write(folder / "tests" / "test.sh", test)
    write(folder / "solution" / "solve.sh", "#!/bin/bash\ncp greeting.txt hello.txt\n")
    return folder


TASK_YAML = """\
instruction: |-
  Create /app/hello.txt containing: Hello, world!
author_email: somebody@example.com
difficulty: medium
category: file-operations
tags: [files]
parser_name: pytest
max_agent_timeout_sec: 400.0
max_test_timeout_sec: 30.0
run_tests_in_same_shell: false
"""


def terminal_bench(folder: Path, yaml: str = TASK_YAML) -> Path:
    write(folder / "task.yaml", yaml)
    write(folder / "Dockerfile", "FROM debian:12\nWORKDIR /app\n")
    write(folder / "docker-compose.yaml", "services:\n  client:\n    build: .\n")
    write(folder / "run-tests.sh", "#!/bin/bash\npython3 -m pytest $TEST_DIR/test_outputs.py -rA\n")
    write(folder / "tests" / "test_outputs.py", "def test_hello():\n    assert open('/app/hello.txt').read() == 'x'\n")
    write(folder / "solution.sh", "#!/bin/bash\necho 'Hello, world!' > /app/hello.txt\n")
    return folder


def endless(folder: Path) -> Path:
    write(folder / "task.json", '{"description": "Create /home/user/a.", "truth": "a is empty", "name": "task_1"}')
    write(folder / "test_initial_state.py", "def test_a():\n    assert True\n")
    write(folder / "test_final_state.py", "import os\n\ndef test_a():\n    assert os.path.exists('/home/user/a')\n")
    write(folder / "container.def", "Bootstrap: localimage\nFrom: ubuntu_22.04.sif\n\n%post\n    mkdir -p /home/user\n")
    return folder
