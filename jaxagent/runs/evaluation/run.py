"""pass@k of one policy: choose the weights, play the attempts that are missing, write the numbers down.

`evaluation.json` is written twice: before the first attempt with what is evaluated, so that attempts of another policy,
seed or environment are never mixed in; at the end with the results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import LEAST_TEMPERATURE, Config, ConfigError, SamplingConfig, modern, to_dict
from jaxagent.data.sources import balanced_sample
from jaxagent.engine.requests import EngineError
from jaxagent.io import files
from jaxagent.observe import charts
from jaxagent.observe.files import EVALUATIONS_FOLDER
from jaxagent.observe.progress import Progress
from jaxagent.observe.text import duration, number
from jaxagent.rollout.workers import STOP_TIMEOUT_S, batch_deadline_s
from jaxagent.runs import devices, provenance
from jaxagent.runs.checks import check
from jaxagent.runs.evaluation import policy
from jaxagent.runs.evaluation.attempts import ATTEMPTS_FILE, AttemptLog, Key, play
from jaxagent.runs.evaluation.results import ALL, curves, summarise, table
from jaxagent.runs.parts import Parts, open_parts
from jaxagent.types import Episode, Task

EVALUATION_FILE = "evaluation.json"
CONTENTS = "contents"  # in what is evaluated: digests of what the environment reads besides the tasks
CURVE_FILE = "evaluation.html"
HELD_OUT, TRAIN = SPLITS = ("held_out", "train")
# Sections of the config that make an attempt what it is, less what does not: where files lie, how many tasks there are.
_SECTIONS = {
    "model": ("path",),
    "tokenizer": ("path",),
    "data": ("num_eval",),
    "env": ("max_failed_steps", "concurrent_episodes"),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What one command asks for; see jaxagent/evaluate.py. None = as described there."""

    checkpoint: str
    split: str
    tasks: int | None
    samples: int | None
    k: tuple[int, ...] | None
    temperature: float | None
    greedy: bool
    seed: int | None
    min_score: float
    retry_failed: bool
    out: str | None


def run(cfg: Config, options: Options) -> dict[str, Any]:
    """Evaluates, and returns what the last line of stdout says.

    Raises:
      ConfigError: a mistake in config or options, before any device work; files of another evaluation in the way.
      EngineError: generation failed; the same call again goes on.
    """
    options = completed(cfg, options)
    source = policy.choose(cfg, options.checkpoint)
    cfg = dataclasses.replace(policy.configured(cfg, source), seed=options.seed)
    if options.split == HELD_OUT and options.tasks is not None:
        cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, num_eval=options.tasks))
    check(cfg)
    devices.keep_compiled_programs()
    with Progress() as progress, open_parts(cfg, progress.note, options.split == TRAIN) as parts:
        tasks = parts.heldout
        if options.split == TRAIN:
            tasks = balanced_sample(parts.train, options.tasks or cfg.data.num_eval, cfg.data.seed)
        if options.tasks is not None and len(tasks) < options.tasks:
            progress.note(f"there are only {len(tasks)} tasks")
        out = Path(options.out) if options.out else default_out(cfg, options, source)
        record = {
            "policy": str(source),
            "evaluated": what_is_evaluated(parts, options, source),
            # What may differ between calls that share attempts: more of them can be asked for later.
            "asked": {
                "tasks": len(tasks),
                "samples": options.samples,
                "k": list(options.k),
                "min_score": options.min_score,
            },
            "results": None,
        }
        record["evaluated"] = begin(out, record, progress.note)
        progress.note(f"{source}: {len(tasks)} {options.split} tasks x {options.samples} attempts, in {out}")
        started = time.monotonic()
        of_environment = parts.environment
        log = AttemptLog(out / ATTEMPTS_FILE, of_environment.score, source.stage, source.step, cost=of_environment.cost)
        with contextlib.closing(log):
            log.check_same(tasks)
            todo = attempts_left(tasks, options, log)
            if todo:
                play_all(parts, options, source, todo, log, progress)
        results = summarise(tasks, options.samples, options.k, options.min_score, log.attempts)
        seconds = time.monotonic() - started
    timing = {"attempts_played": len(todo), "seconds": round(seconds, 2)}
    record |= {"results": results, "this_call": timing, "config": to_dict(cfg)}
    text = table(results) + f"\n{len(todo)} attempts played in this call, {duration(seconds)} with start-up"
    title = "pass@k over k, with the 95 % interval of all tasks"
    chart = charts.line_chart(title, curves(results), x="k", y="pass@k")
    files.replace(out / CURVE_FILE, page(f"{cfg.workdir}: {source}", chart, text))
    files.replace_json(out / EVALUATION_FILE, record)
    print(text)
    return {
        "checkpoint": str(source),
        **{name: record["asked"][name] for name in ("tasks", "samples", "min_score")},
        **{name: record["evaluated"][name] for name in ("split", "seed", "temperature", "score")},
        "attempts": results["attempts"],
        "failed": results["failed"],
        "failure": results["failure"],
        "pass_at_k": results["pass_at_k"][ALL],
        **{name: results[name] for name in ("cost_mean",) if name in results},
        **timing,
        "out": str(out),
    }


