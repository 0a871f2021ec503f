"""A web shop in pure Python: its wares, its pages, its basket and orders, and what a task wants bought there."""
