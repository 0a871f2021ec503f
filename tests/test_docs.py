"""What README and docs/ say is true: their commands parse, their links lead somewhere, the primer's numbers come out.

No command of a page trains here. `python -m jaxagent.main` lines are parsed and checked as a run would check them,
`--help` is run, and every other `python -m` line is started in this process up to the point where it has parsed its
flags. Pages with Python of their own (rewards, add_an_environment, add_an_algorithm, add_a_family, bring_your_agent,
README) are run by the tests of what they describe.
"""

import argparse
import ast
import contextlib
import importlib.util
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from jaxagent import __main__ as overview
from jaxagent.config import flags
from jaxagent.runs import checks
from launch import grid
from tests.algorithms.test_add_an_algorithm import write_files
from tests.gateway.test_bring_your_agent import write_agent
from tests.models.test_add_a_family import write_family
from tests.test_outside import write_package
from tests.tiny_run import FLAGS, ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
SETTING = re.compile(r"[A-Z_]+=\S*")  # of the environment, in front of a command


def commands(text: str) -> Iterator[list[str]]:
    """The words behind `python -m` of a page's commands: in bash blocks, in indented lines, and in running text.

    `jaxagent NAME` is the module that the table of commands names.
    """
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    indented = re.findall(r"^    ((?=python -m|jaxagent \w|\.venv)(?:.*\\\n)*.*)", text, re.MULTILINE)
    for shell in (*blocks, *indented):
        for line in shell.replace("\\\n", " ").splitlines():
            words = shlex.split(re.sub(r"[][]", "", re.sub(r"'\.\[\w+\]'", ".", line)), comments=True)
            while words:
                end = words.index("&&") if "&&" in words else len(words)
                command, words = words[:end], words[end + 1 :]
                command = command[next((i for i, word in enumerate(command) if not SETTING.fullmatch(word)), 0) :]
                if re.search(r"(^|/)python3?$", command[0]) and command[1] == "-m":
                    yield command[2:]
                elif command[0].rpartition("/")[2] == "jaxagent" and command[1:]:
                    yield [overview.COMMANDS[command[1]][0], *command[2:]]
    for line in re.findall(r"`python -m ([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if not line.startswith("..."):
            yield shlex.split(line)
    for name, line in re.findall(r"`jaxagent (\w+)([^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        yield [overview.COMMANDS[name][0], *shlex.split(line)]


CASES = [
    pytest.param(command, page, id=f"{page.name}: {' '.join(command)[:80]}")
    for page in (*PAGES, *sorted((ROOT / "configs").glob("*.py")))
    for command in commands(page.read_text(encoding="utf-8"))
    if command[0] not in ("venv", "pip")
]
CASES += [pytest.param([row[0], "--help"], ROOT, id=name) for name, row in overview.COMMANDS.items()]


class Parsed(BaseException):
    """A program has read its flags, and would now begin to work."""

    def __init__(self, result: argparse.Namespace | tuple[argparse.Namespace, list[str]]):
        self.options, self.rest = result if isinstance(result, tuple) else (result, [])


@pytest.fixture
def stops_when_parsed(monkeypatch) -> None:
    """The outermost parse of a command line raises `Parsed`; those that it calls for its subcommands return."""
    depth = 0

    def stopping(original):
        def parse(*args, **named):
            nonlocal depth
            depth += 1
            try:
                result = original(*args, **named)
            finally:
                depth -= 1
            if depth == 0 and args[0].prog != "jaxagent.main":  # whose flags are read with the config
                raise Parsed(result)
            return result

        return parse

    for name in ("parse_args", "parse_known_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, stopping(getattr(argparse.ArgumentParser, name)))
    monkeypatch.setattr("jaxagent.runs.devices.use_huge_pages", lambda: None)
    monkeypatch.chdir(ROOT)


def test_every_kind_of_command_is_found():
    assert len(CASES) > 60
    text = "```bash\n.venv/bin/pip x && A=b python -m a.b --c='d e' [--f] \\\n  -g  # h\n```\n\n"
    text += "    python -m i\n\n`python -m j\nk`"
    text += "\n`jaxagent view\nruns`"
    assert list(commands(text)) == [["a.b", "--c=d e", "--f", "-g"], ["i"], ["j", "k"], ["jaxagent.view", "runs"]]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize(("command", "page"), CASES)
def test_the_command_is_one(command, page, stops_when_parsed, monkeypatch, tmp_path, capsys):
    module, *arguments = command
    assert importlib.util.find_spec(module), f"there is no module {module}"
    if page.name == "add_an_algorithm.md":
        write_files(tmp_path, monkeypatch)  # what the page adds
    if page.name == "add_a_family.md":
        write_family(tmp_path, monkeypatch)
    if page.name == "add_an_environment.md":
        write_package(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
    if page.name == "bring_your_agent.md":
        write_agent(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.chdir(tmp_path)
    if module == "pytest":
        assert all((ROOT / path).exists() for path in arguments if path.startswith("tests"))
    elif module == "jaxagent.observe.report" and arguments != ["--help"]:
        assert len(arguments) == 1
    elif arguments in (["--help"], ["--helpfull"]):
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        assert ended.value.code == 0 and module.removeprefix("jaxagent.") in capsys.readouterr().out
    elif module == "jaxagent.main" and arguments:
        checks.check(flags.parse_argv([module, *arguments]).config)
    elif arguments or module not in NAMED_ALONE:
        check_flags(module, arguments, tmp_path, monkeypatch)


# Programs that need flags, and that running text names without any.
NAMED_ALONE = (
    "data_pipelines.corpus",
    "data_pipelines.long_geography",
    "data_pipelines.long_qa",
    "data_pipelines.nq_hotpotqa",
    "jaxagent.envs.check",
    "data_pipelines.python_tasks",
    "data_pipelines.smollm2",
    "jaxagent.serve",
    "jaxagent.envs.search.retriever.server",
    "jaxagent.evaluate",
    "jaxagent.evaluate_lengths",
    "jaxagent.main",
    "jaxagent.replay",
    "launch.sweep",
    "tests.golden.write",
)


def check_flags(module: str, arguments: Sequence[str], tmp_path: pathlib.Path, monkeypatch) -> None:
    """Starts the program, which must accept its flags, its overrides of a config, and a sweep's grid."""
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(Parsed) as stopped:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    parsed = stopped.value
    if module == "launch.sweep":
        of = parsed.options
        assert grid.runs(of.config, of.grid, of.seeds, tmp_path, of.share, parsed.rest)
    elif module in ("jaxagent.evaluate", "jaxagent.evaluate_lengths", "jaxagent.envs.check"):
        given = any(argument.startswith("--config=") for argument in parsed.rest)
        recipe = "memagent" if module == "jaxagent.evaluate_lengths" else "search_r1"
        flags.parse_argv([module, *([] if given else [f"--config=configs/{recipe}.py"]), *parsed.rest])
    elif module in (
        "jaxagent.service.node",
        "jaxagent.join",
        "jaxagent.replay",
        "launch.kubernetes",
        "launch.ray_fleet",
    ):
        assert all(argument.startswith("--config") for argument in parsed.rest)
    else:
        assert not parsed.rest


def test_the_programs_refuse_what_is_wrong(stops_when_parsed, monkeypatch, tmp_path):
    """The check of this file sees a flag that is none, a field that is none, and a preset that is none."""
    for command in (
        "launch.sweep --config=configs/search_r1.py --workdir=w --grids=a=b",
        "launch.sweep --config=configs/search_r1.py --workdir=w --grid preset=laptop+gpso",
        "jaxagent.evaluate --config.workdir=w --config.rl.objective.clip_hihg=1",
        "jaxagent.evaluate --config.workdir=w --ks=1",
        "jaxagent.evaluate_lengths --config.workdir=w --length=1",
        "data_pipelines.harbor chekc DIR",
        "jaxagent.sandbox.images build --debootstrapp bookworm",
    ):
        with pytest.raises((flags.ConfigError, SystemExit, AssertionError)):
            check_flags(*(lambda module, *rest: (module, rest))(*command.split()), tmp_path, monkeypatch)


def test_the_extras_that_pages_install_exist():
    names = re.findall(r'^        "([\w-]+)": ', (ROOT / "setup.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"test", "cuda"} <= set(names)
    for page in PAGES:
        for extra in re.findall(r"(?:\.|jaxagent)\[([\w-]+)\]", page.read_text(encoding="utf-8")):
            assert extra in names, (page.name, extra)


def test_own_tasks_are_read_as_the_page_says(tmp_path):
    page = (ROOT / "docs/bring_your_own.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "echo" in block]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    bash = ["bash", "-ec", block]
    done = subprocess.run(bash, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "Herman Melville" in done.stdout, done.stderr


def test_the_numbers_of_the_primer_come_out():
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/primer.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 7
    for block in blocks:
        exec(compile(block, "primer.md", "exec"), names)


@pytest.mark.slow
def test_the_example_plays_a_group_and_takes_a_step(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["one_episode.py", *FLAGS.split(), f"--config.workdir={tmp_path}"])
    names = runpy.run_path(str(ROOT / "examples/one_episode.py"))
    out = capsys.readouterr().out
    assert out.count("ended by") == 8 and " ACTION " in out and " PROMPT " in out
    assert names["metrics"]["policy/logprob_gap_max"] == 0.0 and names["metrics"]["policy/grad_norm"] > 0
    assert names["again"]["loss/policy"] < names["metrics"]["loss/policy"]
    assert names["state"].step == 1


@pytest.mark.parametrize("name", ["one_episode", "rl_loop", "search_over_http"])
def test_an_example_says_what_it_is(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    monkeypatch.setitem(sys.modules, "openai", None)  # not installed
    with contextlib.suppress(SystemExit):
        runpy.run_path(str(ROOT / f"examples/{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert (
        out.strip()
        == ast.get_docstring(ast.parse((ROOT / f"examples/{name}.py").read_text(encoding="utf-8")), False).strip()
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """To a file that exists, a heading that it has, and, where the text of the link is a name in code, that name."""
    text = page.read_text(encoding="utf-8")
    for label, target in re.findall(r"\[([^][]*)\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, target
        if file.suffix == ".py" and re.fullmatch(r"`\w+`", label):
            assert re.search(rf"^(def|class) {label[1:-1]}\b", file.read_text(), re.MULTILINE), f"{label} in {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    """`models/exact.py` and `jaxagent/loop.py`: from the root of the sources, or from the package."""
    for name in re.findall(r"`([\w.]+(?:/\w+)+\.(?:py|md))`", page.read_text(encoding="utf-8")):
        of_others = name == "tests/test_outputs.py" or name.startswith("my_package/")  # in a task's folder, in yours
        assert of_others or (ROOT / name).exists() or (ROOT / "jaxagent" / name).exists(), name


def test_the_list_of_commands_ends_quietly_when_its_reader_does(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert overview.main(["jaxagent"]) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_are_short(page):
    """At most 140 characters, but for tables, blocks of code, and a command within a sentence, which is not broken."""
    prose = re.sub(r"^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    lines = (line for line in prose.splitlines() if not line.lstrip().startswith("|") and not line.startswith("    "))
    assert [
        line for line in lines if len(line) > 140 and max(map(len, re.findall("`[^`]*`", line)), default=0) < 100
    ] == []
