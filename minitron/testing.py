"""Test parallel layers on CPU ranks: gloo workers that start once and run any function as a job of n ranks.

`assert_layouts_agree` trains a toy model with classes of your own in every layout, and compares it with one process.

Problem: a test of a parallel layer needs several processes with a process group between them. Starting eight Python
processes that import torch takes longer than all the tests that use them, and a rank that fails or hangs leaves the
others waiting in a collective. The idea:

  1. A fork server imports torch once; every worker is a fork of it and lives until the pool closes.
  2. A job is a module-level function with its arguments. Each of the first n workers joins a fresh default process
     group, calls the function and sends back what it returns.
  3. Ranks meet in a key-value store that the parent serves, under a prefix of the job's own: nothing to race for.
  4. When a rank raises, dies or is late, the parent raises an error that shows that rank's traceback or stack, and
     replaces the workers. No later job meets a half-finished collective.

A test:

    @pytest.fixture(scope="session")
    def ranks():
        with RankPool() as pool:
            yield pool.run

    def sum_of_ranks():
        x = torch.tensor([dist.get_rank()])
        dist.all_reduce(x)
        return x

    def test_all_reduce(ranks):
        assert [int(x) for x in ranks(4, sum_of_ranks)] == [6, 6, 6, 6]

The function is sent by name, so it stands at the top of a module that can be imported; what it takes and returns is
pickled. Left out: GPU workers (launch those with torchrun) and worlds of several hosts.
"""

from __future__ import annotations

import faulthandler
import gc
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from minitron.comm import collectives as collectives  # with Axis and Mesh: all that a test of a layer needs, from here
from minitron.comm.mesh import Axis as Axis
from minitron.comm.mesh import Mesh as Mesh
from minitron.config import cli, rules
from minitron.config.files import errors_as
from minitron.config.schema import Config
from minitron.data.loader import Loader
from minitron.data.mock import MockDataset
from minitron.kernels.param import Shard
from minitron.model import gpt
from minitron.optim.buckets import Gradients
from minitron.train import Trainer, build

# When one rank has failed, the others get this long to report a failure of their own.
GRACE_SECONDS = 0.2

# A toy that trains in a moment. AdamW's eps is above the rounding of gradients that nearly vanish.
TOY = (
    "model.num_layers=2 model.hidden_size=32 model.ffn_hidden_size=48 model.num_heads=8 model.num_kv_heads=4 "
    "model.vocab_size=90 train.seq_len=32 train.micro_batch_size=1 train.global_batch_size=4 train.steps=3 "
    "optimizer.lr=1e-3 optimizer.warmup_steps=0 optimizer.eps=1e-5 precision.dtype=fp32"
).split()
# Ranks, and keys of `parallel`: each axis alone, then several.
LAYOUTS = [(2, ""), (2, "tp=2"), (2, "tp=2 sequence_parallel=false"), (2, "pp=2"), (2, "cp=2"), (4, "tp=2 pp=2")]
LAYOUTS += [(8, "tp=2 pp=2 cp=2")]


# ---- the parent's side --------------------------------------------------------------------------------------------


class _Worker(NamedTuple):
    process: multiprocessing.process.BaseProcess
    connection: Connection
    stack_file: Path


class RankPool(AbstractContextManager):
    """Worker processes that run functions as jobs of gloo ranks. Use it as a context manager, or call `close`.

    `preload` names modules that the fork server imports beforehand, to make workers start faster. The first pool of a
    process decides: it starts the server.
    """

    def __init__(self, preload: tuple[str, ...] = ()):
        self._context = multiprocessing.get_context("forkserver")
        # symbolic_shapes: the first backward of a process imports it, with all of sympy, in half a second.
        ours = __name__, "torch.fx.experimental.symbolic_shapes", "numpy.random"
        self._context.set_forkserver_preload([*ours, *preload])
        self._directory = tempfile.TemporaryDirectory(prefix="minitron-ranks-")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[_Worker] = []
        self._numbers = count(1)  # of workers and jobs

    def run(self, world_size: int, fn: Callable, *args, timeout: float = 300.0, **kwargs) -> list:
        """Call fn(*args, **kwargs) on `world_size` ranks and return what each returned, in rank order.

        Each rank has the default process group (gloo) of this job alone, one thread, and torch seeded with 0. Tensors
        arrive as copies without their graph. Raises RuntimeError, with the tracebacks, if a rank raises or dies, and,
        with every rank's stack, if the job takes longer than `timeout` seconds.
        """
        if world_size < 1:
            raise ValueError(f"world_size={world_size} is not a number of ranks; use 1 or more")
        rule = "pass a function defined at the top of a module, and arguments that pickle, as classes defined there do"
        with errors_as(ValueError, lambda error: f"cannot send {fn!r} to the ranks: {error}; {rule}", Exception):
            call = pickle.dumps((fn, args, kwargs))
        while len(self._workers) < world_size:
            self._workers.append(self._start_worker())
        workers = self._workers[:world_size]
        job = f"job{next(self._numbers)}"
        with ExitStack() as unless_done:
            unless_done.callback(self._kill_workers)
            for rank, worker in enumerate(workers):
                worker.connection.send((sys.path, rank, world_size, job, call))
            results = _collect(workers, timeout, f"{fn.__module__}.{fn.__qualname__}")
            for worker in workers:
                worker.connection.send("all ranks are done")
            unless_done.pop_all()
        return results

    def close(self, *_) -> None:
        self._kill_workers()
        self._directory.cleanup()

    __exit__ = close

    def _start_worker(self) -> _Worker:
        stack_file = Path(self._directory.name) / f"stack{next(self._numbers)}"
        connection, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._store.port, str(stack_file)), daemon=True)
        process.start()
        theirs.close()  # or the worker's death would not end the pipe
        return _Worker(process, connection, stack_file)

    def _kill_workers(self) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            worker.connection.close()
        self._workers = []


