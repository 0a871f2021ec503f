"""Sections of the environment."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from jaxagent.config.ranges import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seconds,
    SecondsOrZero,
    ZeroToOne,
    between,
)


@dataclasses.dataclass(frozen=True)
class ShapingConfig:
    """What is added to an outcome for how it was reached (docs/rewards.md). A weight of 0 is off."""

    overlong_weight: NonNegativeFloat  # of DAPO's soft punishment of long episodes, in sampled tokens
    overlong_buffer_tokens: NonNegativeInt  # before the most tokens an episode can sample, where the punishment begins
    efficiency_weight: NonNegativeFloat  # of tool calls that repeat an earlier one or go over the budget
    efficiency_penalty: ZeroToOne  # of one such call, as a part of the weight; all together at most the weight
    efficiency_budget: NonNegativeInt  # tool calls per episode
    cap: NonNegativeFloat  # most that shaping can add or take


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """Search-R1's two reward profiles. See docs/recipes.md for the score table."""

    profile: Literal["em", "em_format"]
    structure_score: ZeroToOne  # s
    final_format_score: ZeroToOne  # f
    retrieval_score: ZeroToOne  # r
    min_answers: Annotated[int, between(1, 2)]  # 2: as published, in prompt + response, where the prompt holds one
    shaping: ShapingConfig


@dataclasses.dataclass(frozen=True)
class RetrieverConfig:
    """The search engine behind the environment."""

    backend: Literal["bm25", "dense", "http"]
    corpus: str  # jsonl of {"id", "contents"}; "" = the dataset's own passages
    index: str  # dense: folder with vectors and FAISS index
    url: str  # http: the POST /retrieve endpoint
    topk: PositiveInt
    timeout_s: Seconds
    retries: NonNegativeInt


@dataclasses.dataclass(frozen=True)
class SandboxConfig:
    """Where commands run; see docs/sandboxes.md. Every limit is one sandbox's."""

    backend: str  # "auto" = the best that works here, "remote", or names of sandbox/choose.py: "bubblewrap,podman"
    unsafe: bool  # plain processes, without any protection, where nothing else works
    workers: str  # read by "remote": their URLs, separated by commas
    token_file: str  # read by "remote": a file with the workers' token
    root: str  # folder that holds a whole root; "" = a minimal one over this machine's /usr
    image: str  # of docker and podman; "" = the root
    layers: str  # folder with a layer per task id, for tasks with an image of their own (Dockerfile, container.def)
    images: str  # folder where such images are kept once they are built; "" = none is built
    bases: tuple[str, ...]  # what FROM may name: "debian:12=debootstrap:bookworm"; see docs/sandboxes.md, Images
    build_network: bool  # build steps have this machine's network; only for tasks that you trust
    warm: NonNegativeInt  # sandboxes kept started ahead
    memory_mb: PositiveInt
    disk_mb: PositiveInt  # everything written
    files: PositiveInt  # files and folders written
    processes: PositiveInt
    cpus: PositiveFloat


@dataclasses.dataclass(frozen=True)
class TerminalConfig:
    """The terminal environment: one attempt is one shell in one sandbox."""

    tools: Literal["plain", "endless", "qwen3_xml"]  # how commands are written; see envs/terminal_tasks/dialogue.py
    command_timeout_s: Seconds
    output_chars: PositiveInt  # of a command's output, at most
    agent_timeout_s: SecondsOrZero  # the attempt's own, then reward 0 without verification; 0 = what the task says
    verifier_timeout_s: SecondsOrZero  # 0 = what the task says
    verify_overlong: bool  # also judge an attempt whose tokens ran out; else it gets 0 without verification
    initial_test: bool  # run the test of the initial state, if there is one, at the start of every attempt
    solved_reward: PositiveFloat  # from which an attempt counts as solved, in reports
    sandbox: SandboxConfig


@dataclasses.dataclass(frozen=True)
class PythonConfig:
    """The Python environment: programs run in a sandbox, each in a fresh process."""

    format: Literal["plain", "fenced", "qwen3_xml"]  # how programs and answers are written; see envs/python.py
    judge: Literal["answer", "tests"]  # a stated answer against the gold one, or hidden tests of the last program
    system: str  # the system message; "" = the format's own (none for "plain")
    run_timeout_s: Seconds  # of one program; past it the policy sees what was printed until then
    output_chars: PositiveInt  # shown of a program's output, at most: its beginning and its end
    traceback: Literal["whole", "message"]  # message: without the frames
    judge_timeout_s: Seconds  # of all hidden tests of a submission
    sandbox: SandboxConfig


@dataclasses.dataclass(frozen=True)
class EnvConfig:
    """The environment. "search" reads `prompt`, `final_turn`, `reward` and `retriever`; the others read their own."""

    name: Literal["search", "terminal", "python"]
    prompt: Literal["search_r1", "plain", "chat"]  # the published instruction, "Question: ...\n", or a short one
    max_turns: PositiveInt
    final_turn: bool  # one more generation with search disabled after max_turns (N+1 variant)
    turn_tokens: PositiveInt  # sampled tokens per turn, at most
    observation_tokens: PositiveInt  # an observation is cut to this many tokens (head kept)
    context_tokens: PositiveInt  # the whole trajectory, at most; also the engine's cache length
    episode_timeout_s: Seconds
    max_failed_steps: NonNegativeInt  # steps in a row of which every episode failed: the run saves and stops; 0 = never
    reward: RewardConfig
    retriever: RetrieverConfig
    terminal: TerminalConfig
    python: PythonConfig
