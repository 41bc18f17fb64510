"""Train a GPT-3 or Llama model from scratch.

Without torchrun this is a world of one process; without a configuration it trains the quickstart model on the corpus.
"""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import time
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from socket import gethostname

from minitron.runtime.environment import raise_file_limits, set_defaults
from minitron.runtime.signals import Listener

if __name__ == "__main__":  # before torch is loaded, which takes seconds
    set_defaults(os.environ)
    listener = Listener(os.environ).open()

import torch
import torch.distributed as dist

from minitron.checkpoint.load import ResumePoint, agree_on_start, check_data, newest_local_save, open_base, restore
from minitron.checkpoint.save import ExporterProtocol
from minitron.checkpoint.weights import Weights, base_of
from minitron.comm.activity import Stopwatch
from minitron.comm.collectives import all_reduce_
from minitron.comm.mesh import Mesh
from minitron.config import cli, rules
from minitron.config.batch import consumed_of, trained_after, trained_of
from minitron.config.schema import MAX_STEPS, Config, changed
from minitron.config.text import short, shown
from minitron.data.build import Datasets, build_datasets
from minitron.data.evaluation import Evaluation, evaluation_only
from minitron.kernels import kernels
from minitron.runtime import profiling
from minitron.runtime.log import Log
from minitron.runtime.rendezvous import Signer, joined
from minitron.runtime.room import check_room
from minitron.runtime.startup import Startup
from minitron.runtime.status import RunError, why_it_ended
from minitron.runtime.stop import Stop
from minitron.runtime.watch import watched
from minitron.train import Trainer, build, train


def main(
    argv: list[str] | None = None, description: str = __doc__, finetune: bool = False, listener: Listener | None = None
) -> None:
    """Run the command.

    description: for --help. finetune: whether finetune.kind must be set. listener: is open; None: make one.
    """
    with nullcontext(listener) if listener is not None else Listener(os.environ) as listener:
        try:
            stopped = run(argv, description, finetune, listener)
        except BaseException as error:  # its line is written, or Python writes its traceback next
            listener.finish()
            listener.tell_torchrun(why_it_ended(error), getattr(error, "code", 1))
            raise
    if stopped == signal.SIGINT and not listener.torchrun:  # torchrun would take a status for a failure
        raise SystemExit(128 + stopped)


