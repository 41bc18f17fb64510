"""The step as CUDA graphs: what the host has launched once, the device then runs by itself.

Problem: the forward and backward passes of a step are ten thousand launches and more, each of which takes the host
some microseconds. Where layers are small, or split over many ranks, a GPU is done before Python asks for the next. The
idea: run some steps as they are, then record one (nothing runs meanwhile), and from then on launch the record:

    step   1 2 3     4 5 6           7                      8 9 10               11 ...
           warm up   eager, timed    recorded, replayed     replayed, timed      the faster of both; all ranks agree

A graph runs the same kernels on the same memory. So all that differs from step to step lies in tensors that stay where
they are: batches, which are copied to where the recorded ones were; parameters and scales, which are changed in place.
What is launched outside, the gathers of parameters, is waited for by events that are declared `external`.

    pp = 1     three graphs, of a microbatch each: the first one's backward writes gradients, the second one's adds to
               them, and runs once for each microbatch in the middle; the last one's also sums them over data ranks
    pp > 1     microbatches overlap: one graph, or several of at most about MOST_NODES kernels

All graphs of a run share their memory, since they run in the order in which they were recorded. Left out: the update,
which is few launches, and evaluation. Documents that are kept apart have boundaries on the host, so such a run stays
eager. Whether NCCL's graphs are as fast between nodes has not been measured: hence the comparison, in every run.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from minitron.comm.collectives import all_reduce_
from minitron.comm.mesh import Mesh
from minitron.config.schema import Config
from minitron.pipeline.executor import Executor, Run
from minitron.pipeline.schedule import Action, Backward, Exchange
from minitron.runtime.log import Log
from minitron.runtime.meter import Mark

WARM_UP = 3  # steps in which kernels are compiled, communicators set up and FP8's scales found
TIMED = 3  # steps of each kind whose times are compared
MOST_NODES = 300_000  # of one graph; a node takes the driver some KiB
NODES_PER_LAYER = 150  # kernels and copies of a block's forward and backward, the most that was counted: FP8, tp 4


class StaticBatch(Protocol):
    """A batch whose device tensors are views of one, `packed`."""

    packed: Tensor | None

    def clone(self: B) -> B: ...


B = TypeVar("B", bound=StaticBatch)


def why_eager(cfg: Config, device: torch.device) -> str | None:
    """Say why no step of this run can be recorded; None: it can."""
    if device.type != "cuda":
        return "there is no GPU"
    if cfg.data.separate_documents:
        return "data.separate_documents keeps boundaries of documents on the host"
    return None


class Part(NamedTuple):
    """Actions that become one graph, which runs once for each of `turns`: the microbatches whose batches it reads."""

    actions: Sequence[Action]
    turns: Sequence[Sequence[int]]


def parts(actions: Sequence[Action], pp: int, num_microbatches: int, nodes_per_action: float) -> list[Part]:
    """Cut the actions of a rank's step into graphs. With pp 1 microbatches 1, 2, ... are all run by the graph of 1."""
    m = num_microbatches
    if pp == 1:
        each = len(actions) // m
        turns = {0: [[0]], 1: [[mb] for mb in range(1, max(2, m - 1))], m - 1: [[m - 1]]}
        return [Part(actions[mb * each : (mb + 1) * each], turns[mb]) for mb in sorted(turns) if mb < m]
    # The sums of gradients, which begin in the last backwards, must end in the graph that they begin in.
    last = next(i for i, action in enumerate(actions) if isinstance(action, Backward) and action.last)
    starts = range(0, last + 1, max(1, int(MOST_NODES / nodes_per_action)))
    ends = [*starts[1:], len(actions)]
    return [Part(actions[a:b], [range(m) if a == 0 else ()]) for a, b in zip(starts, ends)]


class Graph(Protocol):
    """Work that was recorded. nodes: its kernels and copies."""

    nodes: int

    def replay(self) -> None: ...


