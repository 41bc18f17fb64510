"""Save a run while it trains: what goes into a checkpoint, and how it gets there.

Problem: to write the state of a large model takes longer than many steps. The idea: copy it to the host beside the next
step, and let a thread write the copy. The state is the optimizer's (float32 masters and moments, of which every rank
holds slices), fp16's loss scale and the FP8 histories. No more is needed: parameters are rounded or cast masters,
dropout hashes counters, and the order of the data follows from the data and the samples consumed.

    step 20 | step 21: forward, backward | update | step 22 ...     only an update overwrites the optimizer's state, so
            |- copy, 12 bytes a parameter -|                        it alone waits for the copy. There is one: a save
                         thread            |- files -|- rename -|   that comes too soon waits for the one before

At 50 GB/s the 12 bytes of a parameter are copied in 0.24 ns. At 650 TFLOP/s its 6 operations a token take as long for
26,000 tokens: a larger global batch hides the whole copy, in any layout. What the next step changes sooner (FP8
histories, loss scale, step count) is tiny and copied before it begins. The host's memory is taken at the start: 12
bytes for each parameter whose state the rank holds (96 GB for 8 billion of them on one GPU), page-locked where a GPU is
to write to it on its own.

All ranks write, and nothing twice: of a parameter that is replicated over tp or tied between stages only the first copy
is written. The threads agree (comm/agree.py) apart from the collectives of training: rank 0 makes the
folder, every rank reports what it wrote or what went wrong, and rank 0 commits or clears up. What the index says of
tensors follows from the layout: it is put together once, and a save adds its step and checksums. So a failing disk
costs a checkpoint and a line in the log, not the run. A run whose directory was taken over by another one saves once
more, in a folder aside, and ends. When saves are due is cadence.py's; those on the nodes' own disks are local.py's.
"""

from __future__ import annotations

import ctypes
import mmap
import shutil
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from minitron.checkpoint.boxes import Piece, boxes_of_range, to_global, whole_shape
from minitron.checkpoint.cadence import Cadence
from minitron.checkpoint.checksum import THREADS
from minitron.checkpoint.directory import ERRORS, STEP_NAME, TakenOver, begin, check_owner, claim, commit
from minitron.checkpoint.format import CheckpointError, Description, describe, index_bytes, index_tensors, write_shard
from minitron.checkpoint.local import LocalSaves
from minitron.config.schema import Config
from minitron.kernels.fp8 import Fp8Gemm
from minitron.model.gpt import GPT, Head
from minitron.optim.buckets import Gradients
from minitron.optim.rerun import Rerun
from minitron.optim.scaler import LossScaler
from minitron.optim.zero1 import Zero1Optimizer
from minitron.parallel.linear import ParallelLinear
from minitron.runtime.log import Iteration, Log
from minitron.runtime.meter import Mark, Pause, Stall


class Exporter(Protocol):
    """Makes folders of another format from saves, on rank 0 (interop/export.py)."""

    def saved(self, checkpoint: Path, step: int) -> None: ...

    def close(self, stopped: int) -> None: ...


class State(NamedTuple):
    """The parts of a trainer that have a state."""

    chunks: Sequence[GPT]
    optimizer: Zero1Optimizer
    scaler: LossScaler
    base: str | None = None  # fingerprint of frozen weights, which are not saved
    rerun: Rerun | None = None

    def slices(self) -> dict[str, list[Tensor]]:
        """Map each kind to one flat slice per bucket."""
        o = self.optimizer
        return {"master": o.masters, "exp_avg": o.exp_avg, "exp_avg_sq": o.exp_avg_sq}

    def scalars(self) -> dict[str, Tensor]:
        """Map names in the index to 0-d tensors, the same on every rank."""
        return {"optimizer_steps": self.optimizer.steps, **self.scaler.state()}

    def facts(self) -> dict:
        """Map names in the index to what the host knows, the same on every rank."""
        return {"base": self.base} | ({} if self.rerun is None else {"rerun": self.rerun.state()})

    @staticmethod
    def histories(chunk: GPT) -> Iterator[Piece]:
        """Yield the chunk's FP8 magnitudes by layer: views, the same on every rank of tp and dp_cp."""
        for name, module in chunk.named_modules():
            gemm = module.linear.gemm if isinstance(module, (ParallelLinear, Head)) else None
            if isinstance(gemm, Fp8Gemm) and gemm.history is not None:
                yield Piece(name, "fp8_history", tuple(gemm.history.shape), (0, 0), gemm.history)


