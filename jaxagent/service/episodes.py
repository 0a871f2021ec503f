"""Episodes on the wire: the lossless JSON of data/codec.py, and the sha256 of its bytes in a header."""

from __future__ import annotations

import hashlib
import hmac
import json
import sys

from jaxagent.config import ConfigError
from jaxagent.data import codec
from jaxagent.fleet.wire import BadMessageError, RefusedCallError, json_object
from jaxagent.service.states import EpisodeSummary
from jaxagent.types import Episode

DIGEST = "X-Content-SHA256"


def to_bytes(episode: Episode) -> tuple[bytes, str]:
    """The episode and its digest.

    Raises:
      ValueError: it holds a number that is not finite, or what JSON has no word for.
    """
    body = json.dumps(codec.encode_episode(episode), allow_nan=False).encode()
    return body, hashlib.sha256(body).hexdigest()


def from_bytes(body: bytes, digest: str) -> Episode:
    """Raises RefusedCallError: other bytes than the digest's. Raises BadMessageError: no episode."""
    own_digest = hashlib.sha256(body).hexdigest()
    if not hmac.compare_digest(own_digest.encode(), digest.lower().encode("utf-8", "surrogateescape")):
        header_text = f"and {DIGEST} says {digest!r:.80}" if digest else f"and there is no {DIGEST}"
        raise RefusedCallError(
            "damaged", f"the episode's sha256 is {own_digest}, {header_text}: the bytes were changed on the way"
        )
    try:
        return codec.decode_episode(json_object(body), "the episode")
    except ConfigError as error:
        raise BadMessageError(str(error)) from None


def episode_and_summary(body: bytes, digest: str) -> tuple[Episode, EpisodeSummary]:
    """An episode that was received, and what the service needs to know of it.

    Raises: as `from_bytes`; BadMessageError, too, where a metric is no finite number: the trainer takes means of them.
    """
    episode = from_bytes(body, digest)
    for name, value in episode.metrics.items():
        if not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
            raise BadMessageError(f"the episode: column 'metrics.{name}' must be a finite number, got {value!r:.40}")
    trainable = sum(int(trajectory.action_mask.sum()) for trajectory in episode.trajectories)
    error = " ".join(episode.error.split()).encode(errors="replace").decode()[:2000]
    return episode, EpisodeSummary(episode.stop_reason, episode.total_reward, trainable, error, digest.lower())