def completed(cfg: Config, options: Options) -> Options:
    """The options with everything that was left open decided.

    Raises:
      ConfigError: options that do not go together.
    """
    temperature = 0.0 if options.greedy else options.temperature
    temperature = cfg.rl.sampling.temperature if temperature is None else temperature
    if options.greedy and options.temperature:
        raise ConfigError("--greedy and --temperature exclude each other.")
    if temperature and not temperature >= LEAST_TEMPERATURE:  # written so that NaN fails
        raise ConfigError(f"--temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE:g}, got {temperature:g}.")
    samples = options.samples or (8 if temperature else 1)
    if not temperature and samples > 1:
        raise ConfigError(f"--samples={samples}: greedy attempts at a task are all alike, so there is only one.")
    ks = options.k or tuple(2**i for i in range(samples.bit_length()))
    if max(ks) > samples:
        raise ConfigError(f"--k={max(ks)} needs --samples={max(ks)} or more, got {samples}.")
    return dataclasses.replace(
        options,
        temperature=temperature,
        samples=samples,
        k=tuple(sorted(set(ks))),
        seed=cfg.seed if options.seed is None else options.seed,
    )


def what_is_evaluated(parts: Parts, options: Options, source: policy.PolicySource) -> dict[str, Any]:
    """What every attempt in a folder has in common, as JSON values.

    Among it is by content what the environment reads besides the tasks, which a path does not tell: a corpus,
    documents, a shop. Of an environment that reads nothing else there is no such key.
    """
    config = to_dict(parts.cfg)
    sections = {
        section: {name: value for name, value in config[section].items() if name not in apart}
        for section, apart in _SECTIONS.items()
    }
    if config["roles"]:
        sections["roles"] = config["roles"]
    checkpoint = {"stage": source.stage, "step": source.step, "bundle": source.bundle, "digest": source.digest}
    description = {
        "checkpoint": checkpoint,
        "split": options.split,
        "seed": options.seed,
        "temperature": options.temperature,
        "score": parts.environment.score,
        "tokenizer": parts.tokenizer.digest(),
        "config": sections | {"numerics": parts.cfg.numerics},
    }
    code = provenance.own_code((parts.cfg.env, parts.cfg.roles))
    if contents := parts.contents() | {f"code of {file}": digest for file, digest in code.items()}:
        description[CONTENTS] = contents
    return json.loads(json.dumps(description))  # as it is read back


def default_out(cfg: Config, options: Options, source: policy.PolicySource) -> Path:
    """A folder of its own for every policy, split, temperature and seed."""
    name = f"{source.label}_{options.split}_temperature{options.temperature:g}_seed{options.seed}"
    return Path(cfg.workdir) / EVALUATIONS_FOLDER / name


