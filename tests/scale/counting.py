"""Count what a process does to files, to the store and to process groups. For a fork that ends soon: it stays so."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import stat
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401, it registers the backend

from minitron.checkpoint import reader

FOLDER_EVENTS = ("listdir", "scandir", "mkdir", "rmdir", "rename", "remove", "link", "symlink", "truncate")
STATS = ("stat", "lstat", "access", "statvfs")  # without an audit event
SHOWN = 12
PR_SET_PDEATHSIG = 1  # of Linux
own_stat = os.stat


class Ledger:
    """What one rank does, by phase: counts[phase][what].

    what: "opens" of shared files and their "bytes"; "looks" at shared names; "folders" that are listed or changed.
    "own opens", "own bytes" and "own looks" are those of paths that match `own`, in the shared folder: this rank's log,
    shards, data and what is cached of it. "local": all of it on the node's disk. "polls":
    looks at what another rank is building, of which there are as many as there is time for.
    """

    def __init__(self, shared: Path, node: Path, own: str):
        self.shared, self.node, self.own = f"{shared}{os.sep}", f"{node}{os.sep}", re.compile(own)
        self.phase, self.counts = "start", {"start": Counter[str]()}
        self.names: dict[str, dict[str, list[str]]] = {"start": {}}  # some of the shared ones, for a test that fails
        self.written: dict[str, int] = {}  # bytes of a file before it was written

    def add(self, what: str, count: int = 1) -> None:
        self.counts[self.phase][what] += count

    def begin(self, phase: str) -> str:
        """Begin a phase; return the one before."""
        for path, before in self.written.items():
            if exists(path):
                self.add(f"{self._kind(path)}bytes", own_stat(path).st_size - before)
        self.written = {}
        before, self.phase = self.phase, phase
        self.counts.setdefault(phase, Counter())
        self.names.setdefault(phase, {})
        return before

    def event(self, event: str, args: tuple) -> None:
        """Take an event of Python's audit hooks."""
        module, _, name = event.rpartition(".")
        if event == "open" and not isinstance(args[0], int):
            self.opened(args[0], args[2])
        elif module == "os" and name in FOLDER_EVENTS:
            self._noted("folders", args[0], may_be_own=False)
            if name == "rename":
                self._renamed(*(os.path.abspath(os.fsdecode(path)) for path in args[:2]))

    def looked(self, path: Any) -> None:
        """Count a look at a name."""
        self._noted("looks", path)

    def opened(self, path: Any, flags: int = os.O_RDONLY) -> None:
        """Count an open; a file that is read counts with all of its bytes, another with those it grows by."""
        if (kind := self._noted("opens", path)) in (None, "local"):
            return
        size = 0
        with suppress(OSError):
            if stat.S_ISREG((status := own_stat(path)).st_mode):
                size = status.st_size
        if flags & (os.O_WRONLY | os.O_RDWR):
            self.written.setdefault(os.path.abspath(path), 0 if flags & os.O_TRUNC else size)
        else:
            self.add(f"{kind}bytes", size)

    def _renamed(self, old: str, new: str) -> None:
        for path in [path for path in self.written if f"{path}/".startswith(f"{old}/")]:
            self.written[new + path.removeprefix(old)] = self.written.pop(path)

    def _noted(self, what: str, path: Any, may_be_own: bool = True) -> str | None:
        """Count an operation on a path; return its kind, as `_kind`."""
        kind = self._kind(path)
        if kind == "local":
            self.add("local")
        elif kind is not None and str(path).endswith(".partial"):
            self.add("polls")
        elif kind is not None:
            self.add(what := f"{kind if may_be_own else ''}{what}")
            names = self.names[self.phase].setdefault(what, [])
            if len(names) < SHOWN:
                names.append(os.path.basename(os.fsdecode(path)) if isinstance(path, str | bytes | Path) else "")
        return kind

    def _kind(self, path: Any) -> str | None:
        """Return "own " or "" for a path that is shared, "local" for one on the node's disk, None for another."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        path = os.path.abspath(os.fsdecode(path))
        if path.startswith(self.shared):
            return "own " if self.own.fullmatch(path.removeprefix(self.shared)) else ""
        return "local" if path.startswith(self.node) else None


def count_files(ledger: Ledger) -> None:
    """Count operations of this process on files from now on.

    Opens in C are not seen: those of checkpoint shards are counted where safetensors is called.
    """
    sys.addaudithook(ledger.event)
    for name in STATS:
        setattr(os, name, _telling(getattr(os, name), ledger.looked))
    reader.safe_open = _telling(reader.safe_open, ledger.opened)


def exists(path: str | Path) -> bool:
    """Look at a path without being counted."""
    try:
        own_stat(path)
    except FileNotFoundError:
        return False
    return True


def _telling(call: Callable, note: Callable[[Any], None]) -> Callable:
    def told(path: Any, *args: Any, **options: Any) -> Any:
        note(path)
        return call(path, *args, **options)

    return told


class CountingStore(dist.Store):
    """Forwards to another store, and counts: "store" operations and "store bytes" of keys and values.

    "polls": looks at what grows as other ranks come, of which there are as many as there is time for.
    """

    def __init__(self, store: dist.Store, add: Callable[[str, int], None]):
        super().__init__()
        self.store, self.add_count = store, add

    def _count(self, *parts: str | bytes) -> None:
        self.add_count("store", 1)
        self.add_count("store bytes", sum(map(len, parts)))

    def set(self, key: str, value: Any) -> None:
        self._count(key, value)
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        value = self.store.get(key)
        if "arrived" in key:
            self.add_count("polls", 1)
        else:
            self._count(key, value)
        return value

    def add(self, key: str, amount: int) -> int:
        if amount == 0:
            self.add_count("polls", 1)
        else:
            self._count(key)
        return self.store.add(key, amount)

    def append(self, key: str, value: str) -> None:
        self._count(key, value)
        self.store.append(key, value)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self._count(key, expected, desired)
        return self.store.compare_set(key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        self._count(*keys)
        return self.store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._count(*keys)
        self.store.wait(keys) if timeout is None else self.store.wait(keys, timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self.store.set_timeout(timeout)

    def clone(self) -> CountingStore:
        """Open another connection. Torch cannot call this one itself."""
        self.add_count("connections", 1)
        return CountingStore(self.store.clone(), self.add_count)


def count_groups(add: Callable[[str, int], None], fake: str) -> None:
    """Count process groups from now on: "groups" that this rank is in, "gloo members" of those that ask for gloo.

    fake: "all" groups are made with torch's fake backend; "default": the default group and those that take its backend.
    """
    c10d = dist.distributed_c10d
    make = c10d._new_process_group_helper

    def helper(size: int, rank: int | None, ranks: list[int], backend: str, *args: Any, **options: Any) -> Any:
        if not ranks or dist.get_rank() in ranks:
            add("groups", 1)
            add("gloo members", size if ranks and backend == "gloo" else 0)
        chosen = backend if ranks and fake == "default" else "fake"
        return make(size, rank, ranks, chosen, *args, **options)

    c10d._new_process_group_helper = helper
    c10d._set_pg_timeout = lambda timeout, group=None: None  # the fake group has none, and warns


def end_with_parent() -> None:
    """Let Linux kill this process when its parent ends, so that no rank of a test outlives it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
