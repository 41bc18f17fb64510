"""Convert between Hugging Face folders and checkpoints: see minitron/interop/convert_hf.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also without an installed minitron

from minitron.config.command import run
from minitron.interop.convert_hf import main

if __name__ == "__main__":
    run(main)
