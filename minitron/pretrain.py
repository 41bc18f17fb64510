"""Train a GPT-3 or Llama model from scratch.

Without torchrun this is a world of one process; without a configuration it trains the quickstart model on the corpus.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

from minitron.runtime.environment import raise_file_limits, set_defaults
from minitron.runtime.signals import Listener

if __name__ == "__main__":  # before torch is loaded, which takes seconds
    set_defaults(os.environ)
    listener = Listener(os.environ).open()

import torch
import torch.distributed as dist

from minitron.checkpoint.format import CheckpointError
from minitron.checkpoint.load import ResumePoint, agree, check_data, newest_local_save, restore
from minitron.checkpoint.save import Exporter
from minitron.checkpoint.weights import Weights
from minitron.comm.collectives import all_reduce_
from minitron.comm.mesh import Mesh
from minitron.config import cli, rules
from minitron.config.schema import Config
from minitron.data.build import Datasets, build_datasets
from minitron.data.cache import Cache
from minitron.data.indexed import DataError
from minitron.data.tokenizers import Tokenizer
from minitron.kernels import kernels
from minitron.optim.replicas import ReplicasDiffer
from minitron.optim.rerun import WrongResult
from minitron.pipeline.replay import why_eager
from minitron.runtime import profiling
from minitron.runtime.log import Log
from minitron.runtime.rendezvous import Signer, joined
from minitron.runtime.room import OutOfMemory, check_room
from minitron.runtime.startup import Startup
from minitron.runtime.stop import Diverged, Stop
from minitron.runtime.watch import watched
from minitron.train import build, train


def main(
    argv: list[str] | None = None, description: str = __doc__, finetune: bool = False, listener: Listener | None = None
) -> None:
    """Run the command. description: for --help. finetune: what finetune.kind has to be set for. listener: is open."""
    with nullcontext(listener) if listener is not None else Listener(os.environ) as listener:
        try:
            stopped = run(argv, description, finetune, listener)
        except BaseException:  # its line is written, or Python writes its traceback next
            listener.finish()
            raise
    if stopped == signal.SIGINT and not listener.torchrun:  # which would take a status for a failure
        raise SystemExit(128 + stopped)


def run(argv: list[str] | None, description: str, finetune: bool, listener: Listener) -> int:
    """Train until the last step, or until a signal, whose number it returns."""
    with cli.user_errors():
        startup = Startup(os.environ, listener.begun)
        rank, world, local_rank, ranks_here = place(os.environ)
    with cli.user_errors(quiet=local_rank > 0):  # the others on this node find the same mistake
        argv, options = sys.argv[1:] if argv is None else argv, None
        if "--dry-run" in argv:  # the only use of the planner
            from minitron.planner.dryrun import dryrun

            options, argv = dryrun.split(argv)
        cfg = cli.configure(description, argv)
        if finetune != (cfg.finetune.kind is not None):
            raise ValueError(
                f"finetune.kind={cfg.finetune.kind or 'null'} is for python -m minitron."
                f"{'pretrain' if finetune else 'finetune'}; start that, or set finetune.kind="
                f"{'sft or lora' if finetune else 'null'}"
            )
        if options is not None:
            dryrun.command(cfg, options)
            return 0
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if world > 1 and missing:
            raise ValueError(
                f"WORLD_SIZE={world} is set, but {', '.join(missing)} are not; start ranks with torchrun, "
                "or unset WORLD_SIZE"
            )
        port = os.environ.get("MASTER_PORT", "")
        if world > 1 and not (re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 1 << 16):
            raise ValueError(f"MASTER_PORT={port[:40]!r} is no port; use a number from 1 to 65535, or torchrun")
        device, name, capability = choose_device(local_rank, ranks_here)
        rules.check(cfg, world, capability)
        if cfg.train.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to be deterministic
            torch.use_deterministic_algorithms(True)
        chosen = kernels.choose(cfg, device)
        check_room(cfg, world, device)
        profiling.check(cfg.profile, device)
        log = Log(cfg, rank, world, name)
        listener.alarm = log.alarm
        if warning := raise_file_limits(os.environ, world):
            log.warn(warning)
    # Rank 0 prints common errors. Each rank prints errors of its own data and memory.
    alike = CheckpointError, Diverged, ReplicasDiffer, WrongResult
    with log, cli.user_errors((DataError, OutOfMemory)), cli.user_errors(alike, quiet=rank > 0):
        signer = make_signer(os.environ, log)
        mesh = make_mesh(cfg, world, device, listener, signer)
        stop = Stop(mesh, log, cfg.train.max_skipped, listener, signer)
        with watched(mesh, log, cfg.train.hang_seconds, signer):
            with cli.user_errors(quiet=rank > 0):  # raised on all ranks alike
                mesh.activity.begin("load")
                start = agree(cfg, mesh, local_rank == 0, open_weights)
                mesh.activity.begin("datasets")
                data = open_data(cfg, start, mesh, first_on_node=local_rank == 0)
            mesh.activity.begin("start")
            trainer = build(cfg, mesh, chosen, log, start.base_fingerprint)
            startup.mark("build")
            mesh.activity.begin("load")
            start = newest_local_save(cfg, start, data.info, trainer.state, log, first_on_node=local_rank == 0)
            restore(start, trainer.state, log)
            startup.mark("load")
            mesh.activity.begin("start")
            log.start(
                startup,
                unigram_entropy=data.info.get("unigram_entropy"),
                device=name,
                torch=torch.__version__,
                first_step=start.step + 1,
                started=listener.begun,
                load_seconds=startup.parts["load_seconds"],
                **{axis: getattr(mesh, axis).size for axis in ("tp", "pp", "cp", "dp")},
            )
            if data.note:
                log.info(data.note)
            if world > 1 and not os.environ.get("MINITRON_SECRET"):
                log.info("MINITRON_SECRET is not set: any program that reaches the ranks' store can end this run")
            log.info(trainer.describe())
            reason = why_eager(cfg, device, chosen.attention.masks_documents)
            if reason is not None and (
                cfg.train.cuda_graph == "on" or cfg.train.cuda_graph == "auto" and name != "cpu"
            ):
                log.info(f"train.cuda_graph={cfg.train.cuda_graph}: every step is eager, since {reason}")
            for reader, resumed in (start.base_weights, False), (start.reader, start.resume):
                if reader is not None:
                    log.info(f"{'resumed from' if resumed else 'weights of'} {reader.path}")
                    if reader.note:
                        log.info(reader.note)
            start = start._replace(reader=None, base_weights=None)  # an index is large, and was needed once
            reader = None
            with stop:
                try:
                    exporter = make_exporter(cfg, log) if rank == 0 else None
                    waited = train(
                        trainer, data, log, stop, start.step, start.consumed_samples, start.parent_checkpoint, exporter
                    )
                except ValueError:  # a run's own error, raised between steps: graphs must end before NCCL does
                    trainer.runner.close()
                    raise
                if finetune:
                    log.summary()
                from minitron.supervise.goodput import of_run  # of use at the end alone

                log.end(waited, of_run)
                mesh.activity.begin("end")
                all_reduce_(through := torch.zeros(1, device=device), mesh.world)
                through.item()  # keep rank 0, which may host the store, alive until every rank is done with it
    if dist.is_initialized():
        dist.destroy_process_group()
    return stop.agreed


def place(environ: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Read (rank, world) of all nodes and of this one, as torchrun says; alone without it. Raises ValueError."""
    found = []
    for name, default in ("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"):
        if not re.fullmatch("[0-9]{1,9}", text := environ.get(name, default)):
            raise ValueError(
                f"{name}={text[:40]!r} is no number of a rank or of ranks; start ranks with torchrun, or unset {name}"
            )
        found.append(int(text))
    rank, world, local_rank, ranks_here = found
    if rank >= world:
        raise ValueError(
            f"RANK={rank} is none of WORLD_SIZE={world} ranks, which count from 0; start ranks with "
            "torchrun, or unset both"
        )
    most = ranks_here if "LOCAL_WORLD_SIZE" in environ else world
    if local_rank >= most:  # it would leave the lines of errors to a rank 0 of the node that there is not
        raise ValueError(
            f"LOCAL_RANK={local_rank} is none of {most} ranks, which count from 0; start ranks with torchrun, or unset "
            "LOCAL_RANK and LOCAL_WORLD_SIZE"
        )
    return rank, world, local_rank, ranks_here


