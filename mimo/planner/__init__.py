"""Predict the step time and the memory of a run on every layout of some GPUs, without running it."""
