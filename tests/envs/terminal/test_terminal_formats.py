"""Readers of terminal tasks: hand-built folders of every format, the real Endless tasks, and mistakes told by name."""

import pytest

from jaxagent.config import ConfigError
from jaxagent.envs.terminal import folders, rows
from jaxagent.envs.terminal.task import TaskLimits, inline
from jaxagent.types import Task
from tests.envs.terminal import terminal_folders as made


def test_harbor_schema_1(tmp_path):
    task = folders.read_task(made.harbor(tmp_path / "hello"))
    assert (task.id, task.format, task.level, task.reward_from) == ("hello", "harbor", 1, "reward_file")
    assert task.instruction == "Create /app/hello.txt containing: Hello, world!\n"
    assert task.limits == TaskLimits(120.0, 120.0, 300.0, 1.0, 1024, 2048)
    assert task.image.dockerfile == tmp_path / "hello" / "environment" / "Dockerfile"
    assert task.image.context == tmp_path / "hello" / "environment"
    assert dict(task.final_test.files) == {"/tests": tmp_path / "hello" / "tests"}
    assert task.oracle.command == "bash /solution/solve.sh"
    assert task.reward_range == (0.0, 1.0)


def test_harbor_rewards_of_another_range(tmp_path):
    folder = made.harbor(tmp_path / "hello")
    replaced(folder / "task.toml", "[metadata]", "[metadata]\nreward_range = [-1, 2.5]")
    assert folders.read_task(folder).reward_range == (-1.0, 2.5)


def test_harbor_schema_2(tmp_path):
    folder = made.harbor(tmp_path / "hello", made.HARBOR_2, made.TEST_JSON)
    (folder / "solution" / "solve.sh").unlink()
    task = folders.read_task(folder)
    assert task.limits == TaskLimits(90.0, 60.0, 300.0, 2.0, 1024, 2048)
    assert task.level == 3 and task.verifier_env == {"STRICT": "yes"}
    assert task.oracle is None


def test_harbor_defaults_and_a_registry_image(tmp_path):
    folder = made.harbor(tmp_path / "t", '[environment]\ndocker_image = "debian:12"\nworkdir = "/work"\n')
    (folder / "environment" / "Dockerfile").unlink()
    task = folders.read_task(folder)
    assert task.limits == TaskLimits(600.0, 600.0, 600.0, 1.0, 2048, 10240)
    assert (task.image.name, task.image.dockerfile, task.workdir) == ("debian:12", None, "/work")


def test_terminal_bench(tmp_path):
    task = folders.read_task(made.terminal_bench(tmp_path / "hello"))
    assert (task.format, task.level, task.reward_from) == ("terminal_bench", 2, "pytest_summary")
    assert task.instruction == "Create /app/hello.txt containing: Hello, world!"
    assert (task.limits.agent_timeout_s, task.limits.verifier_timeout_s) == (400.0, 30.0)
    assert list(task.final_test.files) == ["/tests", "/tests/run-tests.sh"]  # the folder first: it is replaced whole
    assert task.verifier_env == {"TEST_DIR": "/tests"}


def test_endless(tmp_path):
    task = folders.read_task(made.endless(tmp_path / "task_000001_0a1b2c3d"))
    assert (task.id, task.format, task.reward_from) == ("task_000001_0a1b2c3d", "endless", "exit_status")
    assert task.instruction == "Create /home/user/a."
    assert task.workdir == "/home/user" and task.image.definition.name == "container.def"
    assert dict(task.final_test.files) == {"/home/user/test_final.py": tmp_path / task.id / "test_final_state.py"}
    assert task.oracle is None


def test_an_authors_own_measure_of_difficulty_is_no_level(tmp_path):
    made.harbor(tmp_path / "a")
    replaced(tmp_path / "a/task.toml", 'difficulty = "easy"', "difficulty = 3")
    (task,) = folders.read_tasks(tmp_path)
    assert task.level == 0