def choose_device(local_rank: int, ranks_here: int) -> tuple[torch.device, str, tuple[int, int] | None]:
    """Choose this rank's device: it, its name, its CUDA capability. Raises ValueError if ranks outnumber GPUs."""
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
    """Open the data on all ranks: first on one rank of each node, which may have to build an index. Collective.

    Raises ValueError, on all ranks alike.
    """
    opened: list[Datasets] = []

    def open_in_turn(turn: bool) -> None:
        if first_on_node == turn:
            opened.append(build_data(cfg, start, first_on_node))

    for turn in (True, False):
        mesh.agreement.decide(partial(open_in_turn, turn), lambda _: None, errors=(ValueError,))
    return opened[0]


def open_weights(path: str, vocab_multiple: int, key: str) -> Weights:
    """Open a Hugging Face folder, a checkpoint, or an adapter with its base."""
    from minitron.interop import weights

    return weights.open_weights(path, vocab_multiple, key)


def make_exporter(cfg: Config, log: Log) -> Exporter | None:
    """Make what exports beside saves, if checkpoint.export asks for it."""
    if cfg.checkpoint.export == "none":
        return None
    from minitron.interop.export import Exporter

    return Exporter(cfg, log)


def load_tokenizer(spec: str, cache: Cache) -> Tokenizer:
    """Open the tokenizer of a published model."""
    from minitron.interop import tokenizers

    return tokenizers.load_tokenizer(spec, cache=cache)


