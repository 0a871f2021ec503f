"""The engine against transformers and Tunix: tokens per second, tokens prefilled, and the train step against torch.

    python -m benchmarks.engine [--peers] [--only=static,ragged,prefill,train] [--repetitions=5] [--numerics=fast]
    python -m benchmarks.engine --peers --only=ragged --ways=transformers:rounds/4,tunix:rounds/1    # known to be best

Prints a table and, as the last line, one JSON object. Everyone runs the same five-million-parameter random Qwen2 in
float32 (`tiny_model`), sampling at temperature 1 with forced lengths. With --peers, whichever of transformers and
Tunix can be imported is measured beside ours, each in the way that is fastest for it (`peers`); repetitions are
interleaved (ours, peer, ours, ...) in this one process, and a ratio is that of the medians: above 1, we are faster.
Compilation is never counted, of nobody. Ours returns a log-prob with every token, the peers do not have to.

Sections and their keys:
  static   64 prompts of 128 tokens, 128 new tokens each: static_vs_hf, static_vs_tunix
  ragged   64 episodes of 2 to 8 turns of 4 to 128 tokens (heavy tail), with observations of 20 to 200 tokens between
           them; useful sampled tokens per second of wall time: ragged_vs_hf, ragged_vs_tunix
  prefill  tokens that the engine computed, by its own count:
             group_prefill_ratio   a group of 16 on a prompt of 1,024 tokens / one prompt
             turn_prefill_ratio    turns after the first / the tokens that are new in them
             resent_prefill_ratio  a new session that sends a whole history and a suffix / (suffix + one page)
  train    one optimiser step on [64, 256] tokens: train_step_vs_torch, train_mfu (see `train_vs_torch`)
compiles_after_warmup counts over all sections of the run. A key whose peer is missing is null. The table: seconds of
one repetition (median, min, max), useful tokens per second at the median, and the seconds over ours.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks import peers, tiny_model, train_vs_torch, workloads
from benchmarks.tiny_model import TinyModel
from benchmarks.workloads import Episode
from jaxagent.config import EngineConfig, SamplingConfig
from jaxagent.engine import automaton
from jaxagent.engine.driver import Driver
from jaxagent.engine.lm import LanguageModel
from jaxagent.engine.requests import EngineSetup
from jaxagent.types import Generation

SECTIONS = ("static", "ragged", "prefill", "train")
KEYS = {"transformers": "hf", "tunix": "tunix"}
PAGE_TOKENS = 64
SAMPLING = SamplingConfig(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
_DEADLINE_S = 3600.0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much work."""

    sequences: int = 64
    prompt_tokens: int = 128
    new_tokens: int = 128
    max_turns: int = workloads.MAX_TURNS
    group: int = 16
    group_prompt_tokens: int = 1024
    train_rows: int = 64
    row_tokens: int = 256


QUICK = Sizes(8, 32, 16, 3, 4, 256, 8, 64)


