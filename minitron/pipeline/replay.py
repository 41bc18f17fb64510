"""Record the passes of a step as CUDA graphs, and replay them: one launch a graph instead of one a kernel.

Problem: the passes of a step launch thousands of kernels, and each launch takes the host some microseconds. If layers
are small, or split over many ranks, a GPU is idle until Python launches the next kernel. The idea: run some steps
eagerly, then record one (PyTorch: capture; nothing runs meanwhile), and from then on launch the recording:

    step   1 2 3     4                      5 6 7 ...
           eager     recorded, replayed     replayed

A graph runs the same kernels on the same memory. So everything that differs from step to step is in tensors at fixed
addresses: batches are copied into the recorded ones, parameters and scales are changed in place. The gathers of
parameters are launched outside; the graph waits for them by events that are declared `external`.

    pp = 1     three graphs of one microbatch each
                   first     its backward writes gradients
                   middle    launched for each further microbatch; its backward adds to the gradients
                   last      also sums the gradients over data ranks
    pp > 1     microbatches overlap: one graph, or several of at most about MOST_NODES kernels

A recording serves one number of microbatches. If a schedule of the batch size changes the number, the graphs are
dropped, and steps of the new size begin eagerly again. So only one recording takes memory at a time.

All graphs share their memory, since one runs after the other. Evaluations are recorded, too, because eager ones would
need memory beside that of the graphs. Steps that count FP8 casts have a second recording, so that counting adds no
kernel to ordinary steps. Left out: the update, which is few launches.
"""

from __future__ import annotations

import ctypes
import gc
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from minitron.comm.collectives import all_reduce_
from minitron.comm.mesh import Mesh
from minitron.config.schema import Config
from minitron.config.sizes import NODES_OF_COUNTS, NODES_PER_LAYER
from minitron.kernels.fp8_counts import CastCounts
from minitron.pipeline.executor import Executor, Pass
from minitron.pipeline.schedule import Action, Backward, Exchange
from minitron.runtime.log import Log

STEP, COUNTING_STEP, EVALUATION = "a step", "a step that counts casts", "an evaluation"  # what is recorded
WARM_UP = 3  # steps that compile kernels, set up communicators and find FP8's scales
MOST_NODES = 300_000  # of one graph; a node takes some KiB of the driver's memory


class StaticBatch(Protocol):
    """A batch whose device tensors are views of one, `packed`."""

    packed: Tensor | None

    def static_copy(self) -> Self: ...


def why_eager(cfg: Config, device: torch.device, masks_documents: bool) -> str | None:
    """Return why no step of this run can be recorded; None if it can.

    masks_documents: whether one call of attention takes all documents of a sample, with their bounds in device memory.
    """
    if device.type != "cuda":
        return "there is no GPU"
    if cfg.data.separates and cfg.parallel.cp > 1 and cfg.parallel.cp_style != "ulysses":
        keeps = f"parallel.cp_style={cfg.parallel.cp_style} keeps boundaries of documents on the host"
        return f"{keeps}; parallel.cp_style=ulysses does not"
    if cfg.data.separates and not masks_documents:
        keeps = "this attention takes one document after another, by boundaries on the host"
        return keeps if cfg.model.attention == "auto" else f"{keeps}; model.attention=auto does not"
    return None


class Segment(NamedTuple):
    """Actions that become one graph. launches: a list for each launch, of the microbatches that it computes."""

    actions: Sequence[Action]
    launches: Sequence[Sequence[int]]


def segments(actions: Sequence[Action], pp: int, num_microbatches: int, nodes_per_action: float) -> list[Segment]:
    """Cut the actions of a rank's pass into graphs. If pp is 1, one graph serves all but the first and the last mb."""
    m = num_microbatches
    if pp == 1:
        each = len(actions) // m
        # m = 4: {0: [[0]], 1: [[1], [2]], 3: [[3]]}. For m = 1 or 2, key m - 1 is 0 or 1 and replaces that entry.
        launches = {0: [[0]], 1: [[mb] for mb in range(1, max(2, m - 1))], m - 1: [[m - 1]]}
        return [Segment(actions[mb * each : (mb + 1) * each], launches[mb]) for mb in sorted(launches) if mb < m]
    # Sums of gradients begin in the last backwards and end with the pass. One graph must contain both, so no graph
    # starts after the first of these backwards.
    last = (i for i, action in enumerate(actions) if isinstance(action, Backward) and action.last)
    starts = range(0, next(last, len(actions) - 1) + 1, max(1, int(MOST_NODES / nodes_per_action)))
    ends = [*starts[1:], len(actions)]
    return [Segment(actions[a:b], [range(m) if a == 0 else ()]) for a, b in zip(starts, ends)]