class CudaRecorder:
    """Records what is launched on the current device, all of it with memory of one pool."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def used(self) -> int:
        """Wait for the device; return the bytes of its memory that are in use."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def record(self, work: Callable[[], None]) -> Graph:
        """Return what work() launches, all of which must have joined the current stream at its end; launch nothing."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        # thread_local: other threads go on meanwhile, NCCL's watchdog and the writer of a checkpoint.
        with _collector_off(), torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            work()
        return CudaGraph(graph)


class CudaGraph:
    """A recorded graph, ready to be launched."""

    def __init__(self, graph: torch.cuda.CUDAGraph):
        count = ctypes.c_size_t()
        with suppress(OSError):  # 0 where the runtime is no library of its own
            runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
            runtime.cudaGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
        graph.instantiate()
        self.nodes, self.replay = count.value, graph.replay


class StepGraph:
    """Runs forward and backward of steps: some eagerly, then as graphs if these are faster. Collective over the world.

    scale(microbatches): what a loss is multiplied with. finish(): completes the sums of gradients. reset(): forgets
    what a pass has left, before a recording and after one that failed. layers: blocks on this rank. always: without a
    comparison with eager steps.

    replaying, settled: whether steps are replayed now, and whether that is final. nodes: launches of a replayed step.
    """

    def __init__(
        self,
        executor: Executor,
        scale: Callable[[int], Tensor | float],
        finish: Callable[[], None],
        reset: Callable[[], None],
        mesh: Mesh,
        layers: int,
        always: bool,
        recorder: Callable[[], CudaRecorder] = CudaRecorder,
    ):
        self.executor, self.scale, self.finish, self.reset = executor, scale, finish, reset
        self.mesh, self.layers, self.timed, self.recorder = mesh, layers, 0 if always else TIMED, recorder
        self.log: Log | None = None
        self.calls, self.replaying, self.settled = 0, False, False
        self.nodes, self.capture_seconds = 0, 0.0
        self._marks: list[Mark] = []  # when each of the first steps began
        self._graphs: list[tuple[Graph, Part]] = []
        self._static: dict[int, StaticBatch] = {}  # by microbatch
        self._actions: list[object] = []
        self._loss: Tensor | None = None

    @property
    def graphs(self) -> int:
        """How many graphs a replayed step has."""
        return len(self._graphs)

    def step(self, batches: Sequence[StaticBatch]) -> Tensor:
        """Run forward and backward of all microbatches and sum the gradients; return the loss sum, 0-d."""
        if not self.settled:
            self._advance(batches)
        return self._replay(batches) if self.replaying else self._eager(batches)

    def close(self) -> None:
        """Give the graphs up. To be called before the process groups end whose operations they hold."""
        if self._graphs and self.mesh.device.type == "cuda":
            torch.cuda.synchronize()
        self.settled, self.replaying, self._loss = True, False, None
        self._graphs.clear()
        self._static.clear()

    def _eager(self, batches: Sequence[StaticBatch]) -> Tensor:
        loss = self.executor.train(batches, self.scale(len(batches)))
        self.finish()
        return loss

    def _replay(self, batches: Sequence[StaticBatch]) -> Tensor:
        self.mesh.activity.replay(self._actions)
        for graph, part in self._graphs:
            for microbatches in part.turns:
                for mb in microbatches:
                    static, new = self._place(mb).packed, batches[mb].packed
                    assert static is not None and new is not None
                    static.copy_(new)
                graph.replay()
        self.mesh.activity.begin("update")
        assert self._loss is not None
        return self._loss

    def _place(self, mb: int) -> StaticBatch:
        """Return the recorded batch whose memory a microbatch takes."""
        return self._static[mb if mb in self._static else 1]

    def _advance(self, batches: Sequence[StaticBatch]) -> None:
        """Do what is due in one of the first steps: record, or compare."""
        self.calls += 1
        recorded = WARM_UP + self.timed + 1
        if self.timed:
            self._marks.append(Mark(self.mesh.device))
        if self.calls == recorded:
            self._record_on_all(batches)
        elif self.calls == recorded + self.timed + 1:
            self.settled = True
            if self.timed:
                self._compare(recorded)

    def _record_on_all(self, batches: Sequence[StaticBatch]) -> None:
        """Record a step, and replay from here on if that succeeds on all ranks."""
        problem = None
        try:
            self._record(batches)
        except Exception as error:  # whatever it is, the step can be run as those before
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
        recorded = torch.tensor(problem is None, dtype=torch.int32, device=self.mesh.device)
        all_reduce_(recorded, self.mesh.world, op=dist.ReduceOp.MIN)
        self.replaying = bool(recorded.item())
        self.mesh.activity.begin_step(self.mesh.activity.step)  # of which nothing has run yet
        if not self.replaying:
            self.close()
            self.reset()
            text = f"train.cuda_graph: {problem or 'another rank failed'}; steps stay eager on all ranks"
            if self.log is not None:
                (self.log.alarm if problem else self.log.warn)(f"warning: {text}" if problem else text)

    def _record(self, batches: Sequence[StaticBatch]) -> None:
        begun, recorder = time.perf_counter(), self.recorder()
        used, m, actions = recorder.used(), len(batches), self.executor.training(len(batches))
        planned = parts(actions, self.executor.pp.size, m, NODES_PER_LAYER * self.layers * m / len(actions))
        read = {action.mb for part in planned for action in part.actions if not isinstance(action, Exchange)}
        self._static = {mb: batches[mb].clone() for mb in read}
        self._actions = [action for action in actions if not isinstance(action, Exchange)]
        self.reset()
        run: Run | None = None

        def work(part: Part) -> None:
            nonlocal run
            if run is None:
                run = self.executor.begin([self._place(mb) for mb in range(m)], self.scale(m))
            run.do(part.actions)
            run.join()
            if part is planned[-1]:
                self._loss = run.finish()
                self.finish()

        for part in planned:
            self._graphs.append((recorder.record(partial(work, part)), part))
        more = recorder.used() - used
        self.nodes = sum(graph.nodes * len(part.turns) for graph, part in self._graphs)
        self.capture_seconds = time.perf_counter() - begun
        self._say(
            f"train.cuda_graph: recorded {self.nodes:,} kernels and copies of a step in {len(planned)} graphs, in "
            f"{self.capture_seconds:.1f} s; {more / 2**30:.2f} GiB more"
        )

    def _compare(self, recorded: int) -> None:
        """Return to eager steps if they were faster, on all ranks."""
        each = [end.seconds_since(begin) for begin, end in pairwise(self._marks)]
        medians = [statistics.median(each[first : first + TIMED]) for first in (WARM_UP, recorded)]
        slowest = torch.tensor(medians, dtype=torch.float64, device=self.mesh.device)
        all_reduce_(slowest, self.mesh.world, op=dist.ReduceOp.MAX)
        eager, replayed = slowest.tolist()
        self._marks.clear()
        if self.replaying:
            kept = "replayed" if replayed < eager else "eager"
            self._say(f"train.cuda_graph=auto: {eager:.4f} s a step eager, {replayed:.4f} s replayed; goes on {kept}")
            if kept == "eager":
                self.close()
                self.reset()

    def _say(self, text: str) -> None:
        if self.log is not None:
            self.log.info(text)


@contextmanager
def _collector_off() -> Iterator[None]:
    """Keep Python's garbage collector from freeing, in the middle of a recording, what belongs to another stream."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
