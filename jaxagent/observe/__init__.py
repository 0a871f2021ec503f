"""What a person sees of a run. Fed values from outside; never called from inside maths."""
