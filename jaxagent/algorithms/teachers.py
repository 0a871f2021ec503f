"""What `rl.distill` can name: who judges, and how the policy is pulled to the judgement.

The formulas are in `distill.py`. No jax before a loss is called: a config is read without it.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

import numpy as np

from jaxagent.algorithms.distill import kl
from jaxagent.algorithms.late import jax, jnp
from jaxagent.config.choice import Choice
from jaxagent.config.ranges import NonNegativeInt, PositiveInt, Seconds, between


@dataclasses.dataclass(frozen=True)
class Folder:
    """A model in this process."""

    path: str  # a Hugging Face folder: a run exports its policy to <workdir>/policy


@dataclasses.dataclass(frozen=True)
class Server:
    """A `python -m jaxagent.serve` on another machine."""

    url: str  # "http://127.0.0.1:8001"
    timeout_s: Seconds = 60.0  # of one request
    retries: NonNegativeInt = 2  # of one request, after the first attempt
    request_tokens: PositiveInt = 8192  # of one request, at most (one trajectory may be longer)


TEACHERS: dict[str, type] = {"folder": Folder, "http": Server}


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Distributions over the whole vocabulary: the loss itself runs the teacher, so it must be a folder."""


@dataclasses.dataclass(frozen=True)
class TopK:
    """Distributions over some tokens, in which both are renormalised: over those that the student finds likeliest."""

    which: ClassVar[str] = "student"  # of distill.support_of
    top_k: PositiveInt = 20


class TeacherTopK(TopK):
    """The tokens that the teacher finds likeliest."""

    which: ClassVar[str] = "teacher"


class UnionTopK(TopK):
    """Both."""

    which: ClassVar[str] = "union"


SUPPORTS: dict[str, type] = {
    "vocabulary": Vocabulary,
    "student": TopK,
    "teacher": TeacherTopK,
    "union": UnionTopK,
}


@dataclasses.dataclass(frozen=True)
class SampledLogRatio:
    """An advantage: log q - log p of the sampled token (Thinking Machines, 2025)."""

    support: ClassVar[None] = None


@dataclasses.dataclass(frozen=True)
class Divergence:
    """A loss of two distributions: log-probs f32[..., V] of both -> f32[...]."""

    support: Annotated[Any, Choice("jaxagent.algorithms.teachers:SUPPORTS")] = Vocabulary()

    def __call__(self, student: jax.Array, teacher: jax.Array, support: jax.Array) -> jax.Array:
        raise NotImplementedError


class ReverseKL(Divergence):
    """KL(student || teacher): the student keeps to what the teacher finds likely (MiniLLM, arXiv 2306.08543)."""

    def __call__(self, student: jax.Array, teacher: jax.Array, support: jax.Array) -> jax.Array:
        return kl(student, jax.lax.stop_gradient(teacher), support)


class ForwardKL(Divergence):
    """KL(teacher || student): the student covers all that the teacher does."""

    def __call__(self, student: jax.Array, teacher: jax.Array, support: jax.Array) -> jax.Array:
        return kl(jax.lax.stop_gradient(teacher), student, support)


@dataclasses.dataclass(frozen=True)
class JSD(Divergence):
    """beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p: the generalised Jensen-Shannon divergence.

    See GKD (Agarwal et al., arXiv 2306.13649), eq. 1; p is the student's. Bounded; divided by beta it tends to the
    forward KL as beta goes to 0, divided by 1 - beta to the reverse KL as beta goes to 1.
    """

    beta: Annotated[float, between(0, 1, without="both")] = 0.5  # the teacher's share of the mixture

    def __call__(self, student: jax.Array, teacher: jax.Array, support: jax.Array) -> jax.Array:
        teacher = jax.lax.stop_gradient(teacher)
        mixture = jnp.logaddexp(teacher + np.log(self.beta), student + np.log1p(-self.beta))
        return self.beta * kl(teacher, mixture, support) + (1.0 - self.beta) * kl(student, mixture, support)


LOSSES: dict[str, type] = {"sampled": SampledLogRatio, "reverse_kl": ReverseKL, "forward_kl": ForwardKL, "jsd": JSD}
