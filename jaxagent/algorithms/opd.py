"""The stage "opd", on-policy distillation: the RL stage with another config."""

from __future__ import annotations

import dataclasses

from jaxagent.algorithms.estimators import NoReward
from jaxagent.config import Config


def as_opd(cfg: Config) -> Config:
    """The config whose RL stage is this config's stage "opd": the teacher in place of the reward.

    What only holds the policy (KL, entropy, z-loss) stays: KL in the reward, which there is none of, becomes KL in the
    advantage. All attempts are used, since none needs a reward.
    """
    rl, opd = cfg.rl, cfg.opd
    assert opd is not None  # `parse` has refused the stage without its section
    taught = dataclasses.replace(
        rl,
        steps=opd.steps,
        optimizer=dataclasses.replace(rl.optimizer, learning_rate=opd.learning_rate),
        advantage=NoReward(),
        kl=dataclasses.replace(rl.kl, where="advantage") if rl.kl and rl.kl_in("reward") else rl.kl,
        group_reward=None,
        mask_truncated=False,
        shaping=None,
        echo=None,
        positive_nll=None,
        replay=None,
        refill=None,
        oversample=None,
        keep_groups_frac=1.0,
        distill=opd.distill,
    )
    return dataclasses.replace(cfg, rl=taught)
