"""The blind learner: packs per-token streams, sums weighted losses, applies optimiser updates, keeps checkpoints."""
