"""What ECHO's auxiliary term adds to the train step of its own recipe: the terminal's laptop, with and without it.

    python -m benchmarks.echo [--repetitions=9] [--numerics=fast]

Two learners of `configs/echo.py` (`laptop-grpo` and `laptop`) take steps on the same synthetic episodes in turn, in one
process, so that other work on the machine meets both; the ratio is that of the medians. Episodes have the lengths of
the laptop's tasks: a prompt of 12 tokens, one or two commands of 8 with 5 observed tokens each, an end of 3.

No second forward pass: `matmuls` counts the layers' matrix products in the program that adds up gradients, forward and
backward together; both learners must have as many. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics

import jax
import numpy as np

from benchmarks.train_step import Learner, Shape
from jaxagent.config import parse
from jaxagent.configs import echo
from jaxagent.learner.update import shard

TERMINAL = Shape(prompt=12, action=8, observation=5, last=3)
PRESETS = {"grpo": "laptop-grpo", "echo": "laptop"}


def make(preset: str, numerics: str) -> Learner:
    """A learner of the recipe."""
    raw = echo.get_config(preset)
    raw.numerics = numerics
    return Learner.of(parse(raw), seed=0, shape=TERMINAL)


def matmuls(jaxpr: jax.extend.core.Jaxpr, vocab_rows: int) -> int:
    """Matrix products of a program's layers, those inside its loops and calls included, each once.

    Products with the vocabulary (`vocab_rows` of it) are left out: they come in chunks, more for more targets.
    """
    found = 0
    for equation in jaxpr.eqns:
        shapes = [variable.aval.shape for variable in (*equation.invars, *equation.outvars)]
        found += equation.primitive.name == "dot_general" and not any(vocab_rows in shape for shape in shapes)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            found += matmuls(inner, vocab_rows) if hasattr(inner, "eqns") else 0
    return found


def matmuls_of_update(learner: Learner) -> int:
    """Of the program that runs once for every micro-batch."""
    (batch, *_), *_ = learner.updates()
    policy, state = learner.programs.update.policy, learner.state
    temperature = np.float32(1.0)
    with jax.set_mesh(learner.mesh):
        batch = shard(batch, learner.mesh)
        grads, tally = jax.eval_shape(policy.zeros, state.params, batch, temperature, state.frozen, None)
        traced = jax.make_jaxpr(policy.accumulate)(state.params, batch, temperature, grads, tally, state.frozen, None)
    return matmuls(traced.jaxpr, learner.state.params.embed.shape[0])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--numerics", choices=("fast", "exact"), default="fast")
    args = parser.parse_args()
    learners = {name: make(preset, args.numerics) for name, preset in PRESETS.items()}
    counts = {name: matmuls_of_update(learner) for name, learner in learners.items()}
    times: dict[str, list[float]] = {name: [] for name in learners}
    for learner in learners.values():
        learner.step()  # compiles
    for repetition in range(args.repetitions):
        order = list(learners) if repetition % 2 else list(reversed(learners))
        for name in order:
            times[name].append(learners[name].step())
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    for name, seconds in times.items():
        rows, targets = next(iter(learners[name].updates()))[0].targets.shape
        print(
            f"{name:<5} median {median[name]:.3f} s, {min(seconds):.3f} to {max(seconds):.3f}; "
            f"{counts[name]} matrix products; targets {rows} x {targets}"
        )
    print(
        json.dumps(
            {
                "echo_over_grpo": round(median["echo"] / median["grpo"], 3),
                "echo_over_grpo_of_the_fastest": round(min(times["echo"]) / min(times["grpo"]), 3),
                **{f"{name}_s": round(value, 4) for name, value in median.items()},
                **{f"{name}_matmuls": count for name, count in counts.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
