"""Save a run while it trains: `Saves` decides when, `Checkpointer` copies and writes the state.

Problem: writing the state of a large model takes longer than many steps. The idea: copy it to host memory while the
next step runs, and let a thread write the copy. state.py lists what the state consists of.

    step 20 | step 21: forward, backward | update | step 22 ...     only an update overwrites the optimizer's state, so
            |- copy, 12 bytes a parameter -|                        it alone waits for the copy. There is one copy: a
                         thread            |- files -|- rename -|   save that comes too soon waits for the one before

In any layout forward and backward take longer than the copy if the global batch has some ten thousands of tokens or
more. What the next step changes sooner (FP8 histories, loss scale, step count) is tiny and copied before it begins.
The host memory is allocated at the start: 12 bytes for each parameter whose state the rank holds (96 GB for 8 billion
parameters on one GPU). The buffer is pinned if a GPU copies into it.

All ranks write, and each value is written once: of a parameter that is replicated over tp or tied between stages, only
the first copy is saved. The threads agree (comm/agree.py) apart from the collectives of training. A failed save is
logged, and training continues. A run whose directory was taken over by another one saves once more, in a folder beside
it, and ends. destination.py commits the files of all ranks. interval.py chooses the steps between saves.
"""

from __future__ import annotations

import ctypes
import mmap
import time
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from minitron.checkpoint.boxes import TensorShard
from minitron.checkpoint.checksum import THREADS
from minitron.checkpoint.destination import Destination
from minitron.checkpoint.directory import ERRORS, STEP_NAME, TakenOver, make_writable
from minitron.checkpoint.format import CheckpointError
from minitron.checkpoint.interval import SaveInterval
from minitron.checkpoint.load import ResumePoint
from minitron.checkpoint.state import State, tensor_shards
from minitron.comm.handle import DeviceTime, Handle
from minitron.comm.mesh import Mesh
from minitron.config.schema import Config
from minitron.optim.replicas import Replicas
from minitron.runtime.log import Log
from minitron.runtime.log_formats import Iteration
from minitron.runtime.observer import Observer, StepDone
from minitron.runtime.stop import Stop

LOCAL_KEEP = 2  # the newest local save may be missing on a node that was lost while it was written


class ExporterProtocol(Protocol):
    """Makes folders of another format from saves, on rank 0 (interop/export.py)."""

    def saved(self, checkpoint: Path, step: int) -> None: ...

    def close(self, stopped: int) -> None: ...


class Saves(Observer):
    """Decides when a run saves: after the steps that are due, and where a signal stops it.

    checkpointer: makes the saves; None: the run saves nothing (`can_save`). replicas: copies of parameters are compared
    before each save. start: what the run starts from. waited: seconds that the end of the run waited for a save.
    `close` raises CheckpointError if the last step had to be saved and is not.
    """

    def __init__(self, checkpointer: Checkpointer | None, stop: Stop, replicas: Replicas, start: ResumePoint):
        self.checkpointer, self.stop, self.replicas = checkpointer, stop, replicas
        self.first, self.step, self.consumed, self.waited = start.step, start.step, start.consumed_samples, 0.0

    def stalls(self) -> list[tuple[DeviceTime, DeviceTime]]:
        """Return begin and end of each wait of the training since the last call."""
        return [] if self.checkpointer is None else self.checkpointer.stalls()

    def on_figures(self, it: Iteration) -> None:
        """Measure what saves cost by the figures of a step."""
        if self.checkpointer is not None:
            self.checkpointer.on_figures(it)

    def after(self, done: StepDone) -> None:
        self.step, self.consumed = done.step, done.consumed_samples
        if self.checkpointer is not None:
            shared = bool(self.stop.agreed) or self.checkpointer.due(done.step)
            if shared or self.checkpointer.local_due(done.step):
                self._save(self.checkpointer, local=not shared)

    def close(self) -> None:
        saved, due = False, False
        if self.checkpointer is not None:
            due = bool(self.stop.agreed) or self.checkpointer.due(self.step)
            if due and self.step == self.first:  # the run resumed after its last step, from the nodes' own disks
                self._save(self.checkpointer)
            self.replicas.mesh.activity.begin("checkpoint")
            began = time.perf_counter()
            self.checkpointer.close(self.stop.agreed)
            self.waited, saved = time.perf_counter() - began, self.checkpointer.shared.saved == self.step
        if self.stop.agreed:
            self.stop.report(self.step, saved)
        if self.checkpointer is not None and due and not saved:  # a scheduler must not take the run for complete
            why = f"is not saved in {self.checkpointer.shared.directory}: the log has the reason"
            raise CheckpointError(f"the run ends after step {self.step}, which {why}; start it again")

    def _save(self, checkpointer: Checkpointer, local: bool = False) -> None:
        self.replicas.require_equal(self.step)
        self.replicas.mesh.activity.begin("checkpoint")  # from here on a rank may wait as long as its disk takes
        checkpointer.save(self.step, self.consumed, local=local)


