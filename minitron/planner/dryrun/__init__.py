"""A training step without GPUs, on tensors without memory: the part of the planner that needs torch."""
