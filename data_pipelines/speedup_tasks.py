"""Generates functions to make faster, in NumPy and C, for the environment `speedup`.

    python -m data_pipelines.speedup_tasks --out=data/speedup                     # every family
    python -m data_pipelines.speedup_tasks --out=data/folds --families=folds --style=plain --demonstrations=6000

    folds/sum_times      def f(p, q): return sum(a * b for a, b in zip(p, q))     one number of two vectors, in a loop
    numpy/chain          def f(a, b, v): return (a @ b) @ v                       six families of their own
    c/matmul             void f(const double *a, const double *b, double *out)    four families of their own

A task is a family and a shape. A fifth of these pairs is held out, whatever the names of the arguments (`heldout`), and
so are the folds of `UNSEEN` in all shapes (`heldout_families`). Each row has a solution, which earns all that its
`full_speedup` can give; that is well below what solutions reach on a machine without other work.

Demonstrations are of folds in the plain style, where the policy writes what follows `return`. A part of them
(`slow_frac`) is content with the reference's own loop, or with Python's sum over a vector: correct, and not faster, or
hardly. That is what reinforcement learning has to unlearn.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.command import amount, exit_code, part
from jaxagent.data_pipelines import generated
from jaxagent.envs.speedup import texts
from jaxagent.envs.speedup.rows import KEY

TRAIN, HELDOUT, HELDOUT_FAMILIES = "train", "heldout", "heldout_families"
HELDOUT_FRAC = 0.2
HEAD = "import numpy as np\n\n\ndef f({names}):\n    return "
NAMES = ("x, y", "u, v", "p, q", "r, s", "g, h", "m, n")
LENGTHS = tuple(range(1200, 3200, 200))
# name -> (of two numbers a and b; of two vectors)
ELEMENTS = {
    "plus": ("a + b", "{0} + {1}"),
    "minus": ("a - b", "{0} - {1}"),
    "times": ("a * b", "{0} * {1}"),
    "distance": ("abs(a - b)", "abs({0} - {1})"),
    "square": ("(a - b) ** 2", "({0} - {1}) ** 2"),
    "weight": ("a * a * b", "{0} * {0} * {1}"),
}
FOLDS = ("sum", "max", "min")
UNSEEN = ("max_times", "min_distance")


@dataclasses.dataclass(frozen=True)
class Family:
    """A function to make faster. `{n}` in its texts is the size; `draws`, `shapes` and `output` are formats of it."""

    language: str
    sizes: Sequence[int]
    shapes: Sequence[str]  # of the inputs: "n" or "n,n"
    output: str
    reference: str
    solution: str
    full_speedup: float
    draw: str = "rng.random({shape}) + 0.5"
    dtype: str = "float64"


def _c(arguments: str, before: str, inner: str) -> str:
    return f"void f({arguments}, double *out)\n{{\n    enum {{ n = {{n}} }};\n{before}{inner}}}\n"


FAMILIES = {
    "numpy/chain": Family(
        "numpy", (128, 160, 192, 224, 256), ("n,n", "n,n", "n"), "n",
        "def f(a, b, v):\n    return (a @ b) @ v\n",
        "def f(a, b, v):\n    return a @ (b @ v)\n", 4.0,
    ),
    "numpy/trace": Family(
        "numpy", (128, 160, 192, 224, 256), ("n,n", "n,n"), "",
        "import numpy as np\n\n\ndef f(a, b):\n    return np.trace(a @ b)\n",
        "def f(a, b):\n    return a.ravel() @ b.T.ravel()\n", 2.0,
    ),
    "numpy/diagonal": Family(
        "numpy", (128, 160, 192, 224, 256), ("n", "n,n"), "n,n",
        "import numpy as np\n\n\ndef f(d, a):\n    return np.diag(d) @ a\n",
        "def f(d, a):\n    return d[:, None] * a\n", 2.5,
    ),
    "numpy/pairs": Family(
        "numpy", (24, 32, 40, 48, 56), ("n,8", "n,8"), "n,n",
        "import numpy as np\n\n\ndef f(x, y):\n    return np.array([[((p - q) ** 2).sum() for q in y] for p in x])\n",
        "def f(x, y):\n    return ((x[:, None] - y) ** 2).sum(2)\n", 8.0,
    ),
    "numpy/prefix": Family(
        "numpy", (600, 800, 1000, 1200, 1400), ("n",), "n",
        "import numpy as np\n\n\ndef f(x):\n    return np.array([x[: i + 1].sum() for i in range(len(x))])\n",
        "import numpy as np\n\n\ndef f(x):\n    return np.cumsum(x)\n", 8.0,
    ),
    "numpy/counts": Family(
        "numpy", (2000, 3000, 4000, 5000, 6000), ("n",), "64",
        "import numpy as np\n\n\ndef f(x):\n    out = np.zeros(64, np.int64)\n    for i in x:\n        out[i] += 1\n"
        "    return out\n",
        "import numpy as np\n\n\ndef f(x):\n    return np.bincount(x, minlength=64)\n", 8.0,
        "rng.integers(0, 64, {shape})", "int64",
    ),
    "c/matmul": Family(
        "c", (96, 128, 160, 192, 224), ("n,n", "n,n"), "n,n",
        _c("const double *a, const double *b", "",
           "    for (int i = 0; i < n; i++)\n        for (int j = 0; j < n; j++) {\n            double s = 0;\n"
           "            for (int k = 0; k < n; k++)\n                s += a[i * n + k] * b[k * n + j];\n"
           "            out[i * n + j] = s;\n        }\n"),
        "__attribute__((optimize(\"O3\"))) "
        + _c("const double *restrict a, const double *restrict b",
             "    for (int i = 0; i < n * n; i++)\n        out[i] = 0;\n",
             "    for (int i = 0; i < n; i++)\n        for (int k = 0; k < n; k++)\n"
             "            for (int j = 0; j < n; j++)\n"
             "                out[i * n + j] += a[i * n + k] * b[k * n + j];\n").replace("*out", "*restrict out"), 1.5,
    ),
    "c/polynomial": Family(
        "c", (4000, 6000, 8000, 10000, 12000), ("n", "8"), "n",
        "#include <math.h>\n\n"
        + _c("const double *x, const double *c", "",
             "    for (int i = 0; i < n; i++) {\n        double s = 0;\n        for (int k = 0; k < 8; k++)\n"
             "            s += c[k] * pow(x[i], k);\n        out[i] = s;\n    }\n"),
        _c("const double *x, const double *c", "",
           "    for (int i = 0; i < n; i++) {\n        double s = 0;\n        for (int k = 7; k >= 0; k--)\n"
           "            s = s * x[i] + c[k];\n        out[i] = s;\n    }\n"), 6.0,
    ),
    "c/window": Family(
        "c", (4000, 6000, 8000, 10000, 12000), ("n",), "n",
        _c("const double *x", "",
           "    for (int i = 0; i < n; i++) {\n        double s = 0;\n        for (int k = 0; k < 64 && k <= i; k++)\n"
           "            s += x[i - k];\n        out[i] = s;\n    }\n"),
        _c("const double *x", "    double s = 0;\n",
           "    for (int i = 0; i < n; i++) {\n        s += x[i] - (i < 64 ? 0 : x[i - 64]);\n"
           "        out[i] = s;\n    }\n"), 6.0,
    ),
    "c/exponents": Family(
        "c", (128, 144, 160, 176, 192), ("n", "n"), "n,n",
        "#include <math.h>\n\n"
        + _c("const double *x, const double *y", "",
             "    for (int i = 0; i < n; i++)\n        for (int j = 0; j < n; j++)\n"
             "            out[i * n + j] = exp(x[i] + y[j]);\n"),
        "#include <math.h>\n\n"
        + _c("const double *x, const double *y",
             "    double a[n], b[n];\n    for (int i = 0; i < n; i++) {\n        a[i] = exp(x[i]);\n"
             "        b[i] = exp(y[i]);\n    }\n",
             "    for (int i = 0; i < n; i++)\n        for (int j = 0; j < n; j++)\n"
             "            out[i * n + j] = a[i] * b[j];\n"), 2.0,
    ),
}  # fmt: skip


def _shape(text: str, n: int) -> list[int]:
    return [n if part == "n" else int(part) for part in text.split(",") if part]


def family_row(name: str, n: int) -> dict[str, Any]:
    """The task of a family in one size."""
    family = FAMILIES[name]
    reference, solution = (text.replace("{n}", str(n)) for text in (family.reference, family.solution))
    inputs = [
        {"dtype": family.dtype, "shape": shape, "draw": family.draw.format(shape=tuple(shape))}
        for shape in (_shape(text, n) for text in family.shapes)
    ]
    fence = "python" if family.language == "numpy" else "c"
    forms = "; ".join(f"{one['dtype']}{one['shape']}" for one in inputs)
    output = {"dtype": family.dtype, "shape": _shape(family.output, n)}
    prompt = (
        f"Make this function faster.\n```{fence}\n{reference}```\nInputs: {forms}. Output: "
        f"{output['dtype']}{output['shape']}.\n"
    )
    metadata = {
        "language": family.language,
        "reference": reference,
        "inputs": inputs,
        "output": output,
        "tolerance": 1e-9,
        "full_speedup": family.full_speedup,
        "solution": solution,
    }
    return _row(name, str(n), prompt, metadata)


def fold_row(family: str, n: int, names: str, style: texts.Format) -> dict[str, Any]:
    """The task of a fold. In the plain style the policy writes what follows `return`."""
    loop, _, fast = fold_programs(family, names)
    head = HEAD.format(names=names)
    array = {"dtype": "float64", "shape": [n], "draw": f"rng.random({n}) + 0.5"}
    metadata = {
        "language": "numpy",
        "reference": head + loop,
        "inputs": [array, array],
        "output": {"dtype": "float64", "shape": []},
        "tolerance": 1e-9,
        "full_speedup": 5.0,
        "head": head if style == "plain" else "",
        "solution": fast if style == "plain" else head + fast,
    }
    return _row(f"folds/{family}", f"{n}/{names[0]}", f"def f({names}): return {loop} # {n}\n", metadata)


def fold_programs(family: str, names: str) -> tuple[str, str, str]:
    """(the reference's loop, Python's fold over a vector, NumPy's), each what follows `return`."""
    fold, element = family.split("_")
    scalar, vector = ELEMENTS[element]
    pair = names.split(", ")
    vector = vector.format(*pair)
    inside = vector if vector.startswith("abs") else f"({vector})"
    return f"{fold}({scalar} for a, b in zip({names}))", f"{fold}({vector})", f"{inside}.{fold}()"


def _row(kind: str, shape: str, prompt: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": f"{kind}/{shape}", "prompt": prompt, "answers": [], "kind": kind, "metadata": {KEY: metadata}}


def split_of(family: str, n: int) -> str:
    """The split of a family in one size."""
    if family in UNSEEN:
        return HELDOUT_FAMILIES
    digest = hashlib.blake2b(f"{family}/{n}".encode(), digest_size=4).digest()
    return HELDOUT if int.from_bytes(digest, "big") < HELDOUT_FRAC * 2**32 else TRAIN


def generate(seed: int, families: str, style: texts.Format) -> Iterator[tuple[str, dict[str, Any]]]:
    """(split, row) of all tasks that there are, in an order of the seed's."""
    folds = [f"{fold}_{element}" for fold in FOLDS for element in ELEMENTS]
    rows = [
        (split_of(family, n), fold_row(family, n, names, style))
        for family, n, names in itertools.product(folds, LENGTHS, NAMES)
    ]
    if families == "all":
        rows += [(split_of(name, n), family_row(name, n)) for name, family in FAMILIES.items() for n in family.sizes]
    random.Random(seed).shuffle(rows)
    yield from rows


def demonstration(row: Mapping[str, Any], slow_frac: float, number: int) -> dict[str, Any]:
    """An episode of a fold: a loop, or half of one, that it is content with; or the best, at once or after that."""
    draw = random.Random(f"demonstration/{row['id']}/{number}")
    names = row["prompt"][len("def f(") :].partition(")")[0]
    loop, half, fast = fold_programs(row["kind"].partition("/")[2], names)
    slow = draw.choice(((loop, draw.uniform(0.9, 1.1)), (half, draw.uniform(1.5, 3.0))))
    best = (fast, draw.uniform(10.0, 40.0))
    shown = [slow] if draw.random() < slow_frac else draw.choice(([best], [slow, best]))
    turns = [
        {"action": texts.program("plain", code), "observation": texts.measured("", speedup)} for code, speedup in shown
    ]
    turns.append({"action": texts.DONE, "observation": ""})
    return {"prompt": row["prompt"], "turns": turns, "id": row["id"], "kind": row["kind"]}


def write(
    folder: Path, seed: int, families: str, style: texts.Format, num_demonstrations: int = 0, slow_frac: float = 0.0
) -> None:
    """Writes the dataset described in the module's docstring into `folder`, which must not exist yet.

    Args:
      folder: where it will stand.
      seed: of the order; the same seed gives the same bytes.
      families: "folds", or "all".
      style: in which the policy writes.
      num_demonstrations: rows of full.jsonl, from training tasks.
      slow_frac: see `demonstration`.

    Raises:
      ConfigError: demonstrations of another style than the plain one.
    """
    if num_demonstrations and style != "plain":
        raise ConfigError(f"demonstrations of speedup_tasks are written in the style 'plain' only, not '{style}'.")
    tasks: dict[str, list[dict[str, Any]]] = {TRAIN: [], HELDOUT: [], HELDOUT_FAMILIES: []}
    for split, row in generate(seed, families, style):
        tasks[split].append(row)
    folds = [row for row in tasks[TRAIN] if row["kind"].startswith("folds/")]
    shown = [demonstration(row, slow_frac, i) for i, row in zip(range(num_demonstrations), itertools.cycle(folds))]
    lines = generated.as_rows(generated.episode_texts(shown[:2000]) or [row["prompt"] for row in folds])
    generated.write_dataset(folder, tasks, {"full.jsonl": shown, "texts.jsonl": lines}, need_answers=False)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="what to write; must not exist")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", choices=("folds", "all"), default="all")
    parser.add_argument("--style", choices=tuple(texts.TAGS), default="fenced", help="in which the policy writes")
    parser.add_argument("--demonstrations", type=amount, default=0)
    parser.add_argument("--slow_frac", type=part, default=0.8, help="demonstrations that are content with a loop")
    return generated.finish(
        parser,
        argv,
        lambda args: write(args.out, args.seed, args.families, args.style, args.demonstrations, args.slow_frac),
        "--config=speedup ",
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
