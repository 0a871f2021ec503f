"""The driver around the toy model: bookkeeping, threading, failure; every number checked by hand."""

import asyncio
import dataclasses
import gc
import threading
import time

import jax
import numpy as np
import pytest

from jaxagent.config import ConfigError
from jaxagent.engine import executor
from jaxagent.engine.model import ROWS
from jaxagent.engine.requests import EngineError, QueueFullError
from jaxagent.engine.scheduler import Scheduler
from tests.engine import toys
from tests.engine.toy_model import MixedToy, RecurrentToy, Toy


def letters(text: str) -> list[int]:
    return [ord(c) - ord("a") for c in text]


def chain(text: str) -> np.ndarray:
    """Weights under which each letter of the text surely leads to the next one."""
    params = np.zeros((toys.VOCAB, toys.VOCAB), np.float32)
    for a, b in zip(letters(text), letters(text[1:]), strict=False):
        params[a, b] = 50.0
    return params


async def turn(driver, session, tokens, max_tokens=6, sampling=toys.GREEDY, turn=0, deadline_s=20.0):
    return await driver.generate(session, tokens, max_tokens, sampling, turn, deadline_s)


def test_turns_continue_one_sequence() -> None:
    params = toys.weights()

    async def episode(driver):
        session = await driver.open("t", 0)
        sequence = letters("hello")
        for number, new in enumerate([letters("hello"), letters("observation"), letters("z"), []]):
            sequence = sequence[: len(sequence) if number else 0] + new
            generation = await turn(driver, session, new, max_tokens=5, turn=number)
            assert generation.tokens.tolist() == toys.greedy(params, sequence, 5)
            expected = [
                toys.logprob(params, [*sequence, *generation.tokens[:i]], t, 1) for i, t in enumerate(generation.tokens)
            ]
            np.testing.assert_allclose(generation.logprobs, expected, atol=1e-5)
            assert generation.finish == "length" and generation.policy_versions.tolist() == [7] * 5
            # All but the last sampled token were cached by decoding.
            assert generation.cached_tokens == max(len(sequence) - len(new) - 1, 0)
            sequence += generation.tokens.tolist()
        driver.close(session)

    with toys.running() as driver:
        asyncio.run(episode(driver))
        assert driver.stats()["sampled_tokens"] == 20


def test_conversations_of_one_attempt_draw_other_numbers() -> None:
    async def sampled(driver, **conversation):
        session = await driver.open("t", 0, **conversation)
        try:
            return (await turn(driver, session, letters("hello"), 7, toys.SAMPLED)).tokens.tolist()
        finally:
            driver.close(session)

    async def play(driver):
        return [await sampled(driver), *[await sampled(driver, conversation=number) for number in (0, 1, 1, 2)]]

    with toys.running(stops=()) as driver:
        unnumbered, first, second, again, third = asyncio.run(play(driver))
    assert unnumbered == first and second == again
    assert len({tuple(tokens) for tokens in (first, second, third)}) == 3


def test_ends_at_stop_eos_and_context() -> None:
    async def episodes(driver):
        session = await driver.open("t", 0)
        stop = await turn(driver, session, letters("a"), 20)
        assert (stop.finish, stop.stop_string, stop.tokens.tolist()) == ("stop", "xy", letters("bxy"))
        eos = await turn(driver, session, letters("k"), 20, turn=1)
        assert (eos.finish, eos.stop_string, eos.tokens.tolist()) == ("eos", None, letters("lm"))
        end = await turn(driver, session, letters("pq"), 100, turn=2)
        assert (end.finish, len(end.tokens)) == ("length", toys.CONTEXT - 9)
        full = await turn(driver, session, letters("pq"), 100, turn=3)
        assert (full.finish, len(full.tokens)) == ("length", 0)

    with toys.running(params=chain("abxyz") + chain("klmno") + chain("pqrp"), eos=letters("m")) as driver:
        asyncio.run(episodes(driver))


