"""What of a run goes into a checkpoint, and how it gets there while training goes on.

Problem: writing the state of a large model takes longer than many steps. The idea: copy it to host memory, which takes
a fraction of a step, and let a thread write that copy. The state is the optimizer's (float32 masters and moments, of
which every rank holds slices), fp16's loss scaler and the FP8 histories. There is nothing else: parameters are rounded
masters, dropout hashes counters, and the order of the data follows from the samples consumed and from what the data
were, which the index records.

    step 20   |-copy-| step 21 ----------| step 22 ----------|      the host copy exists once: a save that comes too
    thread           |- files -|- fsync -|- index, rename -|        soon waits for the one before

All ranks write, each what nobody else writes: of a parameter that is replicated over tp, or tied between stages, only
the first copy. They agree through a gloo group of their own, in the thread, so no training collective ever meets them:
rank 0 makes the folder, every rank reports its part of the index or its error, rank 0 commits or gives up. A disk that
fails costs a line in the log and the checkpoint, not the run.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from minitron.checkpoint.boxes import Piece, boxes_of_range, to_global, whole_shape
from minitron.checkpoint.format import CheckpointError, begin, commit, merge, prune, write_shard
from minitron.config import Config
from minitron.fp8 import Fp8Gemm
from minitron.log import Log
from minitron.model.gpt import GPT
from minitron.optim.grads import Gradients
from minitron.optim.scaler import LossScaler
from minitron.optim.zero1 import Zero1Optimizer

# A save may take long, and nothing waits for it but the next; a rank that dies ends the wait at once.
PATIENCE = timedelta(days=1)


class State(NamedTuple):
    """The parts of a trainer that have a state."""

    chunks: Sequence[GPT]
    optimizer: Zero1Optimizer
    scaler: LossScaler | None

    def slices(self) -> dict[str, list[Tensor]]:
        """Kind -> one flat slice per bucket."""
        return {kind: getattr(self.optimizer, name) for kind, name in
                (("master", "masters"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"))}

    def scalars(self) -> dict[str, Tensor]:
        """0-d tensors, the same on every rank, by their names in the index."""
        s = self.scaler
        scaler = {} if s is None else {"loss_scale": s.scale, "clean_steps": s.clean, "loss_tolerance": s.tolerance}
        return {"optimizer_steps": self.optimizer.steps, **scaler}

    @staticmethod
    def histories(chunk: GPT) -> Iterator[Piece]:
        """The chunk's FP8 magnitudes by layer: views, the same on every rank of tp and dp_cp."""
        for name, module in chunk.named_modules():
            gemm = getattr(module, "gemm", None)
            if isinstance(gemm, Fp8Gemm) and gemm.history is not None:
                yield Piece(name, "fp8_history", tuple(gemm.history.shape), (0, 0), gemm.history)


def pieces(gradients: Gradients, slices: Mapping[str, Sequence[Tensor | None]]) -> Iterator[Piece]:
    """This rank's slices as boxes of global tensors: views, to copy from or into.

    slices: kind -> one flat tensor per bucket, laid out as the optimizer's; None leaves the bucket out.
    """
    for part in gradients.owned():
        shape, shard, at = part.param.shape, part.param.shard, 0
        for box in boxes_of_range(shape, part.offset, part.offset + part.numel):
            for kind, flat in slices.items():
                if flat[part.bucket] is not None:
                    view = part.of(flat)[at:at + box.volume].view(box.shape)
                    for cut, start in to_global(box, shard):
                        yield Piece(part.name, kind, whole_shape(shape, shard), start, view[cut.within(box)])
            at += box.volume