def can_save(cfg: Config, mesh: Mesh, log: Log) -> bool:
    """Tell whether the run can save, the same on all ranks. Collective over the world.

    With checkpoint.every=null a run can also resume from a directory that cannot be written. A signal then ends it
    without a save, and the log has a warning.
    """
    c = cfg.checkpoint
    if c.dir is None:
        return False
    if c.saves:
        return True
    directory = Path(c.dir).expanduser()
    try:
        mesh.agreement.decide(lambda: None, lambda _: make_writable(directory), ERRORS)
    except CheckpointError as error:
        log.warn(f"this run saves nothing, even if a signal ends it (checkpoint.every=null): {error}")
        return False
    return True


class Checkpointer:
    """Copies the state to host memory, and writes the copy into checkpoint.dir or checkpoint.local_dir in a thread.

    Constructor, `save`, `wait` and `close` are collective over the world. data: what identifies the order of samples
    (`Datasets.info`). step: the one after which the run begins. parent_checkpoint: step and index checksum of the
    checkpoint in checkpoint.dir that the run descends from; None if there is none. Raises CheckpointError, on all
    ranks, if a host lacks the memory for the copy, if a directory cannot be written, and in `save` and `wait` if
    another run has taken the directory over.
    """

    def __init__(
        self,
        cfg: Config,
        state: State,
        data: dict[str, Any],
        log: Log,
        step: int = 0,
        parent_checkpoint: tuple[int, str] | None = None,
        exporter: ExporterProtocol | None = None,
    ):
        c = cfg.checkpoint
        assert c.dir is not None
        self.cfg, self.state, self.data, self.log, self.exporter = cfg, state, data, log, exporter
        self.parent_checkpoint = parent_checkpoint
        self.interval, self.local_interval = (SaveInterval(n, c.mtbf_hours, step) for n in (c.every, c.local_every))
        self.pauses: list[tuple[DeviceTime, DeviceTime]] = []
        self.mesh = mesh = state.optimizer.gradients.mesh
        self.decide = partial(mesh.agreement.decide, errors=ERRORS)
        on_gpu = mesh.device.type == "cuda"
        self.stream = torch.cuda.Stream(mesh.device) if on_gpu else None
        use_device = partial(torch.cuda.set_device, mesh.device) if on_gpu else None
        self.thread = ThreadPoolExecutor(1, "checkpoint", use_device)
        self.running: Future[None] | None = None
        gradients, masters = state.optimizer.gradients, state.optimizer.masters
        sizes = [
            x.numel() if gradients.has_first_copy(b) else 0 for b, x in zip(gradients.buckets, masters, strict=True)
        ]

        def allocate() -> None:
            self.memory = host_memory(len(state.slices()), sum(sizes), pinned=on_gpu)

        self.decide(allocate, lambda _: None)
        self.host = {kind: row.split(sizes) for kind, row in zip(state.slices(), self.memory)}
        self.shards = list(tensor_shards(gradients, self.host))
        self.histories = [shard for chunk in state.chunks for shard in state.histories(chunk)]
        saved = step if parent_checkpoint is None else parent_checkpoint[0]
        held = self.shards, self.histories
        self.shared = Destination(Path(c.dir).expanduser(), c.keep, mesh, saved, *held)
        self.local: Destination | None = None
        if c.local_dir is not None:
            self.local = Destination(Path(c.local_dir).expanduser(), LOCAL_KEEP, mesh, step, *held, per_node=True)

    def due(self, step: int) -> bool:
        """Tell whether the configuration asks for a save in checkpoint.dir after this step."""
        return self.cfg.checkpoint.every is not None and (step == self.cfg.train.steps or self.interval.due(step))

    def local_due(self, step: int) -> bool:
        """Tell whether the configuration asks for a save in checkpoint.local_dir after this step."""
        return self.local is not None and self.local_interval.due(step)

    def on_figures(self, it: Iteration) -> None:
        """Measure what saves cost by the figures of a step."""
        for interval in (self.interval, self.local_interval):
            interval.observe(it)

    def stalls(self) -> list[tuple[DeviceTime, DeviceTime]]:
        """Return begin and end of each wait of the training since the last call."""
        taken, self.pauses = self.pauses, []
        return taken

    def save(self, step: int, consumed_samples: int, local: bool = False) -> None:
        """Begin to save the state after `step`; without checkpoint.async_save, also finish. Never the same step twice.

        local: save in checkpoint.local_dir, unless checkpoint.dir holds no save yet. Errors of the disk are logged.
        """
        began = DeviceTime(self.mesh.device)
        self.wait()
        if step == self.shared.saved:
            return
        local = local and self.parent_checkpoint is not None
        destination = self.local if local and self.local is not None else self.shared
        intervals = [self.local_interval] if local else [self.interval, self.local_interval]
        for interval in intervals:
            interval.begin(step, own=interval is intervals[0])
        if why := intervals[0].choose(self.decide):
            self.log.info(f"checkpoint.{'local_every' if local else 'every'}=auto: {why}")
        histories = self.histories if destination.has_histories else []
        shards = self.shards + [shard._replace(tensor=_to_host(shard.tensor)) for shard in histories]
        scalars = {name: _to_host(value) for name, value in self.state.scalars().items()}
        pairs = (pair for kind, flat in self.state.slices().items() for pair in zip(self.host[kind], flat))
        copied = copy_beside(self.stream, ((host, device) for host, device in pairs if len(host)))
        if copied is not None:
            self.state.optimizer.wait_before_update(Handle(copied, [partial(self._wait_for_copy, copied)]))
        layout = {axis: getattr(self.mesh, axis).size for axis in ("world", "tp", "pp", "cp", "dp")}
        about = {
            "iteration": step,
            "consumed_samples": consumed_samples,
            "config": asdict(self.cfg),
            "layout": layout | {"vp": len(self.state.chunks)},
            "state": scalars | {"data": self.data} | self.state.facts(),
        }
        self.running = self.thread.submit(self._write, destination, about, shards, copied)
        if not self.cfg.checkpoint.async_save:
            self.wait()
        self.pauses.append((began, DeviceTime(self.mesh.device)))

    def _wait_for_copy(self, copied: torch.cuda.Event) -> None:
        """Let an update wait for the copy. Record how long the device waits."""
        self.pauses.append((DeviceTime(self.mesh.device), DeviceTime(self.mesh.device, copied)))
        copied.wait()

    def wait(self) -> None:
        """Wait until no save is running."""
        running, self.running = self.running, None
        if running is not None:
            running.result()

    def close(self, stopped: int = 0) -> None:
        """Wait until no save and no export is running; `stopped`, by a signal, ends an export instead."""
        self.wait()
        if self.cfg.checkpoint.export == "hf":
            self.decide(lambda: None if self.exporter is None else self.exporter.close(stopped), lambda _: None)

    def _write(
        self,
        destination: Destination,
        about: dict[str, Any],
        shards: list[TensorShard],
        copied: torch.cuda.Event | None,
    ) -> None:
        """Write the copy as a checkpoint, together with the other ranks' threads. Runs in the thread."""
        begun = time.perf_counter()
        if copied is not None:
            copied.synchronize()
        state = {name: x.item() if isinstance(x, Tensor) else x for name, x in about["state"].items()}
        step, local = about["iteration"], destination is self.local
        about = about | {"state": state | ({"root": self.parent_checkpoint} if local else {})}

        def write() -> str:
            """Write and measure the save. Return the checksum of its index."""
            index_checksum = destination.write(about, shards)
            seconds, size = time.perf_counter() - begun, sum(shard.tensor.nbytes for shard in shards) / 1e6
            (self.local_interval if local else self.interval).end(seconds)
            self.log.record("save", step=step, seconds=seconds, local=local)
            where = f"step {step} saved on the nodes' own disks" if local else f"checkpoint of step {step} saved"
            self.log.info(f"{where}: {size:.1f} MB of this rank in {seconds:.2f} s")
            return index_checksum

        try:
            index_checksum = write()
            if not local:
                self.parent_checkpoint = step, index_checksum
                if self.exporter is not None:
                    self.exporter.saved(destination.directory / STEP_NAME(step), step)
        except TakenOver as error:
            self.log.warn(f"{error}; here this run saves aside, and ends")
            destination.directory /= f"aside.{destination.owner}"
            where = f"this run's step {step} is in {destination.directory}"
            try:
                write()
            except CheckpointError as failed:
                where = f"this run's step {step} is not saved: {failed}"
            raise TakenOver(f"{error}; {where}") from error
        except CheckpointError as error:
            what = "local save" if local else "checkpoint"
            self.log.warn(f"{what} of step {step} failed, training goes on: {error}")
        finally:
            self.interval.end(None)
            self.local_interval.end(None)


