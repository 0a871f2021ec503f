"""What a build gives, and how it fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxagent.sandbox.base import Limits, Spec

TAIL_CHARS = 1500  # of a failed step's output


class BuildError(RuntimeError):
    """An image cannot be built.

    Attributes:
      image: its name.
      number: of the step, from 1; 0 = before the first.
      step: the step's text.
      tail: the end of what it printed.
    """

    def __init__(self, image: str, number: int, step: str, problem: str, output: str = ""):
        self.image, self.number, self.step, self.tail = image, number, step, output.strip()[-TAIL_CHARS:]
        short_step = " ".join(step.split())
        short_step = short_step if len(short_step) <= 200 else short_step[:197] + "..."
        place = f" step {number} ({short_step})" if step else ""
        tail_sentence = f" It printed: {self.tail}" if self.tail else ""
        super().__init__(f"image {image}:{place} {problem.removesuffix('.')}.{tail_sentence}")


@dataclasses.dataclass(frozen=True)
class Built:
    """An image, complete or so far: the lower directories of a sandbox and what its programs are told."""

    key: str  # of the content: equal key, equal image
    root: str = ""  # as `Spec.root`
    layers: tuple[str, ...] = ()  # as `Spec.layers`, the lowest first
    image: str = ""  # as `Spec.image`: built or loaded by a container engine
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    directory: str = "/"
    uid: int = 0  # what `id` says inside
    user: str = "root"  # of a base, as its image names it
    home: str = "/root"
    notes: tuple[str, ...] = ()  # instructions without effect here, in words
    built: int = 0  # steps that ran
    cached: int = 0  # steps that were found

    def spec(self, limits: Limits) -> Spec:
        """A sandbox that starts from this image."""
        env = {"HOME": self.home, "USER": self.user, **self.env}
        return Spec(self.root, self.layers, self.image, limits, uid=self.uid, directory=self.directory, env=env)
