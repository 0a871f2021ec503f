"""Games of TextArena."""
