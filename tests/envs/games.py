"""The real packages of games and puzzles, for tests, in an environment of the tests' own."""

from tests import environments

REQUIREMENTS = ("TextArena", "reasoning-gym")


def importable(module):
    """While it is open, textarena or reasoning_gym can be imported; the test skips where it cannot be had."""
    return environments.importable(module, "games", *REQUIREMENTS)
