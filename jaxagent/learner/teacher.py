"""A teacher's judgement of what the policy sampled: another model's weights in this process, or a server's answers.

In: the trajectories of one rollout batch. Out: `distill.Scores` of each. A teacher reads the very token ids that the
student sampled, so both must have one tokenizer; that is checked when it is opened. Nothing of a teacher is trained.
Axis letters: B packed rows, T tokens, R targets per row, K top-k tokens, C candidates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from jaxagent.algorithms.distill import Scores, Support
from jaxagent.algorithms.streams import Streams, action_mask
from jaxagent.algorithms.teachers import Server, StudentTopK, TeacherTopK, Vocabulary
from jaxagent.config import Config, ConfigError, DistillConfig
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.learner import forward
from jaxagent.learner.batch import Batch
from jaxagent.learner.batching import Packer, unpack
from jaxagent.learner.teacher_http import HttpTeacher
from jaxagent.learner.update import same_plan, scalar, shard
from jaxagent.models import global_arrays, hf, params, sharding
from jaxagent.models.spec import Computing, ModelSpec
from jaxagent.types import Trajectory

Tree = Any  # a pytree of arrays


@dataclasses.dataclass(frozen=True)
class Weights:
    """A teacher in this process."""

    spec: ModelSpec
    params: Tree


@dataclasses.dataclass(frozen=True)
class TopScorer:
    """`scorer(params, trajectories, temperature, candidates) -> scores`. Holds a compiled program, no arrays."""

    mesh: jax.sharding.Mesh
    packer: Packer
    program: Callable[[Tree, Batch, jax.Array], Any]  # see forward.top_forward
    candidates: int  # C

    def __call__(
        self,
        weights: Tree,
        trajectories: Sequence[Trajectory],
        temperature: float,
        candidates: Sequence[np.ndarray] | None = None,
    ) -> list[Scores]:
        """Scores action tokens; `candidates` are i32[T, C] of each trajectory, None where C is 0.

        Another temperature compiles nothing.
        """
        if not trajectories:
            return []
        streams = [Streams.of(t, policy_weights=action_mask(t)) for t in trajectories]
        batches = self._with_candidates(self.packer.pack(streams), candidates)
        same_plan("a teacher's scoring", batches)
        at = scalar(temperature, self.mesh)
        with jax.set_mesh(self.mesh), jax.transfer_guard("disallow"):
            found = global_arrays.get([self.program(weights, shard(batch, self.mesh), at) for batch in batches])
        return [
            Scores(*one) for one in zip(*(unpack(batches, x, streams) for x in zip(*found, strict=True)), strict=True)
        ]

    def warm_up(self, weights: Tree) -> None:
        """Compiles, by scoring padding."""
        with jax.set_mesh(self.mesh):
            for batch in self._with_candidates([self.packer.empty()], []):
                global_arrays.get(self.program(weights, shard(batch, self.mesh), scalar(1, self.mesh)))

    def _with_candidates(self, batches: list[Batch], candidates: Sequence[np.ndarray] | None) -> list[Batch]:
        if not self.candidates:
            return batches
        supports = [Support(ids, np.zeros(ids.shape, np.float32)) for ids in candidates or ()]
        return with_support(batches, supports, self.candidates)


def top_scorer(spec: ModelSpec, packer: Packer, mesh: jax.sharding.Mesh, k: int, candidates: int) -> TopScorer:
    """Scores under whatever parameters of `spec` it is called with: tokens, the k likeliest, and candidates."""
    return TopScorer(mesh, packer, jax.jit(forward.top_forward(spec, k)), candidates)


class Teacher(Protocol):
    """Scores trajectories; K and C are fixed when it is made."""

    def __call__(
        self, trajectories: Sequence[Trajectory], candidates: Sequence[np.ndarray] | None, temperature: float
    ) -> list[Scores]:
        """The scores of each trajectory; `candidates` are i32[T, C] of each, None if C is 0."""


@dataclasses.dataclass(frozen=True)
class LocalTeacher:
    """A `Teacher` whose weights are in this process."""

    scorer: TopScorer
    params: Tree

    def __call__(
        self, trajectories: Sequence[Trajectory], candidates: Sequence[np.ndarray] | None, temperature: float
    ) -> list[Scores]:
        """Scores under its own weights."""
        return self.scorer(self.params, trajectories, temperature, candidates)


@dataclasses.dataclass(frozen=True)
class Distiller:
    """Gets the teacher's scores before a step's first update, and puts into batches what the loss reads of them."""

    teacher: Teacher
    student: TopScorer | None  # the policy's own top-k tokens, where the support has them
    compare: forward.Compare | None  # what the update's forward adds, where distillation is in the loss
    weights: Tree | None  # the teacher's, where the loss itself runs it
    width: int  # K of the support; 0: the batch carries none

    def __call__(
        self, policy: Tree, trajectories: Sequence[Trajectory], temperature: float
    ) -> tuple[list[Scores], list[np.ndarray] | None]:
        """The teacher's scores, and the student's top-k tokens i32[T, K] where needed."""
        students = None
        if self.student is not None:
            students = [scores.top_ids for scores in self.student(policy, trajectories, temperature)]
        return self.teacher(trajectories, students, temperature), students

    def batches(self, batches: list[Batch], streams: Sequence[Streams]) -> list[Batch]:
        """Adds the supports of the packed `streams`; one that is not distilled (a replayed attempt) has none."""
        if not self.width:
            return batches
        supports = [s.support or _no_support(len(s.trajectory), self.width) for s in streams]
        return with_support(batches, supports, self.width)

    def warm_up(self, policy: Tree) -> None:
        """Compiles what scores the policy's own tokens, and the teacher that is in this process."""
        if isinstance(self.teacher, LocalTeacher):
            self.teacher.scorer.warm_up(self.teacher.params)
        if self.student is not None:
            self.student.warm_up(policy)