def run(argv: list[str] | None, description: str, finetune: bool, listener: Listener) -> int:
    """Train until the last step or until a signal; return the signal's number or 0. With --evaluate only evaluate."""
    imported = time.time()
    with cli.user_errors():
        rank, world, local_rank, ranks_here = read_torchrun_env(os.environ)
    with cli.user_errors(quiet=local_rank > 0):  # the other ranks of this node find the same mistake
        argv, options = sys.argv[1:] if argv is None else argv, None
        if "--dry-run" in argv:  # the only use of the planner
            from minitron.planner.dryrun import dryrun

            options, argv = dryrun.split(argv)
        if (evaluates := "--evaluate" in argv) and options is not None:
            raise ValueError("--evaluate does not go with --dry-run, which reads no weights; drop one of them")
        from minitron.interop import base  # finetune.base brings sizes of the model and its tokenizer

        cfg = cli.configure(description, [arg for arg in argv if arg != "--evaluate"], base.load)
        if finetune != (cfg.finetune.kind is not None):
            raise ValueError(
                f"finetune.kind={cfg.finetune.kind or 'null'} is for python -m minitron."
                f"{'pretrain' if finetune else 'finetune'}; start that, or set finetune.kind="
                f"{'sft or lora' if finetune else 'null'}"
            )
        if options is not None:
            dryrun.command(cfg, options)
            return 0
        check_meeting_place(os.environ, world)
        device, name, capability = choose_device(local_rank, ranks_here)
        rules.check(cfg, world, capability)
        if evaluates:
            cfg = evaluation_only(cfg)
        if cfg.train.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it to be deterministic
            torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms also imports torch's compiler
        chosen = kernels.choose(cfg, device)
        try:
            check_room(cfg, world, device)
        except ValueError:
            if (base := base_of(cfg)) is not None and not os.path.exists(os.path.expanduser(base)):
                open_base(cfg, open_weights)  # raises: a missing folder is the first mistake
            raise
        profiling.check(cfg.profile, device)
        log = Log(cfg, rank, world, name)
        listener.report_to(log.alarm)
        startup = Startup(os.environ, log, listener.begun, imported)
        if warning := raise_file_limits(os.environ, world):
            log.warn(warning)
    with log, cli.user_errors(RunError, quiet=rank > 0):
        first_on_node = local_rank == 0
        job = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{startup.parts.get('round', 0)}"
        signer = Signer(os.environ.get("MINITRON_SECRET", ""), job, log.alarm)
        # Ranks of one pipeline stage are compared, if it has two or more.
        timed = cfg.train.check_speed_every and world > cfg.parallel.pp
        waits_often = cfg.parallel.tp * cfg.parallel.cp * cfg.parallel.vp > 1
        stopwatch = Stopwatch(device, chosen.add_now, waits_often) if timed else None
        mesh = make_mesh(cfg, world, device, listener, signer, stopwatch)
        stop = Stop(mesh, log, cfg.train.max_skipped, listener, signer)
        with watched(mesh, log, cfg.train.hang_seconds, listener, signer):
            with cli.user_errors(quiet=rank > 0):  # raised on all ranks alike
                mesh.activity.begin("load")
                start = agree_on_start(cfg, mesh, open_weights, first_on_node)
                if evaluates and start.reader is start.base_weights is None:
                    fix = "set checkpoint.dir to one, or finetune.base or checkpoint.load to weights"
                    raise ValueError(f"--evaluate: checkpoint.dir={shown(cfg.checkpoint.dir)} has no checkpoint; {fix}")
                rules.check_batch_sizes(cfg, world, trained_of(cfg.data.skip_samples, start.consumed_samples))
                mesh.activity.begin("datasets")
                data = open_data(cfg, ResumePoint() if evaluates else start, mesh, first_on_node)
                if cfg.train.epochs is not None:
                    cfg = changed(cfg, train=dict(steps=step_after(cfg, start, len(data.train)), epochs=None))
                    rules.check(cfg, world, capability)
                    log.follow(cfg)
            mesh.activity.begin("start")
            trainer = build(cfg, mesh, chosen, log, start.base_fingerprint)
            startup.mark("build")
            mesh.activity.begin("load")
            start = newest_local_save(cfg, start, data.info, trainer.state, log)
            restore(start, trainer.state, log)
            startup.mark("load")
            mesh.activity.begin("start")
            describe_run(log, trainer, data, start._replace(resume=start.resume and not evaluates), name, startup)
            start = start._replace(reader=None, base_weights=None)  # an index is large, and is not needed any more
            exporter = make_exporter(cfg, log) if rank == 0 else None
            with stop.handling():
                try:
                    waited = 0.0
                    if evaluates:
                        Evaluation(trainer.evaluate, cfg, mesh, data.valid, log, stop).run(start.step)
                    else:
                        waited = train(trainer, data, log, stop, start, startup, exporter)
                except RunError:  # raised between steps: graphs must end before NCCL does
                    trainer.runner.close()
                    raise
                if finetune:
                    log.summary()
                end_of_run(log, waited)
                mesh.activity.begin("end")
                all_reduce_(through := torch.zeros(1, device=device), mesh.world)
                through.item()  # rank 0 may host the store, so it stays until every rank is done with it
    mesh.close()
    return stop.agreed


