"""Play some ranks of a large job, each in a fork of this process, and count what they do to what ranks share.

Problem: a job of 2,048 ranks does not fit on a laptop, but a rank of it does. The idea:

  1. Torch's fake process group is a world of any size, so a rank runs all of minitron.pretrain alone.
  2. Some ranks are played at once: the first and the last of the job, of a node and of each group of the agreement.
     They agree through pipes. A missing rank answers what a played rank of the same kind has answered.
  3. Each fork counts its own operations (counting.py).

    rank 0    own() --\\                        /-- answer
    rank 8    own() ----> one value per rank --> rule() on rank 0
    rank 9    own() --/                        \\-- answer
"""

from __future__ import annotations

import gc
import io
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import product
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # noqa: F401, the first backward imports it: once here, not in each fork

import counting
from minitron import pretrain
from minitron.checkpoint import destination, save
from minitron.checkpoint import format as files
from minitron.checkpoint.directory import begin, commit
from minitron.checkpoint.state import tensor_shards
from minitron.comm import agree
from minitron.comm.activity import Activity
from minitron.comm.mesh import Mesh
from minitron.config import cli
from minitron.data import cache
from minitron.data.indexed import IndexedWriter
from minitron.data.loader import Loader
from minitron.planner.dryrun.dryrun import fake_world
from minitron.runtime import rendezvous, stop
from minitron.train import build

NODE = 8  # ranks
LAYOUT = {"tp": 2, "pp": 2, "cp": 2}
PATIENCE_SECONDS = 240.0
SMALL = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=48",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.vocab_size=64",
    "model.vocab_multiple=16",
    "train.seq_len=16",
    "train.micro_batch_size=1",
    "train.steps=4",
    "precision.dtype=fp32",
    "data.source=indexed",
    "data.split='1,0,0'",
    "checkpoint.async_save=false",
    "checkpoint.every=2",
    "checkpoint.local_every=3",
    *(f"parallel.{axis}={size}" for axis, size in LAYOUT.items()),
)
NOTE_BYTES = 1 << 21  # of a row, beside its prompt and completion
RUN, RESTART = "run", "restart"


class Done(NamedTuple):
    """What a rank has done. counts: phase -> what -> how often. names: some of the shared names that it has used."""

    counts: dict[str, dict[str, int]]
    names: dict[str, dict[str, list[str]]]


