"""ToolRL's rows, environment and generated requests: real rows, hand-written ones, hostile texts."""

import asyncio
import itertools
import json
from pathlib import Path

import pytest

from data_pipelines import tool_calls
from jaxagent.config import ConfigError
from jaxagent.data import rows, sources
from jaxagent.envs.base import Opening, Transcript
from jaxagent.envs.toolcalls import rows as toolcall_rows
from jaxagent.envs.toolcalls.environment import ToolCallAttempt, ToolCalls
from jaxagent.envs.toolcalls.rewards import ToolRL
from jaxagent.rollout import demonstrations
from jaxagent.types import StopReason, Task

SHARED = Path(__file__).resolve().parents[3].parent / "shared/data/toolrl-rlla"
TRUTH = '<think> t </think>\n<tool_call>\n{"name": "alarm", "parameters": {"hour": "7"}}\n</tool_call>'
ROW = {
    "data_source": "rlla",
    "prompt": [
        {"role": "system", "content": "Tools: alarm(hour)"},
        {"role": "user", "content": "**Dialogue Records History**\n<user> Wake me at 7. </user>"},
    ],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": TRUTH},
    "extra_info": {"split": "test", "index": 3},
}


def play(action: str, task: Task, environment: ToolCalls | None = None):
    async def played():
        attempt = ToolCallAttempt(task, environment or ToolCalls(max_turns=1))
        messages = await attempt.start()
        step = await attempt.step(action)
        verdict = await attempt.verify(Transcript("", ((action, ""),), ended=step.stop_reason))
        await attempt.close()
        return messages, step, verdict, attempt.counters

    return asyncio.run(played())


def test_a_row_by_hand():
    task = rows.to_task(ROW, True)
    assert (task.id, task.answers, task.kind) == ("rlla/test/3", (TRUTH,), "calls")
    messages, step, verdict, counters = play(TRUTH, task)
    assert [(m.role, m.content) for m in messages] == [(m["role"], m["content"]) for m in ROW["prompt"]]
    assert step.stop_reason is StopReason.ANSWER and counters == {"tool_calls": 1.0, "unreadable_calls": 0.0}
    assert verdict.reward == 4.0 and verdict.components == {"format": 1.0, "correctness": 3.0, "solved": 1.0}


def broken(column: str) -> tuple[dict, str]:
    """The row with one mistake, and what the error says."""
    row = json.loads(json.dumps(ROW))
    if column == "role":
        row["prompt"][0]["role"] = "user"
        return row, "prompt': must be a system and a user message"
    if column == "history":
        row["prompt"][1]["content"] = "Wake me"
        return row, r"prompt\[1\].content': must begin"
    if column == "one message":
        row["prompt"] = row["prompt"][1:]
        return row, "must be a system and a user message"
    if column == "index":
        del row["extra_info"]["index"]
        return row, "extra_info.index"
    truth = {
        "not JSON": TRUTH.replace('{"name"', "{name"),
        "no parameters": TRUTH.replace("parameters", "arguments"),
        "open": TRUTH.replace("</tool_call>", ""),
        "deep": TRUTH.replace('"7"', "[" * 100_000),
    }[column]
    row["reward_model"]["ground_truth"] = truth
    return row, "reward_model.ground_truth"


COLUMNS = ("role", "history", "one message", "index", "not JSON", "no parameters", "open", "deep")


@pytest.mark.parametrize("column", COLUMNS)
def test_a_broken_row_is_named_by_file_row_and_column(column):
    row, message = broken(column)
    with pytest.raises(ConfigError, match=f"rlla.jsonl, row 7: column '.*{message}|rlla.jsonl, row 7: .*{message}"):
        rows.check(row, "rlla.jsonl, row 7", True)


def test_every_real_row_is_read_and_its_messages_come_back():
    path = SHARED / "test.parquet"
    if not path.is_file():
        pytest.skip("toolrl-rlla is not beside this checkout")
    from pyarrow import parquet

    tasks = list(sources.load_tasks(path))
    assert len(tasks) == 80
    for row, task in zip(parquet.read_table(path).to_pylist(), tasks, strict=True):
        messages, _, verdict, _ = play(row["reward_model"]["ground_truth"], task)
        assert [(m.role, m.content) for m in messages] == [(m["role"], m["content"]) for m in row["prompt"]]
        assert verdict.components["solved"] == 1.0 and len(messages) == 2
    assert {task.kind for task in tasks} >= {"calls", "response"}


