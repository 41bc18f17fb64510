"""The step as CUDA graphs: what the host has launched once, the device then runs by itself.

Problem: the forward and backward passes of a step are ten thousand launches and more, each of which takes the host
some microseconds. Where layers are small, or split over many ranks, a GPU is done before Python asks for the next. The
idea: run some steps as they are, then record one (nothing runs meanwhile), and from then on launch the record:

    step   1 2 3     4                      5 6 7 ...
           eager     recorded, replayed     replayed

A graph runs the same kernels on the same memory. So all that differs from step to step lies in tensors that stay where
they are: batches, which are copied to where the recorded ones were; parameters and scales, which are changed in place.
What is launched outside, the gathers of parameters, is waited for by events that are declared `external`.

    pp = 1     three graphs, of a microbatch each: the first one's backward writes gradients, the second one's adds to
               them, and runs once for each microbatch in the middle; the last one's also sums them over data ranks
    pp > 1     microbatches overlap: one graph, or several of at most about MOST_NODES kernels

All graphs of a run share their memory, since one runs after the other. Evaluations are recorded, too, or they would
need memory of their own. Left out: the update, which is few launches.
"""

from __future__ import annotations

import ctypes
import gc
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from minitron.comm.collectives import all_reduce_
from minitron.comm.mesh import Mesh
from minitron.config.schema import Config
from minitron.config.sizes import NODES_PER_LAYER
from minitron.pipeline.executor import Executor, Run
from minitron.pipeline.schedule import Action, Backward, Exchange
from minitron.runtime.log import Log

WARM_UP = 3  # steps in which kernels are compiled, communicators set up and FP8's scales found
MOST_NODES = 300_000  # of one graph; a node takes the driver some KiB


class StaticBatch(Protocol):
    """A batch whose device tensors are views of one, `packed`."""

    packed: Tensor | None

    def for_any(self: B) -> B: ...


B = TypeVar("B", bound=StaticBatch)


def why_eager(cfg: Config, device: torch.device, packs: bool) -> str | None:
    """Say why no step of this run can be recorded; None: it can.

    packs: whether attention takes documents that are kept apart in one call, by their spans on the device.
    """
    if device.type != "cuda":
        return "there is no GPU"
    if cfg.data.separate_documents and cfg.parallel.cp > 1 and cfg.parallel.cp_style != "ulysses":
        keeps = f"parallel.cp_style={cfg.parallel.cp_style} keeps boundaries of documents on the host"
        return f"{keeps}; parallel.cp_style=ulysses does not"
    if cfg.data.separate_documents and not packs:
        keeps = "this attention takes one document after another, by boundaries on the host"
        return keeps if cfg.model.attention == "auto" else f"{keeps}; model.attention=auto does not"
    return None


class Segment(NamedTuple):
    """Actions that become one graph. launches: the microbatches whose batches each launch of it reads."""

    actions: Sequence[Action]
    launches: Sequence[Sequence[int]]


def segments(actions: Sequence[Action], pp: int, num_microbatches: int, nodes_per_action: float) -> list[Segment]:
    """Cut the actions of a rank's step into graphs. With pp 1 microbatches 1, 2, ... are all run by the graph of 1."""
    m = num_microbatches
    if pp == 1:
        each = len(actions) // m
        launches = {0: [[0]], 1: [[mb] for mb in range(1, max(2, m - 1))], m - 1: [[m - 1]]}
        return [Segment(actions[mb * each : (mb + 1) * each], launches[mb]) for mb in sorted(launches) if mb < m]
    # The sums of gradients, which begin in the last backwards, must end in the graph that they begin in.
    last = (i for i, action in enumerate(actions) if isinstance(action, Backward) and action.last)
    starts = range(0, next(last, len(actions) - 1) + 1, max(1, int(MOST_NODES / nodes_per_action)))
    ends = [*starts[1:], len(actions)]
    return [Segment(actions[a:b], [range(m) if a == 0 else ()]) for a, b in zip(starts, ends)]


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
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def record(self, work: Callable[[], None]) -> Graph:
        """Return what work() launches, all of which must have joined the current stream at its end; launch nothing."""
        graph, stream = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.current_stream()
        try:
            # thread_local: other threads go on meanwhile, NCCL's watchdog and the writer of a checkpoint.
            with _collector_off(), torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                work()
        except BaseException:  # torch leaves both of these as they are where a recording cannot be ended
            torch.cuda.set_stream(stream)
            with suppress(RuntimeError, AttributeError):  # it has ended, and given back the pool
                torch._C._cuda_endAllocateToPool(stream.device_index, self.pool)
                torch._C._cuda_releasePool(stream.device_index, self.pool)
            raise
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


