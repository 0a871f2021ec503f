r"""The word problems of `arithmetic`, with demonstrations of a planner that sends others to compute (AgentFlow).

    Query: Oscar packs 287 lemons into each of 46 boxes and has 118 more. How many lemons are there?
    Plan: multiply, add
    Step: Context: / Sub-Goal: 287 * 46 + 118 / Tool Name: Python_Code_Generator_Tool
    Answer: \boxed{13320}

Each call of the planner is a demonstration of its own. A problem of one step goes to either tool. Of the problems of
two steps a part (`estimate_frac`) goes to the generator as a whole, which only estimates, and the answer is wrong: what
reinforcement learning then has to unlearn. The others go to Python as a whole, or step by step to either tool.

Written by the source `arithmetic_plans`: splits as `arithmetic` has them, full.jsonl and texts.jsonl.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.data_pipelines import arithmetic, generated
from jaxagent.data_pipelines.arithmetic import HELDOUT, HELDOUT_TEMPLATES, TRAIN
from jaxagent.envs.agentflow import prompts
from jaxagent.envs.agentflow import roles as arithmetic_team
from jaxagent.envs.agentflow.reading import GENERATOR, PYTHON

WORDS = {"+": "add", "-": "take", "*": "multiply"}


def expressions(program: str) -> tuple[str, list[str]]:
    """A problem as one expression, and as a list of expressions of one operation each.

    Args:
      program: of a row of `arithmetic`: "n = 287 * 46\\nprint(n + 118)".
    """
    first, _, printed = program.removeprefix("n = ").partition("\n")
    rest = printed.removeprefix("print(").removesuffix(")")
    if rest == "n":
        return first, [first]
    inner = f"( {first} )" if "*" in rest else first  # blanks: a number has the tokens that it has in the question
    value, _ = arithmetic_team.compute(first) or (0, 0)
    return rest.replace("n", inner), [first, rest.replace("n", str(value))]


def demonstration(row: Mapping[str, Any], estimate_frac: float, steps: int, role_rows: bool) -> list[dict[str, Any]]:
    """The conversations of one episode, in their order. Which way it goes depends on the problem alone.

    Args:
      row: of `arithmetic`.
      estimate_frac: of problems of two steps, those that are only estimated.
      steps: at most, of the environment.
      role_rows: with what executor and verifier say.
    """
    chance = random.Random(f"plan/{row['id']}")
    prompt = functools.partial(prompts.prompt, style="compact", coder=False)
    whole, parts = expressions(row["metadata"]["program"])
    question, operations = row["prompt"], [WORDS[sign] for part in parts for sign in WORDS if f" {sign} " in part]
    if len(parts) == 1:
        todo = [(whole, chance.choice((PYTHON, GENERATOR)))]
    elif chance.random() < estimate_frac:
        todo = [(whole, GENERATOR)]
    elif chance.random() < 0.5:
        todo = [(whole, PYTHON)]
    else:
        todo = [(part, chance.choice((PYTHON, GENERATOR))) for part in parts]
    plan = f" {', '.join(operations)}"
    said = [("planner", prompt("plan", question=question), plan)]
    memory: prompts.Memory = ()
    result = ""
    for number, (sub_goal, tool) in enumerate(todo, 1):
        asked = prompt("step", memory=memory, question=question, plan=plan, number=number, steps=steps)
        said.append(("planner", asked, f"Context:\nSub-Goal: {sub_goal}\nTool Name: {tool}"))
        command = arithmetic_team.command(sub_goal, tool)
        said.append(("executor", prompt("executor", sub_goal=sub_goal, tool=tool), command))
        result = _result(sub_goal, tool)
        memory += (prompts.action(tool, sub_goal, command, result),)
        asked = prompt("verifier", memory=memory, question=question)
        said.append(("verifier", asked, arithmetic_team.conclusion(question, asked)))
    asked = prompt("final", memory=memory, question=question)
    said.append(("planner", asked, f" \\boxed{{{result}}}"))
    return [
        {
            "prompt": [{"role": "user", "content": asked}],
            "turns": [{"action": action, "observation": ""}],
            "id": row["id"],
            "kind": row["kind"],
            "role": role,
        }
        for role, asked, action in said
        if role == "planner" or role_rows
    ]


def _result(sub_goal: str, tool: str) -> str:
    computed = arithmetic_team.compute(sub_goal)
    if computed is None:
        raise ValueError(f"a demonstrated sub-goal cannot be computed: {sub_goal!r}")
    return str(computed[0]) if tool == PYTHON else arithmetic_team.answer(sub_goal)


def write(
    folder: Path, num: int, seed: int, num_demonstrations: int, estimate_frac: float, role_rows: bool, steps: int
) -> None:
    """Writes problems and demonstrations into `folder`, which must not exist yet.

    Args:
      folder: where they will stand.
      num: problems, all splits together.
      seed: of the draws; the same seed gives the same bytes.
      num_demonstrations: episodes, of training problems: first the dataset's, then further ones.
      estimate_frac, role_rows, steps: see `demonstration`.
    """
    stream = (row for row in arithmetic.generate(seed) if row["metadata"]["split"])
    tasks: dict[str, list[dict[str, Any]]] = {TRAIN: [], HELDOUT: [], HELDOUT_TEMPLATES: []}
    for row in itertools.islice(stream, num):
        tasks[row["metadata"]["split"]].append(row)
    if empty := [split for split in tasks if not tasks[split]]:
        raise ConfigError(f"data.source.num_tasks={num} is too few for a split {empty[0]}.")
    training = itertools.chain(tasks[TRAIN], (row for row in stream if row["metadata"]["split"] == TRAIN))
    episodes = [
        demonstration(row, estimate_frac, steps, role_rows) for row in itertools.islice(training, num_demonstrations)
    ]
    shown = list(itertools.chain.from_iterable(episodes))
    texts = generated.as_rows(tokenizer_texts(shown[:6_000]))
    generated.write_dataset(folder, tasks, {"full.jsonl": shown, "texts.jsonl": texts})


def tokenizer_texts(shown: list[dict[str, Any]]) -> Iterator[str]:
    """What occurs in conversations, and every number of up to three digits often enough to be one token."""
    for row in shown:
        yield row["prompt"][0]["content"]
        yield row["turns"][0]["action"]
    yield from arithmetic.tokenizer_texts([])
