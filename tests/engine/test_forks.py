"""What a fork costs the engine: its context is another attempt's beginning, and nothing of it is computed twice."""

import asyncio

import pytest

from tests.engine import toys
from tests.engine.test_memories import text
from tests.engine.toy_model import MixedToy, RecurrentToy, Toy

PAGE, TURNS, GROUP = 16, 4, 6
SIZES = dict(context=400, pages=400, page_tokens=PAGE, tile_rows=4, prefill_tokens=64, stops=())


async def played(driver, sample, prefix, first, observed=21):
    """An attempt from turn `first` on, whose context is `prefix`: its tokens before each turn and at its end, what its
    first turn needed of prefill, and what the engine says it had cached.
    """
    session = await driver.open("t", sample, GROUP)
    tokens, new, contexts, cost = list(prefix), list(prefix), [], None
    for turn in range(first, TURNS):
        contexts.append(list(tokens))
        before = driver.stats().get("prefill_tokens", 0)
        generation = await driver.generate(session, new, 9, toys.SAMPLED, turn, 20)
        if cost is None:
            cost = driver.stats()["prefill_tokens"] - before, generation.cached_tokens
        new = text(100 * sample + turn, observed).tolist()
        tokens += [*generation.tokens.tolist(), *new]
    driver.close(session)
    return contexts, cost


@pytest.mark.slow
@pytest.mark.parametrize("model", [Toy, RecurrentToy, MixedToy])
def test_prefill_of_a_fork_is_less_than_a_page(model):
    """Of forks at every turn of a root, and of forks of these, whoever else plays: one page at most, here nothing.

    Each fork samples what it samples in an engine that has never seen its parent.
    """
    prompt = text(0, 50).tolist()

    async def scene(driver):
        roots = await asyncio.gather(*(played(driver, sample, prompt, 0) for sample in (0, 1)))
        forks = {}
        for sample, turn in ((2, 1), (3, 2), (4, 3)):
            forks[sample] = turn, await played(driver, sample, roots[0][0][turn], turn)
        contexts, _ = forks[2][1]
        forks[5] = 3, await played(driver, 5, contexts[2], 3)  # a fork of the first fork, at its third turn
        return forks

    async def alone(driver, sample, turn, contexts):
        return await played(driver, sample, contexts[0], turn)

    with toys.running(8, model=model(toys.VOCAB), **SIZES) as driver:
        forks = asyncio.run(scene(driver))
    for turn, (contexts, (prefilled, cached)) in forks.values():
        assert len(contexts[0]) > 50 + 25 * turn
        assert prefilled <= PAGE and prefilled == len(contexts[0]) - 1 - cached
        assert prefilled == 0
    with toys.running(8, model=model(toys.VOCAB), **SIZES) as driver:
        for sample, (turn, (contexts, _)) in list(forks.items())[:2]:
            again, (prefilled, _) = asyncio.run(alone(driver, sample, turn, contexts))
            assert again == contexts
