"""Record one step's operations on a CPU and run them again: what a CUDA graph does on a GPU.

A graph launches the same kernels on the same memory, step after step. Whatever the host decided during the capture is
baked in: a number passed as an argument, a tensor that the next step replaces by another. So such a step is wrong
without an error, on GPUs only. `Recording` shows it on a laptop: it keeps every operation with the very tensors that it
read and wrote, and every collective, and `replay` does all of it again without the code that asked for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minitron.comm import collectives
from minitron.comm.handle import Handle
from minitron.optim.rerun import Rerun
from minitron.parallel import context_parallel as context
from minitron.pipeline import executor
from minitron.pipeline.replay import Replay
from minitron.train import Trainer

aten = torch.ops.aten
UNWRITTEN = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided}
READ_BY_THE_HOST = {aten._local_scalar_dense, aten.equal, aten.nonzero, aten.is_nonzero}


class Recording(TorchDispatchMode):
    """What is launched while it is active, in order."""

    def __init__(self):
        super().__init__()
        self.calls: list[Callable[[], object]] = []
        self.under_way: dict[Handle, Handle] = {}  # of the recording -> of the replay
        self.inside = False  # a collective, which is recorded as one call

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it torch imports its whole compiler

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        assert func.overloadpacket not in READ_BY_THE_HOST, f"{func} makes the host wait for the device"
        if func.namespace == "c10d":
            assert self.inside, f"{func} bypasses comm/collectives.py"
        elif not self.inside and func.overloadpacket not in UNWRITTEN:
            self.calls.append(partial(_again, func, args, kwargs or {}, result))
        return result

    def __enter__(self):
        self.originals = collectives._start, collectives.exchange, Handle.wait
        start, exchange, wait = self.originals
        collectives._start = partial(self._communicate, start)
        executor.exchange = context.exchange = partial(self._communicate, exchange)
        Handle.wait = lambda handle: self._wait(wait, handle)
        return super().__enter__()

    def __exit__(self, *error):
        collectives._start, executor.exchange, Handle.wait = self.originals
        context.exchange = executor.exchange
        return super().__exit__(*error)

    def replay(self) -> None:
        with torch.no_grad():
            for call in self.calls:
                call()

    def _communicate(self, function, *args, **kwargs):
        self.inside = True
        handle = function(*args, **kwargs)
        self.inside = False

        def again():
            self.under_way[handle] = function(*args, **kwargs)

        self.calls.append(again)
        self.under_way[handle] = handle
        return handle

    def _wait(self, wait, handle: Handle) -> object:
        if handle not in self.under_way:  # it has a result of others, or began before the recording
            return wait(handle)
        self.calls.append(lambda: wait(self.under_way[handle]))
        self.inside = True  # gloo copies some results when it is waited for
        result = wait(handle)
        self.inside = False
        return result


def _again(func, args, kwargs, result) -> None:
    """Run it on the same tensors, and put what it returns where its first result was."""
    for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)


class CpuRecorder:
    """Stands in for the CudaRecorder: what it records also runs, once, which a repetition must allow."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def used(self) -> int:
        return 0

    def record(self, work: Callable[[], None]) -> Recorded:
        self.trainer.gradients.wait_parameters()  # on a GPU an event in the graph does
        recording = Recording()
        with recording:
            work()
        return Recorded(recording, self.trainer)


class Recorded:
    def __init__(self, recording: Recording, trainer: Trainer):
        self.recording, self.trainer, self.nodes = recording, trainer, len(recording.calls)

    def replay(self) -> None:
        self.trainer.gradients.wait_parameters()
        self.recording.replay()


def replayed(trainer: Trainer, recorder: Callable | None = None, log=None) -> Trainer:
    """The trainer, with a runner that runs its first steps eagerly and replays the others, as on a GPU."""
    layers, recorder = trainer.cfg.model.num_layers, recorder or partial(CpuRecorder, trainer)
    evaluated = trainer.cfg.num_microbatches(trainer.mesh.dp.size)
    runner, rerun = Replay(trainer.runner, trainer.mesh, layers, evaluated, log, recorder), trainer.rerun
    if rerun is not None:
        rerun = Rerun(runner, trainer.gradients, trainer.fp8, trainer.scaler, log)
    if trainer.numerics is not None:
        trainer.numerics.runner = rerun or runner
    return replace(trainer, runner=runner, rerun=rerun)
