"""Plan a job: see minitron/planner/command.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also without an installed minitron

from minitron.config.command import run
from minitron.interop.base import load
from minitron.planner.command import main

if __name__ == "__main__":
    run(lambda argv: main(argv, load))
