"""Sharded checkpoints that any layout can save and any other can load."""
