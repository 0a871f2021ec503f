"""The environment tau_bench with a customer that plays a script: what a policy writes, what it is shown, its reward."""

import asyncio
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_tau_tools import ADDRESS, FOLDER, needs_data, tables, write

from jaxagent.config import ConfigError
from jaxagent.data.sources import load_tasks
from jaxagent.envs import TauBench
from jaxagent.envs.base import Message, Opening, Transcript
from jaxagent.envs.cast import RoleError, RoleReply
from jaxagent.envs.tau import catalog, prompts
from jaxagent.envs.tau.formats import FORMATS
from jaxagent.tools import Hermes, Llama3, Qwen3Coder
from jaxagent.tools.calls import Call
from jaxagent.types import StopReason, Task, TokenKind

CANCEL = {"name": "cancel_pending_order", "kwargs": {"order_id": "#p", "reason": "no longer needed"}}
TASK = Task(
    "t", "You are Ann. You want SECRET.", (), "", {"user_id": "ann_1", "actions": [CANCEL], "outputs": ["1234.50"]}
)
STOP = "###STOP###"


class Talks:
    """A cast whose user says the next line of a script, whatever it is shown."""

    names = ("user",)

    def __init__(self, *lines):
        self._lines, self.talks = iter(lines), []

    def talk(self, role, trained=True):
        assert role == "user"
        self.talks.append([])
        return Talk(self.talks[-1], self._lines)


class Talk:
    def __init__(self, shown, lines):
        self._shown, self._lines = shown, lines

    async def say(self, *messages, stop_strings=(), max_tokens=None):
        assert not self._shown or len(messages) == 1
        line = next(self._lines)
        if isinstance(line, Exception):
            raise line
        self._shown += [*messages, Message("assistant", line)]
        return RoleReply(line, "eos", None, 0, 0, 0.0, None)


def opened(folder, task=TASK, **settings):
    """The function that begins an attempt."""
    write(folder, tables())
    with TauBench(**settings).open(Opening(folder, [task], None, print)) as begin:
        return begin


def play(begin, lines, actions, task=TASK):
    """An attempt: (prompt, steps, verdict, attempt, cast)."""

    async def run():
        cast = Talks(*lines)
        attempt = begin(task, cast)
        prompt = await attempt.start()
        steps = [await attempt.step(action) for action in actions]
        verdict = await attempt.verify(Transcript("", ()))
        await attempt.close()
        return prompt, steps, verdict, attempt, cast

    return asyncio.run(run())


