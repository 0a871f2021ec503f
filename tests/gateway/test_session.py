"""The rules of a session, each with its test: what is continued, begun anew, joined, given again, cancelled."""

import asyncio
import dataclasses
import hashlib

import pytest

from jaxagent.config import SamplingConfig
from jaxagent.engine.requests import EngineError
from jaxagent.gateway import sampler
from jaxagent.gateway import session as sessions
from jaxagent.gateway.chat import BadRequest, Call, ChatMessage, Text
from jaxagent.gateway.reading import Begun
from jaxagent.gateway.session import SessionLimits
from jaxagent.types import StopReason, TokenKind
from tests.gateway import world
from tests.gateway.scripted import Scripted
from tests.gateway.world import ask, assistant, call, tool, user


def scripted(reply=lambda context, turn: f"turn {turn} saw {len(context)}", **more):
    return Scripted(world.tokenizer(), reply, **more)


class Keyed(Scripted):
    """Samples letters that depend on the keys of the randomness and on nothing else, as an engine's draws do."""

    failing = False

    def answer(self, turn):
        if self.failing:
            raise EngineError("on purpose")
        key = f"{turn.task_id}/{turn.sample}/{turn.conversation}/{turn.turn}"
        return world.letters(hashlib.sha256(key.encode()).hexdigest())


async def told(session, *messages, **more):
    """Asks, takes the whole answer, and returns it as the message that a program sends back."""
    answer = await session.answer(ask(*messages, **more))
    session.delivered(answer)
    return ChatMessage("assistant", answer.text, answer.calls)


def test_a_conversation_of_three_turns_is_one_trajectory_of_the_policys_tokens():
    first_call = '<tool_call>{"name": "shell", "arguments": {"command": "ls", "n": 1.0}}</tool_call>'
    policy = scripted(lambda context, turn: ["looking " + first_call, call("cat a"), "  done  "][turn])

    async def program(session):
        first = await told(session, user("fix it"), tools=True)
        assert (first.text.strip(), first.calls[0].arguments) == ("looking", {"command": "ls", "n": 1.0})
        other = Call("shell", {"n": 1, "command": "ls"}, "other")  # another id, and the number as JavaScript writes it
        history = [user("fix it"), ChatMessage("assistant", " looking", (other,), reasoning="hm"), tool("a b")]
        second = await told(session, *history, tools=True)
        third = await told(session, *history, second, tool("text of a"), user("go on"), tools=True)
        assert third.text.strip() == "done" and not third.calls

    session, trajectories = world.played(policy, program)
    assert len(trajectories) == 1
    one = trajectories[0]
    assert [t.new_tokens for t in policy.turns][1:] != [] and len({t.conversation for t in policy.turns}) == 1
    text = world.tokenizer().decode(one.tokens)
    assert text.count("<|im_start|>assistant") == 3 and text.endswith("  done  <|im_end|>")
    observed = [world.tokenizer().decode(span) for span in world.spans(one, TokenKind.OBSERVATION)]
    assert observed == ["a b", "text of a", "go on"]
    assert session.counters["requests"] == 3 and session.counters["forks"] == 0
    assert session.counters["sampled_tokens"] == one.action_mask.sum()
    assert not policy.left_open


# -------------------------------------------------------------------- what begins anew


def test_a_rewritten_history_keeps_the_tokens_up_to_the_last_common_answer():
    policy = scripted(lambda context, turn: world.scrambled(f"in the quick shell {len(context)}"))

    async def program(session):
        one = await told(session, user("a"))
        two = await told(session, user("a"), one, user("b"))
        await told(session, user("a"), one, user("b"), two, user("c"))
        await told(session, user("a"), one, user("B!"), two, user("d"))

    session, trajectories = world.played(policy, program)
    assert len(trajectories) == 2 and session.counters["forks"] == 1
    fork = policy.turns[-1]
    first = policy.turns[0]
    whole = [*first.context, *first.sampled]
    assert fork.turn == 0 and fork.new_tokens[: len(whole)] == whole
    assert world.contains(fork.context, policy.turns[1].sampled) == 1, "an answer that it had given is spliced"
    kinds = next(t for t in trajectories if t.action_mask.sum() == len(fork.sampled)).kinds
    assert set(kinds[: len(whole)].tolist()) == {int(TokenKind.PROMPT)}, "what was copied is not trained again"