def host_memory(rows: int, numel: int, *, pinned: bool) -> Tensor:
    """Allocate [rows, numel] float32 zeros on the host, so that every page exists. Raises CheckpointError.

    pinned: lock the pages, so that a GPU copies to them by itself. They are registered with CUDA here, because torch
    rounds its own pinned memory up to a power of two. Large pages and several threads make this faster: a rank of a
    large model takes a hundred gigabytes, and a restart waits for it.
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
    with suppress(AttributeError, OSError):  # only Linux has large pages, and not every kernel
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory, part = torch.frombuffer(pages, dtype=torch.float32).view(rows, numel), -(-size // THREADS)
    address, begins = memory.data_ptr(), range(0, size, part)
    with ThreadPoolExecutor(THREADS) as pool:  # not by torch: each thread would start a team of threads
        list(pool.map(lambda begin: ctypes.memset(address + begin, 0, min(part, size - begin)), begins))
    if pinned:
        cuda = torch.cuda.cudart()
        if int(cuda.cudaHostRegister(address, size, 0)) != 0:
            raise lacking
        weakref.finalize(memory, cuda.cudaHostUnregister, address).atexit = False  # at exit the system does it
    return memory


def copy_beside(stream: torch.cuda.Stream | None, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
    """Copy (host, device) pairs on `stream`, after what has been queued so far; return the event of their end.

    Without a stream, on a CPU, they are copied when this returns None. The device's tensors must stay alive and
    unchanged until the event.
    """
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # None: the current stream
        for host, device in pairs:
            host.copy_(device, non_blocking=True)
    return None if stream is None else stream.record_event(torch.cuda.Event(blocking=True, enable_timing=True))


def _to_host(x: Tensor) -> Tensor:
    """Copy x to the host; the copy is complete when the current stream has done it."""
    return x.to("cpu", non_blocking=True, copy=True)
