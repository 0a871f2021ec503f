"""Rewards as pure functions of what an episode left behind. `view.View` is what they look at; one file per idea."""