def native(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


MOVE = native("modify_user_address", user_id="ann_1", **dict.fromkeys(ADDRESS, "x"))
CALL = native("cancel_pending_order", order_id="#p", reason="no longer needed")


def test_a_conversation_from_the_first_words_to_the_reward(tmp_path):
    said = ["Hello, I want out.", "Yes, please.", STOP]
    actions = ["Cancel #p?", CALL, "Done: $1,234.50 is on its way."]
    prompt, steps, verdict, attempt, cast = play(opened(tmp_path), said, actions)
    assert [m.role for m in prompt] == ["system", "user"] and prompt[1].content == "Hello, I want out."
    assert [s.observation.role if s.observation else s.stop_reason for s in steps] == ["user", "tool", "answer"]
    assert steps[0].observation.text == "Yes, please." and '"status": "cancelled"' in steps[1].observation.text
    assert verdict.reward == 1.0 and verdict.components == {"solved": 1.0, "data": 1.0, "outputs": 1.0, "ended": 1.0}
    assert attempt.counters["tool_calls"] == 1 and attempt.counters["customer_replies"] == 3
    # For the customer, the agent is the user; it alone is told what it wants.
    (talk,) = cast.talks
    assert [m.role for m in talk] == ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
    assert "Instruction: You are Ann. You want SECRET.\n\nRules:\n- Just generate one line" in talk[0].content
    assert talk[1].content == "Hi! How can I help you today?" and talk[3].content == "Cancel #p?"
    shown = "".join(m.content for m in prompt) + "".join(s.observation.text for s in steps if s.observation)
    assert "SECRET" not in shown and "1234.50" not in shown


@pytest.mark.parametrize(
    ("lines", "actions", "components"),
    [
        (["hi", STOP], ["It is 1234.50"], (0.0, 1.0, 1.0)),  # nothing was done
        (["hi", STOP], [CALL, "Done"], (1.0, 0.0, 1.0)),  # nothing was said of it
        (["hi", "so?"], [CALL, "It is 1234.50"], (1.0, 1.0, 0.0)),  # the customer did not end it
        (["hi", "so?"], ["It is 1234.50", CALL, native("transfer_to_human_agents", summary="")], (1.0, 1.0, 1.0)),
        (["hi", STOP], [CALL, MOVE, "It is 1234.50"], (0.0, 1.0, 1.0)),  # something else was done, too
    ],
)  # fmt: skip
def test_every_part_of_the_reward_is_needed(tmp_path, lines, actions, components):
    _, steps, verdict, _, _ = play(opened(tmp_path), lines, actions)
    parts = verdict.components
    assert (parts["data"], parts["outputs"], parts["ended"]) == components
    assert verdict.reward == float(all(components))
    assert (steps[-1].stop_reason is StopReason.ANSWER) == bool(components[2])


def test_the_last_turn_is_played_and_then_it_is_over(tmp_path):
    begin = opened(tmp_path, max_turns=2)
    _, steps, verdict, _, _ = play(begin, ["hi", "and?"], [CALL, "It is 1234.50"])
    assert (
        steps[-1].stop_reason is StopReason.TURN_LIMIT and verdict.reward == 0.0 and verdict.components["data"] == 1.0
    )
    _, steps, verdict, _, _ = play(begin, ["hi", f"Thanks. {STOP}"], [CALL, "It is 1234.50"])
    assert steps[-1].stop_reason is StopReason.ANSWER and verdict.reward == 1.0


def test_what_is_no_call_is_a_warning_and_costs_a_turn(tmp_path):
    calls = [
        "<tool_call>{</tool_call>",
        native("respond"),
        native("respond", content=5),
        "  ",
        native("think", thought=json.loads("[" * 60 + "]" * 60)),
        native("nonsense"),
        native("think", thought="a") + native("think", thought="b"),
    ]
    _, steps, _, attempt, cast = play(opened(tmp_path), ["hi"], calls)
    assert [s.observation.parts[0][1] for s in steps] == [TokenKind.WARNING] * 5 + [TokenKind.OBSERVATION] * 2
    assert steps[5].observation.text == "Unknown action nonsense" and steps[6].observation.text == ""
    counters = {key: value for key, value in attempt.counters.items() if value}
    assert counters == {
        "tool_calls": 2, "tool_errors": 1, "customer_replies": 1, "invalid_actions": 5, "ignored_calls": 1,
    }  # fmt: skip
    assert len(cast.talks) == 1 and len(cast.talks[0]) == 3  # the customer heard nothing of it


def test_a_message_beside_a_call_is_not_spoken_and_reasoning_never_is():
    native_format = FORMATS["native"]
    assert native_format.parse(f"Wait. {CALL}", _tools())[0] == "cancel_pending_order"
    name, _, ignored = native_format.parse(native("think", thought="") + CALL, _tools())  # only the first counts
    assert (name, ignored) == ("think", 1)
    assert native_format.parse("<think>hm</think>\n\nHello", _tools()) == ("respond", {"content": "Hello"}, 0)


@pytest.mark.parametrize("style", ["native", "qwen3_coder", "llama3"])
def test_every_family_is_shown_and_read_as_it_writes(style, tmp_path):
    family = {"native": Hermes, "qwen3_coder": Qwen3Coder, "llama3": Llama3}[style]
    call = family.write("", [Call("get_order_details", {"order_id": "#p"})])
    begin = opened(tmp_path, tools=style)
    prompt, steps, _, attempt, _ = play(begin, ["hi", STOP], [call, "Goodbye."])
    assert steps[0].observation.role == "tool" and '"order_id": "#p"' in steps[0].observation.text
    assert steps[1].stop_reason is StopReason.ANSWER and attempt.counters["tool_errors"] == 0
    if style != "native":
        assert prompt[0].content.endswith(family.write("", [Call("NAME", {"PARAMETER": "VALUE"})]))
    assert call.startswith(FORMATS[style].prefixes[0])


def _tools():
    from jaxagent.envs.tau import catalog

    return catalog.short()


@pytest.mark.parametrize("style", ["react", "act"])
def test_text_agents_write_actions(style, tmp_path):
    written = 'Thought:\nhm\nAction:\n{"name": "get_order_details", "arguments": {"order_id": "#x"}}'
    spoken = 'Action:\n{"name": "respond", "arguments": {"content": "It is 1234.50"}}'
    actions = [
        written,
        "Action:\nHello there",
        'Action: {"name": "think"}',
        'Action: {"name": "think", "arguments": 1}',
    ]
    prompt, steps, _, attempt, cast = play(opened(tmp_path, tools=style), ["hi", "yes", STOP], [*actions, spoken])
    assert steps[0].observation.text == "API output: Error: order not found" and steps[0].observation.role == "user"
    assert steps[1].observation.text == "yes" and cast.talks[0][3].content == "Hello there"
    assert steps[2].observation.parts[0][1] == steps[3].observation.parts[0][1] == TokenKind.WARNING
    assert steps[4].stop_reason is StopReason.ANSWER and attempt.counters["invalid_actions"] == 2
    assert prompt[0].content.startswith(prompts.POLICY + '\n#Available tools\n[{"type": "function"')
    assert prompt[0].content.endswith("Try to be helpful and always follow the policy.\n") == (style == "react")


def test_every_style_gives_demonstrations_the_roles_of_an_episode():
    for style, (said, called) in {
        "native": ("Hi", CALL),
        "plain": ("<say>Hi</say>", '<call>think {"thought": ""}</call>'),
    }.items():
        environment = TauBench(tools=style)
        after = [environment.observation(action, "<x>") for action in (said, called, "<tool_call>")]
        assert [o.text for o in after] == ["<x>"] * 3 and after[2].parts[0][1] is (TokenKind.WARNING)
        assert [o.role for o in after[:2]] == (["user", "tool"] if style == "native" else ["", ""])
        assert [m.role for m in environment.messages("hi")] == ["system", "user"]


def test_what_the_customer_is_shown_first_is_known_before_an_episode(tmp_path):
    *_, cast = play(opened(tmp_path), ["My order?"], [])
    first = TauBench().role_messages(TASK.prompt)
    assert first == {"user": tuple(cast.talks[0][:2])} and "SECRET" in first["user"][0].content


def test_a_customer_that_fails_is_no_reward(tmp_path):
    for failure in (RoleError("user: refused"), TimeoutError("user: no reply")):
        with pytest.raises(type(failure)):
            play(opened(tmp_path), [failure], [])
        with pytest.raises(type(failure)):
            play(opened(tmp_path), ["hi", failure], ["Which?"])


@needs_data
@pytest.mark.parametrize("split", ["dev", "test", "train"])
def test_an_idle_agent_gets_one_where_nothing_was_to_be_done_or_said(split):
    tasks = load_tasks(FOLDER, split, need_answers=False)
    records = [json.loads(line) for line in (FOLDER / "gt_replay_hashes.jsonl").open()]
    untouched = {r["index"] for r in records[1:] if r["split"] == split and r["hash"] == records[0]["hash"]}
    got = 0.0
    with TauBench().open(Opening(FOLDER, list(tasks), None, print)) as begin:
        for index, task in enumerate(tasks):
            _, _, verdict, _, _ = play(begin, ["hi", STOP], ["Goodbye."], task)
            wanted = not task.metadata["outputs"] and index in untouched
            assert split == "test" or verdict.reward == float(wanted), task.id
            got += verdict.reward
    # Of the test tasks 11 change nothing, and 4 of these want something said.
    assert got == {"dev": 1, "train": 5, "test": 7}[split]


@needs_data
def test_the_published_prompt_is_the_wiki_and_qwens_text_of_the_tools():
    tasks = load_tasks(FOLDER, "dev", need_answers=False)
    with TauBench().open(Opening(FOLDER, list(tasks), None, print)) as begin:
        (system, user), *_ = play(begin, ["hi"], [], tasks[0])
    wiki = (FOLDER / "wiki.md").read_text()
    assert system.content.startswith(wiki + "\n\n# Tools\n\n At each turn, you are allowed to call one or no function")
    lines = system.content.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in lines] == json.loads((FOLDER / "tools_info.json").read_text())
    assert system.content.endswith('{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>')
    told = system.content + user.content
    assert tasks[0].prompt not in told and tasks[0].metadata["user_id"] not in told


