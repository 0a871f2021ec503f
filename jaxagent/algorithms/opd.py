"""The stage "opd", on-policy distillation: the RL stage with another config."""

from __future__ import annotations

import dataclasses

from jaxagent.config import Config


def as_opd(cfg: Config) -> Config:
    """The config whose RL stage is this config's stage "opd": the teacher in place of the reward.

    What only holds the policy (KL, entropy, z-loss) stays: KL in the reward, which there is none of, becomes KL in the
    advantage. All attempts are used, since none needs a reward.
    """
    rl, opd = cfg.rl, cfg.opd
    where = "advantage" if rl.kl.where == "reward" else rl.kl.where
    taught = dataclasses.replace(
        rl,
        steps=opd.steps,
        optimizer=dataclasses.replace(rl.optimizer, learning_rate=opd.learning_rate),
        advantage="no_reward",
        kl=dataclasses.replace(rl.kl, where=where),
        drop_zero_signal=False,
        echo=dataclasses.replace(rl.echo, coefficient=0.0),
        positive_nll=dataclasses.replace(rl.positive_nll, coefficient=0.0),
        replay=dataclasses.replace(rl.replay, per_step=0),
        refill=dataclasses.replace(rl.refill, max_rounds=1),
        keep_groups_frac=1.0,
        distill=dataclasses.replace(rl.distill, coefficient=opd.coefficient),
    )
    return dataclasses.replace(cfg, rl=taught)
