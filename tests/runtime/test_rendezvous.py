"""Starts of the same ranks that share one store: each has a number of its own, whoever died before."""

import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch.distributed as dist

from minitron.runtime import rendezvous
from minitron.runtime.rendezvous import SignedStore, Signer
from minitron.runtime.signals import Listener

PATIENCE = 20.0


def starts_of(store, world, secret=""):
    """The number that each rank of one start learns."""
    store = SignedStore(store, Signer(secret, "job"))
    with ThreadPoolExecutor(world) as threads:
        others = [threads.submit(rendezvous._request, store, rank) for rank in range(1, world)]
        first = threads.submit(rendezvous._reply, store, world, PATIENCE)
        numbers, nonces = zip(*(future.result() for future in (first, *others)))
        assert len(set(nonces)) == 1
        return list(numbers)


@pytest.mark.parametrize("secret", ["", "secret"])
def test_what_ranks_write_in_the_store_is_there(secret):
    """This comes first: if a message does not arrive, other tests wait for long."""
    store = SignedStore(dist.HashStore(), Signer(secret, "job"))
    for text in "1", "2":
        store.append("lines", text)
    assert store.lines("lines") == ["1", "2"] and store.add("count", 2) == 2 == store.add("count", 0)
    assert not store.has("key")
    store.set("key", "a b")
    assert store.has("key") and store.get("key") == "a b"
    assert store.compare_set("key", "a", "c") == "a b" and store.compare_set("key", "a b", "c") == "c"
    assert store.compare_set("new", "", "d") == "d" == store.get("new") and store.get("key") == "c"


@pytest.mark.parametrize("failures, resolves", [(0, True), (5, True), (10**9, False)])
def test_a_name_is_looked_up_until_it_resolves_or_the_time_is_over(monkeypatch, failures, resolves):
    """Each look-up takes a second of a clock that only waits move."""
    now, asked = [100.0], []

    def look_up(host, port):
        asked.append(host)
        now[0] += 1.0
        if len(asked) <= failures:
            raise socket.gaierror("unknown")

    monkeypatch.setattr(rendezvous, "monotonic", lambda: now[0])
    monkeypatch.setattr(rendezvous, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", look_up)
    with nullcontext() if resolves else pytest.raises(socket.gaierror):
        rendezvous._resolve("node", 60.0)
    assert asked == ["node"] * (failures + 1 if resolves else 31)  # each second one more is waited


def test_the_dead_of_earlier_starts_do_not_count():
    store = dist.HashStore()
    assert starts_of(store, 4) == [1] * 4
    for _ in range(3):
        store.add("requests", 1)  # requests of ranks that were killed before rank 0 replied
    assert starts_of(store, 2) == [2] * 2
    store.add("starts", 1)  # rank 0 was killed before the others wrote requests
    assert starts_of(store, 5) == [4] * 5


def test_a_rank_that_does_not_come():
    store = SignedStore(dist.HashStore(), Signer())
    with ThreadPoolExecutor(1) as threads:
        threads.submit(rendezvous._request, store, 2)
        with pytest.raises(TimeoutError, match="rank 1 of 3"):
            rendezvous._reply(store, 3, 1.0)


def test_a_stranger_s_replies_and_arrivals_are_ignored():
    store = dist.HashStore()
    for request in range(1, 4):
        store.set(f"reply-{request}", "7 0123")  # the stranger does not have the secret
    store.append("arrived-1", "1\n2\n\xff\n")
    assert starts_of(store, 3, "secret") == [1] * 3


def test_a_message_is_valid_at_one_key_of_one_start():
    stranger, reports = dist.HashStore(), []
    store = SignedStore(stranger, Signer("secret", "job", reports.append))
    store.set("a", "1")
    assert store.get("a") == "1" and not reports and b"secret" not in stranger.get("a")
    stranger.set("b", stranger.get("a"))
    assert store.get("b") is None and store.get("b") is None and len(reports) == 1 and "'b'" in reports[0]
    for other in Signer("secret", "another job"), Signer("another secret", "job"), Signer("", "job"):
        other.enter("1")
        SignedStore(stranger, other).set("c", "1")
        assert store.get("c") is None
    assert "secret" not in "".join(reports)
    odd = SignedStore(stranger, Signer("\udcff", "job"))  # as Python reads a variable that is not UTF-8
    odd.set("d", "1")
    assert odd.get("d") == "1"


def test_the_store_of_a_start():
    """A world of one, in torchrun's environment: keys of the start before are not seen."""
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(served.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    arguments = environ, PATIENCE, timedelta(seconds=PATIENCE), Listener({}), Signer()
    with rendezvous.joined(*arguments) as (store, _, _):
        store.set("key", "of the dead")
    with rendezvous.joined(*arguments) as (store, rank, world):
        assert (rank, world, store.check(["key"])) == (0, 1, False)


def test_messages_of_another_start_with_the_same_number_are_not_valid():
    """They are of an earlier run, which had another store."""
    messages = []
    for _ in range(2):
        served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(served.port)}
        environ["TORCHELASTIC_USE_AGENT_STORE"], signer = "True", Signer("secret", "job")
        with rendezvous.joined(environ, PATIENCE, timedelta(seconds=PATIENCE), Listener({}), signer):
            messages.append(signer.sign("key", "1"))
    assert len({*messages}) == 2


def test_what_python_writes_is_seen_while_c_code_is_silent(capfd):
    """The line of a rank that is told to end must get out, whatever torch does at that moment."""
    with rendezvous._no_stderr_of_c():
        os.write(2, b"a page of torch's\n")
        Listener({}).alarm("a line without a log")
        print("a line", file=sys.stderr)
    os.write(2, b"afterwards\n")
    assert capfd.readouterr().err == "a line without a log\na line\nafterwards\n"