class Checkpointer:
    """Saves a run into checkpoint.dir. Make it, `save` and `wait` on all ranks alike.

    data: what identifies the order of samples (`Datasets.info`). step: that the run begins after, already saved or 0.
    """

    def __init__(self, cfg: Config, state: State, data: dict, log: Log, step: int = 0):
        self.cfg, self.state, self.data, self.log, self.saved = cfg, state, data, log, step
        self.mesh, buckets = state.optimizer.gradients.mesh, state.optimizer.gradients.buckets
        mesh, self.directory = self.mesh, Path(cfg.checkpoint.dir).expanduser()
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE) if mesh.world.size > 1 else None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.running: Future | None = None
        ours = [(mesh.tp.rank == 0 or not b.kind.replicated) and (mesh.pp.rank == 0 or not b.kind.tied) for b in buckets]
        pinned = mesh.device.type == "cuda"  # made now, so that memory that is short is short before the first step
        self.host = {kind: [torch.empty(x.shape, pin_memory=pinned) if our else None for x, our in zip(flat, ours)]
                     for kind, flat in state.slices().items()}

    def save(self, step: int, consumed_samples: int) -> None:
        """Begin to save the state after `step`; without checkpoint.async_save, also finish. Never the same step twice.

        Errors of the disk are logged.
        """
        self.wait()
        if step == self.saved:
            return
        started = time.perf_counter()
        copied = self._copy()
        stall = time.perf_counter() - started
        self.running = self.thread.submit(self._write, step, consumed_samples, stall, *copied)
        if not self.cfg.checkpoint.async_save:
            self.wait()

    def wait(self) -> None:
        """Until no save is running."""
        running, self.running = self.running, None
        if running is not None:
            running.result()

    def _copy(self) -> tuple[list[Piece], dict[str, Tensor], torch.cuda.Event | None]:
        """Begin to copy the state to the host: slices to self.host, FP8 histories and scalars to what is returned."""
        for kind, flat in self.state.slices().items():
            for host, device in zip(self.host[kind], flat, strict=True):
                if host is not None:
                    host.copy_(device, non_blocking=True)
        first = self.mesh.tp.rank == self.mesh.dp_cp.rank == 0
        histories = [p._replace(tensor=_to_host(p.tensor))
                     for chunk in self.state.chunks if first for p in self.state.histories(chunk)]
        scalars = {name: _to_host(value) for name, value in self.state.scalars().items()}
        if self.mesh.device.type != "cuda":
            return histories, scalars, None
        copied = torch.cuda.Event()
        copied.record()
        return histories, scalars, copied

    # ---- in the thread --------------------------------------------------------------------------------------------

    def _write(self, step: int, consumed: int, stall: float, histories: list[Piece], scalars: dict[str, Tensor],
               copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        started, temporary = time.perf_counter(), None
        mine = [*pieces(self.state.optimizer.gradients, self.host), *histories]
        size = sum(piece.tensor.nbytes for piece in mine)
        about = {"iteration": step, "consumed_samples": consumed, "config": asdict(self.cfg), "layout": self._layout(),
                 "state": {name: value.item() for name, value in scalars.items()} | {"data": self.data}}
        try:
            temporary = self._decide(size, lambda sizes: begin(self.directory, step, sum(sizes)))
            try:
                part = write_shard(temporary / f"rank_{self.mesh.rank:05d}.safetensors", mine)
            except CheckpointError as error:
                part = error
            self._decide(part, lambda parts: self._finish(temporary, about | merge(parts)))
        except CheckpointError as error:
            self.log.info(f"checkpoint of step {step} failed, training goes on: {error}")
            if temporary is not None and self.mesh.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
        else:
            self.saved = step
            self.log.info(f"checkpoint of step {step} saved: {size / 1e9:.3f} GB of this rank written in "
                          f"{time.perf_counter() - started:.2f} s, training stood for {stall:.3f} s")

    def _finish(self, temporary: Path, index: dict) -> None:
        commit(temporary, index)
        prune(self.directory, index["iteration"], self.cfg.checkpoint.keep)

    def _layout(self) -> dict[str, int]:
        sizes = {axis: getattr(self.mesh, axis).size for axis in ("world", "tp", "pp", "cp", "dp")}
        return sizes | {"vp": len(self.state.chunks)}

    def _decide(self, value: Any, rule: Callable[[list], Any]) -> Any:
        """rule(the values of all ranks) as rank 0 finds it, on every rank.

        A CheckpointError that is among the values, or that the rule raises, is raised everywhere. Between these ranks
        values travel pickled; no file is ever unpickled.
        """
        values, answer = [value], [None]
        if self.group is not None:
            values = [None] * self.mesh.world.size if self.mesh.rank == 0 else None
            dist.gather_object(value, values, group=self.group)
        if self.mesh.rank == 0:
            errors = [v for v in values if isinstance(v, CheckpointError)]
            try:
                answer = errors[:1] or [rule(values)]
            except CheckpointError as error:
                answer = [error]
        if self.group is not None:
            dist.broadcast_object_list(answer, group=self.group)
        if isinstance(answer[0], CheckpointError):
            raise answer[0]
        return answer[0]


def _to_host(x: Tensor) -> Tensor:
    """A copy that is complete when the device gets there."""
    return x.to("cpu", non_blocking=True, copy=True)
