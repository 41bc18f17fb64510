"""Prepare a process, before torch is imported: torch reads some of this when it loads.

variables     settings that libraries read when they load
caches        compiled kernels go to the node's own disk: a home directory may be slow, and all nodes share it
open files    the usual soft limit of 1,024 is too low for a store that serves a thousand ranks
"""

from __future__ import annotations

import os
import resource
import stat
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from contextlib import suppress

DEFAULTS = {
    # expandable_segments avoids fragmentation. The second option lets a CUDA graph (pipeline/replay.py) reuse memory
    # that another stream has read, such as messages between pipeline stages.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,graph_capture_record_stream_reuse:True",
    # NCCL would register the buffers of recorded collectives, which expandable segments do not allow.
    "NCCL_GRAPH_REGISTER": "0",
}
CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}  # folders below `node_folder`

OWN_FILES = 512  # a rank's open files: code, data, logs, checkpoints, connections to other ranks
STORE_FILES = 4  # connections of each rank to the store: rendezvous, stop, a report of a hang, NCCL's monitor


def set_defaults(environ: MutableMapping[str, str]) -> None:
    """Set the variables that are not set, and raise the limits on open files."""
    if "OMP_WAIT_POLICY" not in environ:
        # A thread of GNU's OpenMP waits for the others by spinning for milliseconds. If other programs use the cores,
        # too, it takes the time of those that it waits for. So it sleeps after some microseconds.
        environ.setdefault("GOMP_SPINCOUNT", "1000")
    for name, value in DEFAULTS.items():
        environ.setdefault(name, value)
    if not environ.keys() >= CACHES.keys():
        with suppress(OSError):  # no folder can be written: the libraries have defaults
            folder = node_folder()
            for name, below in CACHES.items():
                environ.setdefault(name, f"{folder}/{below}")
    raise_file_limits(environ)


def node_folder() -> str:
    """Return this user's folder for caches on the node's own disk. Raises OSError.

    All users may write to its parent. So it is used only if it is a real folder of this user that no other user can
    open; otherwise this process gets a new one.
    """
    folder = f"{tempfile.gettempdir()}/minitron-{os.getuid()}"
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return folder
    return tempfile.mkdtemp(prefix="minitron-")


def raise_file_limits(environ: Mapping[str, str], world: int = 1) -> str | None:
    """Raise the soft limit on open files to the hard one; return a warning if that is too low for rank 0 of the world.

    Rank 0 does the same for torchrun, its parent process, which serves the store to all ranks.
    """
    serves, hard = "TORCHELASTIC_RUN_ID" in environ and environ.get("RANK") == "0", sys.maxsize
    for process in [0, os.getppid()][: 1 + serves] if sys.platform == "linux" else []:
        with suppress(PermissionError):  # torchrun runs as another user
            _, hard = resource.prlimit(process, resource.RLIMIT_NOFILE)
            resource.prlimit(process, resource.RLIMIT_NOFILE, (hard, hard))
    if hard >= (needed := OWN_FILES + STORE_FILES * world):
        return None
    return (
        f"the hard limit on open files is {hard} here, and rank 0 of {world} ranks needs {needed}; if it fails with "
        f"'Too many open files', raise the limit of its node (ulimit -Hn {needed})"
    )
