"""How the ranks of one start meet: in a part of the key-value store that no earlier start has used.

Problem: when `torchrun --max-restarts` starts ranks again it keeps its store, and so the keys of the ranks that died.
torch writes the same keys once more, but a rank that reads too early gets an old value (the address of a dead rank, an
old NCCL id) and waits for that until the timeout (pytorch/pytorch#135712). torchrun's count of restarts does not help:
each node has its own. The idea: ranks start only after all earlier ranks have ended. So rank 0 numbers the starts. Each
other rank takes the next request number, and rank 0 writes the number of the start as the reply to each request.

    rank 2   request 7                         reads reply 7: this is start 3    counts itself into start 3
    rank 0   this is start 3, replies 1 to 7                                     until all are counted

A reply to a rank that has died is harmless: every request has its own number.

Any program that reaches the store's port can write to it. So our messages are signed, if the ranks share a secret.

A rank that cannot join the others ends with one line: a name does not resolve, an address is not served, a rank is
missing, or process groups cannot be made. The thread of `signals.Listener` measures the time, since the main thread may
wait in C code.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from datetime import timedelta
from time import monotonic, sleep

import torch.distributed as dist

from minitron.comm.activity import Activity, listed
from minitron.runtime.signals import Listener
from minitron.runtime.status import LOST, RanksLost

NAME_SECONDS = 60.0  # the name of a node that has just started may not resolve for this long
AGAIN = (
    "see the first error in the logs of all nodes; without one, the kernel may have killed a rank (out of memory); "
    "start all ranks again"
)


class Signer:
    """Signs messages of the ranks by HMAC-SHA256; without a secret a message is its text alone.

    place: the job, the round and the start that messages belong to. A copied message is not valid in another place.
    report: called with one line for the first invalid message of each key.
    """

    def __init__(self, secret: str = "", place: str = "", report: Callable[[str], object] = lambda _: None):
        self._secret = secret.encode(errors="surrogateescape")  # as it was in the environment, in any encoding
        self._place, self._report = place, report
        self._reported: set[str] = set()

    def enter(self, part: str) -> None:
        """Append a part to the place."""
        self._place += f"/{part}"

    def sign(self, key: str, text: str) -> str:
        """Return the message that holds `text` at `key`; in one place equal texts give equal messages."""
        if not self._secret:
            return text
        signed = json.dumps([self._place, key, text]).encode()
        return f"{hmac.new(self._secret, signed, hashlib.sha256).hexdigest()} {text}"

    def open(self, key: str, message: bytes) -> str | None:
        """Return the text of a message, None if a rank of this place has not signed it for `key`."""
        text = message.decode(errors="replace")
        text = text.partition(" ")[2] if self._secret else text
        if hmac.compare_digest(self.sign(key, text).encode(), message):
            return text
        if key not in self._reported:
            self._reported.add(key)
            self._report(f"a message at {key!r} in the store is not from a rank of this run, and is ignored")
        return None


class SignedStore:
    """The store for signed messages of the ranks. Values that others write are ignored."""

    def __init__(self, store: dist.Store, signer: Signer):
        self._store, self._signer = store, signer
        self.add, self.has = store.add, lambda key: store.check([key])

    def get(self, key: str) -> str | None:
        """Wait for a message; return its text, None if it is not valid."""
        return self._signer.open(key, self._store.get(key))

    def set(self, key: str, text: str) -> None:
        self._store.set(key, self._signer.sign(key, text))

    def append(self, key: str, text: str) -> None:
        """Add a line to those of `key`."""
        self._store.append(key, f"{self._signer.sign(key, text)}\n")

    def lines(self, key: str) -> list[str]:
        """Return the valid lines of `key`."""
        opened = (self._signer.open(key, line) for line in self._store.get(key).splitlines())
        return [text for text in opened if text is not None]

    def compare_set(self, key: str, old: str, new: str) -> str:
        """Replace the text by `new` if it is `old`, not valid or deleted; return the text as it is then."""
        expected = self._signer.sign(key, old).encode() if old else b""
        while True:
            found = self._store.compare_set(key, expected, self._signer.sign(key, new))
            text = self._signer.open(key, found)
            if text is not None and found != expected:
                return text
            # If the key is missing, since anyone can delete it, the store returns the expected value.
            expected = b"" if found == expected else found


@contextmanager
def joined(
    environ: Mapping[str, str], seconds: float, timeout: timedelta, listener: Listener, signer: Signer
) -> Iterator[tuple[dist.Store, int, int]]:
    """Join the other ranks of torchrun's environment, which make process groups inside. All ranks call it, once each.

    Yields (store of this start, rank, world). timeout: of the store's operations. Raises RanksLost if a part of this
    fails. If a part takes longer than `seconds`, the process ends with the same line and status.
    """
    rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    failed = f"rank {rank} on {socket.gethostname()} cannot join the other ranks at {f'{host}:{port}'!r}:"
    activity = Activity()

    def check() -> None:
        if activity.idle() > seconds:
            listener.exit_now(f"error: {failed} {activity.action} ({seconds:.0f} s)", LOST)

    try:
        with listener.every_second(check):
            activity.begin(
                "the name does not resolve; set MASTER_ADDR to a name or address that every node can look up"
            )
            _resolve(host, min(seconds / 2, NAME_SECONDS))
            activity.begin(
                "no store can be reached there, since nothing listens or another program does; look at rank 0, and "
                "check MASTER_ADDR, MASTER_PORT and the firewall between the nodes"
            )
            serves = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun does
            with _no_stderr_of_c():
                whole = dist.TCPStore(host, port, world, serves, timeout, wait_for_workers=False, multi_tenant=True)
                activity.begin(f"{'not all ranks have' if rank == 0 else 'rank 0 has not'} come; {AGAIN}")
                store = SignedStore(dist.PrefixStore("minitron", whole), signer)
                start, nonce = _reply(store, world, 0.9 * seconds) if rank == 0 else _request(store, rank)
                signer.enter(f"{start}/{nonce}")
            activity.begin(f"the process groups were not made, most likely because another rank has died; {AGAIN}")
            yield dist.PrefixStore(f"start-{start}", whole), rank, world
    except (OSError, RuntimeError, UnicodeError) as error:
        raise RanksLost(f"{failed} {activity.action} ({first_line(error)})") from None


def connect(signer: Signer) -> SignedStore:
    """Open a separate connection to this start's store, since other threads may block on theirs.

    A run without process groups, on one rank, gets a store in memory.
    """
    store = dist.distributed_c10d._get_default_store().clone() if dist.is_initialized() else dist.HashStore()
    return SignedStore(store, signer)


def first_line(error: BaseException) -> str:
    """Return the start of an error's message; torch appends advice and the stack of its C++ code."""
    return str(error).partition("\n")[0][:200]