def note(line: str) -> None:
    """Progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)


# -------------------------------------------------------------------- ours


@contextlib.contextmanager
def open_engine(model: TinyModel, sequences: Sequence[int], turns: int) -> Iterator[Driver]:
    """A warm engine for `turns` at once that can keep sequences of these lengths. The only place that makes one."""
    lm = LanguageModel(model.spec, cache_dtype="float32")
    cfg = EngineConfig(
        slots=turns,
        steps_per_dispatch=8,
        prefill_tokens=4096,
        pages=sum(-(-length // PAGE_TOKENS) + 1 for length in sequences),
        page_tokens=PAGE_TOKENS,
        tile_rows=min(64, turns),
        kv_on_update="keep",
        cache_dtype="float32",
        request_timeout_s=600.0,
    )
    stops = automaton.build((), (), lm.vocab_size)
    setup = EngineSetup(cfg=cfg, context=max(sequences), stops=stops, eos_ids=(), exact=model.exact)
    with Driver(lm, model.params, 0, setup, model.mesh) as driver:
        began = time.perf_counter()
        driver.start(_DEADLINE_S)
        note(f"ours: warm after {time.perf_counter() - began:.1f} s")
        yield driver


class Ours:
    """Plays episodes through the driver's public API, and counts what it compiles."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._compiled = driver.stats().get("compiles", 0)
        self._sessions = 0

    @property
    def compiles(self) -> int:
        """Programs compiled since it was warm."""
        return int(self._driver.stats().get("compiles", 0) - self._compiled)

    def spent(self) -> str:
        """The driver's own account since it was warm."""
        stats = self._driver.stats()
        names = ("prefill_s", "decode_s", "dispatches", "prefill_tokens", "prefill_padded_tokens", "decode_turns")
        return ", ".join(f"{name} {stats.get(name, 0):.1f}" for name in names)

    def play(self, episodes: Sequence[Episode]) -> float:
        """Seconds for all episodes, concurrently."""

        async def run() -> float:
            began = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for episode in episodes:
                    group.create_task(self._episode(episode))
            return time.perf_counter() - began

        return asyncio.run(run())

    async def _episode(self, episode: Episode) -> np.ndarray:
        """The whole sequence at the end."""
        self._sessions += 1
        session = await self._driver.open(f"task-{self._sessions}", 0)
        sequence = []
        for i, turn in enumerate(episode):
            generation = await self._driver.generate(session, turn.given, turn.sampled, SAMPLING, i, _DEADLINE_S)
            assert len(generation.tokens) == turn.sampled, (len(generation.tokens), turn.sampled)
            sequence += [turn.given, generation.tokens]
        self._driver.close(session)
        return np.concatenate(sequence)

    def group(self, prompt: np.ndarray, size: int) -> int:
        """Tokens prefilled for a group on one prompt."""

        async def one(sample: int) -> Generation:
            session = await self._driver.open("group", sample)
            generation = await self._driver.generate(session, prompt, 4, SAMPLING, 0, _DEADLINE_S)
            self._driver.close(session)
            return generation

        async def run() -> None:
            await asyncio.gather(*(one(sample) for sample in range(size)))

        return self._prefilled(run)

    def later_turns(self, episodes: Sequence[Episode]) -> tuple[int, list[np.ndarray]]:
        """Tokens prefilled for all turns but the first; the sequences."""
        sequences: list[np.ndarray] = []

        async def whole() -> None:
            sequences.extend(await asyncio.gather(*(self._episode(episode) for episode in episodes)))

        async def first() -> None:
            await asyncio.gather(*(self._episode(episode[:1]) for episode in fresh))

        # The first turns' share is measured on other text of the same lengths.
        rng = np.random.default_rng(len(episodes))
        fresh = [(dataclasses.replace(e[0], given=rng.permutation(e[0].given)),) for e in episodes]
        return self._prefilled(whole) - self._prefilled(first), sequences

    def resend(self, histories: Sequence[np.ndarray], suffixes: Sequence[np.ndarray]) -> int:
        """Tokens prefilled for new sessions that send a whole history and a suffix."""

        async def run() -> None:
            pairs = zip(histories, suffixes, strict=True)
            await asyncio.gather(*(self._episode((workloads.Turn(np.concatenate(pair), 4),)) for pair in pairs))

        return self._prefilled(run)

    def _prefilled(self, run: Callable) -> int:
        before = self._driver.stats().get("prefill_tokens", 0)
        asyncio.run(run())
        return int(self._driver.stats()["prefill_tokens"] - before)


# -------------------------------------------------------------------- sections


@dataclasses.dataclass
class Report:
    """What has been measured so far."""

    rows: list[tuple[str, str, list[float], int]] = dataclasses.field(default_factory=list)
    values: dict[str, float | None] = dataclasses.field(default_factory=dict)
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    compiles: int = 0

    def timed(self, section: str, seconds: dict[str, list[float]], tokens: int) -> None:
        """Adds rows; the first contender is ours."""
        self.rows += [(section, name, values, tokens) for name, values in seconds.items()]

    def table(self) -> str:
        """For people."""
        head = (
            f"{'section':<8} {'contender':<14} {'median s':>9} {'min s':>8} {'max s':>8} {'tokens/s':>9} {'vs ours':>8}"
        )
        lines = [head]
        ours = 0.0
        for section, name, seconds, tokens in self.rows:
            median = statistics.median(seconds)
            ours = median if name == "ours" else ours
            lines.append(
                f"{section:<8} {name:<14} {median:9.3f} {min(seconds):8.3f} {max(seconds):8.3f} {tokens / median:9.0f} "
                f"{median / ours:8.2f}"
            )
        lines += [f"{name}: {text}" for name, text in self.notes.items()]
        lines += [f"{name}: {value}" for name, value in self.values.items()]
        return "\n".join(lines)