def read_torchrun_env(environ: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Read (rank, world) of all nodes and of this one; without torchrun (0, 1, 0, 1). Raises ValueError."""
    numbers = {}
    for name, single in ("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"):
        if not re.fullmatch("[0-9]{1,9}", text := environ.get(name, single)):
            raise ValueError(f"{name}={text[:40]!r} is not a number; start ranks with torchrun, or unset {name}")
        numbers[name] = int(text)
    node = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environ else "WORLD_SIZE"
    for name, size in ("RANK", "WORLD_SIZE"), ("LOCAL_RANK", node):  # a node needs a rank 0, which prints errors
        if numbers[name] >= numbers[size]:
            raise ValueError(
                f"{name}={numbers[name]} is not one of {size}={numbers[size]} ranks, which count from 0; start ranks "
                "with torchrun, or unset both"
            )
    return numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"], numbers["LOCAL_WORLD_SIZE"]


def ranks_of_node(environ: Mapping[str, str]) -> int:
    """Return the number of ranks on this node; 0 if it is unknown or their numbers are not consecutive."""
    rank, _, local_rank, count = read_torchrun_env(environ)
    return count if "LOCAL_WORLD_SIZE" in environ and rank % count == local_rank else 0


def check_meeting_place(environ: Mapping[str, str], world: int) -> None:
    """Raise ValueError unless the environment has the address and port at which the ranks of a world meet."""
    if world == 1:
        return
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environ]:
        raise ValueError(
            f"WORLD_SIZE={world} is set, but {', '.join(missing)} are not; start ranks with torchrun, "
            "or unset WORLD_SIZE"
        )
    if not (re.fullmatch("[0-9]{1,5}", port := environ["MASTER_PORT"]) and 0 < int(port) < 1 << 16):
        raise ValueError(f"MASTER_PORT={port[:40]!r} is not a port; use a number from 1 to 65535, or torchrun")


def describe_run(log: Log, trainer: Trainer, data: Datasets, start: ResumePoint, device: str, startup: Startup) -> None:
    """Log the start of the run, and its data, model and layout. device: the GPU's name, or "cpu"."""
    cfg, mesh = trainer.cfg, trainer.mesh
    log.record(
        "run",
        world=log.world,
        unigram_entropy=data.info.get("unigram_entropy"),
        device=device,
        torch=torch.__version__,
        first_step=start.step + 1,
        started=startup.begun,
        load_seconds=startup.parts["load_seconds"],
        **{axis: getattr(mesh, axis).size for axis in ("tp", "pp", "cp", "dp")},
    )
    notes = [data.note]
    if log.world > 1 and not os.environ.get("MINITRON_SECRET"):
        notes.append("MINITRON_SECRET is not set: any program that reaches the ranks' store can end this run")
    notes.append(trainer.describe())
    if trainer.eager_reason and (cfg.train.cuda_graph == "on" or device != "cpu"):
        notes.append(f"train.cuda_graph={cfg.train.cuda_graph}: every step is eager, since {trainer.eager_reason}")
    if mesh.uneven:
        why = "nodes have different numbers of data ranks, or LOCAL_WORLD_SIZE does not tell how many ranks they have"
        notes.append(f"optimizer.reduce_dtype=bf16: {why}; so gradients travel in float32")
    for reader, resumed in (start.base_weights, False), (start.reader, start.resume):
        if reader is not None:
            notes += [f"{'resumed from' if resumed else 'weights of'} {reader.path}", reader.note]
    if start.resume and start.step >= cfg.train.steps:
        most = step_after(cfg, start, len(data.train) + 1) - 1
        until = f" (to {most} at most: its order of samples is as long)" if "train_samples" in start.data else ""
        notes.append(
            f"the run is finished: {start.reader.path} has step {start.step} of {cfg.train.steps}. Raise train.steps"
            f"{until} or train.epochs, or start another run from its weights: checkpoint.load={start.reader.path}, "
            "with another checkpoint.dir"
        )
    for note in filter(None, notes):
        log.info(note)


def end_of_run(log: Log, stall_seconds: float) -> None:
    """Log the end of the run, and the shares of its time over all starts. stall_seconds: the wait for the last save."""
    if log.metrics is None or log.last_step is None:
        return
    from minitron.supervise.goodput import of_run  # only used here

    goodput = of_run(log.metrics.path, {"kind": "end", "time": time.time(), "stall_seconds": stall_seconds})
    log.record("end", step=log.last_step, stall_seconds=stall_seconds, shares={} if goodput is None else goodput.shares)
    if goodput is not None:
        log.info(str(goodput))


def choose_device(local_rank: int, ranks_here: int) -> tuple[torch.device, str, tuple[int, int] | None]:
    """Return this rank's device, its name, its CUDA capability. Raises ValueError if ranks outnumber GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), "cpu", None
    gpus = torch.cuda.device_count()
    if ranks_here > gpus:
        raise ValueError(
            f"--nproc-per-node={ranks_here} ranks need a GPU each, and this node has {gpus}; use "
            f"--nproc-per-node {gpus}"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank), torch.cuda.get_device_name(), torch.cuda.get_device_capability()


def open_data(cfg: Config, start: ResumePoint, mesh: Mesh, first_on_node: bool) -> Datasets:
    """Open the data on all ranks, first on one rank of each node, which may build an index. Collective.

    Raises ValueError, on all ranks alike, also if nodes read different data.
    """
    opened: list[Datasets] = []

    def open_here() -> tuple[str, dict]:
        opened.append(build_data(cfg, start, first_on_node))
        return gethostname(), opened[0].info

    def compare(ranks: list) -> None:
        (first, ours), *others = filter(None, ranks)
        for node, theirs in others:
            if key := next((key for key in ours if ours[key] != theirs.get(key)), None):
                differ = f"{key} is {short(ours[key], 200)} on {first} and {short(theirs.get(key), 200)} on {node}"
                same = "Python" if key == "python" else "files (data.paths, data.valid_paths, data.tokenizer)"
                raise ValueError(f"nodes read different data: {differ}; give all nodes the same {same}")

    mesh.agreement.decide(lambda: open_here() if first_on_node else None, compare)
    mesh.agreement.decide(lambda: bool(opened or open_here()), lambda _: None)
    return opened[0]


def open_weights(path: str, vocab_multiple: int, key: str) -> Weights:
    """Open a Hugging Face folder, a checkpoint, or an adapter with its base."""
    from minitron.interop import weights

    return weights.open_weights(path, vocab_multiple, key)


def make_exporter(cfg: Config, log: Log) -> ExporterProtocol | None:
    """Return the exporter of saves, if checkpoint.export is set."""
    if cfg.checkpoint.export == "none":
        return None
    from minitron.interop.export import Exporter

    return Exporter(cfg, log)


def build_data(cfg: Config, start: ResumePoint = ResumePoint(), first_on_node: bool = True) -> Datasets:
    """Open the data of the run. A resumed run keeps its order of samples, also with another number of steps.

    All ranks may call it at once. It needs no process group. first_on_node: see build_datasets. Raises ValueError.
    """
    from minitron.interop.rows import READERS

    t = cfg.train
    needed = consumed_after(cfg, start, t.steps)
    # The samples of train.epochs, in whole steps.
    of_epochs = lambda epoch: consumed_after(cfg, start, step_after(cfg, start, math.ceil((t.epochs or 0) * epoch)))
    data = build_datasets(
        cfg.data,
        vocab_size=cfg.model.vocab_size,
        seq_len=t.seq_len,
        seed=t.seed,
        train_samples=start.data.get("train_samples", needed) if t.epochs is None else of_epochs,
        valid_samples=t.eval_steps * t.global_batch_size if t.eval_every else 0,
        first_on_node=first_on_node,
        readers=READERS,
    )
    check_data(start, data.info)
    if len(data.train) < needed and t.epochs is None:
        most = step_after(cfg, start, len(data.train) + 1) - 1
        raise ValueError(
            f"train.steps={t.steps} needs {needed} samples, and the run was laid out for "
            f"{len(data.train)}; use at most {most}, or begin another from its weights (checkpoint.load)"
        )
    return data


def consumed_after(cfg: Config, start: ResumePoint, step: int) -> int:
    """Return the number of samples of the data that this run has read at the end of a step."""
    skipped = cfg.data.skip_samples
    before = trained_of(skipped, start.consumed_samples)
    return consumed_of(skipped, trained_after(cfg.train, max(0, step - start.step), before) - 1) + 1


def step_after(cfg: Config, start: ResumePoint, samples: int) -> int:
    """Return the first step of this run that ends after `samples` samples of the data have been read."""
    return max(start.step, bisect_left(range(MAX_STEPS), samples, key=partial(consumed_after, cfg, start)))


def make_mesh(
    cfg: Config,
    world: int,
    device: torch.device,
    listener: Listener,
    signer: Signer = Signer(),
    stopwatch: Stopwatch | None = None,
) -> Mesh:
    """Make the mesh of torchrun's world. A world of one has no process group. stopwatch: see Mesh.create.

    A rank that cannot join the others ends with exit status LOST and one line, which `listener` writes.
    """
    p = cfg.parallel
    if world == 1:
        return Mesh.offline(device=device)
    timeout = timedelta(seconds=cfg.train.hang_seconds + 60)  # the report of minitron.runtime.watch comes first
    with joined(os.environ, cfg.train.hang_seconds, timeout, listener, signer) as (store, rank, world):
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        tied = cfg.model.tie_embeddings
        node_ranks = ranks_of_node(os.environ) if cfg.optimizer.reduces_in == "bf16" else None
        return Mesh.create(
            tp=p.tp,
            pp=p.pp,
            cp=p.cp,
            tied=tied,
            device=device,
            timeout=timeout,
            stopwatch=stopwatch,
            node_ranks=node_ranks,
        )


if __name__ == "__main__":
    main(listener=listener)