class CudaRecorder:
    """Records launches on the current device. All recordings share one memory pool."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def used(self) -> int:
        """Wait for the device, and return the bytes of its memory that are in use."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def record(self, work: Callable[[], None]) -> CudaGraph:
        """Record the launches of work(). All of its streams must have joined the current stream at its end."""
        graph, stream = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.current_stream()
        try:
            # thread_local: NCCL's watchdog and the writer of a checkpoint use the device meanwhile.
            with _collector_off(), torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                work()
        except BaseException:  # torch restores neither the stream nor the pool if a recording cannot be ended
            torch.cuda.set_stream(stream)
            with suppress(RuntimeError, AttributeError):  # the recording has ended, and has released the pool
                torch._C._cuda_endAllocateToPool(stream.device_index, self.pool)
                torch._C._cuda_releasePool(stream.device_index, self.pool)
            raise
        return CudaGraph(graph)


class CudaGraph:
    """A recorded graph, ready to be launched. nodes: its kernels and copies."""

    def __init__(self, graph: torch.cuda.CUDAGraph):
        count = ctypes.c_size_t()
        with suppress(OSError):  # 0 if the runtime is no separate library
            runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
            runtime.cudaGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
        graph.instantiate()
        self.nodes, self.replay = count.value, graph.replay


class Recording:
    """A recorded pass through a schedule, with static batches.

    start(batches): makes the pass, inside the recording. end(): is recorded after the pass. nodes: kernels and copies
    of all launches. seconds: how long the recording took.
    """

    def __init__(
        self,
        recorder: CudaRecorder,
        planned: Sequence[Segment],
        batches: Sequence[StaticBatch],
        start: Callable[[Sequence[StaticBatch]], Pass],
        end: Callable[[], None],
    ):
        begun, self.segments, self.actions = time.perf_counter(), planned, list(_launched(planned))
        recorded = {a.mb for segment in planned for a in segment.actions if not isinstance(a, Exchange)}
        self.static = {mb: batches[mb].static_copy() for mb in sorted(recorded)}
        run: Pass | None = None

        def work(segment: Segment) -> None:
            nonlocal run
            run = run or start([self.static_batch(mb) for mb in range(len(batches))])
            run.run_actions(segment.actions)
            run.join()
            if segment is planned[-1]:
                self.loss = run.finish()
                end()
            run.executor.pp.activity.begin("recording")  # CUDA now builds the graph, which can take seconds

        self.graphs = [recorder.record(partial(work, segment)) for segment in planned]
        self.nodes = sum(graph.nodes * len(segment.launches) for graph, segment in zip(self.graphs, planned))
        self.seconds = time.perf_counter() - begun

    def static_batch(self, mb: int) -> StaticBatch:
        """Return the recorded batch whose memory a microbatch uses."""
        return self.static[mb if mb in self.static else 1]

    def replay(self, batches: Sequence[StaticBatch]) -> Tensor:
        """Run the pass on other batches; return its loss sum, 0-d, which the next replay overwrites."""
        for graph, segment in zip(self.graphs, self.segments):
            for microbatches in segment.launches:
                for mb in microbatches:
                    static, new = self.static_batch(mb).packed, batches[mb].packed
                    assert static is not None and new is not None
                    static.copy_(new)
                graph.replay()
        return self.loss


def _launched(planned: Sequence[Segment]) -> Iterator[object]:
    """Yield the operations of all launches, in order, each with the microbatch that it computes."""
    for segment in planned:
        for microbatches in segment.launches:
            for action in segment.actions:
                if not isinstance(action, Exchange):
                    yield replace(action, mb=microbatches[0]) if len(segment.launches) > 1 else action


@dataclass(eq=False)
class Eager:
    """Runs the passes of steps and evaluations by launching each kernel from the host.

    loss_grad(microbatches): the gradient with which the backward of each loss sum begins. finish(): completes the sums
    of gradients. reset(): drops the host's state of a pass that was begun and will not end. counts: those of FP8's
    casts.
    """

    executor: Executor
    loss_grad: Callable[[int], Tensor | float]
    finish: Callable[[], None]
    reset: Callable[[], None]
    counts: CastCounts
    replaying = False  # see Replay.replaying

    def forward_backward(self, batches: Sequence[object]) -> tuple[Tensor, bool]:
        """Run forward and backward of all microbatches and complete the sums of gradients.

        Returns the loss sum, 0-d, and False: the update need not be skipped. The host reads nothing from the device.
        """
        loss_sum = self.executor.run(batches, self.loss_grad(len(batches)))
        self.finish()
        return loss_sum, False

    def evaluate(self, batches: Sequence[object]) -> Tensor:
        """Run the forwards of an evaluation; return their loss sum, 0-d."""
        return self.executor.run(batches, None)

    def close(self) -> None:
        """Do nothing: there are no graphs."""