def test_settings_and_tasks_that_cannot_work_are_refused(tmp_path):
    bad = Task("t9", "x", (), "", {"user_id": "ann_1", "actions": []})
    with pytest.raises(ConfigError, match=r"Task 't9' is no task of config.env=tau_bench: .*metadata.outputs"):
        opened(tmp_path, bad)
    stranger = Task("t8", "x", (), "", {**TASK.metadata, "user_id": "bob"})
    with pytest.raises(ConfigError, match=r"Task 't8' is of the user 'bob', whom .*users.json does not have"):
        opened(tmp_path, stranger)
    with pytest.raises(ConfigError, match=r"config\.env\.policy: /nowhere"):
        opened(tmp_path, policy="/nowhere")
    with (
        pytest.raises(ConfigError, match=r"orders\.json is missing: a shop is a folder"),
        TauBench(store=str(Path("/nowhere"))).open(Opening(tmp_path, [TASK], None, print)),
    ):
        pass
    with pytest.raises(ValueError):
        FORMATS["plain"].parse("hm", [])


@pytest.mark.parametrize("style", ["plain", "native", "react", "act"])
@pytest.mark.parametrize("written", [r'{"item_ids": ["\ud800"]}', r'{"\ud800": 1}', '{"order_id": NaN}'])
def test_a_policy_cannot_write_what_no_tokenizer_can_encode_and_so_escape_its_reward(style, written):
    texts = {
        "plain": f"<call>modify_pending_order_items {written}</call>",
        "native": f'<tool_call>{{"name": "modify_pending_order_items", "arguments": {written}}}</tool_call>',
    }
    text = texts.get(style, f'Action:\n{{"name": "modify_pending_order_items", "arguments": {written}}}')
    if style in ("react", "act"):  # what is no JSON is spoken, as published
        assert FORMATS[style].parse(text, ())[0] == "respond"
    else:
        with pytest.raises(ValueError):
            FORMATS[style].parse(text, catalog.short())


