"""What a person sees of a run. Other rooms pass it numbers; no maths calls it."""