def begin(out: Path, record: Mapping[str, Any], note: Callable[[str], None]) -> dict[str, Any]:
    """Writes what is evaluated to a new folder, and makes sure that an older one is of the same.

    A folder of an earlier version does not say what its environment read. Nobody can tell whether that was the same:
    its attempts are taken, every call says that this was not compared, and the folder never claims that it was.

    Returns:
      what is evaluated, less the contents of which the folder does not say anything.

    Raises:
      ConfigError: the folder holds attempts of something else.
    """
    path = out / EVALUATION_FILE
    if path.is_file():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))["evaluated"]
            before |= {"config": modern(before["config"])} if "config" in before else {}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"'{path}' does not say what was evaluated: set another --out.") from error
        now = dict(record["evaluated"])
        contents, contents_before = now.pop(CONTENTS, {}), before.get(CONTENTS, {})
        unnamed = [name for name in contents if name not in contents_before]
        if named := {name: digest for name, digest in contents.items() if name in contents_before}:
            now[CONTENTS] = named
        if different := difference(before, now):
            name, there, ours = different
            raise ConfigError(
                f"'{out}' holds attempts with {name} = {there!r}, here it is {ours!r}: set another --out."
            )
        if unnamed:
            note(f"'{out}' does not say with which {', '.join(unnamed)} its attempts were made: that is not compared")
        return now
    if (out / ATTEMPTS_FILE).exists():
        raise ConfigError(f"'{out}' holds attempts, and no {EVALUATION_FILE} to say of what: set another --out.")
    out.mkdir(parents=True, exist_ok=True)
    files.replace_json(path, record)
    return record["evaluated"]


def difference(there: Any, ours: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The first value that differs between two trees of JSON values, by its dotted name; None when there is none."""
    if not isinstance(there, dict) or not isinstance(ours, dict):
        return None if there == ours else (name, there, ours)
    for key in (*there, *(key for key in ours if key not in there)):
        different = difference(there.get(key), ours.get(key), f"{name}.{key}".lstrip("."))
        if different:
            return different
    return None


def attempts_left(tasks: Sequence[Task], options: Options, log: AttemptLog) -> list[tuple[Task, int]]:
    """The attempts that are still to be played, those at one task next to each other."""

    def is_missing(key: Key) -> bool:
        attempt = log.attempts.get(key)
        return attempt is None or (options.retry_failed and attempt.score is None)

    return [(task, sample) for task in tasks for sample in range(options.samples) if is_missing((task.id, sample))]


def play_all(
    parts: Parts,
    options: Options,
    source: policy.PolicySource,
    todo: Sequence[tuple[Task, int]],
    log: AttemptLog,
    progress: Progress,
) -> None:
    """Starts an engine with the policy and plays.

    Raises:
      EngineError: generation failed, or attempts did not end.
    """
    sampling = SamplingConfig(options.temperature, top_p=1.0, top_k=0, min_p=0.0)
    weights, version = policy.load(parts, source)
    with parts.engine(weights, version) as driver:
        parts.roles.start()
        rollout = parts.rollout(driver, sampling, options.samples)
        progress.stage("evaluate", len(todo))
        attempts_done, failed, tokens, started = 0, 0, 0, time.monotonic()

        def on_episode(episode: Episode) -> None:
            nonlocal attempts_done, failed, tokens
            log.append(episode)
            attempts_done += 1
            failed += episode.stop_reason.is_failure
            tokens += sum(map(len, episode.trajectories))
            progress.update(attempts_done, {"tokens_per_s": tokens / (time.monotonic() - started), "failed": failed})

        at_once = parts.cfg.concurrent_episodes
        deadline = batch_deadline_s(len(todo), at_once, parts.cfg.env.episode_timeout_s)
        parts.workers.run(play(todo, rollout, at_once, deadline, on_episode), deadline + STOP_TIMEOUT_S)
        seconds = time.monotonic() - started
    if attempts_done < len(todo):
        raise EngineError(
            f"{len(todo) - attempts_done} attempts did not end in {deadline:.0f} s; the same call again goes on"
        )
    progress.note(
        f"{attempts_done} attempts, {tokens} tokens in {duration(seconds)}: {number(tokens / seconds)} tokens/s"
    )


def page(title: str, chart: str, text: str) -> str:
    """A chart and a table, as one self-contained page."""
    return charts.document(
        title,
        f'<h1>{html.escape(title)}</h1><div class="charts">{chart}</div><h2>Results</h2>'
        f'<pre class="config">{html.escape(text)}</pre>',
    )