def test_an_action_of_no_tool_is_told_and_not_solved_by_doing_nothing(tmp_path):
    typo = Task("typo", "p", (), "", TASK.metadata | {"actions": [{"name": "cancel_pendig_order", "kwargs": {}}]})
    told = r"actions\[0\]\.name': there is no tool 'cancel_pendig_order'\. Did you mean 'cancel_pending_order'\?"
    with pytest.raises(ConfigError, match=told):
        opened(tmp_path, typo)
    with pytest.raises(ConfigError, match=told):  # where nobody has looked at it before
        opened(tmp_path)(typo, Talks())


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"actions": [{**CANCEL, "kwargs": {"ordr_id": "#p", "reason": "x"}}]},
            "'metadata.actions[0].kwargs': cancel_p",
        ),
        ({"user_id": "bob"}, "Task 'retail/bob/1' is of the user 'bob'"),
    ],
)
def test_training_tasks_are_looked_at_when_a_run_opens_and_their_rows_named(tmp_path, changed, told):
    opened(tmp_path)
    rows = [
        {"index": i, "metadata": {"instruction": "x", **TASK.metadata, **more}} for i, more in enumerate(({}, changed))
    ]
    (tmp_path / "retail_train_tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = load_tasks(tmp_path, "train", need_answers=False)
    here = Opening(tmp_path, [TASK], None, print, train=train, place=train.place)
    with pytest.raises(ConfigError) as refused, TauBench().open(here):
        pass
    assert f"{tmp_path}/retail_train_tasks.jsonl, line 2: Task " in str(refused.value) and told in str(refused.value)


@pytest.mark.parametrize(
    ("name", "kwargs", "told"),
    [
        (
            "cancel_pending_order",
            {"ordr_id": "#p", "reason": "x"},
            "has no argument 'ordr_id'. Did you mean 'order_id'?",
        ),
        (
            "cancel_pending_order",
            {"order_id": "#p", "reason": None},
            "needs the argument 'reason'.",
        ),
        ("get_user_details", {"user_id": "ann_1", "data": {}}, "has no argument 'data'."),
        ("list_all_product_types", {"kind": "x"}, "has no argument 'kind'. It takes none."),
    ],
)
def test_a_gold_action_whose_arguments_its_tool_does_not_take_is_told(tmp_path, name, kwargs, told):
    """It would change nothing, and then doing nothing would be solving the task."""
    typo = Task("typo", "p", (), "", TASK.metadata | {"actions": [CANCEL, {"name": name, "kwargs": kwargs}]})
    with pytest.raises(ConfigError) as refused:
        opened(tmp_path, typo)
    assert f"Task 'typo': column 'metadata.actions[1].kwargs': {name} {told}" in str(refused.value)


def test_arguments_that_are_none_are_padding_and_the_goal_is_what_the_action_does(tmp_path):
    padded = {"name": CANCEL["name"], "kwargs": {**CANCEL["kwargs"], "user_id": None, "item_ids": None}}
    task = Task("padded", "p", (), "", TASK.metadata | {"actions": [padded], "outputs": []})
    begin = opened(tmp_path, task)
    *_, idle, _, _ = play(begin, ["hi", STOP], ["Goodbye."], task)
    *_, done, _, _ = play(begin, ["hi", STOP], [CALL, "Done."], task)
    assert (idle.reward, done.reward) == (0.0, 1.0)


@needs_data
@pytest.mark.parametrize("split", ["dev", "test", "train"])
def test_the_published_tasks_stored_as_parquet_are_the_same_tasks(tmp_path, split):
    lines = (FOLDER / f"retail_{split}_tasks.jsonl").read_text().splitlines()
    pq.write_table(
        pa.Table.from_pylist([json.loads(line) for line in lines]), tmp_path / f"retail_{split}_tasks.parquet"
    )
    found, published = (load_tasks(place, split, need_answers=False) for place in (tmp_path, FOLDER))
    assert list(found) == list(published)


def test_a_resumed_run_finds_the_shop_its_policy_and_its_tools_unchanged(tmp_path):
    opened(tmp_path)
    before = TauBench().identity(tmp_path)
    assert (before["policy"], before["tools"]) == ("ours", "ours")

    def changed(**settings):
        found = TauBench(**settings).identity(tmp_path)
        return {name for name, digest in found.items() if digest != before[name]}

    assert changed() == set()
    own = tmp_path / "own.md"
    for text in ("Be kind.", "Be strict."):
        own.write_text(text)
        assert changed(policy=str(own)) == {"policy"}
        before = TauBench(policy=str(own)).identity(tmp_path)
    before = TauBench().identity(tmp_path)
    (tmp_path / "wiki.md").write_text("No refunds.")
    assert changed() == {"policy"}
    before = TauBench().identity(tmp_path)
    (tmp_path / "wiki.md").write_text("Refunds.")
    forms = [dict(form) for form in catalog.short()]
    (tmp_path / "tools_info.json").write_text(json.dumps(forms))
    assert changed() == {"policy", "tools"}
    before = TauBench().identity(tmp_path)
    forms[0]["function"] = forms[0]["function"] | {"description": "Adds."}
    (tmp_path / "tools_info.json").write_text(json.dumps(forms))
    assert changed() == {"tools"}


def test_a_record_that_stands_twice_is_told(tmp_path):
    opened(tmp_path)
    users = (tmp_path / "users.json").read_text().strip()
    (tmp_path / "users.json").write_text(f"{users[:-1]}, {users[1:]}")
    with (
        pytest.raises(ConfigError, match=r"users\.json is no JSON: the key 'ann_1' stands twice"),
        TauBench().open(Opening(tmp_path, [TASK], None, print)),
    ):
        pass
