"""What is read out of an agent's reply, in the three formats. Expectations are written out by hand."""

import pytest

from jaxagent.envs.terminal import dialogue
from jaxagent.envs.terminal.replies import ParsedTurn, parse

STYLES = ("plain", "endless", "qwen3_xml")
COMMAND = "printf '%s\\n' '</x>' > \"a b\""
THINK = "<think>hm</think>\n"


@pytest.mark.parametrize("style", STYLES)
def test_what_a_demonstration_writes_is_read_back(style):
    before = THINK if style == "qwen3_xml" else ""
    assert parse(style, before + dialogue.action(style, COMMAND)) == ParsedTurn(COMMAND)
    assert parse(style, before + dialogue.finish(style)) == ParsedTurn(done=True)


@pytest.mark.parametrize("style", STYLES)
def test_done_beats_a_command_on_either_side_of_it(style):
    command, done = dialogue.action(style, "rm -rf x"), dialogue.finish(style)
    assert parse(style, command + done).done and not parse(style, command + done).command
    assert parse(style, done + command).done and not parse(style, done + command).command


@pytest.mark.parametrize(
    ("style", "text", "command"),
    [
        ("plain", "x <cmd> ls </cmd> <cmd>pwd</cmd>", "ls"),
        ("plain", "<cmd>cat <<E\na\nE\n</cmd>", "cat <<E\na\nE"),
        ("endless", "<think>I could <command>ls</command></think> <command>\npwd\n</command>", "pwd"),  # the last
        ("endless", "<COMMAND>ls</COMMAND>", "ls"),
        ("qwen3_xml", THINK + dialogue.action("qwen3_xml", "a\nb"), "a\nb"),
        ("qwen3_xml", "thoughts</think>" + dialogue.action("qwen3_xml", "ls"), "ls"),
    ],
)
def test_which_command_is_taken(style, text, command):
    assert parse(style, text) == ParsedTurn(command)


@pytest.mark.parametrize("text", ["", "ls", "<command>ls", "<command> </command>", "done", "<action>wait</action>"])
def test_endless_asks_again(text):
    reply = parse("endless", text)
    assert reply.error.startswith("Could not parse a single <command>...</command> or <action>done</action>.")
    assert not reply.command and not reply.done
    assert parse("endless", "<Action> DONE </action>").done


def call(body):
    return f"<tool_call>\n{body}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        (THINK + "ls", ParsedTurn(error="No <tool_call> found in response.")),
        (
            THINK + call("<function=look>\n</function>"),
            ParsedTurn(error="No commands provided. Please provide commands to execute or set done."),
        ),
        (
            THINK + dialogue.action("qwen3_xml", " "),
            ParsedTurn(
                error="No commands provided. Please provide commands to execute or set done.",
                warnings=("Empty command.",),
            ),
        ),
        (dialogue.action("qwen3_xml", "ls"), ParsedTurn("ls", warnings=("Missing <think> block.",))),
        (
            THINK + "so: " + dialogue.action("qwen3_xml", "ls"),
            ParsedTurn("ls", warnings=("Text outside of <think> and <tool_call>.",)),
        ),
        (
            THINK * 2 + dialogue.action("qwen3_xml", "ls") + dialogue.action("qwen3_xml", "pwd"),
            ParsedTurn("ls", warnings=("Several <think> blocks.", "Several commands: only the first is executed.")),
        ),
        (
            "<think>hm " + dialogue.action("qwen3_xml", "ls"),
            ParsedTurn("ls", warnings=("Unclosed <think>.", "Text outside of <think> and <tool_call>.")),
        ),
        (
            "<think> </think><tool_call><function=done>",
            ParsedTurn(
                error="No <tool_call> found in response.",
                warnings=("Empty <think> block.", "Unclosed <tool_call>."),
            ),
        ),
        # A call inside the thoughts is only thought of.
        (
            "<think>" + dialogue.action("qwen3_xml", "rm x") + "</think>" + dialogue.action("qwen3_xml", "ls"),
            ParsedTurn("ls"),
        ),
        (
            THINK + "<tool_call>" + dialogue.action("qwen3_xml", "ls"),
            ParsedTurn("ls", warnings=("Nested <tool_call>.",)),
        ),
    ],
)
def test_tool_calls_of_echo(text, reply):
    assert parse("qwen3_xml", text) == reply


def test_the_published_observations():
    assert dialogue.observation("endless", "ls x", "no", 2) == "Command failed. Output: no\n\n(exit_code=1)"
    assert dialogue.observation("endless", "ls", "a", 0) == "Command executed successfully. Output: a\n\n(exit_code=0)"
    assert dialogue.observation("qwen3_xml", "ls x", "no", 2) == "Command 'ls x' failed. Output: no\n\n(exit_code=2)"
    assert dialogue.timed_out("endless", "sleep 9", "a" * 700, 10) == (
        "Command timed out. Partial output:\n" + "a" * 500
    )
    assert dialogue.timed_out("qwen3_xml", "sleep 99", "a", 30.0) == (
        "Command 'sleep 99' timed out after 30 seconds.\n\n(exit_code=-1)"
    )
