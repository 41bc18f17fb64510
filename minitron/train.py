"""The page to read first: how a run is built, and what one step does.

    config -> mesh -> model -> pipeline schedule -> optimizer -> loop (step, log, save)

`build` makes the parts, each from a file that teaches one idea. `Trainer.step` is a training step of any layout.
`train` is the loop around it. It queues step n + 1 while the device is in the last backward of n, so that the device
goes on without a pause; the figures of n are logged after that.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from minitron.checkpoint.format import CheckpointError
from minitron.checkpoint.save import Checkpointer, State
from minitron.comm.activity import Progress
from minitron.comm.collectives import all_reduce_
from minitron.comm.mesh import Mesh
from minitron.config.schema import Config
from minitron.config.sizes import stage_layers, stream_length
from minitron.data.batch import Batch
from minitron.data.build import Datasets
from minitron.data.loader import Loader
from minitron.kernels import kernels
from minitron.kernels.fp8 import end_step
from minitron.kernels.gemm import DTYPES
from minitron.kernels.kernels import Kernels
from minitron.model import lora
from minitron.model.gpt import GPT
from minitron.model.init import initialise
from minitron.optim.buckets import Gradients
from minitron.optim.lr import learning_rate
from minitron.optim.replicas import Replicas
from minitron.optim.rerun import Rerun
from minitron.optim.scaler import LossScaler
from minitron.optim.zero1 import Stats, Zero1Optimizer
from minitron.parallel.layout import make_layout
from minitron.pipeline.executor import Executor
from minitron.pipeline.replay import StepGraph, why_eager
from minitron.runtime.log import Log
from minitron.runtime.meter import Meter
from minitron.runtime.profiling import profiled
from minitron.runtime.room import room_for
from minitron.runtime.stop import Stop
from minitron.runtime.stragglers import Stragglers


@dataclass
class Trainer:
    """The parts of a run on this rank."""

    cfg: Config
    mesh: Mesh
    chunks: list[GPT]
    gradients: Gradients
    optimizer: Zero1Optimizer
    executor: Executor
    scaler: LossScaler | None
    kernels: Kernels
    base: str | None = None  # fingerprint of the weights beside which adapters are trained
    graph: StepGraph | None = None  # of forward_backward; None where it cannot be recorded or is not to be
    rerun: Rerun | None = None

    def step(self, batches: list[Batch], lr: float) -> Stats:
        """Run forward, backward and update on this rank's microbatches of a global batch. Collective over the world."""
        loss_sum, skip = self.forward_backward(batches), False
        if self.rerun is not None:
            scale = self.backward_scale(len(batches))
            again, known = partial(self.again, batches), self.contribution(loss_sum, batches)
            loss_sum, skip = self.rerun.check(batches, again, *known, scale)
        # Before the optimizer, whose all-gathers would delay its small reductions.
        end_step([chunk.fp8_state for chunk in self.chunks])
        loss_sum, count = self.contribution(loss_sum, batches)
        stats = self.optimizer.step(lr, loss_sum, count, self.backward_scale(len(batches)), skip)
        if self.scaler is not None:
            self.scaler.update(stats.skipped * (not skip))
        self.mesh.activity.ended()
        return stats

    def forward_backward(self, batches: list[Batch]) -> Tensor:
        """Run forward and backward of all microbatches and complete the sums of gradients; return the loss sum.

        Nothing here is read by the host. From step to step only the contents of device tensors differ: the batches, the
        parameters, the scales of fp16 and FP8. So it can be recorded once and replayed (pipeline/replay.py).
        """
        replayed = None if self.graph is None else self.graph.replay(batches)
        if replayed is not None:
            return replayed
        loss_sum = self.executor.train(batches, self.backward_scale(len(batches)))
        self.finish()
        return loss_sum

    def again(self, batches: list[Batch]) -> Tensor:
        """Compute `forward_backward` once more, with the same result; return this rank's part of the loss sum."""
        self.drop_casts()
        return self.contribution(self.forward_backward(batches), batches)[0]

    def finish(self) -> None:
        """Complete the sums of gradients."""
        self.mesh.activity.begin("update")
        self.gradients.finish()

    def reset(self) -> None:
        """Drop what the host holds of a pass that was begun and will not end."""
        self.drop_casts()
        self.gradients.reset()
        self.chunks[0].layout.comm.reset()

    def drop_casts(self) -> None:
        """Drop the FP8 casts of weights: every training step begins with none."""
        for chunk in self.chunks:
            chunk.fp8_state.drop_casts()

    def near_end(self) -> None:
        """Wait until the device is through with the step's last forward.

        Its backward and the update are time enough to queue the next step, so the device does not see the wait; and the
        host has not yet begun a step that it may be told not to do.
        """
        if self.executor.forwards_done is not None:
            self.executor.forwards_done.synchronize()

    def evaluate(self, batches: list[Batch]) -> Tensor:
        """Return [loss sum, tokens] of the global batch, float64 on the device. Collective over the world."""
        loss_sum = self.executor.evaluate(batches) if self.graph is None else self.graph.evaluate(batches)
        total = torch.stack(self.contribution(loss_sum, batches)).double()
        self.drop_casts()
        all_reduce_(total, self.mesh.world)
        return total

    @property
    def state(self) -> State:
        """Return what a checkpoint holds of this rank."""
        return State(self.chunks, self.optimizer, self.scaler, self.base, self.rerun)

    @property
    def shared_bytes(self) -> int:
        """GPU memory that ranks of a node share, which torch's allocator does not count."""
        return self.chunks[0].layout.comm.nbytes + self.gradients.slices.nbytes

    def memory(self) -> tuple[int, int]:
        """Return the bytes of the GPU in use at the peak, and now."""
        if self.mesh.device.type != "cuda":
            return 0, 0
        if self.graph is not None and self.graph.replaying:  # of which the allocator has seen the recording alone
            free, total = torch.cuda.mem_get_info()
            return total - free, total - free
        allocated = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        return allocated[0] + self.shared_bytes, allocated[1] + self.shared_bytes

    def describe(self) -> str:
        """Describe the model, the layout and the kernels in one line."""
        m, mesh = self.cfg.model, self.mesh
        here, trained = (
            sum(p.numel() for chunk in self.chunks for p in chunk.parameters() if p.requires_grad or every)
            for every in (True, False)
        )
        frozen = "" if here == trained else f", of which {trained / 1e6:.2f} M are trained"
        return (
            f"{m.family}: {m.num_layers} layers, hidden {m.hidden_size}, "
            f"{here / 1e6:.2f} M parameters on rank {mesh.rank}{frozen} | tp {mesh.tp.size} pp {mesh.pp.size} "
            f"vp {len(self.chunks)} cp {mesh.cp.size} dp {mesh.dp.size} | {self.cfg.precision.dtype}, "
            f"{self.kernels.names}, tp: {type(self.chunks[0].layout.comm).__name__}, "
            f"dp: {type(self.gradients.slices).__name__}"
        )

    def backward_scale(self, num_microbatches: int) -> Tensor | float:
        """Return what a microbatch's loss sum is multiplied with before its backward.

        fp16 cannot hold the gradient of a sum over all tokens times the loss scale, so there it is scaled as a mean;
        the optimizer divides by the same number.
        """
        if self.scaler is None:
            return 1.0
        t = self.cfg.train
        return self.scaler.scale / (t.micro_batch_size * t.seq_len * num_microbatches)

    def loss_scale(self) -> Tensor:
        """Return fp16's loss scale as it is now, 1 in other formats: [1] float64."""
        return torch.ones(1, dtype=torch.float64, device=self.mesh.device) * (self.scaler.scale if self.scaler else 1.0)

    def contribution(self, loss_sum: Tensor, batches: list[Batch]) -> tuple[Tensor, Tensor]:
        """Return what this rank adds to the world's sums of losses and tokens: 0 but on tp rank 0 of the last stage."""
        counts = self.mesh.tp.rank == 0 and self.mesh.pp.rank == self.mesh.pp.size - 1
        count = torch.full((), sum(b.count for b in batches) * counts, dtype=torch.float64, device=self.mesh.device)
        return loss_sum * counts, count


