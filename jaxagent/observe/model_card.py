"""README.md of an exported policy: the model card that the Hugging Face hub reads, made of what the workdir holds.

A run writes it when it ends, `python -m jaxagent.observe.report WORKDIR` anew, for example after a replay. With it the
folder can be uploaded as it is: `hf upload NAME RUN/policy`. Licence and notice of the model that the run began with
are copied beside it. A card without the line `MADE` is somebody's own and stays as it is.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from jaxagent.io import files
from jaxagent.observe.files import CONFIG_FILE, OUTDATED_FILE, POLICY_FOLDER, RUN_FILE, SUMMARY_FILE

CARD_FILE = "README.md"
_NOT_YET = (
    "Not yet. With the run's folder, `jaxagent replay --config.workdir=RUN --verify=5` trains it again and compares "
    "the weights by SHA-256; `jaxagent report RUN` then writes the verdict here."
)
_OWN = "The run began with random weights, which carry nobody else's licence: choose one, and write `license:` above."
MADE = "<!-- Made by jaxagent from the run's files; without this line it is not made anew. -->"
_LEGAL = re.compile(r"(licen[cs]e|notice|copying|use_policy)(\.\w+)?", re.IGNORECASE)
_TERMS = re.compile(r"^(license(?:_name|_link)?): *(\S.*?) *$", re.MULTILINE)
_CACHED = re.compile(r"(?:^|/)models--([\w.-]+?)--([\w.-]+)/snapshots/")  # a model in the hub's cache


def write(workdir: pathlib.Path) -> None:
    """Writes the card of the policy that a finished run has exported; nothing where there is none.

    Raises:
      OSError: the disk is full, or failed.
    """
    folder = workdir / POLICY_FOLDER
    card = folder / CARD_FILE
    if not folder.is_dir() or (folder / OUTDATED_FILE).exists() or MADE not in files.text_of(card, MADE):
        return
    config, summary, run = (files.json_of(workdir / name) for name in (CONFIG_FILE, SUMMARY_FILE, RUN_FILE))
    terms: dict[str, str] = {}
    base = pathlib.Path(config["model"]["path"] or "/nowhere")
    if base.is_dir():
        legal = [path for path in sorted(base.iterdir()) if path.is_file() and _LEGAL.fullmatch(path.name)]
        for path in legal:
            shutil.copyfile(path, folder / path.name)
        terms = _terms(base, [path.name for path in legal])
    verdicts = [files.json_of(path) for path in sorted((workdir / "replay").glob("verify-*.json"))]
    files.replace(card, text(config, summary, run, terms, verdicts))


def text(
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    run: Mapping[str, Any],
    terms: Mapping[str, str],
    verdicts: list[dict[str, Any]],
) -> str:
    """The card, of config.json, summary.json and run.json, and of certificates of `jaxagent.replay --verify`.

    `terms`: `license`, `base_model` and the like, of the model that the run began with.
    """
    env, source, path = config["env"]["name"], config["data"]["source"], config["model"]["path"]
    stage = config["stages"][-1]
    data = source["name"] if isinstance(source, Mapping) else str(source)
    scores = list(_scores(summary, stage))
    front: dict[str, Any] = {**terms, "library_name": "transformers", "pipeline_tag": "text-generation"}
    front["tags"] = ["jaxagent", "reinforcement-learning", "agent", env]
    if scores:
        dataset = {"name": f"held-out tasks of {data}", "type": re.sub(r"\W+", "-", data).strip("-").lower() or "tasks"}
        metrics = [{"type": key.partition("/")[2], "value": after, "name": key} for key, _, after in scores]
        result = {"task": {"type": "text-generation"}, "dataset": dataset, "metrics": metrics}
        front["model-index"] = [{"name": f"{env} agent", "results": [result]}]
    rows = [
        f"| `{key}` | {'-' if before is None else f'{before:.4g}'} | {after:.4g} |" for key, before, after in scores
    ]
    header = [f"| on held-out tasks | before {stage} | after {stage} |", "| --- | --- | --- |"]
    licence = "See that of the model that the run began with." if path else _OWN
    if "license" in terms:
        licence = f"`{terms['license']}`, as that of the model that the run began with."
    first = (run.get("starts") or [{}])[0]
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front.items()]
    body = files.text_of(pathlib.Path(__file__).with_suffix(".md")).format(
        name=f"{env} agent",
        env=env,
        data=data,
        start=f"`{terms.get('base_model') or pathlib.PurePath(path).name}`" if path else "random weights",
        stages=", ".join(config["stages"]),
        arguments=" ".join(_arguments(first.get("command", ""))),
        seed=config.get("seed"),
        numerics=config.get("numerics"),
        devices=", ".join(first.get("devices", ["unknown devices"])),
        commit=first.get("commit") or "(unknown)",
        figures="\n".join([*header, *rows]) if rows else "No evaluation was part of the run.",
        verified="\n".join(map(_verdict, verdicts)) or _NOT_YET,
        licence=licence,
    )
    return "\n".join(["---", *lines, "---", MADE, body])


def _scores(summary: Mapping[str, Any], stage: str) -> Iterator[tuple[str, float | None, float]]:
    """Name, value before and after the last stage, of what the summary says of held-out tasks."""
    for key, after in summary.items():
        name = key.removesuffix(f"_after_{stage}")
        if name != key and isinstance(after, (int, float)) and math.isfinite(after):
            yield name, summary.get(f"{name}_before_{stage}"), after


def _verdict(certificate: Mapping[str, Any]) -> str:
    why = f" ({'; '.join(certificate['why'])})" if certificate.get("why") else ""
    steps, seal = certificate["run"]["steps_recorded"], certificate["digests"]["record"]
    return f"- A replay of {steps} recorded steps: **{certificate['verdict']}**{why}; seal of the record `{seal}`."


def _arguments(command: str) -> Iterator[str]:
    """What a command line says of the config, but for this machine's workdir."""
    words = iter(shlex.split(command)[1:])
    for word in words:
        if word.startswith("--config") and "=" not in word:
            word = f"{word}={next(words, '')}"
        if word.startswith("--config") and not word.startswith("--config.workdir="):
            yield shlex.quote(word)


def _terms(base: pathlib.Path, legal: list[str]) -> dict[str, str]:
    """What the base model's own card says of its licence, and its name, where the hub's cache tells it."""
    front = re.match(r"---\n(.*?)\n---", files.text_of(base / CARD_FILE), re.DOTALL)
    terms = {key: value.strip("\"'") for key, value in _TERMS.findall(front[1] if front else "")}
    if cached := _CACHED.search(f"{base}/"):
        terms["base_model"] = f"{cached[1]}/{cached[2]}"
    if "license" not in terms and legal:
        terms |= {"license": "other", "license_name": "as-the-base-model", "license_link": legal[0]}
    return terms
