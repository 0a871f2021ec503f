r"""Accuracy of a policy against the length of the documents that it reads, in one command: MemAgent's figure.

    python -m jaxagent.evaluate_lengths --config.workdir=runs/memagent --lengths=512,1024,2048 --greedy
    python -m jaxagent.evaluate_lengths --config.workdir=RUN --num_docs=50,100,200,400 --samples=4 --tasks=128
    python -m jaxagent.evaluate_lengths --config.workdir=RUN --rows=eval_50.jsonl,eval_100.jsonl \
        --config.env.metric=sub_em

A length is a number of tokens (--lengths), of documents (--num_docs), or a file of rows that bring their contexts
(--rows). At each one the policy is evaluated as by `python -m jaxagent.evaluate`, whose other flags work here too, on
the same tasks; documents are read to their end, whatever env.max_turns says, and longer ones have more time (of --rows
all have --config.env.episode_timeout_s). All lengths and files are looked at before the first is played: a length that
no task's documents reach is refused, and where some do not reach it, a line under the table says how many. Results go
to WORKDIR/evaluations/lengths_<policy>..., or --out: a folder per length, lengths.json and lengths.html, the curve of
the lengths that the command names with 95 % intervals; both are written after every length. The last line of stdout is
one JSON object. The same command again, or one with more lengths, plays only what is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent import evaluate
from jaxagent.config import Config, ConfigError
from jaxagent.config.command import exit_code, quiet_libraries
from jaxagent.io import files
from jaxagent.runs import devices

NO_END = 1_000_000  # turns: a document is read to its end
DOCUMENT_TOKENS = 256  # of one document, rather too many: only an episode's time follows from it
FILE, CURVE = "lengths.json", "lengths.html"


@dataclasses.dataclass(frozen=True)
class Length:
    """One point of the curve."""

    name: str  # of its folder
    env: Mapping[str, int]  # fields of config.env that choose it
    rows: str = ""  # data.eval_source; "" = the run's own tasks


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code. `argv[0]` is the program's name."""
    argv = list(sys.argv if argv is None else argv)
    if evaluate.flags.wants_help(argv):
        print(parser().format_help())
        return 0
    return exit_code(lambda: _run(argv))


def parser() -> argparse.ArgumentParser:
    """The flags of this program, which are those of evaluate and what lengths there are."""
    out = evaluate.parser()
    out.prog, out.description = "python -m jaxagent.evaluate_lengths", __doc__
    out.add_argument("--lengths", type=evaluate.counts, help="of documents, in tokens, with commas")
    out.add_argument("--num_docs", type=evaluate.counts, help="numbers of documents, with commas")
    out.add_argument("--rows", help="files of rows with contexts (docs: data_pipelines.long_qa), with commas")
    return out


def lengths_of_command(options: argparse.Namespace) -> list[Length]:
    """The lengths that a command names, each once, and takes the flags for them out of `options`. Raises ConfigError:
    none of the three flags, or several; a length twice; rows that are none, or not for their split."""
    flags = {name: options.__dict__.pop(name) for name in ("lengths", "num_docs", "rows")}
    length_flags = [name for name, value in flags.items() if value is not None]
    if len(length_flags) != 1:
        raise ConfigError(
            f"Say one of --lengths, --num_docs and --rows; got {', '.join(length_flags) or 'none of them'}."
        )
    if length_flags == ["rows"]:
        paths = flags["rows"].split(",")
        if not all(Path(path).stem.strip(" .") for path in paths):
            raise ConfigError(f"--rows='{flags['rows']}' has an entry that names no file.")
        if options.split != "held_out":
            raise ConfigError(f"--rows are held-out tasks: --split={options.split} would play others. Leave it out.")
        lengths = [Length(Path(path).stem, {"num_docs": 0, "length_tokens": 0}, path) for path in paths]
    else:
        field, other = ("length_tokens", "num_docs") if length_flags == ["lengths"] else ("num_docs", "length_tokens")
        unit = "tokens" if length_flags == ["lengths"] else "documents"
        lengths = [Length(f"{value}_{unit}", {field: value, other: 0}) for value in flags[length_flags[0]]]
    if len({length.name for length in lengths}) < len(lengths):
        raise ConfigError(f"--{length_flags[0]} names a length twice: {', '.join(length.name for length in lengths)}.")
    return lengths


