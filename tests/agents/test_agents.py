"""What agent programs are told, as pure functions; that the programs obey is in tests/gateway/test_programs.py."""

import dataclasses
import json
import tomllib

import pytest

from jaxagent.agents import AGENTS
from jaxagent.agents.base import Where
from jaxagent.agents.command import Command
from jaxagent.agents.shell import Shell
from jaxagent.config import ConfigError

TASK = 'Say "hi" {token} to \\ $HOME'
WHERE = Where("http://127.0.0.1:9999", "secret-token", "policy", TASK, "/work", "/home/user", 8192, 512)


def made(name):
    return AGENTS[name](**({"words": ("run", "{instruction}")} if name == "command" else {}))


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_is_told_everything_and_keeps_to_its_home(name):
    agent = made(name)
    files, argv, env = agent.files(WHERE), agent.argv(WHERE), agent.env(WHERE)
    assert all(path.startswith("/home/user/") and isinstance(data, bytes) for path, data in files.items())
    assert all(isinstance(word, str) and word for word in argv) and "\0" not in "".join(argv)
    assert env["HOME"] == "/home/user" and all(isinstance(value, str) for value in env.values())
    everything = b"\n".join(files.values()).decode() + "\n".join([*argv, *env.values()])
    assert "http://127.0.0.1:9999" in everything and "secret-token" in everything and "policy" in everything
    assert TASK in argv or json.dumps(TASK) in everything  # whole, as one argument
    assert "secret-token" not in "".join(argv)  # a command line is everybody's to read
    assert agent.files(WHERE) == files and agent.argv(WHERE) == argv


@pytest.mark.parametrize("name", AGENTS)
def test_an_instruction_that_looks_like_an_option_stays_the_instruction(name):
    where = dataclasses.replace(WHERE, instruction="--help")
    argv = list(made(name).argv(where))
    if name in ("codex", "opencode"):
        assert argv[-2:] == ["--", "--help"]


def test_codex_reads_toml_with_no_updates_and_no_telemetry():
    ((path, data),) = AGENTS["codex"]().files(dataclasses.replace(WHERE, model='a"b')).items()
    config = tomllib.loads(data.decode())
    assert path == "/home/user/.codex/config.toml"
    assert config["model"] == 'a"b' and config["model_context_window"] == 8192
    provider = config["model_providers"][config["model_provider"]]
    assert provider["base_url"] == "http://127.0.0.1:9999/v1" and provider["wire_api"] == "responses"
    assert AGENTS["codex"]().env(WHERE)[provider["env_key"]] == "secret-token"
    assert config["check_for_update_on_startup"] is False and config["analytics"]["enabled"] is False


def test_a_command_keeps_other_braces_and_fills_in_once():
    agent = Command(words=("sh", "-c", 'echo {"a": 1} ${x} {instruction}{model}', "{directory}", "{home}", "{url}"))
    assert agent.argv(WHERE)[2:] == (f'echo {{"a": 1}} ${{x}} {TASK}policy', "/work", "/home/user", WHERE.url)
    assert agent.env(WHERE)["OPENAI_BASE_URL"] == "http://127.0.0.1:9999/v1"
    assert agent.env(WHERE)["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9999"
    with pytest.raises(ConfigError, match="needs its words"):
        Command().argv(WHERE)


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("task", "{task}", "env.agent.task may name {instruction} and no other braces"),
        ("shown", "{output} {", "env.agent.shown may name {output}, {code} and no other braces"),
        ("late", "{0}", "env.agent.late may name"),
        ("done", "", "needs texts for begin, end and done"),
    ],
)
def test_texts_that_the_shell_agent_cannot_fill_in_are_refused(field, text, message):
    with pytest.raises(ConfigError) as error:
        Shell(**{field: text})
    assert message in str(error.value)
