"""The page to read first: how a run is built, and what one step does.

    config -> mesh -> model -> pipeline schedule -> optimizer -> loop (step, observers)

`build` makes the parts, each from a file that teaches one idea. `Trainer.step` is a training step of any layout.
`train` is the loop around it. It queues step n + 1 while the device is in the last backward of step n, so the device
never waits for the host. Observers do the rest after each step: figures, saves, evaluations.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from minitron.checkpoint.load import ResumePoint
from minitron.checkpoint.save import Checkpointer, ExporterProtocol, Saves, can_save
from minitron.checkpoint.state import State
from minitron.comm.collectives import all_reduce_
from minitron.comm.mesh import Mesh
from minitron.config.batch import batch_size, consumed_of, trained_of
from minitron.config.schema import Config
from minitron.config.sizes import stage_layers, stream_length
from minitron.data.batch import Batch
from minitron.data.build import Datasets
from minitron.data.evaluation import Evaluation
from minitron.data.loader import Loader
from minitron.kernels import kernels
from minitron.kernels.fp8 import Fp8States
from minitron.kernels.gemm import DTYPES
from minitron.kernels.kernels import Kernels
from minitron.model import lora
from minitron.model.gpt import GPT
from minitron.model.init import initialise
from minitron.optim.buckets import Gradients
from minitron.optim.lr import learning_rate
from minitron.optim.numerics import Numerics
from minitron.optim.replicas import Replicas
from minitron.optim.rerun import Rerun
from minitron.optim.scaler import LossScaler
from minitron.optim.zero1 import Stats, Zero1Optimizer
from minitron.parallel.layer_context import make_layer_context
from minitron.pipeline.executor import Executor, MakeSchedule, local_totals
from minitron.pipeline.replay import Eager, Replay, why_eager
from minitron.pipeline.schedule import make
from minitron.runtime.log import Log
from minitron.runtime.meter import Meter
from minitron.runtime.observer import Observer, StepDone
from minitron.runtime.profiling import profiled
from minitron.runtime.room import memory_in_use, room_for
from minitron.runtime.startup import Startup
from minitron.runtime.stop import Stop
from minitron.runtime.stragglers import Stragglers


@dataclass(frozen=True)
class Trainer:
    """The parts of a run on this rank.

    runner: launches or replays the passes of a step. rerun: checks each step, if train.rerun is on. numerics: logs
    norms, zeros and FP8 losses of some steps, if log.numerics_every is set. base_fingerprint: of the frozen weights
    beside adapters. eager_reason: why no step can be recorded; None if steps are recorded or train.cuda_graph is off.
    """

    cfg: Config
    mesh: Mesh
    chunks: list[GPT]
    gradients: Gradients
    optimizer: Zero1Optimizer
    executor: Executor
    scaler: LossScaler
    fp8: Fp8States
    kernels: Kernels
    runner: Eager | Replay
    rerun: Rerun | None
    numerics: Numerics | None
    base_fingerprint: str | None
    eager_reason: str | None

    def step(self, batches: list[Batch], lr: float) -> Stats:
        """Run forward, backward and update on this rank's microbatches of a global batch. Collective over the world.

        The host reads no result of this step here, except with train.rerun.
        """
        # Numerics, if there is one, wraps Rerun or the runner, and Rerun wraps the runner. Losses are sums over tokens.
        loss_sum, skip = (self.numerics or self.rerun or self.runner).forward_backward(batches)
        self.fp8.end_step()  # before the update, because its all-reduces would wait behind the all-gathers
        loss_grad = self.scaler.loss_grad(len(batches))
        stats = self.optimizer.step(lr, *local_totals(self.mesh, loss_sum, batches), loss_grad, skip)
        self.scaler.update(stats.skipped * (not skip))  # a step that Rerun skips did not overflow
        self.mesh.activity.ended()
        return stats

    def evaluate(self, batches: list[Batch]) -> Tensor:
        """Return [loss sum, tokens] of the global batch, float64 on the device. Collective over the world."""
        total = torch.stack(local_totals(self.mesh, self.runner.evaluate(batches), batches)).double()
        self.fp8.drop_casts()
        all_reduce_(total, self.mesh.world)
        return total

    @property
    def state(self) -> State:
        """Return the parts of this rank that a checkpoint holds."""
        return State(self.chunks, self.optimizer, self.scaler, self.base_fingerprint, self.rerun)

    @property
    def shared_bytes(self) -> int:
        """GPU memory that ranks of a node share, which torch's allocator does not count."""
        return self.chunks[0].context.comm.nbytes + self.gradients.slice_comm.nbytes

    def describe(self) -> str:
        """Describe the model, the layout and the kernels in one line."""
        m, mesh = self.cfg.model, self.mesh
        params = [p for chunk in self.chunks for p in chunk.parameters()]
        here, trained = sum(p.numel() for p in params), sum(p.numel() for p in params if p.requires_grad)
        frozen = "" if here == trained else f", of which {trained / 1e6:.2f} M are trained"
        return (
            f"{m.family}: {m.num_layers} layers, hidden {m.hidden_size}, "
            f"{here / 1e6:.2f} M parameters on rank {mesh.rank}{frozen} | tp {mesh.tp.size} pp {mesh.pp.size} "
            f"vp {len(self.chunks)} cp {mesh.cp.size} dp {mesh.dp.size} | {self.cfg.precision.dtype}, "
            f"{self.kernels.names}, tp: {self.chunks[0].context.comm.name}, "
            f"dp: {self.gradients.slice_comm.name}"
        )


