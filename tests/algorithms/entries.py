"""The entries of the advantages' dict by their kind: what tests of every one of a kind go through."""

from jaxagent.algorithms.advantages import BestOfK
from jaxagent.algorithms.estimators import ADVANTAGES, GroupAdvantage, TokenAdvantage, TurnAdvantage


def _of(kind: type) -> dict[str, type]:
    return {name: entry for name, entry in ADVANTAGES.items() if issubclass(entry, kind)}


BEST_OF_K, TURN, TOKEN = _of(BestOfK), _of(TurnAdvantage), _of(TokenAdvantage)
GROUP = {name: entry() for name, entry in _of(GroupAdvantage).items() if name not in BEST_OF_K}