def test_compaction_and_sub_agents_begin_trajectories_of_their_own():
    policy = scripted()

    async def program(session):
        one = await told(session, ChatMessage("system", "agent"), user("a"), tools=True)
        await told(session, ChatMessage("system", "sub-agent"), user("look"), tools=True)
        await told(session, ChatMessage("system", "agent"), user("so far: " + one.text), tools=True)

    session, trajectories = world.played(policy, program)
    assert len(trajectories) == 3 and session.counters["forks"] == 0


def test_another_tool_set_begins_anew_with_the_sampled_ids_spliced():
    policy = scripted(lambda context, turn: world.scrambled(f"in the quick shell {len(context)}"))

    async def program(session):
        one = await told(session, user("a"), tools=True)
        other = dataclasses.replace(ask(user("a"), one, user("b")), tools=(dataclasses.replace(world.SHELL, name="x"),))
        await session.answer(other)

    _, trajectories = world.played(policy, program)
    assert len(trajectories) == 2
    assert policy.turns[1].turn == 0 and world.contains(policy.turns[1].context, policy.turns[0].sampled) == 1


def test_a_request_without_tools_beside_others_with_tools_is_not_trained():
    policy = scripted()

    async def scene(tools):
        session = world.session(policy)
        await told(session, user("a title for: fix it"))
        await told(session, user("fix it"), tools=tools)
        return session, session.close()

    session, trajectories = world.run(lambda: scene(True))
    assert len(trajectories) == 1 and session.counters["side_requests"] == 1
    assert trajectories[0].tokens.tolist() == [*policy.turns[1].context, *policy.turns[1].sampled]
    session, trajectories = world.run(lambda: scene(False))
    assert len(trajectories) == 2 and session.counters["side_requests"] == 0


def test_a_request_while_its_trajectory_generates_is_a_fork():
    policy = scripted(lambda context, turn: f"saw {len(context)}")

    async def program(session):
        one = await told(session, user("a"))
        left, right = await asyncio.gather(
            told(session, user("a"), one, user("b")), told(session, user("a"), one, user("c"))
        )
        await told(session, user("a"), one, user("c"), right, user("d"))
        await told(session, user("a"), one, user("b"), left, user("d"))

    session, trajectories = world.played(policy, program)
    assert [len(world.spans(t)) for t in trajectories] in ([3, 2], [2, 3]) and session.counters["forks"] == 1


def test_of_two_trajectories_that_say_the_same_the_idle_one_goes_on():
    policy = scripted(lambda context, turn: "same")

    async def program(session):
        one = await told(session, user("a"))
        assert await told(session, user("a")) == one
        await asyncio.gather(*(told(session, user("a"), one, user(text)) for text in "bc"))

    session, trajectories = world.played(policy, program)
    assert [len(world.spans(t)) for t in trajectories] == [2, 2] and session.counters["forks"] == 0


# -------------------------------------------------------------------- retries


def test_thirty_identical_requests_in_a_burst_are_one_generation():
    policy = scripted(pause_s=0.001)

    async def scene():
        session = world.session(policy)
        answers = await asyncio.gather(*(session.answer(ask(user("a"))) for _ in range(30)))
        return session, answers, session.close()

    session, answers, trajectories = world.run(scene)
    assert len(policy.turns) == 1 and all(answer is answers[0] for answer in answers)
    assert session.counters["retries_joined"] == 29 and session.counters["requests"] == 30
    world.check(policy, trajectories)


def test_an_answer_that_nobody_took_is_given_again_and_one_that_was_taken_is_not():
    policy = Keyed(world.tokenizer(), lambda context, turn: "")

    async def scene():
        session = world.session(policy)
        lost = await session.answer(ask(user("a")))
        again = await session.answer(ask(user("a")))
        assert again is lost and session.counters["replayed"] == 1
        session.delivered(again)
        new = await session.answer(ask(user("a")))
        assert new is not lost and new.text != lost.text
        session.delivered(new)
        assert await session.answer(ask(user("a")), retry=True) is new
        heard = []
        await session.answer(ask(user("a")), heard.append, retry=True)
        assert heard == [Begun(len(new.prompt_ids)), Text(new.text)]
        third = await session.answer(ask(user("a")))
        return [lost.text, new.text, third.text], session.close()

    texts, trajectories = world.run(scene)
    assert len(set(texts)) == 3 and len(trajectories) == 3
    world.check(policy, trajectories)
    assert world.run(scene)[0] == texts and len(policy.turns) == 6, "the same samples in the same order, every time"