def compare(
    section: str,
    model: TinyModel,
    found: dict[str, peers.Peer],
    make: Callable[[int], list[Episode]],
    repetitions: int,
    report: Report,
    ways: Collection[tuple[str, str]],
) -> None:
    """Static or ragged generation.

    `make(repetition)` gives the episodes, always of the same lengths; `ways` as in `peers.best`.
    """
    episodes = make(0)
    tokens, given = workloads.sampled_tokens(episodes), sum(len(t.given) for e in episodes for t in e)
    note(f"{section}: {len(episodes)} episodes, {tokens} tokens to sample, {given} given")
    with open_engine(model, workloads.lengths(episodes), len(episodes)) as driver:
        ours = Ours(driver)
        note(f"ours, first time: {ours.play(episodes):.2f} s; {ours.spent()}")
        players: dict[str, Callable[[Sequence[Episode]], float]] = {"ours": ours.play}
        for name, peer in found.items():
            if way := peers.best(peer, episodes, section == "ragged", note, ways):
                report.notes[f"{section}, {name}"] = way[0]
                players[name] = lambda episodes, play=way[1]: play(episodes, float("inf"))
        seconds: dict[str, list[float]] = {name: [] for name in players}
        for repetition in range(1, repetitions + 1):
            episodes = make(repetition)
            for name, play in players.items():
                seconds[name].append(play(episodes))
                note(f"{section}, repetition {repetition}, {name}: {seconds[name][-1]:.2f} s")
        report.compiles += ours.compiles
    report.timed(section, seconds, tokens)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    report.values[f"{section}_tokens_per_s"] = round(tokens / medians["ours"], 1)
    for name, key in KEYS.items():
        report.values[f"{section}_vs_{key}"] = round(medians[name] / medians["ours"], 3) if name in medians else None


def count_prefill(model: TinyModel, sizes: Sizes, report: Report) -> None:
    """Tokens prefilled where a prefix could be shared. Counts, not times: once is enough."""
    vocab = model.spec.vocab_size
    episodes = workloads.ragged(0, 8, sizes.prompt_tokens, vocab, max_turns=sizes.max_turns)
    suffixes = workloads.prompts(1, len(episodes), 100, vocab)
    (prompt,) = workloads.prompts(2, 1, sizes.group_prompt_tokens, vocab)
    room = [len(prompt) + 8] * sizes.group + [2 * n + suffixes.shape[1] + 8 for n in workloads.lengths(episodes)]
    with open_engine(model, room, max(sizes.group, len(episodes))) as driver:
        ours = Ours(driver)
        report.values["group_prefill_ratio"] = round(ours.group(prompt, sizes.group) / len(prompt), 3)
        prefilled, histories = ours.later_turns(episodes)
        new = sum(len(turn.given) for episode in episodes for turn in episode[1:])
        report.values["turn_prefill_ratio"] = round(prefilled / new, 3)
        resent = ours.resend(histories, list(suffixes))
        report.values["resent_prefill_ratio"] = round(resent / (suffixes.size + PAGE_TOKENS * len(suffixes)), 3)
        report.compiles += ours.compiles


def train(model: TinyModel, sizes: Sizes, with_torch: bool, repetitions: int, report: Report) -> None:
    """The optimiser step."""
    result = train_vs_torch.measure(model, sizes.train_rows, sizes.row_tokens, repetitions, with_torch, note)
    report.timed("train", result.seconds, sizes.train_rows * sizes.row_tokens)
    report.notes |= {f"train, {name}": way for name, way in result.ways.items()}
    report.values |= result.values


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="also run transformers and Tunix, where importable")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, comma-separated")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--ways", default="", help="PEER:WAY,... to try of the peers, where the best are known (all)")
    parser.add_argument("--numerics", choices=("fast", "exact"), default="fast", help="of our engine")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all?")
    args = parser.parse_args()
    tiny_model.two_devices()
    sections = args.only.split(",")
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    sizes = QUICK if args.quick else Sizes()
    ways = {(peer, way) for peer, _, way in (text.partition(":") for text in args.ways.split(",") if text)}
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model.make(Path(folder), args.numerics == "exact")
        vocab = model.spec.vocab_size
        makers: dict[str, Callable[[int], list[Episode]]] = {
            "static": lambda r: workloads.static(r, sizes.sequences, sizes.prompt_tokens, sizes.new_tokens, vocab),
            "ragged": lambda r: workloads.ragged(
                r, sizes.sequences, sizes.prompt_tokens, vocab, max_turns=sizes.max_turns
            ),
        }
        found = peers.open_peers(model) if args.peers and not set(sections).isdisjoint(makers) else {}
        for section in sections:
            if section in makers:
                compare(section, model, found, makers[section], args.repetitions, report, ways)
            elif section == "prefill":
                count_prefill(model, sizes, report)
            else:
                train(model, sizes, args.peers, args.repetitions, report)
    if set(sections) - {"train"}:
        report.values["compiles_after_warmup"] = report.compiles
    print(report.table())
    print(json.dumps(report.values))


if __name__ == "__main__":
    main()
