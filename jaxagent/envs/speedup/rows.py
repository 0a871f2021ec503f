"""Tasks to make faster: the form of our rows, and KernelBench's.

Ours have in `metadata["speedup"]`:

    {"language": "numpy", "reference": "def f(x): ...", "inputs": [{"dtype": "float64", "shape": [512], "draw":
     "rng.random(512)"}], "output": {"dtype": "float64", "shape": []}, "tolerance": 1e-9, "full_speedup": 5.0,
     "head": "", "solution": "def f(x): ..."}

In "c" the function is `void f(const T0 *input0, ..., T *output)`. `draw` is a Python expression of `rng`, a NumPy
generator with a fresh seed, and `np`.

KernelBench's (https://arxiv.org/abs/2502.10517; github.com/ScalingIntelligence/KernelBench) have the columns level,
name, problem_id and code, which defines Model, get_inputs and get_init_inputs in PyTorch. A GPU measures them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.data import fields
from jaxagent.data.fields import RowError
from jaxagent.envs.forms import TEXT, shaped
from jaxagent.types import Task

KEY = "speedup"
KERNELBENCH = "kernelbench"  # the key of its code, in a task's metadata
COLUMNS = ("level", "name", "problem_id", "code")  # of KernelBench's rows
DTYPES = ("float64", "float32", "int64", "int32", "uint8", "bool")
MOST = 2**21  # numbers of all inputs and the output
_ARRAY = {"dtype": DTYPES, "shape": [object]}
_FORM = {
    "language": ("numpy", "c"),
    "reference": TEXT,
    "inputs": [{**_ARRAY, "draw": TEXT}],
    "output": _ARRAY,
    "tolerance": float,
    "full_speedup": float,
    "head~": str,
    "solution~": str,
}


def of_task(task: Task) -> dict[str, Any]:
    """What a task has in `KEY`, checked. Raises ConfigError: it is of another form, or one of KernelBench's."""
    if KERNELBENCH in task.metadata:
        raise ConfigError(
            f"task '{task.id}' is one of KernelBench's: its PyTorch programs are measured on a GPU with torch in the "
            "sandbox, and sandboxes have no GPU. Leave its rows out, or take those of data_pipelines.speedup_tasks."
        )
    try:
        row = {"head": "", "solution": ""} | shaped(task.metadata.get(KEY), _FORM, f"metadata.{KEY}")
        if not row["inputs"]:
            raise RowError(
                f"metadata.{KEY}.inputs", "must not be empty: what is always the same can be learnt by heart"
            )
        shapes = [array["shape"] for array in (*row["inputs"], row["output"])]
        if not all(type(n) is int and n > 0 for shape in shapes for n in shape) or sum(map(math.prod, shapes)) > MOST:
            raise RowError(f"metadata.{KEY}", f"shapes must be whole numbers above 0, and have {MOST:,} numbers in all")
    except RowError as error:
        raise ConfigError(f"task '{task.id}': {error}.") from None
    return row


def is_published(row: Mapping[str, Any]) -> bool:
    """Whether a row is one of KernelBench's."""
    return {"level", "name", "code"} <= row.keys() and "class Model" in str(row["code"])


def to_task(row: Mapping[str, Any]) -> Task:
    """Converts one of KernelBench's rows. Raises RowError: a column is missing, or the code defines another thing."""
    code, kind = fields.text(row, "code"), f"level{fields.get(row, 'level')}/{fields.text(row, 'name')}"
    if missing := [name for name in ("get_inputs", "get_init_inputs") if f"def {name}" not in code]:
        raise RowError("code", f"it must define {missing[0]}")
    return Task(id=f"kernelbench/{kind}", prompt=code, answers=(), kind=kind, metadata={KERNELBENCH: code})
