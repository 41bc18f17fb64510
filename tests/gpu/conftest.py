"""Loads Transformer Engine before a test can load torch's cuDNN, beside which its own would not load any more."""

from contextlib import suppress

with suppress(ImportError):
    import transformer_engine.pytorch  # noqa: F401