def build(
    cfg: Config,
    mesh: Mesh,
    chosen: Kernels | None = None,
    log: Log | None = None,
    base_fingerprint: str | None = None,
    schedule: MakeSchedule | None = None,
) -> Trainer:
    """Make and initialise this rank's part of the model, and all that trains it. Collective over the world.

    chosen: the kernels, if they were chosen before. log: for messages about recordings and steps that are run again.
    base_fingerprint: see Trainer. schedule: makes another schedule than parallel.schedule.
    """
    m, pp, vp, micro_batch_size = cfg.model, mesh.pp, cfg.parallel.vp, cfg.train.micro_batch_size
    chosen = chosen or kernels.choose(cfg, mesh.device)
    stages = stage_layers(m.num_layers, pp.size, vp, cfg.parallel.layers_per_stage)
    mine = range(pp.rank, pp.size * vp, pp.size)
    context = make_layer_context(cfg, mesh, chosen)
    chunks = [GPT(cfg, mesh, context, stages[i], first=i == 0, last=i == len(stages) - 1) for i in mine]
    if cfg.finetune.kind == "lora":
        for chunk in chunks:
            lora.attach(chunk, cfg)
    initialise(chunks, cfg.train.seed)
    with room_for("the gradients"):
        dtype = DTYPES[cfg.optimizer.accumulates_in]
        gradients = Gradients(chunks, mesh, chosen, overlap=cfg.parallel.overlap_grads, dtype=dtype)
    with room_for("the optimizer's masters and moments"):
        optimizer = Zero1Optimizer(gradients, cfg.optimizer, chosen)
    executor = Executor(
        chunks,
        mesh,
        (stream_length(cfg), micro_batch_size, m.hidden_size),
        DTYPES[cfg.precision.dtype],
        begin_backward=gradients.begin_backward,
        begin_pass=context.comm.begin_pass,
        weight_queue=context.weight_queue,
        make=schedule or partial(make, kind=cfg.parallel.schedule),
    )
    scaler = LossScaler(cfg.precision, mesh.device, micro_batch_size * cfg.train.seq_len)
    fp8 = Fp8States([chunk.fp8_state for chunk in chunks])

    def reset() -> None:
        fp8.drop_casts()
        gradients.reset()
        context.comm.reset()

    eager = Eager(executor, scaler.loss_grad, gradients.finish, reset, chosen.counts)
    runner: Eager | Replay = eager
    why = None
    if cfg.train.cuda_graph != "off" and (why := why_eager(cfg, mesh.device, chosen.attention.masks_documents)) is None:
        evaluated = cfg.num_microbatches(mesh.dp.size) if cfg.train.eval_every else 0
        runner = Replay(eager, mesh, sum(len(stages[i]) for i in mine), evaluated, log)
    rerun = Rerun(runner, gradients, fp8, scaler, log) if cfg.train.rerun == "on" else None
    observed = rerun or runner, scaler, optimizer, chosen.counts, log
    numerics = Numerics(cfg, *observed) if cfg.log.numerics_every else None
    parts = chunks, gradients, optimizer, executor, scaler, fp8, chosen, runner, rerun, numerics
    return Trainer(cfg, mesh, *parts, base_fingerprint, why)


def train(
    trainer: Trainer,
    data: Datasets,
    log: Log,
    stop: Stop,
    start: ResumePoint,
    startup: Startup,
    exporter: ExporterProtocol | None = None,
) -> float:
    """Run the steps after those of `start` until the last one, or until `stop` ends the run.

    startup: times the first step. exporter: makes folders of another format beside saves, on rank 0. Returns the
    seconds that the end waited for a save.

    Collective over the world. Raises CheckpointError if the last step could not be saved, ReplicasDiffer if ranks hold
    different copies of a parameter, WrongResult if a rank gets another result when it computes a step again.
    """
    cfg, t, mesh, skipped = trainer.cfg, trainer.cfg.train, trainer.mesh, trainer.cfg.data.skip_samples
    trained = trained_of(skipped, start.consumed_samples)
    keep_collector_out()
    loader = Loader(data.train, cfg, mesh)
    replicas = Replicas(trainer.chunks, trainer.gradients, t)
    stragglers = Stragglers(mesh, log, t)
    checkpointer = None
    if can_save(cfg, mesh, log):
        checkpointer = Checkpointer(cfg, trainer.state, data.info, log, start.step, start.parent_checkpoint, exporter)
    saves = Saves(checkpointer, stop, replicas, start)
    memory = lambda: memory_in_use(trainer.shared_bytes, trainer.runner.replaying)
    observers: list[Observer] = []  # the meter gives them the figures of each step
    meter = Meter(log, mesh, memory, saves.stalls, observers)
    evaluation = Evaluation(trainer.evaluate, cfg, mesh, data.valid, log, stop, meter)
    observers += [meter, replicas, stragglers, stop, evaluation, saves, startup, *filter(None, [trainer.numerics])]
    startup.mark("prepare")
    for step in profiled(range(start.step + 1, t.steps + 1), cfg, mesh, log):
        mesh.activity.begin_step(step)
        mesh.activity.begin("data")
        batches = loader.step(trained, step)
        trained += batch_size(t, trained)
        lr = learning_rate(cfg.optimizer, t, trained)
        scale = trainer.scaler.scale.double().reshape(1)
        stats = trainer.step(batches, lr)
        done = StepDone(step, consumed_of(skipped, trained), lr, batches, torch.cat([stats.values, scale]))
        trainer.executor.wait_last_forward()  # a signal that came before this line stops the run after this step
        for observer in observers:
            observer.after(done)
        if stop.agreed:
            break
    loader.close()
    trainer.runner.close()
    for observer in observers:
        observer.close()
    return saves.waited


def keep_collector_out() -> None:
    """Hide the objects made so far from Python's garbage collector. A pause of one rank's collector stops all ranks.

    Reference counts free what a step makes. The collector finds the few cycles that remain quickly.
    """
    gc.collect()
    gc.freeze()