def build_data(cfg: Config, start: ResumePoint = ResumePoint(), first_on_node: bool = True) -> Datasets:
    """Open what the run reads; a run that goes on keeps the order it began with, however many steps it has now.

    Safe on all ranks at once, and needs no process group. first_on_node: see build_datasets. Raises ValueError.
    """
    t = cfg.train
    needed = start.consumed_samples + max(0, t.steps - start.step) * t.global_batch_size
    data = build_datasets(
        cfg.data,
        vocab_size=cfg.model.vocab_size,
        seq_len=t.seq_len,
        seed=t.seed,
        train_samples=start.data.get("train_samples", needed),
        valid_samples=t.eval_steps * t.global_batch_size if t.eval_every else 0,
        first_on_node=first_on_node,
        load_tokenizer=load_tokenizer,
    )
    check_data(start, data.info)
    if len(data.train) < needed:
        most = start.step + (len(data.train) - start.consumed_samples) // t.global_batch_size
        raise ValueError(
            f"train.steps={t.steps} needs {needed} samples, and the run was laid out for "
            f"{len(data.train)}; use at most {most}, or begin another from its weights (checkpoint.load)"
        )
    return data


def make_signer(environ: Mapping[str, str], log: Log) -> Signer:
    """Make what signs this rank's messages, by the secret that all ranks of the job share."""
    round_ = json.loads(environ.get("MINITRON_ROUND", "{}")).get("round", 0)
    place = f"{environ.get('TORCHELASTIC_RUN_ID', '')}/{round_}"
    return Signer(environ.get("MINITRON_SECRET", ""), place, log.alarm)


def make_mesh(cfg: Config, world: int, device: torch.device, listener: Listener, signer: Signer = Signer()) -> Mesh:
    """Make the mesh of torchrun's world; of this process alone, without a process group, if there is no other.

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
        return Mesh.create(tp=p.tp, pp=p.pp, cp=p.cp, tied=tied, device=device, timeout=timeout)


if __name__ == "__main__":
    main(listener=listener)
