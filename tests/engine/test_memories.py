"""States of fixed size behind the engine: what is reused is right, what can be reused is, and there may be too few."""

import asyncio
import itertools

import numpy as np
import pytest

from jaxagent.engine.memories import Memories
from tests.engine import toys
from tests.engine.test_scheduler import episodes, schedulers
from tests.engine.toy_model import MixedToy, RecurrentToy

__all__ = ["schedulers"]
both = pytest.mark.parametrize(
    "model", [RecurrentToy(toys.VOCAB), MixedToy(toys.VOCAB)], ids=lambda m: type(m).__name__
)


def text(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, toys.VOCAB, size)


async def ask(driver, tokens, sample=0, count=4, task="t") -> tuple[list[int], int]:
    """What a session of one turn samples, and how many tokens are prefilled meanwhile."""
    before = driver.stats().get("prefill_tokens", 0)
    session = await driver.open(task, sample)
    g = await driver.generate(session, tokens, count, toys.SAMPLED, 0, 20)
    driver.close(session)
    return g.tokens.tolist(), driver.stats()["prefill_tokens"] - before


async def all_of(driver, *calls) -> list:
    """What turns return that the driver sees at once."""
    with driver._work:
        turns = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0)
    return await asyncio.gather(*turns)


LONG = dict(context=1100, pages=40, page_tokens=64, tile_rows=4, prefill_tokens=256, stops=())


def test_the_snapshot_that_was_used_longest_ago_goes_first_and_the_wanted_one_last() -> None:
    memories = Memories(4)
    a, b, c = ((0, name) for name in (b"aaaa", b"bbbb", b"cccc"))
    of = {place: memories.take() for place in (a, b, c)}
    for place, memory in of.items():
        memories.keep(place, memory)
    assert memories.use(a) == of[a] and memories.use(b) == of[b]
    assert [memories.take(wanted=c), memories.take(), memories.take()] == [of[a], of[c], of[b]]


@both
def test_a_group_prefills_its_prompt_once_and_turns_only_what_is_new(schedulers, model) -> None:
    prompt = text(0, 1024)
    sizes = LONG | dict(pages=400)
    with toys.running(16, **sizes) as attention:
        expected = [
            tokens for tokens, _ in asyncio.run(all_of(attention, *(ask(attention, prompt, i) for i in range(16))))
        ]

    async def scene(driver):
        group = [tokens for tokens, _ in await all_of(driver, *(ask(driver, prompt, i) for i in range(16)))]
        prefilled = driver.stats()["prefill_tokens"]
        session = await driver.open("u", 0)
        g = await driver.generate(session, prompt, 10, toys.SAMPLED, 0, 20)
        await driver.generate(session, [1, 2, 3], 10, toys.SAMPLED, 1, 20)
        driver.close(session)
        turns = driver.stats()["prefill_tokens"] - prefilled
        _, resent = await ask(driver, [*prompt, *g.tokens, 1, 2, 3, 4, 5, 6])  # the last four tokens are others
        _, parted = await ask(driver, [*prompt, *g.tokens[:-2], 1, 1, 1])
        return group, prefilled, turns, resent, parted

    with toys.running(16, model=model, **sizes) as driver:
        group, prefilled, turns, resent, parted = asyncio.run(scene(driver))
    assert group == expected
    assert prefilled <= 1.1 * len(prompt)
    assert turns == 3  # the last one sampled and two of the three; the prompt was known
    # From the second turn's context on: its last token, 3, is followed by others. Else from the prompt's end on.
    assert resent == 3
    assert parted == 1 + 8 + 2


@both
def test_a_group_that_comes_when_idle_sessions_have_all_memories_prefills_once(schedulers, model) -> None:
    async def scene(driver):
        idle = [await driver.open("idle", i) for i in range(7)]
        for i, session in enumerate(idle):
            await driver.generate(session, text(i, 9), 2, toys.SAMPLED, 0, 20)
        before = driver.stats()["prefill_tokens"]
        await all_of(driver, *(ask(driver, text(0, 300), i) for i in range(4)))
        return driver.stats()["prefill_tokens"] - before

    with toys.running(4, model=model, memories=7, **LONG) as driver:
        assert asyncio.run(scene(driver)) == 299
        assert driver.stats()["preemptions"] > 0


