"""A teacher's judgement of what the policy sampled: another model's weights in this process, or a server's answers.

In: the trajectories of one rollout batch. Out: `distill.Scores` of each. A teacher reads the very token ids that the
student sampled, so both must have one tokenizer; that is checked when it is opened. Nothing of a teacher is trained.
Axis letters: B packed rows, T tokens, R targets per row, K top-k tokens, C candidates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxagent.algorithms.distill import Scores, Support
from jaxagent.algorithms.streams import Streams
from jaxagent.algorithms.teachers import Server, TeacherTopK, Vocabulary
from jaxagent.config import Config, ConfigError, DistillConfig
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.learner import forward
from jaxagent.learner.batching import Packer
from jaxagent.learner.score import Scorer, top_scorer, with_support
from jaxagent.learner.state import Batch
from jaxagent.learner.teacher_http import HttpTeacher
from jaxagent.models import hf, params, sharding
from jaxagent.models.spec import Computing, ModelSpec
from jaxagent.types import Trajectory

Tree = Any  # a pytree of arrays


# Scores of each trajectory, from i32[T, C] candidates of each (None if C is 0) and a temperature.
Teacher = Callable[[Sequence[Trajectory], Sequence[np.ndarray] | None, float], list[Scores]]
Weights = tuple[ModelSpec, Tree]  # of a teacher in this process


@dataclasses.dataclass(frozen=True)
class Distiller:
    """Gets the teacher's scores before a step's first update, and puts into batches what the loss reads of them."""

    teacher: Teacher
    local: tuple[Scorer, Tree] | None  # what scores for a teacher in this process, and its weights
    student: Scorer | None  # the policy's own top-k tokens, where the support has them
    compare: forward.Compare | None  # what the update's forward adds, where distillation is in the loss
    weights: Tree | None  # the teacher's, where the loss itself runs it
    width: int  # K of the support; 0: the batch carries none

    def __call__(
        self, policy: Tree, trajectories: Sequence[Trajectory], temperature: float
    ) -> tuple[list[Scores], list[np.ndarray] | None]:
        """The teacher's scores, and the student's top-k tokens i32[T, K] where needed."""
        students = None
        if self.student is not None:
            _, students, *_ = self.student(policy, trajectories, temperature)
        return self.teacher(trajectories, students, temperature), students

    def batches(self, batches: list[Batch], streams: Sequence[Streams]) -> list[Batch]:
        """Adds the supports of the packed `streams`; one that is not distilled (a replayed attempt) has none."""
        if not self.width:
            return batches
        none = [(len(s.trajectory), self.width) for s in streams]
        supports = [
            s.support or Support(np.zeros(shape, np.int32), np.full(shape, -np.inf, np.float32))
            for s, shape in zip(streams, none, strict=True)
        ]
        return with_support(batches, supports, self.width)

    def warm_up(self, policy: Tree) -> None:
        """Compiles what scores the policy's own tokens, and the teacher that is in this process."""
        if self.local is not None:
            scorer, weights = self.local
            scorer.warm_up(weights)
        if self.student is not None:
            self.student.warm_up(policy)


def distiller(
    distill: DistillConfig,
    spec: ModelSpec,
    mesh: jax.sharding.Mesh,
    packer: Packer,
    source: Weights | HttpTeacher,
) -> Distiller:
    """What `rl.distill` runs on the device beside the update, not compiled yet; `spec` is the policy's."""
    loss, k = distill.loss, distill.top_k
    student_top = 0 if isinstance(loss.support, TeacherTopK) else k  # candidates: the student's own top k
    student = top_scorer(spec, packer, mesh, student_top, 0) if student_top else None
    from_teacher = 0 if getattr(loss.support, "which", "") == "student" else k
    most = from_teacher or 1  # the likeliest, for the metrics
    local = teacher_spec = weights = None
    if isinstance(source, HttpTeacher):
        teacher: Teacher = lambda paths, candidates, at: source.score(paths, candidates, most, at)  # noqa: E731
    else:
        spec_there, weights_there = source
        local = scorer, _ = top_scorer(spec_there, packer, mesh, most, student_top), weights_there
        teacher = lambda paths, candidates, at: [  # noqa: E731
            Scores(*row) for row in zip(*scorer(weights_there, paths, at, candidates), strict=True)
        ]
        if isinstance(loss.support, Vocabulary):
            teacher_spec, weights = source
    compare = None if distill.in_advantage else forward.compare_to_teacher(spec, loss, teacher_spec)
    return Distiller(teacher, local, student, compare, weights, student_top + from_teacher)


def check_teacher(cfg: Config, tokenizer: Tokenizer) -> None:
    """Raises ConfigError for a teacher that cannot judge the policy, before its weights are read.

    No such folder or server, another tokenizer, or a context that is too short.
    """
    if cfg.rl.distill is None:
        return
    teacher = cfg.rl.distill.teacher
    if isinstance(teacher, Server):
        _http(teacher).check(tokenizer, cfg.env.context_tokens)
        return
    path = Path(teacher.path)
    if not path.is_dir():
        raise ConfigError(f"distill.teacher: no folder '{path}'. A run exports its policy to <workdir>/policy.")
    spec = _spec(cfg, teacher.path)
    spec.check_context(cfg.env.context_tokens)
    theirs = Tokenizer.load(path)
    check_same_tokens(tokenizer.token_bytes(), theirs.token_bytes(), str(path))
    theirs.check_fits(spec.vocab_size)


def check_same_tokens(ours: Sequence[bytes], theirs: Sequence[bytes], source: str) -> None:
    """Raises ConfigError unless every token id means the same to both, naming the first that does not."""
    different = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if different is not None:
        raise ConfigError(
            f"distill.teacher '{source}' has another tokenizer than the policy: token {different} is "
            f"{theirs[different]!r} there and {ours[different]!r} here. Set tokenizer.path to the teacher's folder."
        )
    if len(ours) != len(theirs):
        raise ConfigError(
            f"distill.teacher '{source}' has a tokenizer of {len(theirs)} tokens, the policy one of {len(ours)}. "
            "Set tokenizer.path to the teacher's folder."
        )


def open_teacher(cfg: Config, mesh: jax.sharding.Mesh) -> Weights | HttpTeacher | None:
    """The teacher that `check_teacher` found good, its weights read; None where the algorithm has none."""
    if cfg.rl.distill is None:
        return None
    teacher = cfg.rl.distill.teacher
    if isinstance(teacher, Server):
        return _http(teacher)
    spec = _spec(cfg, teacher.path)
    where = params.shardings(spec, mesh, sharding.TRAIN)
    return spec, hf.load(teacher.path, spec, where)


def _http(server: Server) -> HttpTeacher:
    return HttpTeacher(server.url, server.timeout_s, server.retries, server.request_tokens)


def _spec(cfg: Config, path: str) -> ModelSpec:
    """The teacher's shape, from its config.json; how it is computed, from the policy's config."""
    model = cfg.model
    dtype = model.compute_dtype
    computing = Computing(model.vocab_multiple, dtype, dtype, "none", model.logprob_chunk_tokens)
    return hf.read_spec(path, computing)