def config_at_length(config: Config, length: Length) -> Config:
    """The config of an evaluation at a length. An episode has as much more time as the documents may be longer.

    How long those of files of rows are is not known here: they have env.episode_timeout_s as it is.

    Raises:
      ConfigError: the environment reads no documents of a length.
    """
    env: Any = config.env
    if not all(hasattr(env, field) for field in (*length.env, "chunk_tokens", "too_short")):
        raise ConfigError("config.env reads no documents of a length: --config must be a run of configs/memagent.py.")
    now = max(length.env["length_tokens"], DOCUMENT_TOKENS * length.env["num_docs"])
    trained = (env.max_turns - 1) * env.chunk_tokens
    longer = max(1, math.ceil(now / trained))
    env = dataclasses.replace(env, **length.env, max_turns=NO_END, episode_timeout_s=longer * env.episode_timeout_s)
    data = dataclasses.replace(config.data, eval_source=length.rows) if length.rows else config.data
    return dataclasses.replace(config, env=env, data=data)


def _run(argv: Sequence[str]) -> int:
    options, rest = parser().parse_known_args(argv[1:])
    if options.k and 1 not in options.k:
        raise ConfigError("--k must hold 1: accuracy is pass@1.")
    lengths = lengths_of_command(options)
    config = evaluate.read_config([argv[0], *rest])
    quiet_libraries()
    config = devices.provide_for(config)
    configs = [config_at_length(config, length) for length in lengths]
    # Late imports: what they name loads jax, which costs seconds.
    from jaxagent.engine.requests import EngineError
    from jaxagent.observe.files import EVALUATIONS_FOLDER
    from jaxagent.runs.evaluation import lengths as curve
    from jaxagent.runs.evaluation import policy, run

    command_options = run.Options(**vars(options))
    settings = run.completed(config, command_options)
    source = policy.choose(config, settings.checkpoint)
    name = f"lengths_{run.default_out(config, settings, source).name}"
    out = Path(options.out) if options.out else Path(config.workdir) / EVALUATIONS_FOLDER / name
    notes = [
        note_on_tasks(length_config, settings, length, source)
        for length, length_config in zip(lengths, configs, strict=True)
    ]
    about = {
        "policy": str(source), "policy_digest": source.digest, "split": settings.split,
        "temperature": settings.temperature, "seed": settings.seed, "score": config.env.score,
        "min_score": settings.min_score,
    }  # fmt: skip
    points: list[dict[str, Any]] = []
    for length, length_config, note in zip(lengths, configs, notes, strict=True):
        try:
            run.run(length_config, dataclasses.replace(command_options, out=str(out / length.name)))
        except EngineError as error:
            there = f"; {len(points)} of {len(lengths)} lengths are in {out}" if points else ""
            print(f"error: {error}{there}", file=sys.stderr)
            return 1
        points.append(curve.point(length.name, out / length.name) | {"note": note})
        ordered = curve.ordered(points)
        text = "\n".join((curve.table(ordered), *filter(None, (point["note"] for point in ordered))))
        # At once: whatever fails later, what was played for hours is there to be read.
        files.replace(out / CURVE, curve.page(f"{config.workdir}: {source}", ordered, text, config.env.score))
        to_play = [length.name for length in lengths[len(points) :]]
        files.replace_json(out / FILE, {**about, "lengths": ordered, "to_play": to_play})
    print(text)
    print(json.dumps({"checkpoint": str(source), "score": config.env.score, "lengths": points, "out": str(out)}))
    return 0


def note_on_tasks(config: Config, settings: Any, length: Length, source: Any) -> str:
    """Opens what an evaluation at a length will read; returns what is to be said under the table, "" = nothing.

    Raises:
      ConfigError: tasks or documents that cannot be read, or none whose documents reach the length.
    """
    from jaxagent.data.sources import balanced_sample
    from jaxagent.runs.checks import check
    from jaxagent.runs.evaluation import policy, run
    from jaxagent.runs.parts import open_parts

    config = policy.configured(config, source)
    num = settings.tasks or config.data.num_eval
    config = dataclasses.replace(config, seed=settings.seed, data=dataclasses.replace(config.data, num_eval=num))
    check(config)
    with open_parts(config, lambda line: None, plays_train=settings.split == run.TRAIN) as parts:
        tasks, place = parts.heldout, Path(config.data.eval_source or parts.dataset)
        if settings.split == run.TRAIN:
            tasks, place = balanced_sample(parts.train, num, config.data.seed), parts.dataset
        wanted_tokens = length.env["length_tokens"]
        if not wanted_tokens or not tasks:
            return ""
        env: Any = config.env
        short = env.too_short(tasks, place, lambda text: len(parts.tokenizer.encode(parts.tokenizer.normalize(text))))
    if len(short) == len(tasks):
        raise ConfigError(
            f"--lengths={wanted_tokens}: the documents of every task end before. Name a shorter length, or bring more "
            f"documents to '{place}'."
        )
    many = "of 1 task end" if len(short) == 1 else f"of {len(short)} tasks end"
    return f"{length.name}: the documents {many} before it, of {len(tasks)} tasks" if short else ""


if __name__ == "__main__":
    devices.use_huge_pages()
    sys.exit(main())