def build(cfg: Config, mesh: Mesh, chosen: Kernels | None = None) -> Trainer:
    """Make this rank's part of the model, initialised, with everything that trains it. Collective over the world.

    chosen: the kernels, if they were chosen before.
    """
    m, pp, vp = cfg.model, mesh.pp, cfg.parallel.vp
    dtype = DTYPES[cfg.precision.dtype]
    chosen = chosen or kernels.choose(cfg, mesh.device)
    stages = stage_layers(m.num_layers, pp.size, vp, cfg.parallel.layers_per_stage)
    mine = range(pp.rank, pp.size * vp, pp.size)
    layout = make_layout(cfg, mesh, chosen)
    chunks = [GPT(cfg, mesh, layout, stages[i], first=i == 0, last=i == len(stages) - 1) for i in mine]
    if cfg.finetune.kind == "lora":
        for chunk in chunks:
            lora.attach(chunk, cfg)
    initialise(chunks, cfg.train.seed)
    with room_for("the gradients"):
        grad_dtype = DTYPES[cfg.optimizer.grad_dtype]
        gradients = Gradients(chunks, mesh, chosen, overlap=cfg.parallel.overlap_grads, dtype=grad_dtype)
    with room_for("the optimizer's masters and moments"):
        optimizer = Zero1Optimizer(gradients, cfg.optimizer, chosen)
    shape = stream_length(cfg), cfg.train.micro_batch_size, m.hidden_size
    executor = Executor(
        chunks,
        pp,
        shape,
        dtype,
        mesh.device,
        gradients.begin_backward,
        layout.comm.begin_pass,
        layout.put_off,
        cfg.parallel.schedule,
    )
    executor.connect()
    scaler = LossScaler(cfg.precision, mesh.device) if cfg.precision.dtype == "fp16" else None
    trainer = Trainer(cfg, mesh, chunks, gradients, optimizer, executor, scaler, chosen)
    if mesh.device.type == "cuda":
        mesh.activity.progress = Progress.of(mesh.device)
    if cfg.train.rerun == "on":
        trainer.rerun = Rerun(gradients)
    packs = chosen.attention.packs
    if cfg.train.cuda_graph != "off" and why_eager(cfg, mesh.device, packs) is None:
        trainer.graph = StepGraph(
            executor,
            trainer.backward_scale,
            trainer.finish,
            trainer.reset,
            mesh,
            sum(len(stages[i]) for i in mine),
            evaluates=cfg.train.eval_every > 0,
        )
    return trainer


