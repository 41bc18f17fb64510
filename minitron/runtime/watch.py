"""Report where a run hangs, and end it.

Problem: one rank of a thousand stops: a lost disk, a driver, a branch that only this rank took. The others wait for it
in a collective, without a message and with GPUs that look busy. The idea:

1. Each rank has an `Activity`: step, schedule action, collective. The code of the step keeps it up to date, by a few
   attribute writes. Every `Axis` carries it, so collectives find it and it need not be a global.
2. The thread of `signals.Listener` reads it. If nothing was written for train.hang_seconds, this rank hangs.
3. The host runs ahead of its GPU by a step at most, so a stuck kernel soon stops the host, too. The device writes
   counters after each action (`Progress`), also in a replayed step. They and torch's flight recorder show where the
   *device* is.
4. A rank that hangs writes its activity to the store in which the ranks met, which needs no collective. The first one
   lists all. A rank that is missing there is dead, or in C code that holds the interpreter's lock (see `py-spy dump`).
5. It ends by os._exit, since nothing else ends a process whose main thread is in C. Then torchrun ends the others.

    activity of all ranks:
      ranks 0, 1: step 3, Backward(mb=1, chunk=0, last=False), exchange over pp (8,192 bytes)
      rank 2: step 3, Forward(mb=1, chunk=0)                                        <- its report has the stack
      rank 3: step 3, Forward(mb=1, chunk=0), all-gather over tp (4,096 bytes)
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from time import sleep

import torch
import torch.distributed as dist

from minitron.comm.activity import PeerLost, listed
from minitron.comm.mesh import Mesh
from minitron.runtime.log import Log
from minitron.runtime.rendezvous import AGAIN, Signer, connect, first_line
from minitron.runtime.signals import Listener
from minitron.runtime.status import HUNG, RanksLost

# Actions that may take long without a fault of another rank. ("start" is not one: ranks meet there.)
OWN_PACE = frozenset({"data", "datasets", "checkpoint", "load", "profile", "recording"})
# Writing terabytes takes hours and is not a hang, but a stuck disk must be reported, too. At the start the other ranks
# wait as long for the slowest one: "load" is a checkpoint, "datasets" are indices to build or to read.
DISK_SECONDS, DISK = 6 * 3600.0, frozenset({"checkpoint", "load", "datasets"})


@contextmanager
def watched(mesh: Mesh, log: Log, seconds: float, listener: Listener, signer: Signer = Signer()) -> Iterator[None]:
    """End this rank if it does not move for `seconds` inside. Raises RanksLost if a collective fails inside."""
    watch = _Watch(mesh, log, seconds, listener, signer)
    try:
        # The end waits for a report under way: it uses the mesh, whose groups Python destroys when it ends.
        with listener.every_second(watch.check):
            yield
    except RuntimeError as error:
        if mesh.activity.collective is None and not isinstance(error, PeerLost | dist.DistError):
            raise
        if watch.hangs:
            sleep(watch.grace)  # the report gives the reason; the process ends in this time
        log.current_traceback()
        raise RanksLost(
            f"{mesh.coordinates()} failed in {mesh.activity}; most likely another rank has died: {AGAIN}. "
            f"On {socket.gethostname()} the error was: {first_line(error)}. The traceback is in this rank's log"
        ) from error


class _Watch:
    def __init__(self, mesh: Mesh, log: Log, seconds: float, listener: Listener, signer: Signer):
        self.mesh, self.log, self.seconds, self.listener, self.signer = mesh, log, seconds, listener, signer
        self.grace = min(max(seconds / 10, 2.0), 30.0)  # for the reports of others, which may stop a step later
        self.hangs = False

    def check(self) -> None:
        """Report a hang, once."""
        limit = max(self.seconds, DISK_SECONDS) if self.mesh.activity.action in DISK else self.seconds
        if self.hangs or (idle := self.mesh.activity.idle()) <= limit:
            return
        self.hangs = True
        self.listener.exit_within(self.grace, HUNG)  # even if the report fails
        what = f"{self.mesh.coordinates()} has not moved for {idle:.0f} s"
        host = f"  host: {self.mesh.activity}{self.mesh.activity.partners()}"
        self.listener.tell_torchrun(f"{what} in {self.mesh.activity}", HUNG)
        self.log.alarm("\n".join([what, host, *self._device(), *stacks()]))
        self._report_all()

    def _device(self) -> list[str]:
        if self.mesh.device.type != "cuda":
            return []
        torch.cuda.set_device(self.mesh.device)  # for this thread, or it would open the first GPU
        try:
            assert self.mesh.activity.progress is not None, "a GPU's Activity has it"
            return [f"  device: {self.mesh.activity.progress.unfinished()}", *unfinished_nccl()]
        except RuntimeError as error:  # a device that has failed returns that error from every call
            return [f"  device: {first_line(error)}"]

    def _report_all(self) -> None:
        """Write this rank's activity to the store. The first rank to do so waits for others, and reports them all."""
        world = self.mesh.world.ranks
        if len(world) == 1:
            return
        store = connect(self.signer)
        store.set(f"hang/{self.mesh.rank}", str(self.mesh.activity))
        if store.add("hang", 1) == 1:
            sleep(self.grace / 2)
            places: dict[str, list[int]] = {}
            for rank in world:
                place = store.get(key) if store.has(key := f"hang/{rank}") else None
                places.setdefault(place or "no report", []).append(rank)
            lines = [f"  {listed(ranks)}: {place}" for place, ranks in places.items()]
            self.log.alarm("\n".join(["activity of all ranks:", *lines]))


def unfinished_nccl(at_most: int = 4) -> list[str]:
    """List the oldest NCCL operations that the device has not finished, by torch's flight recorder."""
    entries = json.loads(torch._C._distributed_c10d._dump_nccl_trace_json())["entries"]
    return [
        f"  not finished: {e['profiling_name']} of group {e['process_group'][1]}, sizes {e['input_sizes']}"
        for e in entries
        if e["state"] != "completed" and not e["retired"]
    ][:at_most]


def stacks() -> list[str]:
    """List the Python stack of the main thread and, on a GPU, of autograd's; without torch's own frames."""
    main = threading.main_thread().ident
    others = {thread.ident for thread in threading.enumerate()} - {main}  # autograd's is not one of Python's
    lines = []
    for ident, frame in sys._current_frames().items():
        if ident not in others:
            lines.append("  the main thread:" if ident == main else "  a thread of autograd's:")
            lines += [
                f"    {f.filename}:{f.lineno}, {f.name}: {f.line}"
                for f in traceback.extract_stack(frame)
                if not f.filename.startswith(os.path.dirname(torch.__file__))
            ]
    return lines
