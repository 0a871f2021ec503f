"""Gymnasium's FrozenLake on another map for every seed, for `config.env.make=examples.lakes:make`.

The package's own map is always the same one, so nothing would be held out: here `reset(seed)` makes the map, by the
package's `generate_random_map`, and what is shown is the map with an S where the player stands.
"""

from typing import Any

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map


class Lakes(gymnasium.Env):
    """A lake of `size` times `size`; the seed of `reset` says which."""

    def __init__(self, size: int, max_episode_steps: int) -> None:
        self._size, self._most, self._steps = size, max_episode_steps, 0
        self._lake = FrozenLakeEnv(desc=generate_random_map(size, seed=0), is_slippery=False)
        self.action_space = self._lake.action_space
        self.observation_space = gymnasium.spaces.Text(max_length=size * (size + 1), min_length=size)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begins at the upper left corner of the seed's map."""
        super().reset(seed=seed)
        self._lake = FrozenLakeEnv(desc=generate_random_map(self._size, seed=seed), is_slippery=False)
        self._lake.reset(seed=seed)
        self._steps = 0
        return self._shown(), {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """One move. It pays 1 at the goal."""
        _, reward, terminated, _, _ = self._lake.step(action)
        self._steps += 1
        return self._shown(), float(reward), terminated, self._steps >= self._most, {}

    def _shown(self) -> str:
        rows = [[cell.decode() for cell in row] for row in self._lake.desc]
        rows[0][0] = "F"
        rows[self._lake.s // self._size][self._lake.s % self._size] = "S"
        return " ".join("".join(row) for row in rows)


def make(size: int = 3, max_episode_steps: int = 6) -> gymnasium.Env:
    """The environment."""
    return Lakes(size, max_episode_steps)