class Recording:
    """A pass through a schedule, recorded, with batches of its own. begin(batches) starts it; end() follows on it."""

    def __init__(
        self,
        recorder: CudaRecorder,
        planned: Sequence[Segment],
        batches: Sequence[StaticBatch],
        begin: Callable[[Sequence[StaticBatch]], Run],
        end: Callable[[], None],
    ):
        self.segments = planned
        recorded = {a.mb for segment in planned for a in segment.actions if not isinstance(a, Exchange)}
        self.static = {mb: batches[mb].for_any() for mb in sorted(recorded)}
        self.actions = list(_launched(planned))
        run: Run | None = None

        def work(segment: Segment) -> None:
            nonlocal run
            run = run or begin([self.place(mb) for mb in range(len(batches))])
            run.do(segment.actions)
            run.join()
            if segment is planned[-1]:
                self.loss = run.finish()
                end()
            run.executor.pp.activity.begin("recording")  # what follows, CUDA's part of it, can take seconds

        self.graphs = [recorder.record(partial(work, segment)) for segment in planned]

    @property
    def nodes(self) -> int:
        """Kernels and copies of a pass."""
        return sum(graph.nodes * len(segment.launches) for graph, segment in zip(self.graphs, self.segments))

    def place(self, mb: int) -> StaticBatch:
        """Return the recorded batch whose memory a microbatch takes."""
        return self.static[mb if mb in self.static else 1]

    def replay(self, batches: Sequence[StaticBatch]) -> Tensor:
        """Run the pass on other batches; return its loss sum, 0-d, which the next replay overwrites."""
        for graph, segment in zip(self.graphs, self.segments):
            for microbatches in segment.launches:
                for mb in microbatches:
                    static, new = self.place(mb).packed, batches[mb].packed
                    assert static is not None and new is not None
                    static.copy_(new)
                graph.replay()
        return self.loss


def _launched(planned: Sequence[Segment]) -> Iterator[object]:
    """Yield the operations of all launches, in order, each with the microbatch that it then works on."""
    for segment in planned:
        for microbatches in segment.launches:
            for action in segment.actions:
                if not isinstance(action, Exchange):
                    yield replace(action, mb=microbatches[0]) if len(segment.launches) > 1 else action


class Eager:
    """Runs the passes of steps and evaluations by launching each kernel from the host.

    scale(microbatches): the factor of a loss sum before its backward. finish(): completes the sums of gradients.
    reset(): drops what the host holds of a pass that was begun and will not end.
    """

    replaying, nodes, capture_seconds = False, 0, 0.0  # as of Replay

    def __init__(
        self,
        executor: Executor,
        scale: Callable[[int], Tensor | float],
        finish: Callable[[], None],
        reset: Callable[[], None],
    ):
        self.executor, self.scale, self.finish, self.reset = executor, scale, finish, reset

    def forward_backward(self, batches: Sequence[object]) -> Tensor:
        """Run forward and backward of all microbatches and complete the sums of gradients; return the loss sum, 0-d.

        The host reads nothing here. From step to step only the contents of device tensors differ: batches, parameters,
        the scales of fp16 and FP8. So it can be recorded once and replayed.
        """
        loss_sum = self.executor.train(batches, self.scale(len(batches)))
        self.finish()
        return loss_sum

    def evaluate(self, batches: Sequence[object]) -> Tensor:
        """Run the forwards of an evaluation; return their loss sum, 0-d."""
        return self.executor.evaluate(batches)

    def close(self) -> None:
        """Nothing has to be given up."""