def _collect(workers: list[_Worker], timeout: float, name: str) -> list:
    """Collect the value that each rank returned. Raises RuntimeError if one failed or did not return in time."""
    pending = {worker.connection: rank for rank, worker in enumerate(workers)}
    results, failures, deadline = {}, {}, time.monotonic() + timeout
    while pending and (ready := wait(pending, timeout=max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            rank = pending.pop(connection)
            try:
                returned, value = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                workers[rank].process.join()
                returned, value = False, f"died with exit code {workers[rank].process.exitcode}\n"
            (results if returned else failures)[rank] = value
        if failures:
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    world = f"of {len(workers)} running {name}"
    if failures:
        raise RuntimeError("\n".join(f"rank {rank} {world}: {failures[rank]}" for rank in sorted(failures)))
    if pending:
        stacks = _stacks({rank: workers[rank] for rank in pending.values()})
        lines = [f"rank {rank}: " + ("returned" if rank in results else stacks[rank]) for rank in range(len(workers))]
        raise RuntimeError("\n".join([f"ranks {sorted(stacks)} {world} did not return in {timeout} s", *lines]))
    return [results[rank] for rank in range(len(workers))]


def _stacks(workers: dict[int, _Worker], patience_seconds: float = 2.0) -> dict[int, str]:
    """Ask each worker where it is. faulthandler answers the signal in C, so also while Python waits in a collective."""
    for worker in workers.values():
        os.kill(worker.process.pid, signal.SIGUSR1)
    texts, deadline = {}, time.monotonic() + patience_seconds
    while time.monotonic() < deadline:
        before, texts = texts, {rank: worker.stack_file.read_text() for rank, worker in workers.items()}
        if all(texts.values()) and texts == before:  # everybody wrote, and nobody is writing
            break
        time.sleep(0.05)
    return {rank: text or "did not answer the signal" for rank, text in texts.items()}


# ---- the worker's side --------------------------------------------------------------------------------------------


def _serve(connection: Connection, port: int, stack_file: str) -> None:
    """Serve as a worker: one job after another, until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends its workers
    gc.freeze()  # no collection writes to pages that the workers share
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with suppress(EOFError), open(stack_file, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        while True:
            path, rank, world_size, job, call = connection.recv()
            sys.path[:] = path
            connection.send_bytes(_run_job(dist.PrefixStore(job, store), rank, world_size, call))
            connection.recv()  # all ranks are done: only now may this rank's sockets close
            dist.destroy_process_group()


def _run_job(store: dist.Store, rank: int, world_size: int, call: bytes) -> bytes:
    """Run one job: pickled (True, fn's result) or (False, traceback). The process group stays up for other ranks."""
    try:
        # Longer than any job's timeout: it is the parent that decides, and shows the stacks.
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(days=1))
        torch.manual_seed(0)
        fn, args, kwargs = pickle.loads(call)
        return pickle.dumps((True, fn(*args, **kwargs)))
    except BaseException:  # pytest.fail and sys.exit too: whatever it is, it is the parent that must hear of it
        return pickle.dumps((False, traceback.format_exc()))


# ---- comparing ----------------------------------------------------------------------------------------------------


def assert_close_rel(actual: Tensor, expected: Tensor, tol: float = 1e-5, name: str = "tensor") -> None:
    """Assert that the norm of actual - expected is at most `tol` times the norm of expected, all in float64.

    A norm over the whole tensor, because single elements that nearly cancel carry no relative precision. If expected
    is zero there is nothing to be relative to: then the norm of actual is at most float32's rounding step at 1.
    """
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    actual, expected = (x.detach().to("cpu", torch.float64) for x in (actual, expected))
    difference, norm = float((actual - expected).norm()), float(expected.norm())
    bound = tol * norm if norm > 0 else torch.finfo(torch.float32).eps
    # A NaN compares as False, so it fails.
    assert difference <= bound, f"{name}: norm of the difference {difference:.3e} > {bound:.3e}, {tol:g} of {norm:.3e}"


# ---- a change of the model ------------------------------------------------------------------------------------------


def assert_layouts_agree(run: Callable, classes: dict[str, type], *keys: str, layouts=LAYOUTS, tol=1e-5) -> None:
    """Assert that a toy trains in each layout as in one process, with `classes` in the place of minitron.model.gpt's.

    run: `RankPool.run`, or the fixture `ranks`. classes: by the names that they replace, from modules that can be
    imported. keys: overrides, as on the command line. layouts: the ranks and keys of `parallel` of each, as LAYOUTS.
    Each rank's losses, gradient norms and gradients are compared. A mistake that is the same in every layout, such as
    a wrong derivative, is not found: compare the class itself with plain torch.
    """
    load = lambda layout: cli.load([*TOY, *keys, *(f"parallel.{key}" for key in layout.split())])
    ((figures, gradients),) = run(1, train_toy, load(""), classes)
    whole = {name: grad for name, (grad, _) in gradients.items()}
    for world, layout in layouts:
        rules.check(cfg := load(layout), world)
        where = f" of {world} with {layout or 'dp alone'}"
        assert_same_training(run(world, train_toy, cfg, classes), figures, whole, tol, where)


def assert_same_training(results: list, figures: list, whole: dict[str, Tensor], tol: float, where: str = "") -> None:
    """Assert that what `train_toy` returned on all ranks is the figures and the gradients of one process."""
    assert {name for _, gradients in results for name in gradients} == whole.keys()
    for rank, (steps, gradients) in enumerate(results):
        for name, (grad, shard) in gradients.items():
            part = whole[name] if shard is None else shard.cut(whole[name])
            assert_close_rel(grad, part, tol, f"gradient of {name} on rank {rank}{where}")
        for step, (ours, theirs) in enumerate(zip(steps, figures, strict=True), 1):
            for name, value in theirs.items():
                assert math.isclose(ours[name], value, rel_tol=tol), f"{name} of step {step} on rank {rank}{where}"


def train_toy(cfg: Config, classes: dict[str, type] | None = None, mesh: Mesh | None = None) -> tuple:
    """Train some steps on random tokens; return all steps' figures, an evaluation's at last, and `first_gradients`."""
    t, p = cfg.train, cfg.parallel
    with mock.patch.multiple(gpt, **classes) if classes else ExitStack():
        trainer = build(cfg, mesh or Mesh.create(tp=p.tp, pp=p.pp, cp=p.cp))
    dataset = MockDataset(cfg.model.vocab_size, t.seq_len, t.global_batch_size * (t.steps + 1), t.seed, 10.0)
    loader, gradients, figures = Loader(dataset, cfg, trainer.mesh), first_gradients(trainer), []
    for step in range(t.steps):
        stats = trainer.step(loader.step(step * t.global_batch_size, step), cfg.optimizer.lr)
        figures.append(stats.read() | {"loss_scale": float(trainer.scaler.scale)})
    loss, count = trainer.evaluate(loader.step(t.steps * t.global_batch_size, 0)).tolist()
    loader.close()
    return [*figures, {"loss": loss / count}], gradients


def first_gradients(trainer: Trainer) -> dict[str, tuple[Tensor, Shard | None]]:
    """Return {name: (local gradient, how it is cut)}, filled in the next step, between its backward and its update.

    Gradients are sums over all tokens.
    """
    eager, gradients = getattr(trainer.runner, "eager", trainer.runner), dict[str, tuple[Tensor, Shard | None]]()
    scale = float(trainer.scaler.loss_grad(trainer.cfg.num_microbatches(trainer.mesh.dp.size)))
    finish, shards = eager.finish, {p.spec.name: p.spec.shard for chunk in trainer.chunks for p in chunk.parameters()}

    def finish_and_look() -> None:
        finish()
        if not gradients:
            for name, grad in assemble(trainer.gradients, [b.grad_slice for b in trainer.gradients.buckets]).items():
                gradients[name] = grad / scale, without_group(shards[name])

    eager.finish = finish_and_look
    return gradients


def assemble(gradients: Gradients, slices: list[Tensor]) -> dict[str, Tensor]:
    """One flat slice per bucket (gradients, moments) -> {name: whole local tensor}. Collective over dp_cp."""
    result = {}
    for bucket, part in zip(gradients.buckets, slices, strict=True):
        flat, gathered = (part.new_empty(bucket.plan.size) for _ in range(2))
        collectives.all_gather_into(gathered, part, gradients.mesh.dp_cp)
        for rank, of_rank in enumerate(gathered.split(len(part))):
            flat[bucket.plan.slice_of(rank)] = of_rank
        result |= {name: flat[i : i + n].view(bucket.params[name].shape) for name, i, n in bucket.plan.spans}
    return result


def without_group(shard: Shard | None) -> Shard | None:
    """Return a copy that can be sent to another process, which a process group cannot."""
    return None if shard is None else replace(shard, axis=Axis("tp", shard.axis.rank, shard.axis.size, ()))