def _resolve(host: str, seconds: float) -> None:
    """Look up a name until it resolves. Raises gaierror if it does not within `seconds`."""
    deadline = monotonic() + seconds
    while True:
        with suppress(socket.gaierror) if monotonic() < deadline else nullcontext():
            socket.getaddrinfo(host, None)
            return
        sleep(seconds / 60)


@contextmanager
def _no_stderr_of_c() -> Iterator[None]:
    """Drop what C code writes to stderr: torch writes a page for each failed attempt. What Python writes stays."""
    with open(os.dup(2), "w", buffering=1) as stream, open(os.devnull, "w") as nothing, redirect_stderr(stream):
        os.dup2(nothing.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stream.fileno(), 2)


def _request(store: SignedStore, rank: int) -> tuple[int, str]:
    """Return what rank 0 replies to a new request: the number of the start and its nonce."""
    while (reply := store.get(f"reply-{store.add('requests', 1)}")) is None:
        sleep(0.01)
    start, nonce = reply.split()
    store.append(f"arrived-{start}", str(rank))
    return int(start), nonce


def _reply(store: SignedStore, world: int, seconds: float) -> tuple[int, str]:
    """Reply to requests until all ranks are counted. Return the number of the start and its unique nonce."""
    start, nonce, replied, deadline = store.add("starts", 1), secrets.token_hex(8), 0, monotonic() + seconds
    store.append(f"arrived-{start}", "0")
    while len(arrived := set(map(int, store.lines(f"arrived-{start}")))) < world:
        if monotonic() > deadline:
            raise TimeoutError(f"{listed(sorted({*range(world)} - arrived))} of {world} missing")
        requests = store.add("requests", 0)
        for request in range(replied + 1, requests + 1):
            store.set(f"reply-{request}", f"{start} {nonce}")
        replied = requests
        sleep(0.01)
    return start, nonce
