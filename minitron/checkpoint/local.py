"""Saves on the nodes' own disks, beside those that all nodes share (checkpoint.local_dir).

Problem: a shared disk is slow, so saves are rare, and a failure costs the work since the last one; but most failures
leave the nodes' own disks as they were. The idea: each node keeps a checkpoint directory of its own (directory.py), in
which its ranks write their files. Its index lists these files only, so it stays small in a large job. All indices of a
save have the same `local_save`, a random number.

    node 0: /nvme/a/step_00000130/  index.json  rank_00000.safetensors  rank_00001.safetensors
    node 1: /nvme/a/step_00000130/  index.json  rank_00002.safetensors  rank_00003.safetensors

A start resumes from a local save (load.py) if it is newer than the shared one, all nodes have it, and each rank finds
all that it needs on its node, undamaged. Otherwise the save is named and skipped, for an older local one or for the
shared one. Another layout can use a local save only on a single node.

Whose save is it? Its index has the checksum of the index of the shared checkpoint that it was made after. It counts for
a start from this checkpoint only, so what another run, or the time before going back, has left on a node never does.
Without a shared checkpoint there would be no such mark: then the first local save is made as a shared one.
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

from minitron.checkpoint.boxes import Piece
from minitron.checkpoint.directory import ERRORS, STEP_NAME, TakenOver, begin, check_owner, claim, commit, make_writable
from minitron.checkpoint.format import (
    CheckpointError,
    Description,
    disk_errors,
    index_bytes,
    index_tensors,
    write_shard,
)
from minitron.comm.mesh import Mesh

KEEP = 2  # the newest may be missing on a node that was lost while it was written


class LocalSaves:
    """This rank's part of the saves on its node. Collective over the world, as each of its methods.

    num_bytes: that this rank saves. boxes, histories: descriptions of its boxes and of its stage's FP8 histories, which
    one rank of each stage on a node writes: has_histories. Raises CheckpointError, on all ranks, if a node's directory
    cannot be written, or if several nodes see the same one.
    """

    def __init__(
        self,
        place: str,
        mesh: Mesh,
        saved: int,
        num_bytes: int,
        boxes: Sequence[Description],
        histories: Sequence[Description],
    ):
        self.directory, self.rank, self.saved = Path(place).expanduser(), mesh.rank, saved
        self.decide = partial(mesh.agreement.decide, errors=ERRORS)
        self.leaders: list[int] = []  # on rank 0: of each rank the first one of its node

        def group(ranks: list[tuple]) -> list[tuple]:
            first: dict[str, int] = {}
            self.leaders = [first.setdefault(str(node), rank) for rank, (node, *_) in enumerate(ranks)]
            nodes: dict[int, list] = {leader: [0, []] for leader in self.leaders}  # bytes and descriptions
            stages, answers = set(), []
            for rank, (leader, (_, stage, size, its_boxes, its_histories)) in enumerate(zip(self.leaders, ranks)):
                alone = (leader, stage) not in stages
                stages.add((leader, stage))
                nodes[leader][0] += size
                nodes[leader][1].append(its_boxes + its_histories * alone)
                answers.append((leader == rank, alone))
            return [(*answer, *(nodes[rank] if answer[0] else (0, []))) for rank, answer in enumerate(answers)]

        answer = self.decide(
            lambda: (identity(self.directory), mesh.pp.rank, num_bytes, boxes, histories), group, each=True
        )
        self.leads, self.has_histories, self.node_bytes, described = answer
        self.tensors = index_tensors(described)
        self.owner: str | None = None

        def check_alone() -> None:
            try:
                check_owner(self.directory, self.owner)
            except TakenOver:
                why = "is one directory that several nodes see"
                fix = "name a folder on each node's own disk, or drop it"
                raise CheckpointError(f"checkpoint.local_dir={place} {why}; {fix}") from None

        self._on_nodes(self._claim)
        self._on_nodes(check_alone)

    def _claim(self) -> None:
        self.owner = claim(self.directory)

    def _on_nodes(self, call: Callable[[], object]) -> None:
        """Call on the first rank of each node. Its CheckpointError is raised on all ranks."""

        def own() -> None:
            if self.leads:
                call()

        self.decide(own, lambda _: None)

    def write(self, about: dict, mine: Sequence[Piece]) -> None:
        """Write a save on all nodes and commit it on each. Raises CheckpointError, on all ranks alike."""
        step = about["iteration"]
        token = self.decide(lambda: None, lambda _: secrets.token_hex(4))
        about = about | {"state": about["state"] | {"local_save": token}}
        folder = self.directory / f"{STEP_NAME(step)}.tmp-{token}"

        def by_node(records: list[dict]) -> list[dict]:
            files: dict[int, dict] = {rank: {} for rank in range(len(records))}
            for leader, record in zip(self.leaders, records):
                files[leader] |= record
            return list(files.values())

        try:
            self._on_nodes(lambda: begin(self.directory, step, self.node_bytes, self.owner, token))
            path = folder / f"rank_{self.rank:05d}.safetensors"
            files = self.decide(lambda: write_shard(path, mine), by_node, each=True)
            changing = index_bytes(about, files)
            self._on_nodes(lambda: commit(folder, changing, self.tensors, KEEP, self.saved, self.owner))
        except CheckpointError as error:
            if self.leads:
                shutil.rmtree(folder, ignore_errors=True)
            text = str(error).replace("checkpoint.dir=", "checkpoint.local_dir=")
            raise CheckpointError(text.replace(", or lower checkpoint.keep", "")) from error
        self.saved = step


def identity(directory: Path) -> tuple:
    """Make a directory if it is not there, and tell it from others: on another machine, or elsewhere on this one."""
    make_writable(directory)
    machine = socket.gethostname()
    with suppress(OSError):  # of the kernel: containers on a machine have a name each, and may share a directory
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()
    with disk_errors(directory):
        there = os.stat(directory)
    return machine, there.st_dev, there.st_ino
