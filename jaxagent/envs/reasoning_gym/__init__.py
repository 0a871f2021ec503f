"""Puzzles of reasoning-gym."""
