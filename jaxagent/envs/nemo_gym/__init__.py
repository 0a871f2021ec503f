"""Resources servers of NeMo-Gym, and their tasks."""
