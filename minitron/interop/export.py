"""Export Hugging Face folders beside the saves of a run: checkpoint.export=hf.

Problem: users want to try a model during its training, with programs that read Hugging Face's files. The idea: a
checkpoint does not depend on a layout, so another process can convert it to such a folder, with memory and CPU time of
its own: `tools/convert_hf.py export runs/a/step_00000100 runs/a/step_00000100-hf`.

    save 100 | save 200 | save 300 ...          rank 0 starts it once a save is there, and does not wait for it
             |- export 100 -----|               save 200 is not exported: export 100 is still running

The run waits for it only at its end, unless a signal ended the run. A failed export is logged, and training continues.
An export fails, for example, if its save is deleted in the meantime (checkpoint.keep). Folders of exports are never
deleted.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from minitron.config.installed import ROOT
from minitron.config.schema import Config
from minitron.runtime.log import Log

TOOL = ROOT / "tools" / "convert_hf.py"


class Exporter:
    """Starts the exports of a run, one at a time. On rank 0 alone."""

    def __init__(self, cfg: Config, log: Log):
        self.cfg, self.log = cfg, log
        self.running: subprocess.Popen | None = None
        self.target, self.saves = Path(), 0

    def due(self, step: int) -> bool:
        """Tell whether the save after this step is exported."""
        c = self.cfg.checkpoint
        if c.every == "auto":
            return step == self.cfg.train.steps or self.saves % c.export_every == 0
        every = (c.every or 0) * c.export_every
        return step == self.cfg.train.steps or (every > 0 and step % every == 0)

    def saved(self, checkpoint: Path, step: int) -> None:
        """Begin to export a checkpoint that has been saved, if it is due, and report the export before it."""
        target = checkpoint.with_name(f"{checkpoint.name}-hf")
        self.saves += 1
        if not self.due(step) or os.path.lexists(target):
            return
        if step == self.cfg.train.steps:
            self.wait()
        if self.running is not None and self.running.poll() is None:
            fix = "raise checkpoint.export_every"
            self.log.warn(f"no export of step {step}: {self.target} is still being written; {fix}")
            return
        self.wait()
        self.target, words = target, [sys.executable, TOOL, "export", checkpoint, target]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        try:  # in a separate session: Ctrl-C signals the run only, and the run ends the export
            self.running = subprocess.Popen(words, **pipes, start_new_session=True, text=True)
        except OSError as error:
            self.log.warn(f"export of step {step} cannot be started, training goes on: {error}")

    def wait(self) -> None:
        """Wait for the export that is running, and report it."""
        running, self.running = self.running, None
        if running is None:
            return
        said = running.communicate()[1].replace("\r", "\n").strip().splitlines()
        if running.returncode == 0:
            self.log.info(f"exported to {self.target}")
        else:
            self.log.warn(f"export to {self.target} failed, training goes on: {said[-1] if said else 'it was killed'}")

    def close(self, stopped: int) -> None:
        """Wait for the last export; after a signal end it and delete its folder."""
        if stopped and self.running is not None and self.running.poll() is None:
            self.running.kill()  # gentler signals may be blocked here, which a child inherits
            self.running.communicate()
            shutil.rmtree(self.target.with_name(f"{self.target.name}.partial-{self.running.pid}"), ignore_errors=True)
            self.log.info(f"{self.target} is not exported: the run was stopped first")
            self.running = None
        self.wait()
