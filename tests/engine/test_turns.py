"""Several engines on one mesh: one round at a time, in turns; neither starves, errors or stops the other."""

import asyncio
import contextlib
import itertools
import threading

import pytest

from jaxagent.engine.driver import Driver
from jaxagent.engine.requests import EngineError
from jaxagent.engine.turns import Turns
from tests.engine import toys
from tests.engine.test_driver import Broken, Gate, letters, turn
from tests.engine.toy_model import Toy

WAIT_S = 20.0


def never() -> bool:
    return False


class Line:
    """Threads that take turns; each says so, and goes on when it is told to."""

    def __init__(self) -> None:
        self.turns, self.order = Turns(), []
        self._threads: list[threading.Thread] = []

    def take(self, name: str, rounds: int, hold: threading.Event, unwanted=never) -> None:
        def run() -> None:
            for _ in range(rounds):
                with self.turns.turn(unwanted) as waited_s:
                    self.order.append(name if waited_s is not None else f"{name} gave up")
                    assert hold.wait(WAIT_S)

        before = len(self.turns._line)
        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()
        self.until(lambda: len(self.turns._line) > before)

    def until(self, happened) -> None:
        for _ in range(2000):
            if happened():
                return
            threading.Event().wait(0.01)
        raise AssertionError("it never happened")

    def join(self) -> None:
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()


def test_who_asks_first_is_first_and_two_alternate() -> None:
    line, go = Line(), threading.Event()
    line.take("a", 1, go)
    line.take("b", 3, go)
    line.take("c", 3, go)
    assert line.order == ["a"]
    go.set()
    line.join()
    assert line.order == ["a", "b", "c", "b", "c", "b", "c"]


def test_alone_nobody_waits() -> None:
    turns = Turns()
    for _ in range(3):
        with turns.turn(never) as waited_s:
            assert waited_s == 0.0


def test_who_waits_may_give_up_and_the_others_go_on() -> None:
    line, go, enough = Line(), threading.Event(), threading.Event()
    line.take("a", 1, go)
    line.take("b", 1, go, enough.is_set)
    line.take("c", 1, go)
    enough.set()
    line.turns.look()
    line.until(lambda: len(line.order) == 2)
    assert line.order == ["a", "b gave up"]
    go.set()
    line.join()
    assert line.order == ["a", "b gave up", "c"]


def test_a_failed_turn_is_given_back() -> None:
    turns = Turns()
    with pytest.raises(ValueError), turns.turn(never):
        raise ValueError
    with turns.turn(never) as waited_s:
        assert waited_s == 0.0


# ---------------------------------------------------------------- with engines