def train(
    trainer: Trainer,
    data: Datasets,
    log: Log,
    stop: Stop,
    done: int = 0,
    consumed: int = 0,
    root: tuple[int, str] | None = None,
) -> float:
    """Run the steps after the `done` ones, which took `consumed` samples, to the last or until `stop`.

    root: the checkpoint in checkpoint.dir that they descend from, see Checkpointer. Returns the seconds that the end
    waited for a save.

    Collective over the world. Raises CheckpointError if its last step could not be saved, ReplicasDiffer if ranks hold
    different copies of a parameter, WrongResult if one computes another result the second time.
    """
    cfg, t, activity = trainer.cfg, trainer.cfg.train, trainer.mesh.activity
    keep_collector_out()
    if trainer.graph is not None:
        trainer.graph.log = log
    if trainer.rerun is not None:
        trainer.rerun.log = log
    loader = Loader(data.train, cfg, trainer.mesh)
    replicas = Replicas(trainer.chunks, trainer.gradients, t)
    stragglers = Stragglers(trainer.mesh, log, t, kernels.gpu_clock(trainer.mesh.device))
    saves = Checkpointer(cfg, trainer.state, data.info, log, done, root) if cfg.checkpoint.dir is not None else None
    meter = Meter(log, trainer.mesh, stop, *filter(None, [saves]))
    step = done
    log.ready()
    for step in profiled(range(done + 1, t.steps + 1), cfg, trainer.mesh, log):
        activity.begin_step(step)
        activity.begin("data")
        batches = loader.step(consumed, step)
        consumed += t.global_batch_size
        lr = learning_rate(cfg.optimizer, consumed, global_batch_size=t.global_batch_size, total_steps=t.steps)
        scale = trainer.loss_scale()
        stats = trainer.step(batches, lr)
        known = {"step": step, "consumed_samples": consumed, "lr": lr}
        if cfg.data.separate_documents:
            known["squared_lengths"] = sum(b.squared_lengths for b in batches)
            known["padding"] = sum(b.padding for b in batches)
        stalls = () if saves is None else saves.stalls()
        meter.step(torch.cat([stats.values, scale]), trainer.memory(), stalls, **known)
        replicas.step(step)
        stragglers.step(step)
        trainer.near_end()
        if not stop.now() and t.eval_every and step % t.eval_every == 0:
            meter.flush()
            evaluate(trainer, Loader(data.valid, cfg, trainer.mesh), log, stop, step)
            meter.restart()
        if stop.agreed:
            break
        if saves is not None and ((shared := saves.due(step)) or saves.local_due(step)):
            replicas.require_equal(step)
            activity.begin("checkpoint")
            saves.save(step, consumed, local=not shared)
    meter.flush()
    loader.close()
    if trainer.graph is not None:
        trainer.graph.close()
    replicas.flush()
    stragglers.flush()
    if saves is not None and stop.agreed:
        replicas.require_equal(step)
    activity.begin("checkpoint")  # from here on a rank may stand still for as long as its disk takes
    began = time.perf_counter()
    if saves is not None:
        if stop.agreed or step == done and saves.due(step):  # no step was left after a save on the nodes' own disks
            saves.save(step, consumed)
        saves.close(stop.agreed)
    waited = time.perf_counter() - began
    if stop.agreed:
        stop.report(step, saves is not None and saves.saved == step)
    if saves is not None and saves.saved != step and (stop.agreed or saves.due(step)):  # no success for a scheduler
        raise CheckpointError(
            f"the run ends after step {step}, of which there is no checkpoint in "
            f"{cfg.checkpoint.dir}: its save failed, as said above"
        )
    return waited


def keep_collector_out() -> None:
    """Hide the objects made so far from Python's garbage collector, which stops one rank, and so all, at any time.

    What a step makes is freed by reference counts; the few cycles that remain are young and quickly found.
    """
    gc.collect()
    gc.freeze()


def evaluate(trainer: Trainer, loader: Loader, log: Log, stop: Stop, step: int) -> None:
    """Log the mean loss per token over train.eval_steps global batches, the same ones in every evaluation.

    `stop` ends it, without a result. Closes the loader.
    """
    t, began = trainer.cfg.train, time.perf_counter()
    total = torch.zeros(2, dtype=torch.float64, device=trainer.mesh.device)
    for i in range(t.eval_steps):
        total += trainer.evaluate(loader.step(i * t.global_batch_size, step=0))
        if stop.now():
            break
    else:
        loss_sum, count = total.tolist()
        log.evaluation(step, loss_sum / count, time.perf_counter() - began)
    loader.close()
