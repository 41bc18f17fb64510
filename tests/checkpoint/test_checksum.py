"""Checksums of parts put together are those of the whole."""

import io
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minitron.checkpoint import checksum, format, load, reader, save
from minitron.checkpoint.boxes import TensorShard


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_parts_are_the_whole(a, b):
    assert checksum.joined(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


def test_zeros_by_the_terabyte_count():
    """The sum of n zeros behind a byte repeats with the period of x in the field, 2^32 - 1 bits."""
    one = zlib.crc32(b"a")
    after = [checksum.joined(one, 0, zeros) for zeros in (1, (1 << 32) - 1, 1 << 32)]
    assert after == [zlib.crc32(b"a\0") ^ zlib.crc32(b"\0"), one, after[0]]


@pytest.mark.parametrize("sizes", [[], [0], [5], [7] * 100, [1000, 3, 1000, 0, 20]])
def test_blocks_are_summed_in_order_by_several_threads(sizes):
    data = [bytes((i + j) % 251 for j in range(size)) for i, size in enumerate(sizes)]
    names = set()

    def block(i):
        names.add(threading.current_thread().name)
        return data[i]

    assert checksum.crc32(partial(block, i) for i in range(len(data))) == zlib.crc32(b"".join(data))
    assert all(name.startswith("checksum") for name in names) and bool(names) == bool(sizes)


def test_two_calls_a_thread_are_begun_ahead():
    drawn = []
    calls = (drawn.append(i) or partial(int, i) for i in range(20))
    found = checksum.in_order(calls, 3, "ahead")
    for i in range(20):
        assert next(found) == i and len(drawn) == min(20, i + 6)


def test_calls_are_made_without_threads_once_these_have_ended():
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    assert checksum._begin(pool, partial(int, 7)).result(timeout=0) == 7


def test_many_blocks_are_written_checked_and_read_as_one(tmp_path, monkeypatch):
    """Blocks of 64 bytes, some smaller than a row; and the parts of a read that a network's file system cuts short."""
    for module in format, reader, load:
        monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    shapes = (50, 3), (2, 40), (7,), (0, 5), (0,), (3, 4, 5)
    saved = [
        TensorShard(f"w{i}", "master", shape, (0,) * len(shape), torch.randn(shape)) for i, shape in enumerate(shapes)
    ]
    (folder := tmp_path / "step_00000001").mkdir()
    about = {"iteration": 1, "consumed_samples": 1, "config": {}, "layout": {"world": 1}, "state": {}}
    shard = format.write_shard(folder / "rank_00000.safetensors", saved)
    tensors = format.index_tensors([format.describe("rank_00000.safetensors", saved)])
    format.write_index(folder, format.index_bytes(about, shard), tensors)
    whole = (folder / "rank_00000.safetensors").read_bytes()
    assert shard["rank_00000.safetensors"]["checksum"] == f"{zlib.crc32(whole):08x}" and len(whole) > 20 * 64

    class Short(io.FileIO):
        def readinto(self, buffer):
            return super().readinto(memoryview(buffer)[:23])

    monkeypatch.setattr(reader, "open", lambda path, *_, **__: Short(path), raising=False)
    found = [piece._replace(tensor=torch.full_like(piece.tensor, torch.nan)) for piece in saved if len(piece.tensor)]
    opened = reader.Reader(folder)
    load._fill(opened, found, SimpleNamespace(rank=0, world=SimpleNamespace(size=1)))
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(found, (p for p in saved if len(p.tensor))))
    (folder / "rank_00000.safetensors").write_bytes(whole[:-70] + b"?" + whole[-69:])
    with pytest.raises(format.CheckpointError, match="is damaged: its checksum is"):
        opened.verify()


def test_the_memory_for_saves_is_zero_and_can_be_written():
    memory = save.host_memory(3, 100_003, pinned=False)
    assert memory.shape == (3, 100_003) and not memory.any()
    assert (memory.fill_(1.0) == 1).all()