class Replay:
    """Replays the passes of steps and evaluations, after WARM_UP eager steps. Collective over the world.

    eager: runs what is not recorded. layers: blocks on this rank. evaluates: whether evaluations will come, which are
    then recorded with the step. log: None writes nothing.

    nodes, capture_seconds: of the recorded step.
    """

    def __init__(
        self,
        eager: Eager,
        mesh: Mesh,
        layers: int,
        evaluates: bool,
        log: Log | None = None,
        recorder: Callable[[], CudaRecorder] = CudaRecorder,
    ):
        self.eager, self.mesh, self.layers, self.evaluates = eager, mesh, layers, evaluates
        self.log, self.recorder = log, recorder
        self.nodes, self.capture_seconds, self._calls = 0, 0.0, 0
        self._training: Recording | None = None
        self._evaluation: Recording | None = None

    @property
    def replaying(self) -> bool:
        """Tell whether steps are replayed now."""
        return self._training is not None

    @property
    def replays_evaluations(self) -> bool:
        """Tell whether evaluations are, too."""
        return self._evaluation is not None

    @property
    def graphs(self) -> int:
        """How many graphs a replayed step has."""
        return 0 if self._training is None else len(self._training.graphs)

    def forward_backward(self, batches: Sequence[StaticBatch]) -> Tensor:
        """As Eager has it; a replay overwrites the loss sum of the one before."""
        self._calls += 1
        if self._calls == WARM_UP + 1:
            self._record_all(batches)
        if self._training is None:
            return self.eager.forward_backward(batches)
        loss_sum = self._replay(self._training, batches)
        self.mesh.activity.begin("update")
        return loss_sum

    def evaluate(self, batches: Sequence[StaticBatch]) -> Tensor:
        """As Eager has it; replayed if steps are, because graphs keep the memory that eager forwards would need."""
        return self.eager.evaluate(batches) if self._evaluation is None else self._replay(self._evaluation, batches)

    def _replay(self, recording: Recording, batches: Sequence[StaticBatch]) -> Tensor:
        self.mesh.activity.replay(recording.actions)
        return recording.replay(batches)

    def close(self) -> None:
        """Give the graphs up. To be called before the process groups end whose operations they hold."""
        if self._training is not None and self.mesh.device.type == "cuda":
            torch.cuda.synchronize()
        self._training = self._evaluation = None

    def _record_all(self, batches: Sequence[StaticBatch]) -> None:
        """Record a step, and an evaluation if any will come."""
        if self.evaluates:
            self.eager.evaluate(batches)  # compiles what steps have not needed
        recorder = self.recorder()
        self._training = self._on_all("steps", partial(self._record, recorder, batches, True))
        if self.evaluates and self.replaying:
            self._evaluation = self._on_all("evaluations", partial(self._record, recorder, batches, False))

    def _on_all(self, what: str, record: Callable[[], Recording]) -> Recording | None:
        """Return what record() returns; None on all ranks if it fails on one."""
        recording, problem, where = None, None, ""
        try:
            recording = record()
        except Exception as error:  # whatever it is, the pass can be run as those before
            first: BaseException = error
            while first.__context__ is not None:  # CUDA only says afterwards that something had failed
                first = first.__context__
            problem, where = f"{type(first).__name__}: {first}".splitlines()[0], traceback.format_exc()
        everywhere = torch.tensor(recording is not None, dtype=torch.int32, device=self.mesh.device)
        all_reduce_(everywhere, self.mesh.world, op=dist.ReduceOp.MIN)
        if everywhere.item():
            return recording
        self.eager.reset()
        text = f"train.cuda_graph: {what} stay eager on all ranks: {problem or 'another rank could not record them'}"
        if self.log is not None and problem:
            self.log.alarm(f"warning: {text}", where)
        else:  # no warning: a rank that failed has given it
            self._say(text)
        return None

    def _record(self, recorder: CudaRecorder, batches: Sequence[StaticBatch], training: bool) -> Recording:
        begun, m, executor = time.perf_counter(), len(batches), self.eager.executor
        recorder.used()  # the device has to be through with what a reset drops
        self.eager.reset()
        # Only now, for what it dropped, an eager evaluation's casts among it, is given back here.
        used, actions = recorder.used(), executor.training(m) if training else executor.evaluation(m)
        planned = segments(actions, executor.pp.size, m, NODES_PER_LAYER * self.layers * m / len(actions))
        with self.mesh.activity.recording():
            if training:
                start, end = lambda x: executor.begin(x, self.eager.scale(m)), self.eager.finish
            else:
                start, end = lambda x: Run(executor, x, None), lambda: None
            recording = Recording(recorder, planned, batches, start, end)
        more, seconds = (recorder.used() - used) / 2**30, time.perf_counter() - begun
        if training:
            self.nodes, self.capture_seconds = recording.nodes, seconds
        self._say(
            f"train.cuda_graph: recorded {recording.nodes:,} kernels and copies of "
            f"{'a step' if training else 'an evaluation'} in {len(planned)} graphs, in {seconds:.1f} s; "
            f"{more:.2f} GiB more"
        )
        return recording

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