def test_nobody_waits_so_the_generation_ends_and_a_retry_samples_the_same(monkeypatch):
    monkeypatch.setattr(sessions, "LINGER_S", 0.05)
    policy = Keyed(world.tokenizer(), lambda context, turn: "", pause_s=0.01)

    async def program(session):
        one = await told(session, user("a"))
        before = len(policy.turns)
        work = asyncio.create_task(session.answer(ask(user("a"), one, user("b"))))
        while len(policy.turns) == before or not policy.turns[-1].sampled:
            await asyncio.sleep(0.005)
        work.cancel()
        await asyncio.sleep(0)
        assert session.running == 1, "a retry may come"
        while session.running:
            await asyncio.sleep(0.01)
        await told(session, user("a"), one, user("b"))

    session, trajectories = world.played(policy, program)
    cancelled, whole = policy.turns[1:]
    assert cancelled.finish == "cancelled" and whole.finish == "eos" and session.counters["cancelled"] == 1
    assert (whole.conversation, whole.turn, whole.context) == (
        cancelled.conversation,
        cancelled.turn,
        cancelled.context,
    )
    assert whole.sampled[: len(cancelled.sampled)] == cancelled.sampled
    assert whole.new_tokens == whole.context, "the policy's sequence was opened again"
    assert len(trajectories) == 1 and not policy.left_open


def test_a_generation_that_failed_leaves_no_trace():
    policy = Keyed(world.tokenizer(), lambda context, turn: "")

    async def program(session):
        one = await told(session, user("a"))
        policy.failing = True
        for _ in range(3):
            with pytest.raises(EngineError, match="on purpose"):
                await session.answer(ask(user("a"), one, user("b")))
            with pytest.raises(EngineError, match="on purpose"):
                await session.answer(ask(user("new")))
        policy.failing, failure = False, session.failure
        await told(session, user("a"), one, user("b"))
        await told(session, user("new"))
        assert isinstance(failure, EngineError) and session.failure is None
        await told(session, user("a"))  # else it would have the key of the first, and sample the same tokens again

    _, trajectories = world.played(policy, program)
    assert sorted(len(world.spans(t)) for t in trajectories) == [1, 1, 2]
    failed, (*done, again) = [t for t in policy.turns if t.finish == "cancelled"], policy.done
    assert {t.conversation for t in failed} == {t.conversation for t in done}
    assert done[0].context == again.context and done[0].conversation != again.conversation


def test_keys_do_not_depend_on_arrival():
    policies = [Keyed(world.tokenizer(), lambda context, turn: "") for _ in range(2)]

    async def scene(policy, names):
        session = world.session(policy)
        for name in names:
            one = await told(session, user(name))
            await told(session, user(name), one, user("more"))
        return session.close()

    there = world.run(lambda: scene(policies[0], "abc"))
    back = world.run(lambda: scene(policies[1], "cab"))
    assert [t.tokens.tolist() for t in there] == [t.tokens.tolist() for t in back]


# -------------------------------------------------------------------- limits