def test_a_folder_of_tasks_of_several_formats(tmp_path):
    made.harbor(tmp_path / "c")
    made.endless(tmp_path / "a")
    made.terminal_bench(tmp_path / "b")
    (tmp_path / "notes").mkdir()
    assert [(t.id, t.format) for t in folders.read_tasks(tmp_path)] == [
        ("a", "endless"), ("b", "terminal_bench"), ("c", "harbor")
    ]  # fmt: skip


def replaced(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "task.toml",
            "timeout_sec = 120.0\n\n[agent]",
            "timeout_secs = 120.0\n\n[agent]",
            "key 'verifier.timeout_secs' unknown field. Did",
        ),
        ("task.toml", "[agent]", "[agents]", "key 'agents' unknown field. Did you mean 'agent'?"),
        ("task.toml", "cpus = 1", "cpus = -1", "'environment.cpus' must be a number above 0, got int -1"),
        ("task.toml", "cpus = 1", "cpus = inf", "'environment.cpus' must be a number above 0, got float inf"),
        ("task.toml", "cpus = 1", 'cpus = "one"', "'environment.cpus' must be a number above 0, got str 'one'"),
        ("task.toml", 'memory = "1G"', 'memory = "much"', "'environment.memory' must be a size"),
        ("task.toml", 'version = "1.0"', 'schema_version = "3.0"', "schema_version '3.0' is not known"),
        ("task.toml", 'version = "1.0"', "version = 1.0 2", "task.toml is not TOML"),
        ("task.toml", "[metadata]", "metadata = 3\n[other]", "key 'other' unknown field"),
        (
            "task.toml",
            "[metadata]",
            "[metadata]\nreward_range = [1, 0]",
            "'metadata.reward_range' must be [lowest, highest]",
        ),
        (
            "task.toml",
            "[metadata]",
            '[metadata]\nreward_range = [0, "1"]',
            "[lowest, highest], got list [0, '1']",
        ),
        (
            "task.toml",
            "[metadata]",
            "[metadata]\nreward_range = [0, inf]",
            "[lowest, highest], got list [0, inf]",
        ),
        ("task.toml", "[metadata]", "[metadata]\nreward_ranges = [0, 2]", "Did you mean 'reward_range'?"),
        ("task.toml", "allow_internet = false", "gpus = 1", "no GPU"),
        (
            "task.toml",
            "allow_internet = false",
            "allow_internet = true",
            "'environment.allow_internet' asks for a network (public)",
        ),
        ("task.toml", "[agent]", '[[steps]]\nname = "a/b"\n[agent]', "'steps[0].name' must be a folder's name"),
        (
            "task.toml",
            "memory =",
            "memory_mb = 5\nmemory =",
            "'environment.memory' is 1024 MB, and environment.memory_mb",
        ),
        ("instruction.md", "Create", "", ""),
        ("tests/test.sh", made.TEST_TXT, " \n", "test.sh is empty"),
    ],
)
def test_mistakes_in_harbor_tasks(tmp_path, file, old, new, message):
    folder = made.harbor(tmp_path / "t")
    replaced(folder / file, old, new)
    if not message:
        (folder / file).rename(folder / "instructions.md")
        message = "instruction.md is missing. Did you mean 'instructions.md'?"
    with pytest.raises(ConfigError) as error:
        folders.read_task(folder)
    assert message in str(error.value) and str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("parser_name: pytest", "parser_name: dbt", "'parser_name' must be one of 'pytest'"),
        ("instruction: |-", "instructions: |-", "key 'instructions' is unknown. Did you mean 'instruction'?"),
        ("run_tests_in_same_shell: false", "run_tests_in_same_shell: true", "fresh process only"),
        ("max_test_timeout_sec: 30.0", "max_test_timeout_sec: soon", "'max_test_timeout_sec' must be a number"),
        ("tags: [files]", "tags: [files", "task.yaml is not YAML"),
    ],
)
def test_mistakes_in_terminal_bench_tasks(tmp_path, old, new, message):
    folder = made.terminal_bench(tmp_path / "t")
    replaced(folder / "task.yaml", old, new)
    with pytest.raises(ConfigError) as error:
        folders.read_task(folder)
    assert message in str(error.value) and "task.yaml" in str(error.value)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("task.json", "{", "is not JSON"),
        ("task.json", '{"descriptions": "x"}', "key 'descriptions' is unknown. Did you mean 'description'?"),
        ("task.json", '{"description": 3}', "'description' must be text"),
        ("test_final_state.py", "def test_a(:\n", "test_final_state.py is not Python"),
        ("container.def", "", "container.def is empty"),
    ],
)
def test_mistakes_in_endless_tasks(tmp_path, file, text, message):
    folder = made.endless(tmp_path / "t")
    (folder / file).write_text(text)
    with pytest.raises(ConfigError) as error:
        folders.read_task(folder)
    assert message in str(error.value) and file in str(error.value)