def pieces(gradients: Gradients, slices: Mapping[str, Sequence[Tensor]]) -> Iterator[Piece]:
    """Yield this rank's slices as boxes of global tensors: views, to copy from or into.

    slices: kind -> one flat tensor per bucket, laid out as the optimizer's; an empty one leaves the bucket out.
    """
    for part in gradients.owned():
        shape, shard, at = tuple(part.param.shape), part.param.spec.shard, 0
        whole = whole_shape(shape, shard)
        for box in boxes_of_range(shape, part.offset, part.offset + part.numel):
            begin, at = at, at + prod(box.shape)
            for kind, flat in slices.items():
                if len(flat[part.bucket]):
                    view = part.of(flat)[begin:at].view(box.shape)
                    for cut, start in to_global(box, shard):
                        yield Piece(part.name, kind, whole, start, view[cut.within(box)])


class Checkpointer:
    """Saves a run into checkpoint.dir and checkpoint.local_dir. Make it, `save` and `wait` on all ranks alike.

    data: what identifies the order of samples (`Datasets.info`). step: the one after which the run begins. root: step
    and index checksum of the checkpoint in checkpoint.dir that it descends from; None if there is no parent.
    Raises CheckpointError, on all ranks: where a host has no memory for the copy, where nothing can be saved, and in
    `save` and `wait` if another run has taken the directory over.

    saved: the last step that was saved in checkpoint.dir.
    """

    def __init__(
        self,
        cfg: Config,
        state: State,
        data: dict,
        log: Log,
        step: int = 0,
        root: tuple[int, str] | None = None,
        exporter: Exporter | None = None,
    ):
        self.cfg, self.state, self.data, self.log = cfg, state, data, log
        self.saved, self.root = (step, None) if root is None else root
        c = cfg.checkpoint
        self.cadence, self.local_cadence = (Cadence(n, c.mtbf_hours, step) for n in (c.every, c.local_every))
        self.pauses: list[Stall] = []
        self.mesh = mesh = state.optimizer.gradients.mesh
        self.file = f"rank_{mesh.rank:05d}.safetensors"
        self.decide = partial(mesh.agreement.decide, errors=ERRORS)
        on_gpu = mesh.device.type == "cuda"
        self.stream = torch.cuda.Stream(mesh.device) if on_gpu else None
        self.thread = ThreadPoolExecutor(1, "checkpoint", torch.cuda.set_device if on_gpu else None, (mesh.device,))
        self.running: Future | None = None
        gradients, masters = state.optimizer.gradients, state.optimizer.masters
        sizes = [x.numel() if gradients.counts(b) else 0 for b, x in zip(gradients.buckets, masters, strict=True)]
        self.directory = Path(cfg.checkpoint.dir).expanduser()
        self.exporter = exporter

        def take_memory() -> None:
            self.memory = host_memory(len(state.slices()), sum(sizes), pinned=on_gpu)

        self.owner = self.decide(take_memory, lambda _: claim(self.directory))
        self.host = {kind: row.split(sizes) for kind, row in zip(state.slices(), self.memory)}
        self.pieces = list(pieces(gradients, self.host))
        self.histories = [piece for chunk in state.chunks for piece in state.histories(chunk)]
        # They are the same along tp and dp_cp.
        self.has_histories = mesh.tp.rank == mesh.dp_cp.rank == 0
        described = describe(self.file, self.pieces + self.histories)
        boxes, histories = described[: len(self.pieces)], described[len(self.pieces) :]
        size = sum(piece.tensor.nbytes for piece in self.pieces + self.histories)
        self.num_bytes, self.tensors = 0, b""  # on rank 0: of all ranks

        def describe_all(ranks: list[tuple[int, list[Description]]]) -> None:
            self.num_bytes, self.tensors = sum(size for size, _ in ranks), index_tensors(boxes for _, boxes in ranks)

        self.decide(lambda: (size, boxes + histories * self.has_histories), describe_all)
        self.local = None
        if c.local_dir is not None:
            self.local = LocalSaves(c.local_dir, mesh, step, size, boxes, histories)

    def due(self, step: int) -> bool:
        """Tell whether the configuration asks for a save in checkpoint.dir after this step."""
        return self.cfg.checkpoint.every is not None and (step == self.cfg.train.steps or self.cadence.due(step))

    def local_due(self, step: int) -> bool:
        """Tell whether it asks for one on the nodes' own disks."""
        return self.local is not None and self.local_cadence.due(step)

    def saw(self, it: Iteration) -> None:
        """Measure what saves cost by the figures of a step."""
        for cadence in (self.cadence, self.local_cadence):
            cadence.saw(it)

    def stalls(self) -> list[Stall]:
        """Return what training has waited for since the last call."""
        taken, self.pauses = self.pauses, []
        return taken

    def save(self, step: int, consumed_samples: int, local: bool = False) -> None:
        """Begin to save the state after `step`; without checkpoint.async_save, also finish. Never the same step twice.

        local: on the nodes' own disks, unless there is nothing in checkpoint.dir yet. Errors of the disk are logged.
        """
        began = Mark(self.mesh.device)
        self.wait()
        if step == self.saved:
            return
        local = local and self.root is not None
        cadences = [self.local_cadence] if local else [self.cadence, self.local_cadence]
        for cadence in cadences:
            cadence.begin(step)
        self._agree(cadences[0], "local_every" if local else "every")
        has_histories = self.local.has_histories if local and self.local is not None else self.has_histories
        histories = self.histories if has_histories else []
        mine = self.pieces + [piece._replace(tensor=_to_host(piece.tensor)) for piece in histories]
        scalars = {name: _to_host(value) for name, value in self.state.scalars().items()}
        pairs = (pair for kind, flat in self.state.slices().items() for pair in zip(self.host[kind], flat))
        copied = copy_beside(self.stream, ((host, device) for host, device in pairs if len(host)))
        if copied is not None:
            self.state.optimizer.snapshot_done = Snapshot(copied, self.mesh.device, self.pauses)
        progress, facts = {"iteration": step, "consumed_samples": consumed_samples}, self.state.facts()
        begun = time.perf_counter()
        self.running = self.thread.submit(self._write, progress, facts, mine, scalars, copied, local, begun)
        if not self.cfg.checkpoint.async_save:
            self.wait()
        self.pauses.append(Pause(began, Mark(self.mesh.device)))

    def _agree(self, cadence: Cadence, key: str) -> None:
        """Choose the interval to the next save, on all ranks alike. No thread of theirs communicates meanwhile."""
        if cadence.auto:
            why = cadence.agree(self.decide(cadence.costs, cadence.best))
            if why:
                self.log.info(f"checkpoint.{key}=auto: {why}")

    def wait(self) -> None:
        """Wait until no save is running."""
        running, self.running = self.running, None
        if running is not None:
            running.result()

    def close(self, stopped: int = 0) -> None:
        """Wait until no save and no export is running; `stopped`, by a signal, ends an export instead. Collective."""
        self.wait()
        if self.cfg.checkpoint.export == "hf":
            self.decide(lambda: None if self.exporter is None else self.exporter.close(stopped), lambda _: None)

    def _write(
        self,
        progress: dict,
        facts: dict,
        mine: list[Piece],
        scalars: dict[str, Tensor],
        copied: torch.cuda.Event | None,
        local: bool,
        begun: float,
    ) -> None:
        """Make a checkpoint of the copy, together with the other ranks' threads. Runs in the thread."""
        if copied is not None:
            copied.synchronize()
        layout = {axis: getattr(self.mesh, axis).size for axis in ("world", "tp", "pp", "cp", "dp")}
        layout["vp"] = len(self.state.chunks)
        state = {name: value.item() for name, value in scalars.items()} | {"data": self.data} | facts
        about = progress | {"config": asdict(self.cfg), "layout": layout, "state": state}
        step = progress["iteration"]
        try:
            if local:
                assert self.local is not None
                self.local.write(about | {"state": state | {"root": self.root}}, mine)
                return self._report(step, mine, begun, local)
            self._to_disk(about, mine, begun)
            if self.exporter is not None:
                self.exporter.saved(self.directory / STEP_NAME(step), step)
        except TakenOver as error:
            self.log.warn(f"{error}; here this run saves aside, and ends")
            self.directory /= f"aside.{self.owner}"
            where = f"this run's step {step} is in {self.directory}"
            try:
                self._to_disk(about, mine, begun)
            except CheckpointError as failed:
                where = f"this run's step {step} is not saved: {failed}"
            raise TakenOver(f"{error}; {where}") from error
        except CheckpointError as error:
            what = "local save" if local else "checkpoint"
            self.log.warn(f"{what} of step {step} failed, training goes on: {error}")
        finally:
            self.cadence.end(None)
            self.local_cadence.end(None)

    def _report(self, step: int, mine: list[Piece], begun: float, local: bool) -> None:
        """Measure, record and log a save that is whole."""
        seconds, size = time.perf_counter() - begun, sum(piece.tensor.nbytes for piece in mine) / 1e6
        (self.local_cadence if local else self.cadence).end(seconds)
        self.log.record("save", step=step, seconds=seconds, local=local)
        where = f"step {step} saved on the nodes' own disks" if local else f"checkpoint of step {step} saved"
        self.log.info(f"{where}: {size:.1f} MB of this rank in {seconds:.2f} s")

    def _to_disk(self, about: dict, mine: list[Piece], begun: float) -> None:
        """Write and commit the checkpoint. Raises CheckpointError and TakenOver, on all ranks alike."""
        temporary, step = None, about["iteration"]

        def make_folder(_: list) -> str:
            return str(begin(self.directory, step, self.num_bytes, self.owner))

        def commit_all(records: list[dict]) -> str:
            assert temporary is not None
            changing = index_bytes(about, {name: record for files in records for name, record in files.items()})
            return commit(temporary, changing, self.tensors, self.cfg.checkpoint.keep, self.saved, self.owner)

        try:
            temporary = Path(self.decide(lambda: None, make_folder))
            mark = self.decide(lambda: write_shard(temporary / self.file, mine), commit_all)
        except CheckpointError:
            if temporary is not None and self.mesh.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            # Whoever took the directory over may have cleared this save away, in the midst of a file.
            self.decide(lambda: None, lambda _: check_owner(self.directory, self.owner))
            raise
        self.saved, self.root = step, (step, mark)
        self._report(step, mine, begun, local=False)