class Seen(Turns):
    """Turns that know who had them, and that at no time two did."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []
        self._inside = 0

    @contextlib.contextmanager
    def turn(self, unwanted):
        with super().turn(unwanted) as waited_s:
            if waited_s is not None:
                self._inside += 1
                assert self._inside == 1
                self.order.append(threading.current_thread().name)
            try:
                yield waited_s
            finally:
                self._inside -= waited_s is not None


def both(turns: Turns | None, data: int = 1, **first) -> tuple[Driver, Driver]:
    """Two engines with weights of their own on one mesh."""
    a = toys.make(8, stops=(), data=data, turns=turns, pages=96, **first)
    b = toys.make(8, stops=(), data=data, turns=turns, pages=96, params=toys.weights(1))
    return a, b


@contextlib.contextmanager
def started(*drivers: Driver):
    with contextlib.ExitStack() as stack:
        for driver in drivers:
            stack.enter_context(driver)
            driver.start(60)
        yield


async def episodes(driver: Driver, name: str, count: int = 6) -> dict:
    """Two sampled turns each: what was sampled, with its log-probs."""
    out = {}

    async def one(i: int) -> None:
        session = await driver.open(name, i)
        found = []
        for number, new in enumerate((letters("hello"), letters("observation"))):
            generation = await turn(driver, session, new, 11, toys.SAMPLED, number, deadline_s=60.0)
            found += [*generation.tokens.tolist(), *generation.logprobs.tolist()]
        driver.close(session)
        out[i] = found

    await asyncio.gather(*(one(i) for i in range(count)))
    return out


def apart_and_together(data: int) -> Seen:
    """Plays both engines alone and at once; what each samples must be the same."""
    alone = []
    for which in (0, 1):
        driver = both(None, data)[which]
        with started(driver):
            alone.append(asyncio.run(episodes(driver, f"task{which}")))
    seen = Seen()
    a, b = both(seen, data)

    async def together():
        return await asyncio.wait_for(asyncio.gather(episodes(a, "task0"), episodes(b, "task1")), 120)

    with started(a, b):
        compiles = [driver.stats().get("compiles", 0) for driver in (a, b)]
        a._thread.name, b._thread.name = "first", "second"
        seen.order.clear()
        assert asyncio.run(together()) == alone
        assert [driver.stats().get("compiles", 0) for driver in (a, b)] == compiles, "something compiled after warm-up"
        assert all(driver.stats()["turn_wait_s"] > 0 for driver in (a, b))
    assert alone[0] != alone[1]
    return seen


@pytest.mark.slow
def test_two_engines_sample_what_each_samples_alone_and_alternate() -> None:
    order = apart_and_together(1).order
    changes = sum(x != y for x, y in itertools.pairwise(order))
    assert {*order} == {"first", "second"} and changes > len(order) / 2, order


@pytest.mark.slow
def test_two_engines_on_eight_devices_do_not_lock_each_other() -> None:
    apart_and_together(8)


@pytest.mark.slow
def test_an_error_of_one_engine_does_not_hang_the_other() -> None:
    a, b = both(Turns(), model=Broken(toys.VOCAB))

    async def scene():
        session = await a.open("t", 0)
        broken = turn(a, session, letters("az"), 30)
        failed, found = await asyncio.gather(broken, episodes(b, "task1"), return_exceptions=True)
        assert isinstance(failed, EngineError) and "on fire" in str(failed)
        assert len(found) == 6
        assert len(await episodes(b, "later")) == 6

    with started(a, b):
        asyncio.run(asyncio.wait_for(scene(), 60))


@pytest.mark.slow
def test_an_engine_stops_while_it_waits_for_its_turn() -> None:
    Gate.entered.clear()
    Gate.opened.set()  # warm-up passes
    turns = Turns()
    slow, other, late = (toys.make(turns=turns, model=model(toys.VOCAB)) for model in (Gate, Toy, Toy))

    async def scene():
        held = asyncio.create_task(turn(slow, await slow.open("t", 0), letters("abc"), 3))
        await asyncio.to_thread(Gate.entered.wait, WAIT_S)  # it has the turn
        waiting = asyncio.create_task(turn(other, await other.open("t", 0), letters("abc"), 3))
        while len(turns._line) < 2:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(other.stop, WAIT_S)
        with pytest.raises(EngineError, match="stopped"):
            await waiting
        starting = asyncio.create_task(asyncio.to_thread(late.start, WAIT_S))
        while len(turns._line) < 2:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(late.stop, WAIT_S)
        with pytest.raises(EngineError, match="stopped before it began"):
            await starting
        assert not held.done()
        Gate.opened.set()
        assert len((await held).tokens) == 3

    with started(slow, other):
        Gate.entered.clear()
        Gate.opened.clear()
        asyncio.run(asyncio.wait_for(scene(), 60))


@pytest.mark.slow
def test_new_weights_come_while_the_other_engine_works() -> None:
    a, b = both(Turns())

    async def scene():
        busy = asyncio.create_task(episodes(b, "task1", 12))
        await asyncio.to_thread(a.update_params, toys.weights(2), 8)
        session = await a.open("t", 0)
        generation = await turn(a, session, letters("abc"), 5)
        assert generation.tokens.tolist() == toys.greedy(toys.weights(2), letters("abc"), 5)
        assert generation.policy_versions.tolist() == [8] * 5
        await busy

    with started(a, b):
        asyncio.run(asyncio.wait_for(scene(), 60))