def test_sampling_is_the_runs_and_every_limit_is_told():
    policy = scripted(lambda context, turn: world.letters("x" * 100))
    limits = SessionLimits(turn_tokens=50, context_tokens=200, requests=4)

    async def scene():
        session = world.session(policy, limits)
        hot = SamplingConfig(temperature=2.0, top_p=0.5, top_k=3, min_p=0.0)
        answer = await session.answer(
            dataclasses.replace(ask(user("a"), max_tokens=7, ignored=("seed",)), sampling=hot)
        )
        assert answer.finish == "length" and policy.turns[-1].sampling == world.SAMPLING
        assert session.counters["ignored_fields"] == 2 and len(answer.tokens) == 7
        answer = await session.answer(ask(user("b"), max_tokens=1000))
        assert len(answer.tokens) == 50
        with pytest.raises(BadRequest, match=r"prompt is too long"):
            await session.count(ask(user("a" * 5000)))
        assert session.stop is None, "to count a request is none"
        with pytest.raises(BadRequest, match=r"prompt is too long: .* > 200 maximum") as refused:
            await session.answer(ask(user("long " * 200)))
        assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
        assert session.stop == StopReason.TOKEN_LIMIT
        long = await session.answer(ask(user("c" * 100)))
        assert len(long.prompt_ids) + len(long.tokens) <= 200 and session.stop is None
        await session.answer(ask(user("d")))
        with pytest.raises(BadRequest, match="4 requests are used up") as refused:
            await session.answer(ask(user("e")))
        assert refused.value.status == 403 and session.stop == StopReason.TURN_LIMIT
        trajectories = session.close()
        with pytest.raises(BadRequest, match="closed") as refused:
            await session.answer(ask(user("f")))
        assert refused.value.status == 401 and session.close() is trajectories
        return trajectories

    world.check(policy, world.run(scene))


@pytest.mark.parametrize("found_by_the_engine", [True, False])
def test_a_stop_string_of_the_program_ends_the_turn_where_it_is_complete(found_by_the_engine, monkeypatch):
    if not found_by_the_engine:
        monkeypatch.setattr(sampler, "ENGINE_STOP_BYTES", 0)
    first = "think. STOP " + "never read " * 40
    policy = scripted(lambda context, turn: [first, "done"][turn], piece=3, pause_s=0.002)

    async def scene():
        session = world.session(policy)
        heard = []
        answer = await session.answer(ask(user("a"), stops=("STOP",)), heard.append)
        session.delivered(answer)
        assert (answer.text, answer.finish, answer.stop_string) == ("think. ", "stop_sequence", "STOP")
        assert "".join(e.text for e in heard if isinstance(e, Text)) == "think. "
        await told(session, user("a"), assistant("think."), user("b"), stops=("STOP",))
        return answer, session.close()

    answer, trajectories = world.run(scene)
    assert len(trajectories) == 1
    text = world.tokenizer().decode(trajectories[0].tokens)
    assert "think. STOP<|im_end|>" in text and "never" not in text, "what lies behind the stop string is not context"
    assert world.contains(trajectories[0].tokens, answer.tokens.tolist()) == 1
    assert not policy.left_open and len(policy.turns[0].sampled) < 40, "the engine is told at once"
    assert len(policy.sequences) == (1 if found_by_the_engine else 2), "a sequence that ended exactly is kept"


def test_the_engine_gets_one_set_of_stop_strings_of_an_attempt_and_may_refuse_it():
    class Refusing(Scripted):
        async def generate(self, *args, stop_strings=None, **more):
            if stop_strings is not None:
                raise ValueError("engine.stop_states leaves no room")
            return await super().generate(*args, stop_strings=None, **more)

    async def scene(policy, *stops):
        session = world.session(policy)
        for i, some in enumerate(stops):
            answer = await session.answer(ask(user(f"{i}"), stops=some))
            assert (answer.text, answer.stop_string) == ("a ", "S")
        return session.close()

    policy = scripted(lambda context, turn: "a S b")
    trajectories = world.run(lambda: scene(policy, ("S",), ("S", "no"), ("S",), ("S", "x" * 50)))
    assert [turn.stop_strings for turn in policy.turns] == [("S",), (), ("S",), ()]
    policy = Refusing(world.tokenizer(), lambda context, turn: "a S b")
    refused = world.run(lambda: scene(policy, ("S",), ("S", "no"), ("S",), ("S", "x" * 50)))
    assert [t.tokens.tolist() for t in refused] == [t.tokens.tolist() for t in trajectories]
    assert not policy.left_open