def played_ranks(world: int) -> list[int]:
    """Choose the first and the last rank of the job, of stages and of nodes, and first ranks of the agreement's groups.

    At least one of them stands for every other rank.
    """
    firsts = {NODE**i for i in range(1, 5) if NODE**i < world} | {world - NODE, world // LAYOUT["pp"]}
    return sorted({0, 1, NODE - 1, *firsts, min(NODE + 1, world - 1), world - 1})


def play(
    world: int, folder: Path, kind: str, plant: Callable[[], None] | None = None, more: Sequence[str] = ()
) -> dict[int, Done]:
    """Play a new run, or one that goes on from a checkpoint; return what each played rank did.

    plant: called in each rank before it starts. more: keys. Raises RuntimeError if a rank fails or does not end.
    """
    shared = folder / "shared"
    options = [*SMALL, f"train.global_batch_size={2 * world // NODE}", f"data.paths=[{shared}/text]", *more]
    options += [f"data.cache_dir={shared}/cache", f"log.dir={shared}/log", f"checkpoint.dir={shared}/checkpoint"]
    _write_data(shared / "text")
    if kind == RESTART:
        write_checkpoint(shared / "checkpoint", [*options, "train.steps=2"], world)
    players = {}
    gc.collect()
    gc.freeze()  # so that a collection in a fork is short
    for rank in played_ranks(world):
        node = folder / f"node-{rank // NODE}"
        ours, theirs = Pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            counting.end_with_parent()
            ours.close()
            _player(rank, world, [*options, f"checkpoint.local_dir={node}/local"], theirs, (shared, node), kind, plant)
        theirs.close()
        players[rank] = pid, ours
    try:
        return _conduct({rank: connection for rank, (_, connection) in players.items()}, world)
    finally:
        for pid, _ in players.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


# ---- the agreement of the played ranks ------------------------------------------------------------------------------


def _conduct(players: dict[int, Connection], world: int) -> dict[int, Done]:
    """Carry what the played ranks send to each other, until all have ended."""
    while True:
        sent = {rank: _receive(player) for rank, player in players.items()}
        if len(kinds := {kind for kind, _ in sent.values()}) > 1:
            raise RuntimeError(f"ranks have come apart: {sent}")
        values = {rank: value for rank, (_, value) in sent.items()}
        match kinds.pop():
            case "gather":
                players[0].send([values[rank] if rank in values else _twin(rank, values) for rank in range(world)])
            case "broadcast":
                for player in players.values():
                    player.send(values[0])
            case "end":
                return values


def _receive(connection: Connection) -> Any:
    if not connection.poll(PATIENCE_SECONDS):
        raise RuntimeError(f"a played rank has not moved for {PATIENCE_SECONDS} s")
    kind, value = connection.recv()
    if kind == "failed":
        raise RuntimeError(value)
    return kind, value


def _twin(rank: int, values: dict[int, bytes]) -> bytes:
    """Make the value of a rank that is not played: that of one of its kind, with other names of file and node."""
    like = NODE if rank % NODE == 0 and NODE in values else 0 if rank % NODE == 0 else 1
    names = {f"rank_{like:05d}": f"rank_{rank:05d}", f"node-{like // NODE}": f"node-{rank // NODE}"}
    return re.sub("|".join(map(re.escape, names)), lambda found: names[found[0]], values[like].decode()).encode()


# ---- a rank that is played ------------------------------------------------------------------------------------------


def _player(
    rank: int,
    world: int,
    options: list[str],
    connection: Connection,
    places: tuple[Path, Path],
    kind: str,
    plant: Callable[[], None] | None,
) -> None:
    """Be one rank, until the end of its run. Does not return."""
    ledger = counting.Ledger(*places, own=rf"log/rank-{rank}\.log|.*/rank_\d+\.safetensors|text(\..*)?|cache(/.*)?")
    ledger.begin(RESTART if kind == RESTART else "start")
    try:
        sys.stdout = sys.stderr = written = io.StringIO()
        if plant is not None:
            plant()
        _stand_in(rank, world, ledger, connection)
        counting.count_files(ledger)
        pretrain.main(options)
        ledger.begin("after")
        result = "end", Done({phase: dict(counts) for phase, counts in ledger.counts.items()}, ledger.names)
    except BaseException:
        result = "failed", f"rank {rank}: {written.getvalue()}\n{traceback.format_exc()}"
    connection.send(result)
    signal.pause()  # until all have ended


def _stand_in(rank: int, world: int, ledger: counting.Ledger, connection: Connection) -> None:
    """Give this process the environment of a rank, and stand-ins for what joins it to the others."""
    here = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % NODE, "LOCAL_WORLD_SIZE": NODE}
    os.environ |= {name: str(value) for name, value in here.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    torch.set_num_threads(1)
    kept = dist.HashStore()
    others = rendezvous.SignedStore(dist.PrefixStore("minitron", kept), rendezvous.Signer())
    if rank == 0:
        others.add("requests", world - 1)
    else:
        others.set("reply-1", "1 random")
    store = Meeting(kept, ledger.add, others)
    dist.TCPStore = lambda *_, **__: store
    stop.connect = lambda signer: rendezvous.SignedStore(store.clone(), signer)
    counting.count_groups(ledger.add, fake="all")
    destination.identity = lambda directory: f"node-{rank // NODE}"
    _stand_in_for_tree(rank, world, ledger, connection)
    if rank:
        _let_first_rank_build()
    _mark_phases(ledger)


class Meeting(counting.CountingStore):
    """The store in which the other ranks wait for rank 0's replies, see minitron.runtime.rendezvous."""

    def __init__(self, store: dist.Store, add: Callable[[str, int], None], others: rendezvous.SignedStore):
        super().__init__(store, add)
        self.others = others

    def set(self, key: str, value: Any) -> None:
        super().set(key, value)
        if key.startswith("minitron/reply-"):
            self.others.append("arrived-1", key.rpartition("-")[2])


def _stand_in_for_tree(rank: int, world: int, ledger: counting.Ledger, connection: Connection) -> None:
    """Let ranks agree by way of `_conduct`, as if all were in one group; count what the tree would do.

    "agreed bytes": what this rank sends up the tree, also for the ranks below it, and what comes down to it.
    """
    groups, decide, each_its_own = agree.tree(rank, world), agree.Agreement.decide, False

    def create(*_: object) -> agree.Agreement:
        for group in groups:
            ledger.add("groups")
            ledger.add("gloo members", len(group))
        return agree.Agreement([agree.Level(tuple(range(world)), rank, None)])

    def decide_and_tell(*args: Any, each: bool = False, **options: Any) -> Any:
        nonlocal each_its_own
        each_its_own = each
        return decide(*args, each=each, **options)

    def to_first(_: agree.Level, data: bytes) -> list[bytes]:
        ledger.add("agreements")
        ledger.add("agreed bytes", sum(len(data) * agree.FAN_OUT**level for level in range(len(groups))))
        connection.send(("gather", data))
        return [] if rank else connection.recv()

    def from_first(_: agree.Level, data: bytes) -> bytes:
        connection.send(("broadcast", data))
        answer = connection.recv()
        ledger.add("agreed bytes", len(_part(answer, groups[-1]) if each_its_own else answer))
        return answer

    agree.Agreement.create, agree.Agreement.decide = create, decide_and_tell
    agree._to_first, agree._from_first = to_first, from_first


def _part(answer: bytes, group: tuple[int, ...]) -> bytes:
    """Return the part of an answer that goes to a group of the tree, and to the ranks below it."""
    told = json.loads(answer)
    if "value" in told:
        told["value"] = told["value"][group[0] : group[-1] + group[1] - group[0]]
    return json.dumps(told).encode()


def _let_first_rank_build() -> None:
    """Let rank 0 build what is to be cached: any rank may, and here the busiest of a kind stands for all of it."""
    claim = cache._claim

    def claim_later(final: Path) -> Path | None:
        while not any(counting.exists(path) for path in (final, final.with_name(f"{final.name}.0.partial"))):
            time.sleep(0.001)
        return claim(final)

    cache._claim = claim_later


def _mark_phases(ledger: counting.Ledger) -> None:
    """Let the parts of a run say which phase they begin."""

    def during(owner: Any, name: str, phase: Callable[..., str]) -> None:
        """The phase lasts as long as a call of this function."""
        call = getattr(owner, name)

        def marked(*args: Any, **options: Any) -> Any:
            before = ledger.begin(phase(*args, **options))
            try:
                return call(*args, **options)
            finally:
                ledger.begin(before)

        setattr(owner, name, marked)

    def from_here(owner: Any, name: str, phase: Callable[..., str]) -> None:
        """The phase begins with a call of this function."""
        call = getattr(owner, name)

        def marked(*args: Any, **options: Any) -> Any:
            if ledger.phase != "end":
                ledger.begin(phase(*args, **options))
            return call(*args, **options)

        setattr(owner, name, marked)

    steps: list[int] = []

    def step(_: Activity, number: int) -> str:
        steps.append(number)
        return "first step" if len(steps) == 1 else "step"

    for name in "newest_local_save", "restore":
        during(pretrain, name, lambda *_, **__: "load")
    during(save.Checkpointer, "save", lambda *_, local=False: "local save" if local else "save")
    from_here(Activity, "begin_step", step)
    from_here(Loader, "close", lambda _: "end")


# ---- what a run finds ------------------------------------------------------------------------------------------------


def _write_data(prefix: Path) -> None:
    """Write token files, and beside them a file of rows for SFT."""
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(64):
            writer.add_document(np.arange(1024, dtype=np.uint16) % 64)
    rows = [{"prompt": "Hi", "completion": " Hello"}] * 64
    rows.append({"prompt": "Hi", "completion": " Hello", "note": "x" * NOTE_BYTES})
    prefix.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_checkpoint(directory: Path, options: Sequence[str], world: int) -> None:
    """Write the checkpoint that all ranks of a run would have saved after its last step.

    Data ranks have the same parameters, so each part of the model is built once; the numbers in it do not matter.
    """
    cfg = cli.load(options)
    temporary, shards, step = begin(directory, cfg.train.steps, 0), {}, cfg.train.steps
    for pp, tp in product(range(cfg.parallel.pp), range(cfg.parallel.tp)):
        stage = pp * world // cfg.parallel.pp
        with fake_world(world, stage + tp, "cpu"):
            mesh = Mesh.create(**LAYOUT, tied=False)
            state = build(cfg, mesh).state
            gradients = state.optimizer.gradients
            kept = [gradients.has_first_copy(bucket) for bucket in gradients.buckets]
            slices = {kind: [x[: len(x) * k] for x, k in zip(flat, kept)] for kind, flat in state.slices().items()}
            for index in range(mesh.dp_cp.size):
                gradients.mesh = replace(mesh, dp_cp=replace(mesh.dp_cp, rank=index))
                rank, pieces = stage + index * mesh.tp.size + tp, list(tensor_shards(gradients, slices))
                path = temporary / f"rank_{rank:05d}.safetensors"
                shards[rank] = files.write_shard(path, pieces), files.describe(path.name, pieces)
    layout = {"world": world, **LAYOUT, "dp": cfg.dp(world), "vp": 1}
    known = {"optimizer_steps": step, "base": None, "data": pretrain.build_data(cfg).info}
    about = {"iteration": step, "consumed_samples": step * cfg.train.global_batch_size, "config": asdict(cfg)}
    records, boxes = zip(*(shards[rank] for rank in range(world)))
    written = {file: record for found in records for file, record in found.items()}
    changing = files.index_bytes({**about, "layout": layout, "state": known}, written)
    commit(temporary, changing, files.index_tensors(boxes))
