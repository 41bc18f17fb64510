"""Data: token files, samples, blends, tokenizers and the built-in corpus (NumPy only, no torch)."""
