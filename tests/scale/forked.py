"""Start a job of many real ranks on this machine, forked from one process that has imported torch, and measure it.

The store is a real one, in a process of its own, as torchrun's agent of the first node has it. "nccl": torch's fake
process group takes the place of NCCL's, so that gloo connects only what it connects beside GPUs. "gloo": the default
group and all axes are gloo's, as in a job on CPUs. Connections are on loopback.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import counting
from minitron import pretrain
from minitron.comm.collectives import all_reduce_
from minitron.config import cli
from minitron.runtime import rendezvous, signals, stop
from played import LAYOUT, NODE

OPTIONS = tuple(f"parallel.{axis}={size}" for axis, size in LAYOUT.items())
PATIENCE_SECONDS = 300.0
ERRORS, SHOWN = "stderr", 4000  # a file of all ranks, and how much of it a test that fails shows


class Measured(NamedTuple):
    """A job of `ranks`: its start, up to the first agreement of all ranks, and its end.

    store: operations on it by all ranks. of_first: by rank 0 alone. descriptors, threads, cpu_seconds: of the rank with
    most of them. agent_...: of the process with the store. all_seconds, end_seconds: until the last rank was there, on
    the cores of this machine, which the ranks share.
    """

    ranks: int
    store: int
    store_of_first: int
    descriptors: int
    threads: int
    cpu_seconds: float
    agent_descriptors: int
    agent_threads: int
    agent_cpu_seconds: float
    all_seconds: float
    end_seconds: float


def start(world: int, backend: str, folder: Path) -> Measured:
    """Run a job. Raises RuntimeError if a rank fails, or the job takes longer than PATIENCE_SECONDS."""
    os.environ["RES_OPTIONS"] = "attempts:0"  # the store looks up the name of each client: not in a network's DNS
    folder.mkdir(parents=True)
    gc.collect()
    gc.freeze()  # so that a collection does not copy the pages that the forks share
    agent, port = _agent(folder / ERRORS)
    waiting, go = os.pipe()
    ranks = {}
    try:
        for rank in range(world):
            sys.stdout.flush()
            if (pid := os.fork()) == 0:
                _begin(folder / ERRORS)
                os.close(go)
                os.read(waiting, 1)  # ends when all are there
                _rank(rank, world, backend, port, agent, folder)
            ranks[pid] = rank
        os.close(go)
        _wait(dict(ranks))
    except RuntimeError as error:
        raise RuntimeError(f"{error}: {(folder / ERRORS).read_text()[:SHOWN]}") from None
    finally:
        for pid in [*ranks, agent]:
            _end(pid)
        os.close(waiting)
    found = {rank: json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)}
    return _summed(world, found)


def _agent(errors: Path) -> tuple[int, int]:
    """Fork a process that serves a store; return it and its port."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        _begin(errors)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, f"{store.port}".encode())
        signal.pause()
    os.close(writing)
    port = int(os.read(reading, 16))
    os.close(reading)
    return pid, port


def _begin(errors: Path) -> None:
    """Begin as a fork that ends with its parent and writes to a file what would be on stderr."""
    counting.end_with_parent()
    with errors.open("a") as file:
        os.dup2(file.fileno(), 2)


def _wait(ranks: dict[int, int]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks and status:
            raise RuntimeError(f"rank {ranks[pid]} failed")
        ranks.pop(pid, None)
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(ranks)} ranks have not ended within {PATIENCE_SECONDS:.0f} s")
        if not pid:
            time.sleep(0.01)


def _end(pid: int) -> None:
    """Kill a child, unless it has ended and was waited for."""
    try:
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    except ChildProcessError:
        pass


def used(pid: int | str = "self") -> dict[str, float]:
    """Return a process's open descriptors, its threads, and the seconds for which it has computed."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "cpu_seconds": (int(user) + int(system)) / os.sysconf("SC_CLK_TCK"),
    }


def _rank(rank: int, world: int, backend: str, port: int, agent: int, folder: Path) -> None:
    """Be one rank: what minitron.pretrain does to join, agree and end. Does not return."""
    status = 1
    try:
        found = _join_and_end(rank, world, backend, port, agent)
        (folder / f"{rank}.json").write_text(json.dumps(found))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _join_and_end(rank: int, world: int, backend: str, port: int, agent: int) -> dict:
    began, before, counts = time.monotonic(), used(), Counter()
    here = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % NODE, "LOCAL_WORLD_SIZE": NODE, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in here.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)

    def add(what: str, count: int = 1) -> None:
        counts[what] += count

    make_store, stores = dist.TCPStore, []
    counted = rank % NODE < 2 or rank == world - 1  # a store in Python is slower

    def store_of_rank(*args: Any, **options: Any) -> dist.Store:
        store = make_store(*args, **options)
        stores.append(counting.CountingStore(store, add) if counted else store)
        return stores[0]

    dist.TCPStore = store_of_rank
    stop.connect = lambda signer: rendezvous.SignedStore(stores[0].clone(), signer)
    if backend == "nccl":
        counting.count_groups(add, fake="default")
        dist.get_backend = lambda *_: "nccl"
    signer = rendezvous.Signer()
    mesh = pretrain.make_mesh(cli.load(OPTIONS), world, torch.device("cpu"), signals.Listener(os.environ), signer)
    gate = stop.StopGate(stop.connect(signer))
    serving = mesh.agreement.decide(lambda: None, lambda _: used(agent))  # when all ranks are there
    mine, started = {what: count - before[what] for what, count in used().items()}, time.monotonic()
    gate.next()
    if backend == "gloo":
        all_reduce_(torch.zeros(1), mesh.world)
    dist.destroy_process_group()
    ended = time.monotonic()
    return {
        "counted": counted,
        "counts": counts,
        "agent": serving,
        "mine": mine,
        "seconds": {"all_seconds": started - began, "end_seconds": ended - started},
    }


def _summed(world: int, found: dict[int, dict]) -> Measured:
    counted = {rank: f["counts"].get("store", 0) for rank, f in found.items() if f["counted"]}
    firsts = [n for rank, n in counted.items() if rank % NODE == 0 and rank]
    others = [n for rank, n in counted.items() if rank % NODE]
    store = counted[0] + max(firsts) * (world // NODE - 1) + max(others) * (world - world // NODE)
    most = {name: max(f[part][name] for f in found.values()) for part in ("mine", "seconds") for name in found[0][part]}
    agent = {f"agent_{name}": value for name, value in found[0]["agent"].items()}
    return Measured(world, store, counted[0], **most, **agent)