@pytest.mark.parametrize(
    ("action", "reward", "unreadable"),
    [
        ("", -3.0, 0),
        ("<tool_call>" * 50_000, -3.0, 1),
        ("<think>" * 50_000 + "</think>\n<tool_call>\n{}\n</tool_call>", -2.0, 0),  # as published: format 1
        (TRUTH.replace('"7"', "[" * 100_000), -2.0, 1),
        (TRUTH + TRUTH, 3.0, 0),  # the first block is read, the format is 0
        (TRUTH.replace("</tool_call>", ""), -3.0, 1),
        ("\0" + TRUTH, 3.0, 0),
    ],
)
def test_hostile_texts(action, reward, unreadable):
    _, _, verdict, counters = play(action, rows.to_task(ROW, True))
    assert verdict.reward == reward and counters["unreadable_calls"] == unreadable


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="max_turns=4 must be 1"):
        ToolCalls()
    here = Opening(None, [Task("t7", "p", (TRUTH.replace("{", "[", 1),))], lambda c, s: None, print)
    with pytest.raises(ConfigError, match="task 't7'"), ToolCalls(max_turns=1).open(here):
        pass


def drafts(number: int, seed: int = 0) -> list[tool_calls.Draft]:
    return list(itertools.islice(tool_calls.generate(seed), number))


def test_a_draft_by_hand():
    draft = tool_calls.Draft(
        "two_calls/alarm",
        ("taxi", "alarm"),
        {"city": "place", "day": "day", "hour": "time", "item": "item"},
        (("taxi", {"city": "Oslo", "hour": "9"}), ("alarm", {"hour": "7"})),
        "I need a taxi in Oslo at 9. And: Wake me at 7.",
    )
    assert draft.prompt == (
        "Tools: taxi(place, time), alarm(time)\n\n**Dialogue Records History**\n"
        "<user> I need a taxi in Oslo at 9. And: Wake me at 7. </user>\n"
    )
    assert draft.answer(2) == (
        '<think> taxi alarm </think>\n<tool_call>\n{"name": "taxi", "parameters": {"place": "Oslo", "time": "9"}}\n'
        '{"name": "alarm", "parameters": {"time": "7"}}\n</tool_call>'
    )
    whole, first = (ToolRL().score(draft.answer(count), draft.answer(2)) for count in (2, 1))
    assert whole["reward"] == 4.0
    # Of 1 + 3 + 2 points: half of the names, and all three of the first call.
    assert first["reward"] == pytest.approx(1 + 6 * 3.5 / 6 - 3)


def test_generated_requests_replay_and_say_what_they_need():
    for draft in drafts(600):
        row = tool_calls.row(draft)
        task = rows.to_task(row, True)
        _, _, verdict, _ = play(draft.answer(len(draft.calls)), task)
        assert verdict.reward == 4.0
        _, (user, content) = toolcall_rows.messages(task.prompt)
        assert user == "user" and all(value in content for _, args in draft.calls for value in args.values())
        tools = {call["name"] for line in row["answers"][0].split("\n")[2:-1] if (call := json.loads(line))}
        assert tools <= set(draft.listed) and len(draft.listed) == tool_calls.LISTED
        assert demonstrations._problem(tool_calls.demonstration(draft, 0.5)) == ""
    assert drafts(100) == drafts(100) != drafts(100, seed=1)


def test_how_many_demonstrations_make_the_first_call_alone():
    shown = [tool_calls.demonstration(draft, 0.75) for draft in drafts(800)]
    two = [row for row in shown if row["kind"].startswith("two_calls/")]
    alone = [row["turns"][0]["action"].count('"name"') == 1 for row in two]
    assert len(two) == 400 and 0.7 < sum(alone) / 400 < 0.8


def test_a_whole_dataset_of_requests(tmp_path, capsys):
    arguments = ["--num=200", "--demonstrations=30", f"--out={tmp_path / 'data'}"]
    assert tool_calls.main(arguments) == 0 and "wrote" in capsys.readouterr().out
    train, heldout = (sources.load_tasks(tmp_path / "data", split) for split in ("train", "heldout"))
    requests = [{toolcall_rows.messages(task.prompt)[1][1] for task in split} for split in (train, heldout)]
    assert len(train) > len(heldout) > 10 and not requests[0] & requests[1]
    assert len(demonstrations.load(tmp_path / "data/full.jsonl")) == 30
    assert tool_calls.main(arguments) == 2 and "exists" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="too few"):
        tool_calls.write(tmp_path / "few", 1, 0, 0)