def test_a_turn_has_the_least_of_the_three_limits():
    async def scene(room, turn_tokens, max_tokens):
        policy = scripted(lambda context, turn: world.letters("x" * 300))
        prompt = len(world.renderer().prompt([user("a")], (), {}).ids)
        session = world.session(policy, SessionLimits(turn_tokens, prompt + room, 10))
        return len((await session.answer(ask(user("a"), max_tokens=max_tokens))).tokens)

    for limits in ((7, 50, 90), (50, 7, 90), (50, 90, 7), (7, 50, None), (50, 7, None)):
        assert world.run(lambda limits=limits: scene(*limits)) == 7


def test_a_log_prob_that_is_not_finite_is_no_turn():
    class Broken(Scripted):
        def _part(self, *args):
            part = super()._part(*args)
            return dataclasses.replace(part, logprobs=part.logprobs * float("nan"))

    async def scene():
        session = world.session(Broken(world.tokenizer(), lambda context, turn: "a"))
        with pytest.raises(EngineError, match="not finite"):
            await session.answer(ask(user("a")))
        return session.close()

    assert world.run(scene) == ()


def test_requests_that_differ_in_more_than_messages_are_not_one():
    policy = scripted(lambda context, turn: "a long answer of many words", pause_s=0.001)
    other = dataclasses.replace(world.SHELL, description="Runs another command.")

    async def program(session):
        bodies = [ask(user("q"), tools=True), ask(user("q"), tools=True, max_tokens=3)]
        bodies += [ask(user("q"), tools=True, stops=("z",)), dataclasses.replace(bodies[0], tools=(other,))]
        answers = await asyncio.gather(*(session.answer(body) for body in bodies))
        for answer in answers:
            session.delivered(answer)
        said = assistant(answers[0].text)
        await told(session, user("q"), said, user("r"), tools=True)
        last = dataclasses.replace(ask(user("q"), said, user("s")), tools=(other,))
        await session.answer(last)

    session, _ = world.played(policy, program)
    assert len(policy.turns) == 6 and session.counters["retries_joined"] == 0
    assert "Runs another command" in world.tokenizer().decode(policy.turns[-1].context)


def test_only_the_latest_answers_are_kept_to_be_given_again():
    async def scene():
        session = world.session(scripted(lambda context, turn: "a"))
        for i in range(sessions.KEPT_TURNS + 10):
            await session.answer(ask(user(f"{i}")))
        return len(session._turns)

    assert world.run(scene) == sessions.KEPT_TURNS


def test_new_weights_while_an_agent_waits_are_in_the_versions():
    policy = scripted(lambda context, turn: world.letters("a long answer"), piece=2)

    async def program(session):
        work = asyncio.create_task(session.answer(ask(user("a"))))
        while not policy.turns or len(policy.turns[0].sampled) < 4:
            await asyncio.sleep(0)
        policy.gate.clear()
        await asyncio.sleep(0.01)
        policy.version = 5
        policy.gate.set()
        await work

    _, (trajectory,) = world.played(policy, program)
    versions = trajectory.policy_versions[trajectory.action_mask].tolist()
    assert set(versions) == {0, 5} and versions == sorted(versions)


@pytest.mark.parametrize("steps", range(8))
def test_a_session_that_ends_at_any_moment_leaves_no_sequence_open(steps):
    policy = scripted(pause_s=0.001)

    async def scene():
        session = world.session(policy)
        done = await session.answer(ask(user("a")))
        work = asyncio.create_task(session.answer(ask(user("b"))))
        for _ in range(steps):
            await asyncio.sleep(0)
        (trajectory,) = session.close()
        with pytest.raises(BadRequest, match="closed"):
            await work
        await asyncio.sleep(0.01)
        assert not policy.left_open and trajectory.tokens.tolist() == [*done.prompt_ids, *done.tokens.tolist()]

    world.run(scene)


def test_a_malformed_call_comes_back_as_text_and_the_program_can_answer_it():
    bad = '<tool_call>{"name": "shell", "arguments": {</tool_call>'
    policy = scripted(lambda context, turn: [bad, call("ls")][turn])

    async def program(session):
        one = await told(session, user("a"), tools=True)
        assert one.text == bad and not one.calls
        two = await told(session, user("a"), one, user("that is no JSON"), tools=True)
        assert two.calls

    session, trajectories = world.played(policy, program)
    assert session.counters["malformed_calls"] == 1 and len(trajectories) == 1
