"""Measurements: this machine's ceilings, minitron's step, and other trainers beside it."""
