"""An environment is a guest: its folder is named in tables of paths, and no other file of the package imports it."""

import ast
from pathlib import Path

import pytest

from jaxagent.config import ConfigError
from jaxagent.config.choice import Choice, object_at
from jaxagent.data import rows
from jaxagent.envs.toolcalls.rewards import ToolRL

PACKAGE = Path(__file__).resolve().parents[2] / "jaxagent"
FOLDERS = {path.name for path in (PACKAGE / "envs").iterdir() if (path / "__init__.py").is_file()}


def test_nothing_but_an_environment_imports_one():
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE).parts
        if place[0] == "envs" and place[1] in FOLDERS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for name in names:
                parts = f"{module}{name}".split(".")
                own = parts[:2] != ["jaxagent", "envs"] or not FOLDERS & {*parts[2:3]}
                assert own, f"{path} imports {'.'.join(parts)}"


def test_the_tables_name_what_there_is():
    environments = Choice("jaxagent.envs:ENVIRONMENTS").entries
    assert {cls.__module__.split(".")[2] for cls in environments.values()} == FOLDERS
    assert all(path.split(".")[2] in FOLDERS for path in rows.LAYOUTS.values())


def test_a_config_of_an_earlier_version_names_a_built_in_class_by_its_old_path():
    assert object_at("jaxagent.rewards.toolrl:ToolRL", "config.env.reward") is ToolRL
    assert object_at("jaxagent.roles.retail_customer:RetailCustomer", "config.roles.user").__name__ == "RetailCustomer"
    assert object_at("jaxagent.agents.claude_code:ClaudeCode", "config.env.agent").__name__ == "ClaudeCode"


def test_a_users_module_that_imports_what_moved_is_not_told_to_install_the_package(tmp_path, monkeypatch):
    (tmp_path / "older_plugin.py").write_text("from jaxagent.algorithms.kl import kl_estimate\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"no module 'jaxagent\.algorithms\.kl'\. This version of the package has it"):
        object_at("older_plugin:Mine", "config.env")
    with pytest.raises(ConfigError, match=r"no module 'no_such_plugin'\. Install it"):
        object_at("no_such_plugin:Mine", "config.env")
