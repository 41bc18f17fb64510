"""Saves on the nodes' own disks, beside those that all nodes share (checkpoint.local_dir).

Problem: a shared disk is slow, so saves are rare, and a failure costs the work since the last one; but most failures
leave the nodes' own disks as they were. The idea: each node keeps a checkpoint directory of its own, in which its
ranks write their files. It is one like any other (directory.py), its index lists the files of all nodes, and all nodes
have the same index, byte for byte.

    node 0: /nvme/a/step_00000130/  index.json  rank_00000.safetensors  rank_00001.safetensors
    node 1: /nvme/a/step_00000130/  index.json  rank_00002.safetensors  rank_00003.safetensors

A start goes on from a local save (load.py) if it is newer than the shared one, its index is the same everywhere, and
each rank finds all that it needs on its node, undamaged. Else it is named and skipped, for an older local one or for
the shared one. In another layout that is so as long as all ranks share one node.

Whose save is it? Its index has the checksum of the index of the shared checkpoint that it was made after. It counts for
a start from this checkpoint only, so what another run, or the time before going back, has left on a node never does.
Without a shared checkpoint there would be no such mark: then the first local save is made as a shared one.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from minitron.checkpoint.boxes import Piece
from minitron.checkpoint.directory import TakenOver, begin, check_owner, claim, commit, make_writable
from minitron.checkpoint.format import CheckpointError, disk_errors, write_shard

KEEP = 2  # the newest may be missing on a node that was lost while it was written


class LocalSaves:
    """This rank's part of the saves on its node. Collective over the world, as each of its methods.

    decide: (own, rule) -> what rank 0 makes of all ranks' own(), see `save.decide`. Raises CheckpointError, on all
    ranks, if a node's directory cannot be written, or is one with another node's.
    """

    def __init__(self, place: str, rank: int, saved: int, decide: Callable):
        self.directory, self.rank, self.saved, self.decide = Path(place).expanduser(), rank, saved, decide
        nodes = decide(lambda: identity(self.directory), lambda found: found)
        self.leaders = [nodes.index(node) for node in nodes]  # of each rank: the first one of its node
        self.leads = self.leaders[rank] == rank
        owners = decide(lambda: claim(self.directory) if self.leads else None, lambda owners: owners)
        self.owner = owners[self.leaders[rank]]

        def check_alone() -> None:
            try:
                check_owner(self.directory, self.owner)
            except TakenOver:
                why = "is one directory that several nodes see"
                fix = "name a folder on each node's own disk, or drop it"
                raise CheckpointError(f"checkpoint.local_dir={place} {why}; {fix}") from None

        decide(check_alone, lambda _: None)

    def write(self, about: dict, mine: Sequence[Piece]) -> None:
        """Write a save on all nodes and commit it on each. Raises CheckpointError, on all ranks alike."""
        step, size, folders = about["iteration"], sum(piece.tensor.nbytes for piece in mine), None
        sizes = self.decide(lambda: size, lambda sizes: sizes)
        here = sum(bytes_ for bytes_, leader in zip(sizes, self.leaders) if leader == self.leaders[self.rank])
        try:
            folders = self.decide(
                lambda: begin(self.directory, step, here, self.owner) if self.leads else None, lambda found: found
            )
            folder = folders[self.leaders[self.rank]]
            # All indices have to be equal: rank 0's words, and the files in the order of the ranks.
            about, shards = self.decide(
                lambda: write_shard(folder / f"rank_{self.rank:05d}.safetensors", mine), lambda shards: (about, shards)
            )
            self.decide(
                lambda: commit(folder, about, shards, KEEP, self.saved, self.owner) if self.leads else None,
                lambda _: None,
            )
        except CheckpointError as error:
            if folders is not None and self.leads:
                shutil.rmtree(folders[self.rank], ignore_errors=True)
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
