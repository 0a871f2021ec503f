"""What must hold between numbers of a config; the schema states what must hold of one alone.

Only what is plain arithmetic, so that it is refused before jax is loaded. What depends on a name that code registers
(an advantage, an environment, a model family) is checked beside that code.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxagent.config import Config, ConfigError


def check(cfg: Config) -> None:
    """Refuses numbers that contradict each other.

    Raises:
      ConfigError: the first relation that does not hold, with its fields and their values.
    """
    for sentence in broken_relations(cfg):
        raise ConfigError(sentence)


def broken_relations(cfg: Config) -> Iterator[str]:
    """Yields a sentence for every relation that does not hold."""
    env, rl = cfg.env, cfg.rl
    samples = "rl" in cfg.stages or "opd" in cfg.stages
    if env.turn_tokens >= env.context_tokens:
        yield (
            f"env.turn_tokens ({env.turn_tokens}) must be less than env.context_tokens ({env.context_tokens}): a turn "
            "follows a prompt."
        )
    batches = {"rl": rl.batch} | ({"warm_start": cfg.warm_start.batch} if cfg.warm_start else {})
    for section, batch in batches.items():
        if cfg.mesh.context > 1 and batch.row_tokens % (2 * cfg.mesh.context):  # each device has two stripes of a row
            yield (
                f"{section}.batch.row_tokens ({batch.row_tokens}) must be a multiple of 2 * mesh.context "
                f"({2 * cfg.mesh.context})."
            )
    if own := cfg.fleet and cfg.fleet.engine:
        for name, size in (("slots", own.slots or cfg.engine.slots), ("pages", own.pages or cfg.engine.pages)):
            if size % (own.data * own.fsdp):
                yield f"fleet.engine: {size} {name} are no multiple of data * fsdp ({own.data * own.fsdp})."
    if samples and rl.updates_per_step > rl.tasks_per_step * rl.group_size:
        yield (
            f"rl.updates_per_step ({rl.updates_per_step}) must be at most rl.tasks_per_step * rl.group_size "
            f"({rl.tasks_per_step * rl.group_size}): an update has one episode or more."
        )
    if rl.routes.replay == "always" and cfg.numerics == "exact":
        yield "rl.routing.replay=always needs numerics=fast: in exact ones trainer and engine choose the same experts."
    if rl.replay and rl.replay.low >= rl.replay.high:
        yield f"rl.replay.low ({rl.replay.low:g}) must be less than rl.replay.high ({rl.replay.high:g})."
    if rl.entropy_control and rl.entropy_coefficient > rl.entropy_control.maximum:
        yield (
            f"rl.entropy_coefficient ({rl.entropy_coefficient:g}) must be at most rl.entropy_control.maximum "
            f"({rl.entropy_control.maximum:g})."
        )
