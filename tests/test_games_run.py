"""Whole runs of two steps in other people's games, each chosen by one flag: a tiny policy of random weights."""

import pytest

from jaxagent import main as cli
from tests import tiny_run
from tests.envs import games

pytestmark = pytest.mark.slow

SPACES = {
    "Discrete": "Discrete(3, start=1)",
    "Box": "Box(-1, np.inf, (2,), np.float32)",
    "MultiDiscrete": "MultiDiscrete([2, 3])",
    "Dict": "Dict(go=Discrete(2), say=Text(3))",
    "Tuple": "Tuple([MultiBinary(2), OneOf([Discrete(2), Box(0, 9, (), np.int64)])])",
    "Sequence": "Sequence(Discrete(2))",
    "Graph": "Graph(Discrete(2), None)",
}


def run(workdir, *flags, config="search_r1"):
    """A warm start where there are demonstrations, and two steps of RL; the summary of the whole run."""
    every = ["--config.rl.steps=2", "--config.numerics=fast", *flags]
    assert cli.main(tiny_run.argv(workdir, *every, config=config)) == 0
    return tiny_run.ended(workdir, 2)[0]


@pytest.mark.parametrize("kind", SPACES)
def test_actions_of_each_kind_of_space(tmp_path, kind):
    """Random play is shown first, so that some actions can be read; whichever are, none of them fails."""
    made = f'--config.env.arguments={{"of": "{SPACES[kind]}"}}'
    data = ("--config.data.source=seeds", "--config.data.source.num_train=40", "--config.data.source.num_heldout=8")
    flags = ("--config.env=gymnasium", "--config.env.make=tests.envs.gymnasium_worlds:Spaces", made)
    warm_start = (
        "--config.warm_start.curriculum_steps=0",
        "--config.warm_start.gate_every=9",
        "--config.warm_start.gate_family=",
    )
    shown = ("--config.data.source.num_demonstrations=40", "--config.env.turn_tokens=90", *warm_start)
    summary = run(tmp_path / "run", *data, *flags, *shown, config="ragen")
    assert summary["eval/n"] == 8 and "eval/actions_after_rl" in summary


def test_a_game_against_a_random_player(tmp_path):
    data = ("--config.data.source=seeds", "--config.data.source.num_train=40", "--config.data.source.num_heldout=8")
    flags = ("--config.env=textarena", "--config.env.make=TicTacToe-v0", "--config.env.players=2")
    role = ("--config.roles.opponent=random_player", "--config.stages=rl")
    room = ("--config.env.context_tokens=900", "--config.rl.batch.row_tokens=900", "--config.engine.pages=256")
    with games.importable("textarena"):
        summary = run(tmp_path / "run", *data, *flags, *role, *room)
    assert summary["eval/n"] == 8 and "eval/moves_after_rl" in summary


def test_puzzles(tmp_path):
    data = ("--config.data.source=reasoning_gym", "--config.data.source.num_train=40")
    flags = ("--config.env=reasoning_gym", "--config.env.make=chain_sum", "--config.env.max_turns=1")
    with games.importable("reasoning_gym"):
        summary = run(tmp_path / "run", *data, *flags, "--config.stages=rl")
    assert summary["eval/n"] == 8 and 0.0 <= summary["eval/score_after_rl"] <= 1.0
