"""Many processes: who plays which episode under which weights, and what a step trains on."""