def host_memory(rows: int, numel: int, *, pinned: bool) -> Tensor:
    """Take [rows, numel] float32 of the host, written once so that each page is there. Raises CheckpointError.

    pinned: lock the pages, so that a GPU copies to them by itself. They are registered with CUDA here, because torch's
    own pinned memory comes in powers of two, up to twice of what is needed. Linux is asked for large pages, and several
    threads write: a rank of a large model takes a hundred gigabytes, and a restart waits for it.
    """
    size = 4 * rows * numel
    fix = "use more hosts, or save nothing with checkpoint.dir=null"
    why = f"checkpoint.dir is set and the host has no {size / 1e9:.1f} GB for a copy of this rank's state"
    lacking = CheckpointError(f"{why}; {fix}")
    if not size:
        return torch.zeros(rows, numel)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise lacking from error
    if hasattr(mmap, "MADV_HUGEPAGE"):  # of Linux
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory, part = torch.frombuffer(pages, dtype=torch.float32).view(rows, numel), -(-size // THREADS)
    address, begins = memory.data_ptr(), range(0, size, part)
    with ThreadPoolExecutor(THREADS) as pool:  # not by torch, of which each thread would start a team
        list(pool.map(lambda begin: ctypes.memset(address + begin, 0, min(part, size - begin)), begins))
    if pinned:
        cuda = torch.cuda.cudart()
        if int(cuda.cudaHostRegister(address, size, 0)) != 0:
            raise lacking
        weakref.finalize(memory, cuda.cudaHostUnregister, address).atexit = False  # the system does it then
    return memory


def copy_beside(stream: torch.cuda.Stream | None, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
    """Copy (host, device) pairs on `stream`, after what has been queued so far; returns the event of their end.

    Without a stream, on a CPU, they are copied when this returns None. The device's tensors are to live on unchanged
    until the event.
    """
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # of None: where it is
        for host, device in pairs:
            host.copy_(device, non_blocking=True)
    return None if stream is None else stream.record_event(torch.cuda.Event(blocking=True, enable_timing=True))


class Snapshot:
    """The end of a copy, for which an update waits; tells how long the device stood still for it.

    stalls: where it notes itself when an update has come to it.
    """

    def __init__(self, copied: torch.cuda.Event, device: torch.device, stalls: list[Stall]):
        self.copied, self.device, self.stalls = copied, device, stalls
        self.reached: Mark | None = None

    def wait(self) -> None:
        """Let the current stream wait for the copy."""
        if self.reached is None:
            self.reached = Mark(self.device)
            self.stalls.append(self)
        self.copied.wait()

    def seconds(self) -> float:
        assert self.reached is not None and self.reached.event is not None
        return self.reached.event.elapsed_time(self.copied) / 1000


def _to_host(x: Tensor) -> Tensor:
    """Copy x to the host; the copy is complete when the current stream has done it."""
    return x.to("cpu", non_blocking=True, copy=True)
