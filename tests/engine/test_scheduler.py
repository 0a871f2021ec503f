"""Too few pages, too many turns, and people who change their mind: nothing is lost, nothing differs, nothing leaks."""

import asyncio
import contextlib

import numpy as np
import pytest

from jaxagent.engine.requests import EngineError
from jaxagent.engine.scheduler import Scheduler
from tests.engine import toys


@pytest.fixture
def schedulers(monkeypatch) -> list[Scheduler]:
    """Every scheduler made in a test; each checks its invariants after every step."""
    made, dispatch, init = [], Scheduler.dispatch, Scheduler.__init__

    def checked(self, version):
        self.check()
        finished = dispatch(self, version)
        self.check()
        return finished

    def remember(self, *args):
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(Scheduler, "dispatch", checked)
    monkeypatch.setattr(Scheduler, "__init__", remember)
    return made


async def episodes(driver, count: int, turns: int = 3, domains: int = 1):
    """Episodes with prompts that are shared by threes and observations of many lengths: all that was sampled."""

    async def episode(i: int):
        rng = np.random.default_rng(i // 3)
        session = await driver.open(f"t{i // 3}", i % 3, 3, f"domain {i * i % 7 % domains}")
        out = []
        for turn in range(turns):
            new = rng.integers(0, toys.VOCAB, rng.integers(1, 9))
            g = await driver.generate(session, new, 1 + (i + turn) % 5, toys.SAMPLED, turn, 60)
            out.append((g.tokens.tolist(), g.logprobs.tolist()))
        driver.close(session)
        return out

    return await asyncio.gather(*(episode(i) for i in range(count)))


@pytest.mark.slow
def test_ten_times_more_turns_than_pages(schedulers) -> None:
    with toys.running(slots=16, pages=512) as roomy:
        expected = asyncio.run(episodes(roomy, 60))
        assert roomy.stats().get("preemptions", 0) == 0
    for changes in (dict(pages=10), dict(pages=13, prefill_tokens=4, steps_per_dispatch=2), dict(pages=12, slots=3)):
        with toys.running(**{"slots": 16} | changes) as tight:
            assert asyncio.run(episodes(tight, 60)) == expected
            assert tight.stats()["preemptions"] > 0
            # Sessions that go first for another reason than their age change nothing, and nobody waits for ever.
            assert asyncio.run(episodes(tight, 60, domains=4)) == expected
            tight.update_params(toys.weights(), 8)  # by then the thread has seen every close
            assert schedulers[-1].stores[0].used_pages == 0


def test_one_that_generates_takes_from_those_who_are_being_prefilled(schedulers) -> None:
    """Three domains are admitted in turn, each with a context that ends at a page's end, and two fit. Who begins to
    generate beside a neighbour's long prefill must get pages of it, or all are prefilled in turn for ever."""

    async def one(driver, i: int):
        session = await driver.open(f"t{i}", 0, 1, f"domain {i}")
        prompt = np.random.default_rng(i).integers(0, toys.VOCAB, 20)
        g = await driver.generate(session, prompt, 20, toys.SAMPLED, 0, 20)
        driver.close(session)
        return g.tokens.tolist()

    async def all_of_them(driver):
        return await asyncio.gather(*(one(driver, i) for i in range(3)))

    with toys.running(slots=16, pages=512, stops=()) as roomy:
        expected = asyncio.run(all_of_them(roomy))
    with toys.running(slots=8, pages=10, prefill_tokens=8, stops=()) as tight:
        assert asyncio.run(all_of_them(tight)) == expected


def test_shards_have_pages_of_their_own(schedulers) -> None:
    with toys.running(slots=16, pages=512) as one:
        expected = asyncio.run(episodes(one, 30))
    with toys.running(slots=8, pages=48, data=4) as four:
        assert asyncio.run(episodes(four, 30)) == expected
    assert all(store.hit_tokens > 0 for store in schedulers[1].stores)


def test_hundreds_of_changes_of_mind(schedulers) -> None:
    rng = np.random.default_rng(0)

    async def fickle(driver, i: int) -> None:
        session = await driver.open(f"t{i % 50}", i)
        with contextlib.suppress(TimeoutError, EngineError, asyncio.CancelledError):
            for turn in range(3):
                new = np.random.default_rng(i % 50).integers(0, toys.VOCAB, 5)
                deadline = 20 if i % 3 else 0.001 * (i % 17)
                task = asyncio.create_task(driver.generate(session, new, 9, toys.SAMPLED, turn, deadline))
                await asyncio.sleep(0.001 * (i % 7))
                if i % 5 == turn:
                    task.cancel()
                elif i % 7 == turn:
                    driver.close(session)
                await task
        driver.close(session)

    async def all_of_them(driver) -> None:
        gate = asyncio.Semaphore(40)

        async def one(i: int) -> None:
            async with gate:
                await fickle(driver, i)

        await asyncio.gather(*(one(int(i)) for i in rng.permutation(350)))
        # Whoever comes after finds everything as it should be.
        assert len(await episodes(driver, 9)) == 9

    with toys.running(slots=8, pages=24) as driver:
        asyncio.run(all_of_them(driver))
        driver.update_params(toys.weights(), 8)  # by then the thread has seen every close
        (scheduler,) = schedulers
        scheduler.check()
        assert scheduler.stores[0].used_pages == 0 and not scheduler.requests


def test_a_resent_history_is_prefilled_from_where_it_is_new(schedulers) -> None:
    history = np.random.default_rng(1).integers(0, toys.VOCAB, 30)

    async def resend(driver):
        counts = []
        for length in (20, 25, 30):  # an agent program that sends everything again
            session = await driver.open("t", length)
            before = driver.stats().get("prefill_tokens", 0)
            g = await driver.generate(session, history[:length], 4, toys.GREEDY, 0, 20)
            counts.append(driver.stats()["prefill_tokens"] - before)
            assert g.tokens.tolist() == toys.greedy(toys.weights(), history[:length].tolist(), 4)
            driver.close(session)
        return counts

    with toys.running() as driver:
        assert asyncio.run(resend(driver)) == [
            19,
            4,
            4,
        ]  # the last token of the one before was cached by decoding from it


def test_new_weights_serve_nothing_the_old_ones_cached(schedulers) -> None:
    async def ask(driver):
        session = await driver.open("t", 0)
        await driver.generate(session, [1, 2, 3, 4, 5, 6], 3, toys.GREEDY, 0, 20)
        driver.close(session)

    with toys.running() as driver:
        asyncio.run(ask(driver))
        first = driver.stats()["prefill_tokens"]
        driver.update_params(toys.weights(1), 8)
        asyncio.run(ask(driver))
        assert driver.stats()["prefill_tokens"] == 2 * first == 10


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_what_sessions_keep_of_old_weights(schedulers, policy: str) -> None:
    async def ask(driver):
        session = await driver.open("t", 0)
        await driver.generate(session, [1, 2, 3, 4, 5, 6], 3, toys.GREEDY, 0, 20)
        await asyncio.to_thread(driver.update_params, toys.weights(1), 8)
        before = driver.stats()["prefill_tokens"]
        g = await driver.generate(session, [7, 8], 3, toys.GREEDY, 1, 20)
        assert g.policy_versions.tolist() == [8, 8, 8]
        return driver.stats()["prefill_tokens"] - before

    with toys.running(kv_on_update=policy) as driver:
        # Kept: the last sampled token and the first new one. Computed again: all but the last token.
        assert asyncio.run(ask(driver)) == {"keep": 2, "recompute": 10}[policy]