def distiller(
    distill: DistillConfig,
    spec: ModelSpec,
    mesh: jax.sharding.Mesh,
    packer: Packer,
    opened: Weights | HttpTeacher,
) -> Distiller:
    """What `rl.distill` runs on the device beside the update, not compiled yet; `spec` is the policy's."""
    loss, k = distill.loss, distill.top_k
    asked = 0 if isinstance(loss.support, TeacherTopK) else k  # candidates: the student's own top k
    student = top_scorer(spec, packer, mesh, asked, 0) if asked else None
    told = 0 if isinstance(loss.support, StudentTopK) else k
    own = told or 1  # the likeliest, for the metrics
    teacher_spec = None
    if isinstance(opened, Weights):
        teacher: Teacher = LocalTeacher(top_scorer(opened.spec, packer, mesh, own, asked), opened.params)
        teacher_spec = opened.spec if isinstance(loss.support, Vocabulary) else None
    else:
        teacher = lambda paths, candidates, at: opened.score(paths, candidates, own, at)  # noqa: E731
    whole = teacher_spec is not None
    compare = None if distill.in_advantage else forward.compare_to_teacher(spec, loss, teacher_spec)
    return Distiller(teacher, student, compare, opened.params if whole else None, asked + told)


def with_support(batches: Sequence[Batch], supports: Sequence[Support], width: int) -> list[Batch]:
    """The batches with `support` and `teacher_logprobs` i32 and f32 [B, R, width]; padding has no entry that counts.

    Args:
      batches: what `Packer.pack` gave.
      supports: [T, width] of each sequence that was packed.
      width: K.
    """
    starts = np.cumsum([0, *(len(support.ids) for support in supports)])
    ids = np.concatenate([np.zeros((0, width), np.int32), *(support.ids for support in supports)])
    logprobs = np.concatenate([np.zeros((0, width), np.float32), *(support.teacher_logprobs for support in supports)])
    out = []
    for batch in batches:
        real = batch.sequence >= 0
        at = starts[batch.sequence[real]] + batch.offset[real]
        tokens = np.zeros((*real.shape, width), np.int32)
        known = np.full((*real.shape, width), -np.inf, np.float32)
        tokens[real], known[real] = ids[at], logprobs[at]
        out.append(batch.replace(support=tokens, teacher_logprobs=known))
    return out


def check_teacher(cfg: Config, tokenizer: Tokenizer) -> None:
    """Refuses a teacher that cannot judge the policy, before its weights are read.

    Raises:
      ConfigError: no such folder or server, another tokenizer, or a context that is too short.
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


def check_same_tokens(ours: Sequence[bytes], theirs: Sequence[bytes], whose: str) -> None:
    """Raises ConfigError unless every token id means the same to both, naming the first that does not."""
    different = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if different is not None:
        raise ConfigError(
            f"distill.teacher '{whose}' has another tokenizer than the policy: token {different} is "
            f"{theirs[different]!r} there and {ours[different]!r} here. Set tokenizer.path to the teacher's folder."
        )
    if len(ours) != len(theirs):
        raise ConfigError(
            f"distill.teacher '{whose}' has a tokenizer of {len(theirs)} tokens, the policy one of {len(ours)}. "
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
    return Weights(spec, hf.load(teacher.path, spec, where))


def _no_support(length: int, width: int) -> Support:
    return Support(np.zeros((length, width), np.int32), np.full((length, width), -np.inf, np.float32))


def _http(server: Server) -> HttpTeacher:
    return HttpTeacher(server.url, server.timeout_s, server.retries, server.request_tokens)


def _spec(cfg: Config, path: str) -> ModelSpec:
    """The teacher's shape, from its config.json; how it is computed, from the policy's config."""
    model = cfg.model
    dtype = model.compute_dtype
    computing = Computing(model.vocab_multiple, dtype, dtype, "none", model.logprob_chunk_tokens)
    return hf.read_spec(path, computing)