@dataclass(eq=False)
class Replay:
    """Replays the passes of steps and evaluations, after WARM_UP eager steps. Collective over the world.

    eager: runs the passes that are not recorded. layers: blocks on this rank. evaluates: microbatches of an evaluation,
    which is recorded after the step; 0 if the run does not evaluate. log: None writes nothing.

    training, counting, evaluation: the recordings of a step, of a step that counts FP8's casts and of an evaluation;
    each is None if it was not made.
    """

    eager: Eager
    mesh: Mesh
    layers: int
    evaluates: int
    log: Log | None = None
    recorder: Callable[[], CudaRecorder] = CudaRecorder
    training: Recording | None = field(default=None, init=False)
    counting: Recording | None = field(default=None, init=False)
    evaluation: Recording | None = field(default=None, init=False)
    _calls: int = field(default=0, init=False)  # steps in a row with the same number of microbatches
    _microbatches: int = field(default=0, init=False)

    @property
    def replaying(self) -> bool:
        """Tell whether steps are replayed now."""
        return self.training is not None

    def forward_backward(self, batches: Sequence[StaticBatch]) -> tuple[Tensor, bool]:
        """Do the same as Eager. A replay overwrites the loss sum of the previous one."""
        if self._microbatches != len(batches):
            self.close()
            self._microbatches, self._calls = len(batches), 0
        self._calls += 1
        if self._calls == WARM_UP + 1:
            self._record_all(batches)
        recording = self.counting if self.eager.counts.on else self.training
        if recording is None:
            return self.eager.forward_backward(batches)
        loss_sum = self._replay(recording, batches)
        self.mesh.activity.begin("update")
        return loss_sum, False

    def evaluate(self, batches: Sequence[StaticBatch]) -> Tensor:
        """Do the same as Eager. A replay needs no memory beside that of the graphs; eager forwards would."""
        return self.eager.evaluate(batches) if self.evaluation is None else self._replay(self.evaluation, batches)

    def _replay(self, recording: Recording, batches: Sequence[StaticBatch]) -> Tensor:
        self.mesh.activity.replay(recording.actions)
        return recording.replay(batches)

    def close(self) -> None:
        """Drop the graphs. Call it before the process groups end whose operations they hold."""
        if self.training is not None and self.mesh.device.type == "cuda":
            torch.cuda.synchronize()
        self.training = self.counting = self.evaluation = None

    def _record_all(self, batches: Sequence[StaticBatch]) -> None:
        """Record a step, an evaluation if the run evaluates, and a step that counts casts if some steps do."""
        counts, due = self.eager.counts, self.eager.counts.on
        record = partial(self._record, self.recorder())
        if self.evaluates:
            self.eager.evaluate(batches)  # compiles kernels that steps do not use
        if counts.layers:
            counts.count(True)
            self.eager.forward_backward(batches)  # compiles kernels that only counting steps use
        self.training = self._on_all("steps", partial(record, STEP, batches))
        if self.evaluates and self.replaying:
            evaluated = [batches[0]] * self.evaluates
            self.evaluation = self._on_all("evaluations", partial(record, EVALUATION, evaluated))
        if counts.layers and self.replaying:
            self.counting = self._on_all("steps that count casts", partial(record, COUNTING_STEP, batches))
        counts.count(due)

    def _on_all(self, what: str, record: Callable[[], Recording]) -> Recording | None:
        """Return the result of record(); None on all ranks if it fails on one."""
        recording, problem, where = None, None, ""
        try:
            recording = record()
        except Exception as error:  # whatever it is, the run goes on with eager passes
            first: BaseException = error
            while first.__context__ is not None:  # CUDA's own error comes after the one that caused it
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

    def _record(self, recorder: CudaRecorder, what: str, batches: Sequence[StaticBatch]) -> Recording:
        m, executor, training = len(batches), self.eager.executor, what != EVALUATION
        self.eager.counts.count(what == COUNTING_STEP)
        recorder.used()  # waits for the device, which may still use what a reset drops
        self.eager.reset()
        used, actions = recorder.used(), executor.actions(m, training)  # read after the reset has freed memory
        nodes = self.layers * m * (NODES_PER_LAYER + NODES_OF_COUNTS * (what == COUNTING_STEP))
        planned = segments(actions, executor.pp.size, m, nodes / len(actions))
        start = lambda x: Pass(executor, x, self.eager.loss_grad(m) if training else None)  # reads fp16's scale tensor
        end = self.eager.finish if training else lambda: None
        with self.mesh.activity.recording():
            recording = Recording(recorder, planned, batches, start, end)
        more = (recorder.used() - used) / 2**30
        self._say(
            f"train.cuda_graph: recorded {recording.nodes:,} kernels and copies of {what} in {len(planned)} graphs, in "
            f"{recording.seconds:.1f} s; {more:.2f} GiB more"
        )
        return recording

    def _say(self, text: str) -> None:
        if self.log is not None:
            self.log.info(text)


@contextmanager
def _collector_off() -> Iterator[None]:
    """Keep Python's garbage collector from freeing another stream's memory in the middle of a recording."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
