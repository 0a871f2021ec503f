"""What agent programs are told, as pure functions; that the programs obey is in tests/gateway/test_programs.py."""

import dataclasses
import json
import tomllib

import pytest

from jaxagent.agents import AGENTS
from jaxagent.agents.base import Where
from jaxagent.agents.programs import Command
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
    assert TASK in " ".join(argv) or json.dumps(TASK) in everything  # opencode joins its words with blanks
    assert "secret-token" not in "".join(argv)  # a command line is everybody's to read
    if name in ("shell", "codex", "claude_code"):  # and so are variables; a file of its own can be removed
        assert "secret-token" not in "".join(env.values()) and list(files.values()).count(b"secret-token") == 1
    assert agent.files(WHERE) == files and agent.argv(WHERE) == argv


@pytest.mark.parametrize("name", [name for name in AGENTS if name != "command"])
@pytest.mark.parametrize("text", ["--help", "- mend  it\n- then stop", "/help", "-", 'a "b" c', "--version --"])
def test_an_instruction_that_looks_like_an_option_or_a_command_is_the_instruction(name, text):
    """It stands behind "--", in the same word as its option, in a file, or behind the option that takes it (mini)."""
    argv = list(made(name).argv(dataclasses.replace(WHERE, instruction=text)))
    if name in ("codex", "opencode", "claude_code"):
        assert " ".join(argv[argv.index("--") + 1 :]) == (
            f" {text}" if name == "claude_code" and text[0] == "/" else text
        )
    elif name == "qwen_code":
        assert argv[-1] == f"--prompt={' ' * (text[0] == '/')}{text}"
    else:
        assert text not in argv or (argv[-2:] == ["-t", text] and name == "mini_swe_agent")


@pytest.mark.parametrize(("context", "turn", "window"), [(200_000, 4000, "200000"), (60_000, 4000, "100000")])
def test_claude_code_knows_its_context_and_sums_its_talk_up_in_time(context, turn, window):
    env = AGENTS["claude_code"]().env(dataclasses.replace(WHERE, context_tokens=context, turn_tokens=turn))
    assert env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == str(context) and env["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == window
    small = AGENTS["claude_code"]().env(dataclasses.replace(WHERE, context_tokens=20_000))
    assert "CLAUDE_CODE_AUTO_COMPACT_WINDOW" not in small  # it would sum up every turn


def test_codex_reads_toml_with_no_updates_and_no_telemetry():
    files = AGENTS["codex"]().files(dataclasses.replace(WHERE, model='a"b'))
    config = tomllib.loads(files["/home/user/.codex/config.toml"].decode())
    assert config["model"] == 'a"b' and config["model_context_window"] == 8192
    provider = config["model_providers"][config["model_provider"]]
    assert provider["base_url"] == "http://127.0.0.1:9999/v1" and provider["wire_api"] == "responses"
    key = provider["auth"]["args"][1].split()[1]
    assert files[key] == b"secret-token" and provider["auth"]["args"][1] == f"cat {key} && rm {key}"
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
