"""A real pretrained model, SmolLM2-135M-Instruct: our engine against transformers, a GRPO step of ours against TRL's.

    python -m data_pipelines.smollm2 --out=runs/smollm2                              # the model, once
    python -m benchmarks.real_model [--model=runs/smollm2] [--repetitions=3]         # two cores: about 40 minutes

Both sides have the same folder, prompts and lengths, float32, temperature 1 and all cores, and take turns; each lives
in a process of its own, as its users run it. A ratio is that of the medians: above 1, we are faster. Compilation is not
counted, of nobody; ours returns a log-prob with every token, transformers does not.

  decode   1, 8 and 32 prompts of 128 tokens, 64 new tokens each: decode_vs_hf
  step     GRPO on problems of `configs/gsm8k_python.py:smollm2` in the model's chat template, 6 tasks x 8 attempts of
           56 tokens each: sampling, advantages, gradients, AdamW: step_vs_trl; ours in parts: rollout_s, learn_s
  prefix   one update of a group of 8 whose prompt is two thirds of its tokens, the prompt trained once over the prompt
           trained eight times: shared_prefix_ratio, see `benchmarks.shared_prefix`

The last line is JSON; what was not compared, because a library is missing, is null. `compile_s` is what our side spent
in XLA (less where programs are kept from an earlier run), `peak_gib` its largest resident memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.sides import Side, reply_with, requests
from jaxagent.runs import devices

SEQUENCES = (1, 8, 32)
PROMPT_TOKENS, NEW_TOKENS = 128, 64
TASKS, GROUP, TURN_TOKENS = 6, 8, 56
LEARNING_RATE = 2e-5
SYSTEM = "To compute, write a ```python block; you are shown what it prints. Then write the answer as \\boxed{...}."
ANSWER_TIMEOUT_S = 3600.0


def text_ids(repetition: int, count: int, vocab: int) -> np.ndarray:
    """Random prompts i32[count, PROMPT_TOKENS] that no cache has seen."""
    return np.random.default_rng((repetition, count)).integers(100, vocab, (count, PROMPT_TOKENS), np.int32)


def problems(repetition: int) -> list[list[dict[str, str]]]:
    """TASKS conversations with a problem each, other ones in every repetition."""
    from jaxagent.data_pipelines import arithmetic
    from jaxagent.envs.python import formats

    rows = itertools.islice(arithmetic.generate(repetition), TASKS)
    conversations = [formats.messages("fenced", "answer", row["prompt"], SYSTEM) for row in rows]
    return [[{"role": m.role, "content": m.content} for m in messages] for messages in conversations]


class Ours:
    """Engine and learner of `configs/gsm8k_python.py:smollm2`, without its environment and with forced lengths."""

    def __init__(self, folder: str) -> None:
        import jax

        from jaxagent import config
        from jaxagent.configs import gsm8k_python
        from jaxagent.data.tokenizer import Tokenizer
        from jaxagent.engine import automaton
        from jaxagent.engine.driver import Driver
        from jaxagent.engine.lm import LanguageModel
        from jaxagent.engine.requests import EngineSetup
        from jaxagent.learner.programs import make_programs
        from jaxagent.models import hf, params, sharding
        from jaxagent.observe.compiles import CompileCounter
        from jaxagent.rollout.templates import CHAT_DATE, open_template
        from jaxagent.runs import devices

        raw = gsm8k_python.get_config("smollm2")
        raw.model.path, raw.rl.tasks_per_step, raw.rl.group_size = folder, TASKS, GROUP
        raw.rl.optimizer.update(learning_rate=LEARNING_RATE, schedule="constant", warmup_steps=0)
        self.cfg = config.parse(raw)
        devices.keep_compiled_programs()
        self.compiles = CompileCounter().__enter__()
        self.tokenizer = Tokenizer.load(folder)
        self.template = open_template(self.tokenizer, True, CHAT_DATE)
        spec, mesh = hf.read_spec(folder, self.cfg.model), sharding.make_mesh(self.cfg.mesh)
        weights = hf.load(Path(folder), spec, params.shardings(spec, mesh, sharding.TRAIN))
        self.vocab = spec.vocab_size
        setup = EngineSetup(
            cfg=self.cfg.engine,
            context=self.cfg.env.context_tokens,
            stops=automaton.build((), (), spec.padded_vocab_size),
            eos_ids=(),
            exact=False,
        )
        self.driver = Driver(LanguageModel(spec, self.cfg.engine.cache_dtype), weights, 0, setup, mesh)
        self.driver.start(ANSWER_TIMEOUT_S)
        self.programs, self.state = make_programs(self.cfg, spec, mesh, weights)
        jax.block_until_ready(self.state.params)

    def decode(self, count: int, repetition: int) -> dict[str, float]:
        """Seconds for `count` prompts."""
        prompts = text_ids(repetition, count, self.vocab)
        began = time.perf_counter()
        self._sample([(f"text {repetition} {i}", 0, 1, ids) for i, ids in enumerate(prompts)], NEW_TOKENS)
        return {"seconds": time.perf_counter() - began}

    def step(self, repetition: int) -> dict[str, float]:
        """Seconds of a GRPO step, and of its two parts."""
        from jaxagent.algorithms import compose

        began = time.perf_counter()
        prompts = [self.tokenizer.encode(self._prompt(messages)) for messages in problems(repetition)]
        asked = [(f"task {repetition} {t}", i, GROUP, ids) for t, ids in enumerate(prompts) for i in range(GROUP)]
        generations = self._sample(asked, TURN_TOKENS)
        sampled = time.perf_counter()
        groups = _groups(prompts, generations)
        streams, _ = compose.streams(groups, self.cfg.rl, 0.0)
        for part in compose.mini_batches(streams, self.cfg.rl, (0, repetition)):
            self.state, metrics = self.programs.train(self.state, part, self.cfg.rl.sampling.temperature, 0)
        self.driver.update_params(self.state.policy, int(self.state.step))
        ended = time.perf_counter()
        assert metrics["policy/update_applied"] == 1.0, metrics
        return {
            "seconds": ended - began,
            "rollout_s": sampled - began,
            "learn_s": ended - sampled,
            "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            "compile_s": self.compiles.seconds,
        }

    def _prompt(self, messages: Sequence[dict[str, str]]) -> str:
        from jaxagent.envs.base import Message

        return self.template.prompt([Message(m["role"], m["content"]) for m in messages])

    def _sample(self, asked: Sequence[tuple[str, int, int, Sequence[int]]], new_tokens: int) -> list[Any]:
        """Generations of (task, attempt, group size, prompt), all at once."""

        async def one(task: str, sample: int, group: int, prompt: Sequence[int]) -> Any:
            session = await self.driver.open(task, sample, group)
            try:
                sampling = self.cfg.rl.sampling
                return await self.driver.generate(session, prompt, new_tokens, sampling, 0, ANSWER_TIMEOUT_S)
            finally:
                self.driver.close(session)

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*(one(*request) for request in asked))

        generations = asyncio.run(all_of_them())
        assert all(len(g.tokens) == new_tokens for g in generations)
        return generations


def _groups(prompts: Sequence[Sequence[int]], generations: Sequence[Any]) -> list[Any]:
    """Groups of one turn per episode; every other attempt succeeds, so that all of it is trained."""
    from jaxagent.types import Episode, Group, StopReason, Task, TokenKind, Trajectory

    groups = []
    for t, prompt in enumerate(prompts):
        task, episodes = Task(str(t), "", ("",)), []
        for i, generation in enumerate(generations[t * GROUP : (t + 1) * GROUP]):
            new, given = len(generation.tokens), len(prompt)
            trajectory = Trajectory(
                tokens=np.concatenate([np.asarray(prompt, np.int32), generation.tokens]),
                kinds=np.asarray([TokenKind.PROMPT] * given + [TokenKind.ACTION] * new, np.uint8),
                logprobs=np.concatenate([np.zeros(given, np.float32), generation.logprobs]),
                policy_versions=np.concatenate([np.full(given, -1, np.int32), generation.policy_versions]),
                turns=np.zeros(given + new, np.int32),
            )
            reward = float(i % 2)
            episodes.append(Episode(task, i, (trajectory,), reward, {}, StopReason.ANSWER, 1))
        groups.append(Group(task, tuple(episodes)))
    return groups


class Peer:
    """transformers' `generate`, and TRL's GRPOTrainer, which is driven step by step through a callback."""

    def __init__(self, folder: str) -> None:
        import torch
        import transformers

        self.torch = torch
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def decode(self, count: int, repetition: int) -> dict[str, float]:
        """Seconds for `count` prompts in one batch."""
        prompts = self.torch.from_numpy(text_ids(repetition, count, self.model.config.vocab_size).astype(np.int64))
        self.model.eval()
        began = time.perf_counter()
        with self.torch.no_grad():
            out = self.model.generate(
                prompts,
                attention_mask=self.torch.ones_like(prompts),
                do_sample=True,
                top_k=0,
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
            )
        assert out.shape[1] == PROMPT_TOKENS + NEW_TOKENS
        return {"seconds": time.perf_counter() - began}

    def train(self, steps: int, asked: Iterator[Any], reply: Callable[[Any], None]) -> None:
        """Takes a step for every further request, and replies with its seconds."""
        import datasets
        import transformers
        import trl

        class Turns(transformers.TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                self.began = time.perf_counter()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                reply({"seconds": time.perf_counter() - self.began})
                if next(asked, None) is None:
                    control.should_training_stop = True

        rows = [{"prompt": messages} for repetition in range(steps) for messages in problems(repetition)]
        with tempfile.TemporaryDirectory() as folder:
            config = trl.GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                per_device_train_batch_size=GROUP,
                gradient_accumulation_steps=TASKS,
                num_generations=GROUP,
                max_completion_length=TURN_TOKENS,
                generation_kwargs={"min_new_tokens": TURN_TOKENS},
                temperature=1.0,
                beta=0.0,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                max_steps=steps,
                shuffle_dataset=False,
                gradient_checkpointing=False,  # memory is no matter here, and it would cost a third more
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                disable_tqdm=True,
            )
            trl.GRPOTrainer(
                model=self.model,
                reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
                args=config,
                train_dataset=datasets.Dataset.from_list(rows),
                processing_class=self.tokenizer,
                callbacks=[Turns()],
            ).train()


def serve(name: str, folder: str, steps: int) -> None:
    """One side: requests are {"decode": sequences, "repetition": r} and {"step": r}."""
    reply, asked = reply_with(), requests()
    side = Ours(folder) if name == "ours" else Peer(folder)
    for request in asked:
        if "decode" in request:
            reply(side.decode(request["decode"], request["repetition"]))
        elif name == "ours":
            reply(side.step(request["step"]))
        else:
            side.train(steps, asked, reply)


def compare(sides: Sequence[Side], repetitions: int, note: Callable[[str], None]) -> dict[str, Any]:
    """Interleaved: everybody's first time compiles and is not counted."""
    seconds: dict[str, dict[str, list[float]]] = {}
    ours: list[dict[str, float]] = []
    requests = [(f"decode {n}", {"decode": n}) for n in SEQUENCES] + [("step", {})]
    for what, request in requests:
        seconds[what] = {side.name: [] for side in sides}
        for repetition in range(repetitions + 1):
            for side in sides:
                full = {**request, "repetition": repetition} if request else {"step": repetition}
                answer = side.call(full)
                note(f"{what}, repetition {repetition}, {side.name}: {answer['seconds']:.2f} s")
                if repetition:
                    seconds[what][side.name].append(answer["seconds"])
                if side.name == "ours" and what == "step" and repetition:
                    ours.append(answer)
    median = {what: {n: statistics.median(t) for n, t in by.items()} for what, by in seconds.items()}
    ratio = {what: round(by["peer"] / by["ours"], 3) if "peer" in by else None for what, by in median.items()}
    for what, by in seconds.items():
        for name, times in by.items():
            print(f"{what:<10} {name:<5} median {median[what][name]:8.2f} s  ({min(times):.2f} to {max(times):.2f})")
    part = lambda name: round(statistics.median(a[name] for a in ours), 2)  # noqa: E731
    return {
        "decode_vs_hf": {str(n): ratio[f"decode {n}"] for n in SEQUENCES},
        "step_vs_trl": ratio["step"],
        "step_s": part("seconds"),
        "rollout_s": part("rollout_s"),
        "learn_s": part("learn_s"),
        "peak_gib": round(ours[-1]["peak_gib"], 2),
        "compile_s": round(ours[-1]["compile_s"], 1),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/smollm2")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--side", choices=("ours", "peer"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not (Path(args.model) / "config.json").is_file():
        sys.exit(f"no model in '{args.model}': python -m data_pipelines.smollm2 --out={args.model}")
    if args.side:
        if args.side == "ours":
            devices.use_huge_pages()
        serve(args.side, args.model, args.repetitions + 1)
        return
    note = lambda line: print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)  # noqa: E731
    names = ["ours"]
    if all(importlib.util.find_spec(name) for name in ("torch", "transformers", "trl")):
        names.append("peer")
    else:
        note("transformers and trl are not installed here (pip install '.[peers]'): not compared")
    command = ["-m", "benchmarks.real_model", f"--model={args.model}", f"--repetitions={args.repetitions}"]
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(Side(n, [*command, "--side", n], ANSWER_TIMEOUT_S)) for n in names]
        values = compare(sides, args.repetitions, note)
    print(json.dumps(values | {"shared_prefix_ratio": shared_prefix_ratio(args.repetitions)}))


def shared_prefix_ratio(repetitions: int) -> float:
    """Of `benchmarks.shared_prefix`, at this model's shape and with random weights, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.shared_prefix", "--smollm2", f"--repetitions={repetitions}"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, encoding="utf-8", errors="replace", check=True, timeout=ANSWER_TIMEOUT_S
    )
    return json.loads(done.stdout.splitlines()[-1])["shared_prefix_ratio"]


if __name__ == "__main__":
    main()
