"""Optimizer: gradient buckets, the sharded AdamW, the learning-rate schedule and the fp16 loss scale."""
