"""Boxes, files and their checksums, without a model or a process group: what is written is read, what is damaged is
refused."""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
import time
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minitron.checkpoint import format as files
from minitron.checkpoint import reader as readers
from minitron.checkpoint.boxes import Box, TensorShard, boxes_of_range, covers, to_global
from minitron.checkpoint.format import CheckpointError
from minitron.checkpoint.reader import Reader
from minitron.comm.mesh import Axis
from minitron.interop import import_weights
from minitron.interop.import_weights import write_checkpoint
from minitron.kernels.param import Shard
from tools import inspect_checkpoint

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(prod(shape), dtype=torch.float32).view(shape)


def at(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(s, s + n) for s, n in zip(*box, strict=True))]


# ---- boxes --------------------------------------------------------------------------------------------------------


@given(shapes, st.data())
def test_a_flat_range_is_a_few_boxes_in_its_order(shape, data):
    first, last = sorted(data.draw(st.integers(0, prod(shape))) for _ in range(2))
    boxes, whole = boxes_of_range(shape, first, last), numbered(shape)
    assert len(boxes) <= 2 * len(shape) - 1
    assert [x for box in boxes for x in at(whole, box).flatten().tolist()] == list(range(first, last))


@given(shapes, st.integers(1, 3), st.data())
def test_boxes_of_a_slice_hold_the_slices_own_elements(other, size, data):
    """Every tensor-parallel rank's flat ranges, cut anywhere and carried to the whole, are the whole once."""
    dim = data.draw(st.integers(0, len(other) - 1))
    chunks = tuple(size * n for n in data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    full = numbered((*other[:dim], sum(chunks), *other[dim + 1 :]))
    found = []
    for rank in range(size):
        shard = Shard(dim, Axis("tp", rank, size, tuple(range(size))), chunks)
        local = shard.cut(full)
        middle = data.draw(st.integers(0, local.numel()))
        for ends in (0, middle), (middle, local.numel()):
            for box in boxes_of_range(tuple(local.shape), *ends):
                for part, start in to_global(box, shard):
                    found.append(Box(start, part.shape))
                    assert torch.equal(at(local, part), at(full, found[-1]))
    assert covers(tuple(full.shape), found)


@given(shapes, st.data())
def test_coverage_is_each_element_once(shape, data):
    """Against counting: any handful of boxes, most of which leave holes or overlap."""
    box = st.tuples(*(st.tuples(st.integers(0, n - 1), st.integers(1, n)) for n in shape))
    boxes = [Box(*zip(*drawn)) for drawn in data.draw(st.lists(box, max_size=4))]
    half = prod(shape) // 2
    boxes = data.draw(
        st.sampled_from(
            [
                boxes,
                [Box((0,) * len(shape), shape)],
                boxes_of_range(shape, 0, half) + boxes_of_range(shape, half, prod(shape)),
            ]
        )
    )
    count = torch.zeros([2 * n for n in shape])
    for b in boxes:
        at(count, b).add_(1)
    wanted = torch.zeros_like(count)
    at(wanted, Box((0,) * len(shape), shape)).fill_(1)
    assert covers(shape, boxes) == torch.equal(count, wanted)


# ---- written and read ---------------------------------------------------------------------------------------------

TENSORS = {
    "a.weight": torch.randn(6, 5),
    "b.bias": torch.randn(7),
    "c": torch.randn(3, 4, 2).bfloat16(),
    "d": torch.randn(4, 4).half(),
}


def write(directory: Path, iteration: int = 3, cuts: int = 3, tensors: dict = TENSORS) -> None:
    """Every tensor as `cuts` flat ranges; dtypes as they are."""
    pieces = []
    for name, tensor in tensors.items():
        ends = [tensor.numel() * i // cuts for i in range(cuts + 1)]
        for first, last in itertools.pairwise(ends):
            for box in boxes_of_range(tuple(tensor.shape), first, last):
                pieces.append(TensorShard(name, "param", tuple(tensor.shape), box.start, at(tensor, box)))
    write_checkpoint(directory, {"model": {}}, pieces, iteration)


def test_a_file_that_goes_while_it_is_opened_is_one_line(tmp_path, monkeypatch):
    """As when another run replaces the checkpoint: it was a traceback of torch's."""
    write(tmp_path)
    reader, map_file = Reader(tmp_path), torch.UntypedStorage.from_file
    name = reader.names()[0]

    def late(path, *args, **keys):
        Path(path).unlink()
        return map_file(path, *args, **keys)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", late)
    with pytest.raises(CheckpointError, match="safetensors cannot be read: .*No such file"):
        reader.read(name, "param", [0] * len(reader.shape(name)), reader.shape(name))


@settings(max_examples=20)
@given(st.integers(1, 6), st.sampled_from([8, 100, 2 << 30]), st.data())
def test_any_box_is_read_from_any_boxes(tmp_path_factory, cuts, shard_bytes, data):
    directory = tmp_path_factory.mktemp("checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_weights, "FILE_BYTES", shard_bytes)
        write(directory, cuts=cuts)
    reader = Reader(directory)
    reader.verify()
    assert (reader.path, reader.iteration) == (directory / "step_00000003", 3)
    assert reader.names() == list(TENSORS) and (len(reader.files) > 1) == (shard_bytes < 200 and len(reader.files) > 1)
    for name, tensor in TENSORS.items():
        assert reader.shape(name) == tensor.shape and reader.kinds(name) == ["param"]
        start = tuple(data.draw(st.integers(0, n - 1)) for n in tensor.shape)
        shape = tuple(data.draw(st.integers(1, n - s)) for n, s in zip(tensor.shape, start))
        found = reader.read(name, "param", start, shape)
        assert found.dtype == tensor.dtype and torch.equal(found, at(tensor, Box(start, shape)))
    assert reader.kinds("nothing") == []


def test_boxes_are_read_in_any_order_of_the_index(tmp_path, monkeypatch):
    """Boxes of one file need not follow each other in the index."""
    monkeypatch.setattr(import_weights, "FILE_BYTES", 60)
    write(tmp_path, cuts=6)
    index = json.loads((tmp_path / "step_00000003" / "index.json").read_text())
    boxes = index["tensors"]["a.weight"]["kinds"]["param"]["boxes"]
    boxes[:] = boxes[::2] + boxes[1::2]
    assert len({box["file"] for box in boxes}) < len(list(itertools.groupby(box["file"] for box in boxes)))
    reindex(tmp_path, tensors=index["tensors"])
    monkeypatch.setattr(torch, "empty", lambda shape, dtype: torch.full(shape, torch.nan, dtype=dtype))
    assert torch.equal(Reader(tmp_path).read("a.weight", "param", (0, 0), (6, 5)), TENSORS["a.weight"])


def test_files_are_plain_safetensors_and_json(tmp_path):
    """Others can read them: safetensors' own loader, and a JSON parser."""
    from safetensors.torch import load_file

    write(tmp_path, cuts=1)
    index = json.loads((tmp_path / "step_00000003" / "index.json").read_text())
    stored = load_file(tmp_path / "step_00000003" / "part_00000.safetensors")
    for name, tensor in TENSORS.items():
        boxes = index["tensors"][name]["kinds"]["param"]["boxes"]
        assert len(boxes) == 1 and torch.equal(stored[boxes[0]["key"]], tensor)
    for name in ("x" * n for n in range(1, 9)):  # data begin at a multiple of eight bytes
        begin = files.header([(name, torch.float32, (2, 3))])
        assert len(begin) % 8 == 0 and int.from_bytes(begin[:8], "little") == len(begin) - 8
        assert json.loads(begin[8:]) == {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    assert json.loads(files.header([], format="pt")[8:]) == {"__metadata__": {"format": "pt"}}


def test_a_hostile_checkpoint_runs_no_code(tmp_path):
    """Pickles where files are expected, in torch's and in Python's own format, are refused as damage."""
    payload = f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()"
    pickle = b"cbuiltins\nexec\n(V" + payload.encode() + b"\ntR."
    write(tmp_path)
    for name in "part_00000.safetensors", "index.json":
        path = tmp_path / "step_00000003" / name
        path.write_bytes(pickle)
        with pytest.raises(CheckpointError, match=name):
            Reader(tmp_path).verify()
        with pytest.raises(CheckpointError, match=name):
            Reader(tmp_path).read("b.bias", "param", (0,), (7,))
    assert not (tmp_path / "ran").exists()


# ---- damage -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A directory with checkpoints of steps 2 and 3, of two files each."""
    directory = tmp_path_factory.mktemp("sound")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_weights, "FILE_BYTES", 200)
        write(directory, 2)
        write(directory, 3, tensors={name: tensor + 1 for name, tensor in TENSORS.items()})
    Reader(directory).verify()
    return directory


@settings(max_examples=100)
@given(st.data())
def test_every_corruption_is_found(tmp_path_factory, sound, data):
    """A flipped bit, a lost end, a lost file or two swapped files, anywhere in what a resume reads."""
    directory = tmp_path_factory.mktemp("damaged") / "copy"
    shutil.copytree(sound, directory)
    read = [directory / "latest", *sorted((directory / "step_00000003").iterdir())]
    older = sorted((directory / "step_00000002").iterdir())
    path, damage = data.draw(st.sampled_from(read)), data.draw(st.sampled_from(["flip", "truncate", "swap", "remove"]))
    content = bytearray(path.read_bytes())
    if damage == "flip":
        bit = data.draw(st.integers(0, 8 * len(content) - 1))
        content[bit // 8] ^= 1 << bit % 8
    elif damage == "truncate":
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    elif damage == "swap":
        other = data.draw(st.sampled_from([p for p in read + older if p.read_bytes() != content]))
        content = bytearray(other.read_bytes())
        other.write_bytes(path.read_bytes())
    path.write_bytes(content)
    if damage == "remove":
        path.unlink()
        if path.name == "latest":  # without it the newest folder counts
            return Reader(directory).verify()
    if damage == "swap" and path.name == other.name == "index.json":
        match = "safetensors"  # an index that is sound, beside files that are not its own
    else:
        match = f"{directory}.*"
    with pytest.raises(CheckpointError, match=match):
        Reader(directory).verify()


def reindex(directory: Path, step: str = "step_00000003", **changes) -> Path:
    """The index with changes and a checksum that is right: what only a program that means to would write."""
    path = directory / step / "index.json"
    index = json.loads(path.read_text())
    del index["checksum"]
    body = json.dumps(index | changes)[1:].encode()
    path.write_bytes(b'{"checksum": "%s",\n' % files.checksum(body).encode() + body)
    return path


def tensors_with(*others: dict, whole=(7,), **box) -> dict:
    """The tensor b.bias as one box, and others that differ from this one in these entries."""
    first = {"file": "part_00000.safetensors", "key": "k", "start": [0], "shape": [7]} | box
    boxes = [first, *(first | other for other in others)]
    return {"b.bias": {"shape": list(whole), "kinds": {"param": {"dtype": "fp32", "boxes": boxes}}}}


def of_two_kinds() -> dict:
    tensor = tensors_with()["b.bias"]
    return {"b.bias": tensor | {"kinds": dict.fromkeys(("master", "param"), tensor["kinds"]["param"])}}


def file_of(**record) -> dict:
    return {"bytes": 1, "checksum": "0", "algorithm": "crc32"} | record


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(version=2), "'version': 2}, and this code reads .*'version': 1}; use the minitron that wrote it"),
        (dict(format="other"), "'format': 'other'"),
        (dict(tensors=tensors_with(shape=[6])), "boxes of param of b.bias do not fit its shape"),
        (dict(tensors=tensors_with(file="other")), "boxes of param of b.bias do not fit its shape"),
        (dict(files={"../a": file_of()}), "'../a' is not a file beside it"),
        (dict(files={"a.safetensors": file_of(algorithm="md5")}), "with a crc32 checksum"),
        (dict(tensors={"b.bias": {"shape": [7]}}), "damaged or from another version .KeyError"),
        (dict(files={"a/b.safetensors": file_of()}), "'a/b.safetensors' is not a file beside it"),
        (dict(files={"b.safetensors.bak": file_of()}), "'b.safetensors.bak' is not a file beside it"),
        (dict(files={"b.safetensors": file_of(bytes=1.0)}), "1.0 is not a count"),
        (dict(files=3), "files is not an object"),
        (dict(tensors=3), "tensors is not an object"),
        (dict(tensors=[]), "tensors is not an object"),
        (
            dict(tensors={"a": {"shape": [7], "kinds": {"param": {"dtype": "fp32", "boxes": []}}}}),
            "another version .ValueError",
        ),
        (dict(iteration=4), "is of iteration 4, and the name of its folder of 00000003; give it its old name back"),
        (dict(iteration=2), "is of iteration 2, and the name of its folder of 00000003"),
        (dict(iteration=1 << 60), "1152921504606846976 is not a count"),
        (dict(consumed_samples=True), "True is not a count"),
        (dict(config=[]), "config is not an object"),
        (dict(config={"model": {}, "data": 3}), "config.data is not an object"),
        (dict(layout={"tp": 1.5}), "1.5 is not a count"),
        (dict(state={"data": []}), "state.data is not an object"),
        (dict(state={"rerun": {"in_a_row": -1}}), "-1 is not a count"),
        (
            dict(state={"rerun": {"history": {"loss": [1.0, "1"]}}}),
            "state.rerun.history holds a value that is not a number",
        ),
        (dict(state={"data": {"train_samples": -1}}), "-1 is not a count"),
        (dict(state={"data": {"valid_samples": 0.5}}), "0.5 is not a count"),
        (dict(state={"optimizer_steps": 1 << 40}), "optimizer_steps=1099511627776 is not a counter"),
        (dict(state={"optimizer_steps": -1}), "optimizer_steps=-1 is not a counter"),
        (dict(state={"optimizer_steps": float("nan")}), "NaN is not a number in JSON"),
        (dict(state={"clean_steps": -1}), "clean_steps=-1 is not a counter"),
        (dict(state={"loss_tolerance": -(1 << 31) - 1}), "loss_tolerance=-2147483649 is not a counter"),
        (dict(state={"loss_scale": 0.5}), "loss_scale=0.5 is not a loss scale"),
        (dict(state={"loss_scale": 2.0**128}), r"loss_scale=3.4\d*e\+38 is not a loss scale"),
        (dict(tensors=tensors_with(key=3)), "the key 3 is not a string"),
        (dict(tensors=tensors_with(file=[])), "damaged or from another version .TypeError"),
        (dict(tensors=tensors_with(start=[0.0])), "0.0 is not a count"),
        (dict(tensors=tensors_with(shape="7")), "'7' is not a count|7 is not a count"),
        (
            dict(tensors=tensors_with(whole=[7] * 9, start=[0] * 9, shape=[7] * 9)),
            "boxes of param of b.bias do not fit",
        ),
        (dict(tensors=tensors_with(whole=[7.0])), "7.0 is not a count"),
        (
            dict(tensors=tensors_with({"start": [0], "shape": [4], "file": "other"}, shape=[3], start=[4])),
            "of param of b.bias do not fit",
        ),
        (
            dict(tensors=tensors_with({"start": [0]}, {"start": [0]}, shape=[3], start=[4])),
            "boxes of param of b.bias do n",
        ),
        (dict(tensors=tensors_with({"start": [1]}, shape=[3], start=[4])), "boxes of param of b.bias do not fit"),
        (dict(tensors=tensors_with({}, whole=[], start=[], shape=[])), "boxes of param of b.bias do not fit"),
        (dict(tensors=tensors_with({"start": [3]}, shape=[4], start=[0])), "boxes of param of b.bias do not fit"),
        (
            dict(tensors=tensors_with({"start": [3], "shape": [4]}, shape=[3])),
            "two boxes have the key 'k' of part_00000",
        ),
        (dict(tensors=of_two_kinds()), "two boxes have the key 'k' of part_00000.safetensors"),
        (
            dict(tensors={name: tensors_with()["b.bias"] for name in "ab"}),
            "two boxes have the key 'k' of part_00000.safetensors",
        ),
    ],
)
def test_a_foreign_index_is_refused(tmp_path, changes, message):
    write(tmp_path)
    path = reindex(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        Reader(tmp_path)
    assert str(path) in str(caught.value)


def test_names_of_an_index_are_printed_on_one_line(tmp_path, capsys):
    write(tmp_path)
    hostile = "a\x1b[2Jb\nc\u2028d"
    tensors = {hostile: tensors_with()["b.bias"]}
    reindex(tmp_path, tensors=tensors, state={hostile: 1}, layout={hostile: 1})
    inspect_checkpoint.main([str(tmp_path), "--tensors", "--no-verify"])
    assert all(line.isprintable() and not line.startswith("c") for line in capsys.readouterr().out.split("\n"))


@pytest.mark.parametrize("shape", [lambda n: (4, n), lambda n: (n, 4), lambda n: (n,)])
def test_boxes_are_checked_in_linear_time(shape):
    """Columns of a matrix all reach over its first row: a sweep over rows compared each with all others."""

    def seconds(n: int) -> float:
        whole = shape(n)
        dim = whole.index(n)
        size = (*whole[:dim], 1, *whole[dim + 1 :])
        boxes = [Box(tuple(i * (d == dim) for d in range(len(whole))), size) for i in range(n)]
        gc.collect()
        gc.disable()  # its own time grows with all that lives
        begin = time.process_time()
        assert covers(whole, boxes) and not covers(whole, [*boxes[1:], boxes[-1]])
        gc.enable()
        return time.process_time() - begin

    assert seconds(80_000) < 10 * max(seconds(20_000), 0.05)  # 16 times, if each were compared with all others


def test_a_pipe_in_the_place_of_a_file_is_an_error_and_is_not_opened(tmp_path, monkeypatch):
    write(tmp_path, cuts=1)
    found, path = Reader(tmp_path), tmp_path / "step_00000003" / "part_00000.safetensors"
    path.unlink()
    os.mkfifo(path)
    monkeypatch.setattr(readers, "safe_open", lambda *_, **__: pytest.fail("the pipe was opened"))
    with pytest.raises(CheckpointError, match=f"{path} cannot be read"):
        found.read("b.bias", "param", (0,), (7,))


@pytest.mark.parametrize(
    "key, dtype", [("param:d:3", "fp16"), ("param:a.weight:0", "fp32"), ("param:b.bias:1", "bf16")]
)
def test_a_box_that_is_not_what_the_index_says(tmp_path, key, dtype):
    write(tmp_path, cuts=1)
    (tensors := tensors_with(key=key))["b.bias"]["kinds"]["param"]["dtype"] = dtype
    reindex(tmp_path, tensors=tensors)
    with pytest.raises(CheckpointError, match=f"part_00000.safetensors: {key} does not have the dtype and shape"):
        Reader(tmp_path).read("b.bias", "param", (0,), (7,))


@pytest.mark.parametrize(
    "path, why",
    [("nothing", "no such file or directory"), (".", "no such file or directory"), ("x" * 300, "file name too long")],
)
def test_no_checkpoint_there(tmp_path, path, why):
    with pytest.raises(CheckpointError, match=f"(index.json|latest): {why}"):
        Reader(tmp_path / path)
