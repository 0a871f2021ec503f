"""Pure functions from groups of episodes to per-token streams, and from arrays to per-token losses. No model here."""
