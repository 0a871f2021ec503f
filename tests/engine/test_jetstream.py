"""Our engine through JetStream's own types: prefill, insert, generate give the tokens that our driver gives."""

import asyncio
import itertools

import jax
import numpy as np
import pytest

pytest.importorskip(
    "jetstream.engine.engine_api", reason="the 'jetstream' extra is not installed", exc_type=ImportError
)

from jetstream.engine import engine_api

from jaxagent.data.tokenizer import Tokenizer
from jaxagent.engine import automaton
from jaxagent.engine.jetstream import JetStreamEngine
from jaxagent.engine.lm import LanguageModel
from tests.engine import test_lm, toys
from tests.engine.toy_model import Toy
from tests.models import tiny

PROMPTS = [np.random.default_rng(i).integers(0, toys.VOCAB, n) for i, n in enumerate([5, 1, 12, 9, 17])]


def engine_for(model, stops=("no such",), eos=(), tokenizer_path="") -> engine_api.Engine:
    letters = [bytes([ord("a") + i]) for i in range(toys.VOCAB)] + [b"?"] * (model.vocab_size - toys.VOCAB)
    table = automaton.build(stops, letters, model.vocab_size)
    return JetStreamEngine(model, table, eos, toys.config(4), toys.CONTEXT, toys.mesh_of(1), tokenizer_path)


def padded(tokens) -> dict:
    """As an orchestrator hands a prompt over: padded to a bucket."""
    return dict(padded_tokens=np.pad(np.asarray(tokens, np.int32), (0, 64 - len(tokens))), true_length=len(tokens))


def run(engine: engine_api.Engine, weights, state, steps: int, slots, before=None):
    """Valid tokens of some slots over some steps; `before` are the lengths that the slots start with."""
    out: dict[int, list[int]] = {slot: [] for slot in slots}
    for _ in range(steps):
        state, result = engine.generate(weights, state)
        assert isinstance(result, engine_api.ResultTokens)
        result.copy_to_host_async()
        result = result.convert_to_numpy()
        for slot in slots:
            data = result.get_result_at_slot(slot)
            assert data.tokens.shape == data.valid.shape == (1, 1)
            if data.valid[0, 0]:
                out[slot].append(int(data.tokens[0, 0]))
            assert data.lengths.tolist() == [len(out[slot]) + (before or {}).get(slot, 0)]
    return state, out


def test_the_drivers_greedy_tokens() -> None:
    async def expected(driver):
        async def one(prompt):
            session = await driver.open("t", 0)
            g = await driver.generate(session, prompt, 8, toys.GREEDY, 0, 30)
            driver.close(session)
            return g.tokens.tolist()

        return await asyncio.gather(*map(one, PROMPTS))

    with test_lm.driver_for(test_lm.mesh_of()) as driver:
        driver.start(120)
        want = asyncio.run(expected(driver))
    engine = engine_for(LanguageModel(test_lm.SPEC, "float32"))
    with jax.set_mesh(engine.mesh):
        weights = tiny.init(test_lm.SPEC, 0, None)
    weights = engine.load_params(weights)
    prefixes = [engine.prefill(params=weights, **padded(prompt)) for prompt in PROMPTS]
    # As an orchestrator does it: to where the generating engine wants it.
    prefixes = [jax.device_put(prefix, engine.get_prefix_destination_sharding()) for prefix in prefixes]
    assert engine.max_concurrent_decodes == 4 and engine.samples_per_slot == 1
    state = engine.init_decode_state()
    for slot, prefix in zip((2, 0, 3, 1), prefixes, strict=False):
        state = engine.insert(prefix, state, slot)
    state, out = run(engine, weights, state, 5, range(4))
    assert [out[slot] for slot in (2, 0, 3, 1)] == [tokens[:5] for tokens in want[:4]]
    # A slot is taken over in the middle of the others' turns, which go on.
    state = engine.insert(prefixes[4], state, 0)
    state, out = run(engine, weights, state, 3, range(4), before={0: 0, 1: 5, 2: 5, 3: 5})
    assert (out[0], out[3]) == (want[4][:3], want[2][5:])


def test_an_existing_prefix_goes_on_and_may_be_used_twice() -> None:
    engine, weights = engine_for(Toy(toys.VOCAB)), toys.weights()
    common = engine.prefill(params=weights, **padded(PROMPTS[2]))
    for more in (PROMPTS[0], PROMPTS[1]):
        whole = engine.prefill(params=weights, existing_prefix=common, **padded(more))
        state = engine.insert(whole, engine.init_decode_state(), 1)
        _, out = run(engine, weights, state, 6, [1])
        assert out[1] == toys.greedy(weights, [*PROMPTS[2], *more], 6)
    with pytest.raises(ValueError, match="1 to 39 tokens, not 40"):
        engine.prefill(params=weights, **padded([1] * 40))


def test_turns_end_at_stops_eos_and_context() -> None:
    weights = np.zeros((toys.VOCAB, toys.VOCAB), np.float32)
    for text in ("abxyz", "klmno", "pqrp"):
        for a, b in itertools.pairwise(text):
            weights[ord(a) - ord("a"), ord(b) - ord("a")] = 50.0
    engine = engine_for(Toy(toys.VOCAB), stops=("xy",), eos=[ord("m") - ord("a")])
    state = engine.init_decode_state()
    for slot, letter in enumerate("akp"):
        prefix = engine.prefill(params=weights, **padded([ord(letter) - ord("a")]))
        state = engine.insert(prefix, state, slot)
    _, out = run(engine, weights, state, toys.CONTEXT + 2, range(4))
    text = {slot: "".join(chr(ord("a") + t) for t in tokens) for slot, tokens in out.items()}
    assert (text[0], text[1], text[3]) == ("bxy", "lm", "")
    assert len(text[2]) == toys.CONTEXT - 1


def test_tokenizer_and_sizes(tmp_path) -> None:
    Tokenizer.train(["one two three two one"] * 5, 270, ["<stop>"]).save(tmp_path)
    engine = engine_for(Toy(toys.VOCAB), tokenizer_path=str(tmp_path))
    tokenizer = engine.build_tokenizer(engine.get_tokenizer())
    ids, length = tokenizer.encode("one two")
    assert len(ids) in (1, 2, 4, 8, 16) and tokenizer.decode(ids[:length].tolist()).endswith("one two")
    assert tokenizer.stop_tokens == set(Tokenizer.load(tmp_path).eos_ids) and 0 not in tokenizer.stop_tokens
    assert engine.max_prefill_length == 32