@both
@pytest.mark.parametrize("at_once", [True, False])
def test_what_several_prompts_begin_with_is_prefilled_once_or_twice(schedulers, model, at_once) -> None:
    """Of prompts that come together the first leaves a snapshot where the others part; else the second one does."""
    prompts = [[*text(0, 200), *text(i, 20)] for i in range(1, 7)]

    async def scene(driver):
        calls = [ask(driver, prompt, task=f"t{i}") for i, prompt in enumerate(prompts)]
        outcomes = await all_of(driver, *calls) if at_once else [await call for call in calls]
        return [tokens for tokens, _ in outcomes], driver.stats()["prefill_tokens"]

    with toys.running(8, **LONG) as attention:
        expected, _ = asyncio.run(scene(attention))
    with toys.running(8, model=model, **LONG) as driver:
        tokens, prefilled = asyncio.run(scene(driver))
    assert tokens == expected
    page = 192  # the last page end in common
    assert prefilled == page * (1 if at_once else 2) + 6 * (219 - page)


@pytest.fixture(scope="module")
def expected() -> list:
    """What many episodes sample with pages of tokens, enough of them for all."""
    with toys.running(slots=16, pages=512) as attention:
        return asyncio.run(episodes(attention, 30))


@pytest.mark.slow
@both
def test_too_few_memories_or_pages_change_nothing(schedulers, expected, model) -> None:
    for changes in (
        dict(memories=1),
        dict(memories=5, pages=13, prefill_tokens=4, steps_per_dispatch=2),
        dict(memories=40, pages=12, slots=3),
    ):
        with toys.running(**{"slots": 16, "model": model} | changes) as tight:
            assert asyncio.run(episodes(tight, 30)) == expected
            assert tight.stats()["preemptions"] > 0
            tight.update_params(toys.weights(), 8)  # by then the thread has seen every close
            (store,) = schedulers[-1].stores
            assert store.used_pages == 0


def test_rows_that_fill_up_leave_memories_alone(schedulers, expected) -> None:
    """In fast numerics four rows read their pages together, and the last of a span is repeated."""
    with toys.running(slots=16, pages=512, exact=False, model=MixedToy(toys.VOCAB)) as driver:
        played = asyncio.run(episodes(driver, 30))
    for ours, theirs in zip(itertools.chain(*played), itertools.chain(*expected), strict=True):
        assert ours[0] == theirs[0] and np.allclose(ours[1], theirs[1], atol=1e-5)  # fast: not to the bit


def test_shards_have_memories_of_their_own(schedulers, expected) -> None:
    with toys.running(slots=8, pages=48, memories=40, data=4, model=MixedToy(toys.VOCAB)) as four:
        assert asyncio.run(episodes(four, 30)) == expected
    assert sum(store.hit_tokens > 0 for store in schedulers[0].stores) > 1


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_what_sessions_keep_of_old_weights(schedulers, policy: str) -> None:
    async def scene(driver):
        session = await driver.open("t", 0)
        await driver.generate(session, [1, 2, 3, 4, 5, 6], 3, toys.GREEDY, 0, 20)
        await asyncio.to_thread(driver.update_params, toys.weights(1), 8)
        before = driver.stats()["prefill_tokens"]
        g = await driver.generate(session, [7, 8], 3, toys.GREEDY, 1, 20)
        prefilled = driver.stats()["prefill_tokens"] - before
        assert g.tokens.tolist() == toys.greedy(toys.weights(1), session.tokens[:-3].tolist(), 3)
        driver.close(session)
        # What it leaves is of other weights if it was kept.
        _, again = await ask(driver, session.tokens)
        return prefilled, again

    with toys.running(kv_on_update=policy, model=MixedToy(toys.VOCAB)) as driver:
        assert asyncio.run(scene(driver)) == {"keep": (2, 13), "recompute": (10, 0)}[policy]


def test_a_turn_that_is_given_up_leaves_a_snapshot_where_its_memory_is(schedulers) -> None:
    """And not where its context ended: that snapshot another session has taken meanwhile."""
    context = text(0, 9)

    async def scene(driver):
        session = await driver.open("t", 0)
        got: asyncio.Future = asyncio.get_running_loop().create_future()
        told = lambda new: got.done() or got.set_result(new.tokens.tolist())  # noqa: E731
        turn = asyncio.create_task(driver.generate(session, context, 1000, toys.GREEDY, 0, 20, on_tokens=told))
        sampled = await got
        await ask(driver, text(1, 9))
        assert not turn.done()
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        again = await driver.open("t", 0)
        g = await driver.generate(again, context, len(sampled), toys.GREEDY, 0, 20)
        return sampled, g.tokens.tolist()

    with toys.running(model=MixedToy(toys.VOCAB), memories=2, **LONG) as driver:
        sampled, tokens = asyncio.run(scene(driver))
        assert sampled == tokens == toys.greedy(toys.weights(), context.tolist(), len(sampled))