def test_folders_without_a_task(tmp_path):
    made.harbor(tmp_path / "hello")
    with pytest.raises(ConfigError, match="Did you mean 'hello'"):
        folders.read_task(tmp_path / "helo")
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match=r"holds no task\.toml, task\.yaml, task\.json"):
        folders.read_task(tmp_path / "other")
    with pytest.raises(ConfigError, match="holds no task directories"):
        folders.read_tasks(tmp_path / "other")
    made.endless(tmp_path / "hello")
    with pytest.raises(ConfigError, match=r"task\.toml and task\.json"):
        folders.read_task(tmp_path / "hello")


GENERATED = {
    "setup": "set -e\n",
    "initial_test": "print()\n",
    "final_test": "print()\n",
    "commands": ["touch a", "ls"],
    "processes": False,
    "level": 1,
    "template": "empty_file",
}


def row(**changes):
    about = {**GENERATED, **changes}
    about = {key: value for key, value in about.items() if value is not None}
    return Task("t1", "Create the empty file a.", (), "level1/empty_file", {"terminal": about, "split": "train"})


def test_a_generated_row():
    task = rows.from_task(row())
    assert task.oracle == inline("sh", "touch a\nls")
    assert task.format == "generated"


def test_a_row_that_names_a_folder(tmp_path):
    task = folders.read_task(made.harbor(tmp_path / "hello"))
    made_row = rows.folder_row(task)
    assert made_row["kind"] == "level1/harbor" and made_row["prompt"] == task.instruction
    assert rows.from_task(Task("hello", "x", (), metadata=made_row["metadata"])) == task


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Task("t1", "x", (), metadata={"hops": 2}), "no 'terminal' object"),
        (row(setup=None), "terminal.setup': missing"),
        (row(final_test=" "), "terminal.final_test': must not be empty"),
        (row(commands="ls"), "terminal.commands': must be a list"),
        (row(commands=[]), "terminal.commands': must be a list"),
        (row(processes="no"), "terminal.processes': must be true or false"),
        (row(level=4), "terminal.level': must be one of 1, 2, 3"),
        (row(zzz="x"), "terminal.zzz': unknown field. Valid: setup, "),
        (row(finaltest="x"), "terminal.finaltest': unknown field. Did you mean 'final_test'?"),
    ],
)
def test_mistakes_in_rows(task, message):
    with pytest.raises(ConfigError) as error:
        rows.from_task(task)
    assert message in str(error.value) and "task 't1'" in str(error.value) and ".." not in str(error.value)


def test_all_folders_that_cannot_be_read_are_named_at_once(tmp_path):
    for name in ("a", "b", "c", "d"):
        made.terminal_bench(tmp_path / name)
    (tmp_path / "a/tests/test_outputs.py").unlink()  # the format does not ask for it
    assert [task.id for task in folders.read_tasks(tmp_path)] == ["a", "b", "c", "d"]
    (tmp_path / "b/tests/test_outputs.py").write_text("def test_a(:")
    with pytest.raises(ConfigError, match=r"test_outputs\.py is not Python: ") as error:
        folders.read_tasks(tmp_path)
    assert "\n" not in str(error.value)
    (tmp_path / "c/run-tests.sh").unlink()
    with pytest.raises(ConfigError, match="2 of 4 task folders cannot be read:\n") as error:
        folders.read_tasks(tmp_path)
    assert "b/tests/test_outputs.py is not Python" in str(error.value) and "run-tests.sh is missing" in str(error.value)
    assert "is not Python: " not in str(error.value).splitlines()[2]
