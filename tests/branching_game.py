"""A small game whose values and gradient are computed exactly, by all its paths.

A place, 0 or 1; action 0 is paid 0.3 and leads to place 0, action 1 leads to place 1, where another action 1 ends the
game; it has 5 turns at most. At its end 1 is paid where it was ended by the player at turn 1 or 3 (from 0). The player
takes action 1 with a chance that hangs on the place. The policy's parameters are the logits of these chances, one for
each place at each turn. So the length of a game says much about what it earns, and what is learnt of early and of late
turns is told apart.
"""

import numpy as np

TURNS, CHANCES = 5, (0.6, 0.45)  # of action 1, at places 0 and 1


def outcome(turn, place, action):
    """What an action is paid, the place after it, and whether that is the end."""
    ended = bool(place and action)
    return 0.3 * (1 - action) + (1.0 if ended and turn in (1, 3) else 0.0), action, ended or turn == TURNS - 1


def value(turn, place):
    """Exact value of a state, and its gradient by the policy's logits, [TURNS, 2] flattened."""
    total, gradient = 0.0, np.zeros(2 * TURNS)
    for action, chance in ((1, CHANCES[place]), (0, 1 - CHANCES[place])):
        paid, after, over = outcome(turn, place, action)
        below, slope = (0.0, 0.0) if over else value(turn + 1, after)
        total += chance * (paid + below)
        gradient += chance * slope
        gradient[2 * turn + place] += chance * (action - CHANCES[place]) * (paid + below)
    return total, gradient


VALUE, GRADIENT = value(0, 0)


def sigmas(samples, expected):
    """By how many standard errors the mean of [N, x] is away from what is expected, at most; 0 where nothing varies."""
    error = samples.std(axis=0, ddof=1) / np.sqrt(len(samples))
    return float(np.max(np.abs(samples.mean(axis=0) - expected) / np.where(error, error, np.inf)))
