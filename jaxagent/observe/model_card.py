"""README.md of an exported model: the model card that the Hugging Face hub reads, made of what the workdir holds.

A run writes it when it ends, `python -m jaxagent.observe.report WORKDIR` anew, for example after a replay. With it a
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
MADE = "<!-- Made by jaxagent from the run's files; without this line it is not made anew. -->"
ADAPTER_FOLDER = "adapter"
_LEGAL = re.compile(r"(licen[cs]e|notice|copying|use_policy)(\.\w+)?", re.IGNORECASE)
_FIELD = re.compile(r"^(license(?:_name|_link)?|base_model): *(\S.*?) *$", re.MULTILINE)
_OWN_TERMS = (
    "The run began with random weights, so nobody else's licence is on them: choose one, and write `license:` above. "
    "What the data's licence asks for stays."
)


def write(workdir: pathlib.Path) -> None:
    """Writes the cards of what a finished run has exported, and the base model's licence beside each.

    Raises:
      OSError: the disk is full, or failed.
    """
    for folder in (workdir / POLICY_FOLDER, workdir / ADAPTER_FOLDER):
        card = folder / CARD_FILE
        if not folder.is_dir() or (folder / OUTDATED_FILE).exists() or MADE not in _text(card, MADE):
            continue
        config, summary, run = (_json(workdir / name) for name in (CONFIG_FILE, SUMMARY_FILE, RUN_FILE))
        base = pathlib.Path(config.get("model", {}).get("path") or "")
        legal = [path for path in _listed(base) if _LEGAL.fullmatch(path.name)] if base.name else []
        for path in legal:
            shutil.copyfile(path, folder / path.name)
        terms = _terms(base, [path.name for path in legal]) if base.name else {}
        verdicts = [_json(path) for path in sorted((workdir / "replay").glob("verify-*.json"))]
        files.replace(card, text(folder.name, config, summary, run, terms, verdicts))


def text(
    kind: str,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    run: Mapping[str, Any],
    terms: Mapping[str, str],
    verdicts: list[dict[str, Any]],
) -> str:
    """The card.

    Args:
      kind: "policy" or "adapter".
      config, summary, run: config.json, summary.json and run.json.
      terms: `license`, `base_model` and the like, of the model that the run began with.
      verdicts: certificates of `jaxagent.replay --verify`.
    """
    env, source = config["env"].get("name", ""), config["data"]["source"]
    data = source["name"] if isinstance(source, Mapping) else str(source)
    name, stage, model, first = f"{env} agent", config["stages"][-1], config["model"], (run.get("starts") or [{}])[0]
    scores = list(_scores(summary, stage))
    front: dict[str, Any] = dict(terms) | {
        "library_name": "transformers" if kind == "policy" else "peft",
        "pipeline_tag": "text-generation",
        "tags": ["jaxagent", "reinforcement-learning", "agent", env],
    }
    if scores:
        of_data = {"name": f"held-out tasks of {data}", "type": re.sub(r"\W+", "-", data).strip("-").lower() or "tasks"}
        metrics = [{"type": key.partition("/")[2], "value": after, "name": key} for key, _, after in scores]
        result = {"task": {"type": "text-generation"}, "dataset": of_data, "metrics": metrics}
        front["model-index"] = [{"name": name, "results": [result]}]
    start = pathlib.PurePath(model["path"]).name if model.get("path") else "random weights"
    begun = f"`{terms['base_model']}`" if "base_model" in terms else start
    license_line = f"`{terms['license']}`, as the model that the run began with" if "license" in terms else ""
    load = 'AutoModelForCausalLM.from_pretrained("FOLDER")'
    if kind == "adapter":
        load = 'AutoPeftModelForCausalLM.from_pretrained("FOLDER")'
    lines = [
        *("---", *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front.items()), "---", MADE),
        f"# {name}\n",
        f"A language model trained as an agent in the environment `{env}`, on tasks of `{data}`, by jaxagent; stages: "
        f"{', '.join(config['stages'])}. It began with {begun}.\n",
        "## Use\n",
        "```python",
        f"from {'transformers' if kind == 'policy' else 'peft'} import {load.partition('.')[0]}",
        f"\nmodel = {load}",
        "```\n",
        "It answers in the form that it was trained in; `jaxagent serve --model=FOLDER` serves it over HTTP.\n",
        "## Make it again\n",
        f"```bash\njaxagent train {' '.join(_arguments(first.get('command', '')))}\n```\n",
        f"With seed {config.get('seed')}, `numerics={config.get('numerics')}`, on "
        f"{', '.join(first.get('devices', ['unknown devices']))}, by the code {first.get('commit') or '(unknown)'}.\n",
        "## Figures\n",
        *_table(scores, stage),
        "## Verified\n",
        *_verified(verdicts),
        "## Licence\n",
        license_line or (_OWN_TERMS if not model.get("path") else f"See that of {start}, which the run began with."),
    ]
    return "\n".join(lines) + "\n"


def _scores(summary: Mapping[str, Any], stage: str) -> Iterator[tuple[str, float | None, float]]:
    """Name, value before and after the last stage, of what the summary says of held-out tasks."""
    for key, after in summary.items():
        name = key.removesuffix(f"_after_{stage}")
        if name != key and isinstance(after, (int, float)) and math.isfinite(after):
            yield name, summary.get(f"{name}_before_{stage}"), after


def _table(scores: list[tuple[str, float | None, float]], stage: str) -> Iterator[str]:
    if not scores:
        yield "No evaluation was part of the run.\n"
        return
    yield from (f"| on held-out tasks | before {stage} | after {stage} |", "| --- | --- | --- |")
    for name, before, after in scores:
        yield f"| `{name}` | {'-' if before is None else f'{before:.4g}'} | {after:.4g} |"
    yield ""


def _verified(verdicts: list[dict[str, Any]]) -> Iterator[str]:
    for one in verdicts:
        why = f" ({'; '.join(one['why'])})" if one.get("why") else ""
        seal = one.get("digests", {}).get("record", "unknown")
        asked = one.get("run", {}).get("steps_recorded", "?")
        yield f"- A replay of {asked} recorded steps: **{one.get('verdict')}**{why}; seal of the record `{seal}`."
    if not verdicts:
        yield "Not yet. With the run's folder, `jaxagent replay --config.workdir=RUN --verify=5` trains it again and "
        yield "compares the weights by SHA-256; `jaxagent report RUN` then writes the verdict here."
    yield ""


def _arguments(command: str) -> Iterator[str]:
    """What a command line says of the config, but for this machine's workdir."""
    words = iter(shlex.split(command)[1:])
    for word in words:
        if word.startswith("--config") and "=" not in word:
            word = f"{word}={next(words, '')}"
        if word.startswith("--config") and not word.startswith("--config.workdir="):
            yield shlex.quote(word)


def _terms(base: pathlib.Path, legal: list[str]) -> dict[str, str]:
    """What the base model's own card says of its licence, and its name on the hub, where its folder tells it."""
    card = base / CARD_FILE
    words = _text(card)
    front = re.match(r"---\n(.*?)\n---", words, re.DOTALL)
    terms = {key: value.strip("\"'") for key, value in _FIELD.findall(front[1] if front else "")}
    if MADE not in words:  # else the base is an export of ours, and this the model that it began with
        terms.pop("base_model", None)
    cached = re.search(r"(?:^|/)models--([\w.-]+?)--([\w.-]+)/snapshots/", f"{base}/")  # as the hub's cache has it
    if cached:
        terms["base_model"] = f"{cached[1]}/{cached[2]}"
    if "license" not in terms and legal:
        terms |= {"license": "other", "license_name": "as-the-base-model", "license_link": legal[0]}
    return terms


def _listed(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []


def _text(path: pathlib.Path, otherwise: str = "") -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else otherwise


def _json(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(_text(path, "{}"))
