"""The rules of a session, each with its test: what is continued, begun anew, joined, given again, cancelled."""

from jaxagent.gateway.chat import Call, ChatMessage
from jaxagent.types import TokenKind
from tests.gateway import world
from tests.gateway.scripted import Scripted
from tests.gateway.world import ask, assistant, call, tool, user


def scripted(reply=lambda context, turn: f"turn {turn} saw {len(context)}", **more):
    return Scripted(world.tokenizer(), reply, **more)


async def told(session, *messages, **more):
    """Asks, takes the whole answer, and returns it as the message that a program sends back."""
    answer = await session.answer(ask(*messages, **more))
    session.delivered(answer)
    return ChatMessage("assistant", answer.text, answer.calls)


def test_a_conversation_of_three_turns_is_one_trajectory_of_the_policys_tokens():
    policy = scripted(lambda context, turn: ["looking " + call("ls"), call("cat a"), "  done  "][turn])

    async def scene():
        session = world.session(policy)
        first = await told(session, user("fix it"), tools=True)
        assert (first.text.strip(), first.calls[0].arguments) == ("looking", {"command": "ls"})
        ids_differ = ChatMessage("assistant", " looking", (Call("shell", {"command": "ls"}, "other"),), reasoning="hm")
        history = [user("fix it"), ids_differ, tool("a b")]
        second = await told(session, *history, tools=True)
        third = await told(session, *history, second, tool("text of a"), user("go on"), tools=True)
        assert third.text.strip() == "done" and not third.calls
        return session, session.close()

    session, trajectories = world.run(scene)
    assert len(trajectories) == 1
    world.check(policy, trajectories)
    one = trajectories[0]
    assert [t.new_tokens for t in policy.turns][1:] != [] and len({t.conversation for t in policy.turns}) == 1
    text = world.tokenizer().decode(one.tokens)
    assert text.count("<|im_start|>assistant") == 3 and text.endswith("  done  <|im_end|>")
    observed = [world.tokenizer().decode(span) for span in world.spans(one, TokenKind.OBSERVATION)]
    assert observed == ["a b", "text of a", "go on"]
    assert session.counters["requests"] == 3 and session.counters["forks"] == 0
    assert session.counters["sampled_tokens"] == one.action_mask.sum()
    assert not policy.left_open


def test_numbers_written_otherwise_are_the_same_call():
    reply = '<tool_call>{"name": "shell", "arguments": {"command": "x", "n": 1.0}}</tool_call>'
    policy = scripted(lambda context, turn: reply)

    async def scene():
        session = world.session(policy)
        await told(session, user("go"), tools=True)
        back = assistant("", Call("shell", {"n": 1, "command": "x"}))
        await told(session, user("go"), back, tool("seen"), tools=True)
        return session.close()

    assert len(world.run(scene)) == 1
