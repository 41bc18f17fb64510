"""Commit the files of all ranks as one checkpoint, in a directory that all nodes share or in one directory per node.

Problem: a save consists of files of many ranks, and either all of them appear under its name or none. A shared disk is
slow, too, so saves are rare, and a failure costs the work since the last one. But most failures leave the nodes' own
disks as they were. The idea: each directory (directory.py) has a leader. All ranks write their files into a folder of a
temporary name. Then the leader writes an index of the files of its ranks, and commits.

    checkpoint.dir         leader: rank 0
        step_00000120/                    index.json   rank_00000.safetensors ... rank_00003.safetensors
    checkpoint.local_dir   leader: the first rank of each node
        node 0: .../step_00000130/        index.json   rank_00000.safetensors   rank_00001.safetensors
        node 1: .../step_00000130/        index.json   rank_00002.safetensors   rank_00003.safetensors

A node's index lists the files of its ranks only, so it stays small in a large job. All indices of a local save have the
same `local_save`, a random name. A start resumes from a local save (load.py) if it is newer than the shared one, all
nodes have it, and each rank finds all boxes that it needs on its node, undamaged. So on several nodes a local save
usually needs the same layout. A local save stores the checksum of the shared checkpoint that it follows, and counts
only for a start from this checkpoint. So the saves of another run, or from before going back, are never used.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from minitron.checkpoint.boxes import TensorShard
from minitron.checkpoint.directory import ERRORS, STEP_NAME, TakenOver, begin, check_owner, claim, commit, make_writable
from minitron.checkpoint.format import CheckpointError, describe, disk_errors, index_bytes, index_tensors, write_shard
from minitron.comm.mesh import Mesh
from minitron.config.files import errors_as

Records = list[dict[str, Any]]


class Destination:
    """A directory in which all ranks save together, or one on each node. Its methods are collective over the world.

    The constructor claims the directory. keep: see `commit`. saved: the step after which the run begins, then the last
    one that was saved. shards, histories: what this rank holds; in each directory one rank of each stage writes the
    histories: has_histories. owner: the name under which the directory's leader has claimed it.

    The CheckpointError of any rank is raised on all ranks, for example if a directory cannot be written, or if several
    nodes share one. TakenOver is raised for the shared directory only.
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        mesh: Mesh,
        saved: int,
        shards: Sequence[TensorShard],
        histories: Sequence[TensorShard],
        per_node: bool = False,
    ):
        self.directory, self.keep, self.saved, self.per_node = directory, keep, saved, per_node
        self.file, self.owner = f"rank_{mesh.rank:05d}.safetensors", ""
        self.decide = partial(mesh.agreement.decide, errors=ERRORS)
        self.leaders: list[int] = []  # on rank 0: the leader of each rank

        def own() -> tuple[Any, int]:
            return identity(self.directory) if self.per_node else "", mesh.pp.rank

        def group(ranks: list[Any]) -> list[tuple[str, bool, bool]]:
            first: dict[str, int] = {}
            self.leaders = [first.setdefault(str(node), rank) for rank, (node, _) in enumerate(ranks)]
            token, stages, answers = secrets.token_hex(4), set(), []
            for rank, (leader, (_, stage)) in enumerate(zip(self.leaders, ranks)):
                answers.append((token, leader == rank, (leader, stage) not in stages))
                stages.add((leader, stage))
            return answers

        self.token, self.leads, self.has_histories = self.decide(own, group, each=True)
        written = [*shards, *histories] if self.has_histories else shards
        num_bytes = sum(shard.tensor.nbytes for shard in written)
        owner_of_first = self._on_leaders(self._prepare, lambda: (num_bytes, describe(self.file, written)))
        self.owner = self.owner or owner_of_first
        if per_node:
            self._on_leaders(self._check_alone)

    def _prepare(self, ranks: list[Any]) -> str:
        """Claim the directory for saves of these (bytes, description) of this leader's ranks. Return its owner."""
        self.num_bytes = sum(num_bytes for num_bytes, _ in ranks)
        self.tensors = index_tensors(described for _, described in ranks)
        self.owner = claim(self.directory)
        return self.owner

    def write(self, about: dict[str, Any], shards: Sequence[TensorShard]) -> str:
        """Write a save and commit it; return the checksum of rank 0's index. Raises CheckpointError and TakenOver."""
        step, folder = about["iteration"], self.directory / f"{STEP_NAME(about['iteration'])}.tmp-{self.token}"
        if self.per_node:
            about = about | {"state": about["state"] | {"local_save": self.token}}

        def make_folder(_: Records) -> None:
            begin(self.directory, step, self.num_bytes, self.owner, self.token)

        def commit_all(records: Records) -> str:
            changing = index_bytes(about, {name: record for files in records for name, record in files.items()})
            return commit(folder, changing, self.tensors, self.keep, self.saved, self.owner)

        try:
            self._on_leaders(make_folder)
            index_checksum: str = self._on_leaders(commit_all, lambda: write_shard(folder / self.file, shards))
        except CheckpointError as error:
            if self.leads:
                shutil.rmtree(folder, ignore_errors=True)
            if self.per_node:  # training continues, also if another run has taken over a node's directory
                raise CheckpointError(str(error)) from error
            # A run that takes the directory over may delete the files of this save while they are written.
            self._on_leaders(lambda _: check_owner(self.directory, self.owner))
            raise
        self.saved = step
        return index_checksum

    def _on_leaders(self, call: Callable[[Records], Any], own: Callable[[], Any] | None = None) -> Any:
        """Call `call([own() of each of its ranks])` on every leader; return on all ranks what it returns on rank 0."""
        if not self.per_node:
            return self.decide(own or (lambda: None), call)
        records = [] if own is None else self.decide(own, self._by_leader, each=True)
        return self.decide(lambda: call(records) if self.leads else None, lambda results: results[0])

    def _by_leader(self, records: Records) -> list[Records]:
        """Give each leader the records of its ranks, and the other ranks none."""
        answers: list[Records] = [[] for _ in records]
        for leader, record in zip(self.leaders, records):
            answers[leader].append(record)
        return answers

    def _check_alone(self, _: Records) -> None:
        """Raise CheckpointError if the leader of another node has claimed this directory."""
        fix = "name a folder on each node's own disk, or drop it"
        line = lambda _: f"checkpoint.local_dir={self.directory} is one directory that several nodes share; {fix}"
        with errors_as(CheckpointError, line, TakenOver):
            check_owner(self.directory, self.owner)


def identity(directory: Path) -> tuple[str, int, int]:
    """Make a directory if it does not exist; return the machine, device and inode by which it differs from others."""
    make_writable(directory)
    machine = socket.gethostname()
    with suppress(OSError):  # the kernel's id: containers of a machine have different names, and may share a directory
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()
    with disk_errors(directory):
        there = os.stat(directory)
    return machine, there.st_dev, there.st_ino
