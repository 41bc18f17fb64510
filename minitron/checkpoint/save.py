"""What of a run goes into a checkpoint, and how it gets there while training goes on.

Problem: to write the state of a large model takes longer than many steps. The idea: copy it to the host, which takes a
part of a step, and let a thread write the copy. The state is the optimizer's (float32 masters and moments, of which
every rank holds slices), fp16's loss scale and the FP8 histories, and no more: parameters are rounded masters, dropout
hashes counters, and the order of the data follows from the samples consumed and what the data are.

    training   step 20 |copy| step 21 ----------| step 22 ----------|      there is one copy: a save that comes too
    thread                  |- files -|- index, rename -|                  soon waits for the one before

All ranks write, each what no other writes: of a parameter that is replicated over tp or tied between stages the first
copy only. They agree over a gloo group of their own, in the thread, where no training collective meets them: rank 0
makes the folder, every rank reports what it wrote or what went wrong, rank 0 commits or clears up. So a failing disk
costs a checkpoint and a line in the log, not the run.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from minitron.checkpoint.boxes import Piece, boxes_of_range, to_global
from minitron.checkpoint.format import CheckpointError, begin, commit, write_shard
from minitron.config import Config
from minitron.fp8 import Fp8Gemm
from minitron.log import Log
from minitron.mesh import Mesh
from minitron.model.gpt import GPT
from minitron.optim.grads import Gradients
from minitron.optim.scaler import LossScaler
from minitron.optim.zero1 import Zero1Optimizer

PATIENCE = timedelta(days=1)  # a save may take long; a rank that dies ends the wait for it at once


class State(NamedTuple):
    """The parts of a trainer that have a state."""

    chunks: Sequence[GPT]
    optimizer: Zero1Optimizer
    scaler: LossScaler | None

    @property
    def mesh(self) -> Mesh:
        return self.optimizer.gradients.mesh

    def slices(self) -> dict[str, list[Tensor]]:
        """Kind -> one flat slice per bucket."""
        o = self.optimizer
        return {"master": o.masters, "exp_avg": o.exp_avg, "exp_avg_sq": o.exp_avg_sq}

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
        shape, shard, at = tuple(part.param.shape), part.param.shard, 0
        whole = shape if shard is None else (*shape[:shard.dim], sum(shard.chunks), *shape[shard.dim + 1:])
        for box in boxes_of_range(shape, part.offset, part.offset + part.numel):
            begin, at = at, at + prod(box.shape)
            for kind, flat in slices.items():
                if flat[part.bucket] is not None:
                    view = part.of(flat)[begin:at].view(box.shape)
                    for cut, start in to_global(box, shard):
                        yield Piece(part.name, kind, whole, start, view[cut.within(box)])


class Checkpointer:
    """Saves a run into checkpoint.dir. Make it, `save` and `wait` on all ranks alike.

    data: what identifies the order of samples (`Datasets.info`). step: that the run begins after, already saved or 0.
    """

    def __init__(self, cfg: Config, state: State, data: dict, log: Log, step: int = 0):
        self.cfg, self.state, self.data, self.log, self.saved = cfg, state, data, log, step
        self.mesh = mesh = state.mesh
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE) if mesh.world.size > 1 else None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.running: Future | None = None
        kinds = [bucket.kind for bucket in state.optimizer.gradients.buckets]
        ours = [(mesh.tp.rank == 0 or not k.replicated) and (mesh.pp.rank == 0 or not k.tied) for k in kinds]
        pinned = mesh.device.type == "cuda"  # filled now: no page is missing at a save, too little memory shows before
        self.host = {kind: [torch.empty(x.shape, pin_memory=pinned).zero_() if our else None
                            for x, our in zip(flat, ours)] for kind, flat in state.slices().items()}

    def due(self, step: int) -> bool:
        """Whether the configuration asks for a save after this step."""
        every = self.cfg.checkpoint.every
        return step == self.cfg.train.steps or (every > 0 and step % every == 0)

    def save(self, step: int, consumed_samples: int) -> None:
        """Begin to save the state after `step`; without checkpoint.async_save, also finish. Never the same step twice.

        Errors of the disk are logged; `saved` is the last step that was saved.
        """
        self.wait()
        if step == self.saved:
            return
        for kind, flat in self.state.slices().items():
            for host, device in zip(self.host[kind], flat, strict=True):
                if host is not None:
                    host.copy_(device, non_blocking=True)
        mine = list(pieces(self.state.optimizer.gradients, self.host))
        if self.mesh.tp.rank == self.mesh.dp_cp.rank == 0:
            mine += [p._replace(tensor=_to_host(p.tensor)) for c in self.state.chunks for p in self.state.histories(c)]
        scalars = {name: _to_host(value) for name, value in self.state.scalars().items()}
        copied = torch.cuda.Event() if self.mesh.device.type == "cuda" else None
        if copied is not None:
            copied.record()
        self.running = self.thread.submit(self._write, step, consumed_samples, mine, scalars, copied)
        if not self.cfg.checkpoint.async_save:
            self.wait()

    def wait(self) -> None:
        """Until no save is running."""
        running, self.running = self.running, None
        if running is not None:
            running.result()

    def _write(self, step: int, consumed_samples: int, mine: list[Piece], scalars: dict[str, Tensor],
               copied: torch.cuda.Event | None) -> None:
        """In the thread: from the copy to a checkpoint, together with the other ranks' threads."""
        if copied is not None:
            copied.synchronize()
        c, mesh, temporary, started = self.cfg.checkpoint, self.mesh, None, time.perf_counter()
        layout = {axis: getattr(mesh, axis).size for axis in ("world", "tp", "pp", "cp", "dp")}
        about = {"iteration": step, "consumed_samples": consumed_samples, "config": asdict(self.cfg),
                 "layout": layout | {"vp": len(self.state.chunks)},
                 "state": {name: value.item() for name, value in scalars.items()} | {"data": self.data}}
        size = sum(piece.tensor.nbytes for piece in mine)
        try:
            directory = Path(c.dir).expanduser()
            temporary = decide(size, lambda sizes: begin(directory, step, sum(sizes)), mesh, self.group)
            try:
                shard = write_shard(temporary / f"rank_{mesh.rank:05d}.safetensors", mine)
            except CheckpointError as error:
                shard = error  # for rank 0 to hear of
            decide(shard, lambda shards: commit(temporary, about, shards, c.keep), mesh, self.group)
        except CheckpointError as error:
            if temporary is not None and mesh.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            return self.log.info(f"checkpoint of step {step} failed, training goes on: {error}")
        self.saved = step
        self.log.info(f"checkpoint of step {step} saved: {size / 1e6:.1f} MB of this rank in "
                      f"{time.perf_counter() - started:.2f} s")


def decide(value: Any, rule: Callable[[list], Any], mesh: Mesh, group: dist.ProcessGroup | None = None) -> Any:
    """rule(the values of all ranks) as rank 0 finds it, on every rank.

    A CheckpointError among the values, or of the rule, is raised on every rank. What travels between these ranks is
    pickled in memory; no file is ever unpickled.
    """
    together, values, answer = mesh.world.size > 1, [value], [None]
    if together:
        values = [None] * mesh.world.size if mesh.rank == 0 else None
        dist.gather_object(value, values, group=group)
    if mesh.rank == 0:
        try:
            answer = [v for v in values if isinstance(v, CheckpointError)][:1] or [rule(values)]
        except CheckpointError as error:
            answer = [error]
    if together:
        dist.broadcast_object_list(answer, group=group)
    if isinstance(answer[0], CheckpointError):
        raise answer[0]
    return answer[0]


def _to_host(x: Tensor) -> Tensor:
    """A copy that is complete when the device gets there."""
    return x.to("cpu", non_blocking=True, copy=True)