async def sample_all(driver, tasks, order, max_tokens=7):
    """Episodes of two sampled turns each, begun in a given order: {(task, sample): tokens and log-probs}."""
    out = {}

    async def episode(task, sample):
        session = await driver.open(task, sample)
        a = await turn(driver, session, letters(task), max_tokens, toys.SAMPLED)
        await asyncio.sleep(0.001 * (hash((task, sample, len(order))) % 3))
        b = await turn(driver, session, letters("obs"), max_tokens, toys.SAMPLED, turn=1)
        driver.close(session)
        out[task, sample] = [*a.tokens, *b.tokens], [*a.logprobs, *b.logprobs]

    await asyncio.gather(*(episode(*tasks[i]) for i in order))
    return out


def test_randomness_knows_no_slot_arrival_or_batch_and_no_kind_of_cache() -> None:
    """The last runs keep states of fixed size, with hardly more pages or memories than one sequence needs."""
    tasks = [(task, sample) for task in ("alpha", "beta", "gamma") for sample in range(4)]
    runs = []
    for slots, steps, pages, order, model in (
        (12, 3, 48, range(12), Toy),
        (4, 3, 48, reversed(range(12)), Toy),
        (8, 5, 48, np.random.default_rng(0).permutation(12), Toy),
        (8, 3, 12, np.random.default_rng(1).permutation(12), RecurrentToy),
        (8, 3, 12, np.random.default_rng(1).permutation(12), MixedToy),
    ):
        with toys.running(slots, steps_per_dispatch=steps, pages=pages, model=model(toys.VOCAB)) as driver:
            runs.append(asyncio.run(sample_all(driver, tasks, list(order))))
            assert pages > 12 or (driver.stats()["preemptions"] > 0)
    assert all(run == runs[0] for run in runs)
    assert len({tuple(tokens) for tokens, _ in runs[0].values()}) == len(tasks)  # samples of a task differ
    params = toys.weights()
    for (task, _), (tokens, logprobs) in runs[0].items():
        sequence = letters(task)
        for i, (token, value) in enumerate(zip(tokens[:7], logprobs[:7], strict=True)):
            assert value == pytest.approx(toys.logprob(params, sequence + tokens[:i], token, 0.7), abs=1e-5)


def test_a_group_is_prefilled_once() -> None:
    async def group(driver):
        blocker = await driver.open("other", 0)
        first = asyncio.create_task(turn(driver, blocker, letters("zz"), 30))
        await asyncio.sleep(0)
        sessions = [await driver.open("t", i) for i in range(7)]
        # Submitted in one go while the driver is busy or idle: they are taken together.
        return await asyncio.gather(
            *(turn(driver, s, letters("a" * 11), sampling=toys.SAMPLED) for s in sessions), first
        )

    with toys.running(8) as driver:
        *generations, _ = asyncio.run(group(driver))
        stats = driver.stats()
    assert stats["requests"] == 8
    # Whoever shared says so; what was computed plus what was shared is everything.
    shared = sum(g.cached_tokens for g in generations)
    assert shared >= 5 * 10 and stats["prefill_tokens"] + shared == 7 * 10 + 1
    for i, g in enumerate(generations):
        sequence = letters("a" * 11)
        for j, t in enumerate(g.tokens):
            want = toys.logprob(toys.weights(), [*sequence, *g.tokens[:j]], t, 0.7)
            assert g.logprobs[j] == pytest.approx(want, abs=1e-5), (i, j)


