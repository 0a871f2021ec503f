"""A class of the user's own that the code which reads its field could not use is refused before a run begins."""

import dataclasses

import pytest

from configs.search_r1 import get_config
from jaxagent.algorithms import checks
from jaxagent.algorithms.echo import FullObservation
from jaxagent.algorithms.estimators import GAE, CriticConfig, GroupAdvantage, TokenAdvantage
from jaxagent.algorithms.objectives import SoftGate
from jaxagent.algorithms.teachers import Folder, SampledLogRatio
from jaxagent.config import ConfigError, DistillConfig, EchoConfig, parse


@dataclasses.dataclass(frozen=True)
class Other:
    """Nothing that an algorithm knows."""


@dataclasses.dataclass(frozen=True)
class TwoArguments:
    def __call__(self, tokens, more): ...


@dataclasses.dataclass(frozen=True)
class NoArguments:
    def __call__(): ...


@dataclasses.dataclass(frozen=True)
class Unwritten(GroupAdvantage):
    pass


@dataclasses.dataclass(frozen=True)
class OfTokens(TokenAdvantage):
    def __call__(self, rewards, mask): ...


@dataclasses.dataclass(frozen=True)
class Own(SoftGate):
    pass


RL = parse(get_config()).rl


def test_what_extends_and_takes_what_it_must_is_let_through():
    checks.check(dataclasses.replace(RL, objective=Own()))
    taught = dataclasses.replace(RL.advantage, drop_zero_signal=False)
    distill, echo = DistillConfig(Folder("x"), loss=SampledLogRatio()), EchoConfig(denominator=FullObservation())
    checks.check(dataclasses.replace(RL, advantage=taught, distill=distill, echo=echo))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(objective=Other()), r"rl.objective='.*:Other' needs a method __call__\(self, tokens\)"),
        (dict(group_reward=TwoArguments()), r"rl.group_reward='.*:TwoArguments' needs .* __call__\(self, group\)"),
        (dict(objective=TwoArguments()), r"rl.objective='.*:TwoArguments' needs a method __call__\(self, tokens\)"),
        (dict(objective=NoArguments()), r"rl.objective='.*:NoArguments' needs a method __call__\(self, tokens\)"),
        (
            dict(advantage=Other()),
            r":Other' must extend GroupAdvantage, TurnAdvantage or TokenAdvantage of ",
        ),
        (dict(advantage=Unwritten()), r"rl.advantage='.*:Unwritten' needs a method __call__\(self, rewards, mask\)"),
        (dict(advantage=OfTokens()), r"rl.advantage='.*:OfTokens' needs a method __call__\(self, path\)"),
        (
            dict(aggregation=Other()),
            r"rl.aggregation='.*:Other' must extend Aggregation of ",
        ),
        (dict(advantage=GAE(critic=CriticConfig(loss=Other()))), ":Other' must extend Squared or Categorical of "),
        (dict(correction=Other()), r"rl.correction='.*:Other' must extend Importance or OPSM of "),
        (dict(echo=EchoConfig(denominator=Other())), r"rl.echo.denominator='.*:Other' must extend Denominator of "),
        (dict(distill=DistillConfig(Other())), r"rl.distill.teacher='.*:Other' must extend Folder or Server of "),
        (
            dict(distill=DistillConfig(Folder("x"), loss=Other())),
            ":Other' must extend SampledLogRatio or Divergence of",
        ),
    ],
)
def test_what_could_not_be_used_is_one_line(changes, message):
    with pytest.raises(ConfigError, match=message):
        checks.check(dataclasses.replace(RL, **changes))
