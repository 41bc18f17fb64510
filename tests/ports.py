"""Ports for programs that tests start."""

import itertools
import os
import socket
from contextlib import suppress

# Linux hands out ports from 32,768 on by itself, so a free one of those may be taken before the program has it.
PORTS = range(20000, 32000)
# Each worker of pytest begins at another place.
_next = itertools.count(os.getpid() * 97)


def free_port() -> int:
    """Return a port of loopback that is free, another one at each call."""
    while True:
        port = PORTS[next(_next) % len(PORTS)]
        with socket.socket() as here, suppress(OSError):  # in use
            here.bind(("127.0.0.1", port))
            return port