def test_turns_wait_for_slots_in_order_of_opening() -> None:
    async def ask(driver):
        sessions = [await driver.open("t", i) for i in range(12)]  # three times as many as slots
        ended = []

        async def one(i):
            generation = await turn(driver, sessions[i], letters("ab" + chr(ord("a") + i)), 3)
            ended.append(i)
            return generation

        generations = await asyncio.gather(*(one(i) for i in reversed(range(12))))
        # Four at a time, a dispatch each, the sessions that were opened first go first.
        assert [sorted(ended[i : i + 4]) for i in (0, 4, 8)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        for i, generation in zip(reversed(range(12)), generations, strict=True):
            sequence = letters("ab" + chr(ord("a") + i))
            assert generation.tokens.tolist() == toys.greedy(toys.weights(), sequence, 3)

    with toys.running() as driver:
        asyncio.run(ask(driver))


async def _ends(driver, sessions, count: int = 3) -> list[int]:
    """Submits a turn of one dispatch per session, in one go; in which order they end."""
    ended: list[int] = []

    async def one(i: int) -> None:
        await turn(driver, sessions[i], [*letters("ab"), i], count)
        ended.append(i)

    with driver._work:  # its thread looks when all of them are there
        turns = [asyncio.create_task(one(i)) for i in range(len(sessions))]
        await asyncio.sleep(0)
    await asyncio.gather(*turns)
    return ended


@pytest.mark.slow
def test_nearly_complete_groups_go_first() -> None:
    async def scene(driver):
        # Of group "old" nobody is through, of "new" all but the last two, of its next attempts nobody; sizes 4.
        old = [await driver.open("old", i, 4) for i in range(4)]
        new = [await driver.open("new", i, 4) for i in range(8)]
        for session in new[:2]:
            driver.close(session)
        assert await _ends(driver, [*old, *new[2:]]) == [4, 5, 0, 1, 2, 3, 6, 7, 8, 9]
        # A second sequence of an episode makes it unfinished again: both have 2 left, and "old" is older.
        for session in [*old[:2], new[2]]:
            driver.close(session)
        again = await driver.open("new", 0, 4)
        assert await _ends(driver, [new[3], again, old[2]]) == [2, 0, 1]

    with toys.running(1, tile_rows=1) as driver:
        asyncio.run(scene(driver))
    gc.collect()
    assert not driver._groups  # an entry lives no longer than its sessions


def test_a_flood_of_one_domain_does_not_starve_another() -> None:
    async def scene(driver):
        flood = [await driver.open("a", i, domain="a") for i in range(10)]
        other = [await driver.open("b", i, domain="b") for i in range(3)]
        return await _ends(driver, [*flood, *other])

    for slots in (1, 2):  # in turns, and side by side
        with toys.running(slots, tile_rows=1) as driver:
            ended = asyncio.run(scene(driver))
        assert max(ended.index(i) for i in (10, 11, 12)) <= 5, ended


@pytest.mark.slow
def test_too_many_turns_are_refused_and_may_come_again() -> None:
    Gate.entered.clear()
    Gate.opened.clear()

    async def scene(driver):
        sessions = [await driver.open("t", i) for i in range(5)]
        running = asyncio.create_task(turn(driver, sessions[0], letters("abc")))
        await asyncio.to_thread(Gate.entered.wait, 20)  # it has the only slot
        waiting = [asyncio.create_task(turn(driver, s, letters("abc"))) for s in sessions[1:3]]
        await asyncio.sleep(0)
        for session in sessions[3:]:
            with pytest.raises(QueueFullError, match="3 turns are in hand"):
                await turn(driver, session, letters("abc"))
        driver.close(sessions[2])
        generations = [asyncio.create_task(turn(driver, sessions[3], letters("abc")))]  # in the place of the closed one
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await turn(driver, sessions[4], letters("abc"))
        Gate.opened.set()
        with pytest.raises(EngineError, match="closed"):
            await waiting[1]
        generations = await asyncio.gather(running, waiting[0], *generations)
        generations.append(await turn(driver, sessions[4], letters("abc")))  # refused twice, and as good as new
        assert all(g.tokens.tolist() == toys.greedy(toys.weights(), letters("abc"), 6) for g in generations)

    with toys.running(1, model=Gate(toys.VOCAB), tile_rows=1, max_waiting=2) as driver:
        asyncio.run(scene(driver))


def test_every_result_says_where_its_time_went(monkeypatch) -> None:
    preempt = Scheduler._preempt

    def checked(self, session):
        running = [r for r in self.requests if r.session is session and r.slot >= 0]
        now = time.monotonic()
        preempt(self, session)
        assert all(r.since_s >= now for r in running), "what it did until now counts as waiting"

    monkeypatch.setattr(Scheduler, "_preempt", checked)

    async def timed(driver, session, tokens):
        started = time.monotonic()
        generation = await turn(driver, session, tokens, 12)
        total = time.monotonic() - started
        spent = generation.queue_s + generation.prefill_s + generation.decode_s
        assert 0 < spent <= total < spent + 5, (generation, total)
        return generation

    async def scene(driver):
        sessions = [await driver.open("t", i) for i in range(6)]
        return await asyncio.gather(*(timed(driver, s, [*letters("abcdefgh"), i]) for i, s in enumerate(sessions)))

    # Two slots, then enough of them but pages for two sequences: turns are interrupted and wait in the middle.
    for changes in (dict(slots=2, tile_rows=2), dict(slots=8, pages=10)):
        with toys.running(**changes) as driver:
            generations = asyncio.run(scene(driver))
            assert (driver.stats().get("preemptions", 0) > 0) == ("pages" in changes)
            assert driver.stats()["queue_s"] == pytest.approx(sum(g.queue_s for g in generations), rel=1e-6)
            # In every dispatch some turn is decoding.
            assert sum(g.decode_s for g in generations) >= driver.stats()["decode_s"]
        assert all(g.prefill_s > 0 and g.decode_s > 0 for g in generations)
        if changes["slots"] == 2:  # the last to be admitted waited while two others generated
            assert max(g.queue_s for g in generations) > min(g.decode_s for g in generations)


def on_host(function, x):
    """x through a function of NumPy arrays, shard by shard."""
    rows = jax.P(*ROWS, *(None,) * (x.ndim - 1))
    call = lambda t: jax.pure_callback(function, jax.ShapeDtypeStruct(t.shape, t.dtype), t)  # noqa: E731
    return jax.shard_map(call, in_specs=rows, out_specs=rows)(x)


class Gate(Toy):
    """A toy whose decode waits, on the host, until it is let through."""

    entered, opened = threading.Event(), threading.Event()

    def logits(self, params, hidden):
        def wait(x):
            Gate.entered.set()
            assert Gate.opened.wait(20)
            return x

        return on_host(wait, hidden)


@pytest.mark.parametrize("how", ["close", "cancel", "deadline"])
def test_abandoned_turns_free_their_slot(how: str) -> None:
    Gate.entered.clear()
    Gate.opened.clear()

    async def scene(driver):
        session = await driver.open("t", 0)
        task = asyncio.create_task(
            turn(driver, session, letters("abc"), 30, deadline_s=0.2 if how == "deadline" else 20)
        )
        await asyncio.to_thread(Gate.entered.wait, 20)  # it is on the device
        if how == "close":
            driver.close(session)
        elif how == "cancel":
            task.cancel()
        with pytest.raises({"close": EngineError, "cancel": asyncio.CancelledError, "deadline": TimeoutError}[how]):
            await task
        with pytest.raises(EngineError, match="closed, broken"):
            await turn(driver, session, letters("abc"))
        other = await driver.open("u", 0)
        waiting = asyncio.create_task(turn(driver, other, letters("de"), 5))
        await asyncio.sleep(0.02)
        assert not waiting.done()  # the device is still busy with the abandoned turn
        Gate.opened.set()
        generation = await waiting
        assert generation.tokens.tolist() == toys.greedy(toys.weights(), letters("de"), 5)
        driver.close(session)

    with toys.running(1, model=Gate(toys.VOCAB), tile_rows=1) as driver:
        asyncio.run(scene(driver))
        assert driver.stats()["requests"] == 2


@pytest.mark.slow
def test_new_weights_in_the_middle_of_a_turn() -> None:
    old, new = toys.weights(0), toys.weights(1)
    Gate.entered.clear()
    Gate.opened.clear()

    async def scene(driver):
        session = await driver.open("t", 0)
        task = asyncio.create_task(turn(driver, session, letters("abc"), 9))
        await asyncio.to_thread(Gate.entered.wait, 20)
        update = asyncio.create_task(asyncio.to_thread(driver.update_params, new, 8))
        await asyncio.sleep(0.05)
        Gate.opened.set()
        generation = await task
        await update
        return generation

    with toys.running(model=Gate(toys.VOCAB)) as driver:
        generation = asyncio.run(scene(driver))
    # Three tokens a dispatch: the dispatch in progress keeps its weights, the next one has the new.
    versions = generation.policy_versions.tolist()
    assert versions == [7] * 3 + [8] * 6
    sequence = letters("abc")
    for token, version, value in zip(generation.tokens, versions, generation.logprobs, strict=True):
        params = old if version == 7 else new
        assert token == toys.greedy(params, sequence, 1)[0]
        assert value == pytest.approx(toys.logprob(params, sequence, token, 1), abs=1e-5)
        sequence.append(int(token))


class Broken(Toy):
    """A toy whose device fails when it meets token 25."""

    def extend(self, params, cache, tokens, positions, tables):
        def fail(x):
            if (x == 25).any():
                raise ValueError("the device is on fire")
            return x

        return super().extend(params, cache, on_host(fail, tokens), positions, tables)


@pytest.mark.slow
def test_device_failure_reaches_everyone_and_the_driver_starts_again() -> None:
    async def scene(driver):
        sessions = [await driver.open("t", i) for i in range(4)]
        sessions.append(await driver.open("w", 0))  # one more than slots
        turns = [turn(driver, s, letters("az" if i == 2 else "ab"), 30) for i, s in enumerate(sessions)]
        results = await asyncio.gather(*turns, return_exceptions=True)
        assert len(results) == 5 and all(isinstance(r, EngineError) and "on fire" in str(r) for r in results), results
        with pytest.raises(EngineError, match="on fire"):
            await driver.open("t", 0)
        with pytest.raises(EngineError, match="on fire"):
            driver.update_params(toys.weights(), 1)
        return sessions

    async def again(driver, stale):
        for session in stale:
            driver.close(session)  # of an earlier life: harmless
        sessions = [await driver.open("t", i) for i in range(4)]
        return await turn(driver, sessions[0], letters("ab"), 3)

    with toys.running(model=Broken(toys.VOCAB), params=chain("bcd")) as driver:
        stale = asyncio.run(scene(driver))
        driver.stop(20)
        driver.start(60)
        last = toys.greedy(chain("bcd"), letters("abcd"), 1)
        assert asyncio.run(again(driver, stale)).tokens.tolist() == [*letters("cd"), *last]


class BrokenPrefill(Toy):
    """A toy that fails before a turn has begun; not while warming up, which prefills nothing."""

    def extend(self, params, cache, tokens, positions, tables):
        def fail(x):
            if x.any():
                raise ValueError("no prefill today")
            return x

        return super().extend(params, cache, on_host(fail, tokens), positions, tables)


def test_failure_between_the_queue_and_the_slots_reaches_the_turn() -> None:
    async def scene(driver):
        session = await driver.open("t", 0)
        with pytest.raises(EngineError, match="no prefill"):
            await turn(driver, session, letters("abc"))

    with toys.running(model=BrokenPrefill(toys.VOCAB)) as driver:
        asyncio.run(scene(driver))


def test_stop_tells_who_waits() -> None:
    Gate.entered.clear()
    Gate.opened.clear()

    async def scene(driver):
        session = await driver.open("t", 0)
        task = asyncio.create_task(turn(driver, session, letters("abc"), 30))
        await asyncio.to_thread(Gate.entered.wait, 20)
        stopping = asyncio.create_task(asyncio.to_thread(driver.stop, 20))
        await asyncio.sleep(0.02)
        Gate.opened.set()
        with pytest.raises(EngineError, match="stopped"):
            await task
        await stopping

    with toys.running(model=Gate(toys.VOCAB)) as driver:
        asyncio.run(scene(driver))
        assert not any(t.name == "engine-driver" and t.is_alive() for t in threading.enumerate())


def test_mistakes() -> None:
    async def scene(driver):
        session = await driver.open("t", 0)
        with pytest.raises(ValueError, match="at least one token"):
            await turn(driver, session, [])
        with pytest.raises(ValueError, match="truncation"):
            await turn(driver, session, [1], sampling=dataclasses.replace(toys.SAMPLED, top_p=0.9))

    with toys.running() as driver:
        asyncio.run(scene(driver))
        with pytest.raises(EngineError, match="already started"):
            driver.start(1)
    with pytest.raises(EngineError, match="not started"):
        asyncio.run(toys.make().open("t", 0))


def test_pages_must_hold_one_sequence() -> None:
    with pytest.raises(ConfigError, match="pages: 8 pages of 4 tokens over 1 shards cannot hold one sequence of 40"):
        toys.make(pages=8).start(60)


def test_slots_must_divide_over_the_mesh() -> None:
    driver = toys.make(6, data=4)
    with pytest.raises(ConfigError, match="slots: 6 does not divide"):
        driver.start(60)


def test_what_the_thread_moves_to_the_device_beside_its_calls_fails(monkeypatch) -> None:
    dispatch = Scheduler.dispatch

    def with_a_stray_array(scheduler, version):
        jax.numpy.asarray(np.zeros(3))
        return dispatch(scheduler, version)

    async def one_turn(driver):
        await turn(driver, await driver.open("t", 0), letters("hello"))

    monkeypatch.setattr(Scheduler, "dispatch", with_a_stray_array)
    with toys.running() as driver, pytest.raises(EngineError, match="Disallowed host-to-device transfer"):
        asyncio.run(one_turn(driver))


def test_time_without_a_turn_is_counted_as_it_passes():
    """Whoever looks twice finds no more free time than has passed in between."""

    async def one_turn(driver):
        await turn(driver, await driver.open("t", 0), letters("hello"))

    def free(driver):
        return driver.stats().get("free_slot_s", 0.0)

    with toys.running() as driver:
        assert free(driver) == 0.0, "there was no turn yet"
        asyncio.run(one_turn(driver))
        others = {name: count for name, count in driver.stats().items() if name != "free_slot_s"}
        time.sleep(0.3)
        began, before = time.monotonic(), free(driver)
        assert before > 0.25
        time.sleep(0.1)
        assert 0.1 <= free(driver) - before <= time.monotonic() - began
        assert others == {name: count for name, count in driver.stats().items() if name != "free_slot_s"}
        asyncio.run(one_turn(driver))
        assert free(driver) - before <= time.monotonic() - began
        time.sleep(0.1)
        before = free(driver)
    assert free(driver) == free(driver), "a stopped engine has no free slots"
    assert free(driver) >= before, "what was counted before it stopped stays counted"


def test_calls_move_little_and_never_weights(monkeypatch) -> None:
    moved, issue = [], executor._issue

    def counted(program, *arguments):
        moved.append([x for x in jax.tree.leaves(arguments) if isinstance(x, np.ndarray)])
        return issue(program, *arguments)

    async def one_turn(driver):
        await turn(driver, await driver.open("t", 0), letters("hello"))

    monkeypatch.setattr(executor, "_issue", counted)
    weights = toys.weights()
    with toys.running() as driver:
        moved.clear()
        asyncio.run(one_turn(driver))
    assert moved and all(sum(x.nbytes for x in arrays) < 1 << 16 for arrays in moved)
    assert not any(x.shape == weights.shape and x.dtype == weights.dtype for arrays in moved for x in arrays)


def test_a_second_turn_of_a_busy_session_is_refused_and_the_first_goes_on():
    async def play(driver):
        session = await driver.open("t", 0)
        first = asyncio.create_task(driver.generate(session, letters("a"), 20, toys.GREEDY, 0, 20.0))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="closed, broken or busy"):
            await driver.generate(session, letters("b"), 1, toys.GREEDY, 1, 20.0)
        assert len((await first).tokens) == 20

    with toys.running(stops=()) as driver:
        asyncio.run(asyncio.wait_for(play(driver), 60))
