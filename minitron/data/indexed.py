"""Token files: Megatron's PREFIX.bin and PREFIX.idx, byte for byte, by memory map.

A dataset of a terabyte must open at once and serve any slice of any document. So the tokens lie end to end in one
file without any header, and a second file stores where each sequence begins:

    PREFIX.bin   tokens, little-endian, nothing else
    PREFIX.idx   "MMIDIDX\\0\\0" | version 1: u64 | dtype code: u8 | sequences: u64 | document indices: u64
                 | length of each sequence: i32 | its first byte in .bin: i64 | document indices: i64 | (modes: i8)

Two documents, [7, 8, 9] and [4, 5], as uint16: `.bin` holds 10 bytes, lengths are 3 2, pointers 0 6, document
indices 0 1 2. Document d is the sequences document_indices[d] .. document_indices[d + 1] - 1; text written by
tools/preprocess_data.py has one sequence a document.

Modes belong to multimodal data and are ignored.

The writer works under temporary names and renames at the end, the .idx last: a dataset with an .idx is complete.
PREFIX.json beside them (ours, optional) names the tokenizer that made the tokens. Other programs do not write it.

Left out: reading without a memory map, object stores.
"""

import functools
import glob
import os
import secrets
import struct
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, ContextDecorator
from pathlib import Path
from typing import Any

import numpy as np

from minitron.config.files import errors_as, read_json, status_of, write_json
from minitron.data.cache import fingerprint_of
from minitron.runtime.status import RunError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES = dict(enumerate(map(np.dtype, ("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2")), start=1))
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document indices
_BLOCK_SEQUENCES = 1 << 20
_DAMAGED = "the index is damaged: copy or preprocess the data again (tools/check_data.py checks a dataset in full)"


class DataError(RunError):
    """A file of tokens is missing, damaged, or of another kind. Each rank reads its own samples."""

    quiet = False


def _readable() -> ContextDecorator:
    """Turn the OSError of a file that exists but cannot be read into a DataError."""
    return errors_as(
        DataError, lambda e: f"{e.filename}: cannot be read ({e.strerror}); correct its permissions", OSError
    )


def best_dtype(vocab_size: int) -> np.dtype:
    """Choose the dtype of token ids by Megatron's rule: uint16 below 65,500 ids, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class IndexedDataset:
    """A dataset opened by memory map; `len()` counts sequences.

    lengths: int32 [sequences], in tokens. pointers: int64 [sequences], in bytes. document_indices: int64
    [documents + 1].  All are read-only views of the map.
    fingerprint: computed when it is first needed, unless given.
    Opening reads the header and the last sequence; `check_index` reads the rest.
    Raises DataError when a file is missing, unreadable, not a Megatron index, or of another size than in the index.
    """

    @_readable()
    def __init__(self, prefix: str | os.PathLike[str], fingerprint: str | None = None):
        self.prefix = os.fspath(prefix)
        if fingerprint is not None:
            self.fingerprint = fingerprint
        self.dtype, num_sequences, num_indices = _read_header(self.prefix)
        index = np.memmap(f"{self.prefix}.idx", dtype=np.uint8, mode="r")
        after_lengths = _HEADER.size + 4 * num_sequences
        self.lengths = np.frombuffer(index, "<i4", num_sequences, _HEADER.size)
        self.pointers = np.frombuffer(index, "<i8", num_sequences, after_lengths)
        self.document_indices = np.frombuffer(index, "<i8", num_indices, after_lengths + 8 * num_sequences)
        self._bin = self._map_tokens()
        self.num_bin_bytes = len(self._bin)

    def __len__(self) -> int:
        return len(self.lengths)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return tokens offset .. offset + length - 1 of a sequence, by default to its end: a read-only view [length].

        Raises DataError if .bin does not contain the whole sequence.
        """
        stored, begin = int(self.lengths[sequence]), int(self.pointers[sequence])
        if not (0 <= stored and 0 <= begin <= len(self._bin) - stored * self.dtype.itemsize):
            why = f"sequence {sequence} has {stored} tokens from byte {begin} on, and .bin {len(self._bin)} bytes"
            raise DataError(f"{self.prefix}.idx: {why}; {_DAMAGED}")
        length = stored - offset if length is None else length
        assert 0 <= offset and 0 <= length <= stored - offset, "the slice stays within the sequence"
        return np.frombuffer(self._bin, self.dtype, length, begin + offset * self.dtype.itemsize)

    @property
    def num_tokens(self) -> int:
        """Count the tokens of .bin, which its sequences fill (`check_index`)."""
        return self.num_bin_bytes // self.dtype.itemsize

    @property
    def state(self) -> str:
        """16 hex digits of this path that change whenever a file is replaced or written."""
        files = [status_of(f"{self.prefix}.{kind}") for kind in ("idx", "bin")]
        state = [os.path.abspath(self.prefix), *((f.st_size, f.st_mtime_ns, f.st_ctime_ns) for f in files)]
        return fingerprint_of(repr(state).encode())

    def tokens(self, begin: int, end: int) -> np.ndarray:
        """View tokens begin .. end - 1 of the whole .bin, across sequences, for scans."""
        return np.frombuffer(self._bin, self.dtype, end - begin, begin * self.dtype.itemsize)

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hex digits of the dtype, every length, and both ends of .bin: the same wherever the files are."""
        ends = self._bin[: 1 << 16].data, self._bin[-1 << 16 :].data
        return fingerprint_of(f"{self.dtype.str} {len(self._bin)} ".encode(), self.lengths.data, *ends)

    def _map_tokens(self) -> np.ndarray:
        path = f"{self.prefix}.bin"
        if not os.path.isfile(path):
            raise DataError(f"{path}: no such file, but {self.prefix}.idx is there; copy the .bin beside its .idx")
        size = os.path.getsize(path)
        # Megatron's writers end the file with the last sequence, so this check needs no other pointer.
        needed = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if len(self) else 0
        if size != needed:
            fix = "the file is truncated or belongs to another index: copy or preprocess both again"
            raise DataError(f"{path}: {size} bytes, but {self.prefix}.idx needs {needed}; {fix}")
        return np.memmap(path, dtype=np.uint8, mode="r") if size else np.empty(0, np.uint8)


class IndexedWriter(AbstractContextManager["IndexedWriter"]):
    """A context manager that writes PREFIX.bin and PREFIX.idx; nothing appears under these names before its end.

    It deletes its temporary files after an error. sidecar: a dict for PREFIX.json. Memory: 12 bytes a sequence and 8
    a document.
    Raises ValueError when the files cannot be written, for any reason: a path, a permission, a full disk.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: np.dtype | type, sidecar: dict[str, Any] | None = None):
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.sidecar = sidecar
        if self.dtype not in DTYPES.values():
            known = ", ".join(map(str, DTYPES.values()))
            raise ValueError(f"dtype {self.dtype} has no code in the .idx format; use one of {known}")
        self._suffix = f".{secrets.token_hex(4)}.partial"
        self._lengths, self._document_indices = array("i"), array("q", [0])
        with _writing(self.prefix):
            Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
            self._bin = open(f"{self.prefix}.bin{self._suffix}", "xb")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with _writing(self.prefix), self._bin:  # closing it writes what is buffered; a full disk raises
                if kind is None:
                    self._finalize()
        finally:
            for name in "bin", "idx":
                Path(f"{self.prefix}.{name}{self._suffix}").unlink(missing_ok=True)

    def add_document(self, document: np.ndarray | Sequence[np.ndarray]) -> None:
        """Append a document: one sequence (a 1-D array) or a list of sequences (which may be empty)."""
        for sequence in [document] if isinstance(document, np.ndarray) else document:
            tokens = np.asarray(sequence)
            if tokens.ndim != 1:
                fix = "a document is a 1-D array or a list of 1-D arrays"
                raise ValueError(f"a sequence of shape {tokens.shape} was added to {self.prefix}; {fix}")
            if tokens.dtype != self.dtype and tokens.size and self.dtype.kind in "iu":
                limits, least, most = np.iinfo(self.dtype), tokens.min(), tokens.max()
                if least < limits.min or most > limits.max:
                    why = f"token ids {least} to {most} do not fit {self.dtype} of {self.prefix}"
                    raise ValueError(f"{why}; choose the dtype with best_dtype(vocab_size)")
            with _writing(self.prefix):
                self._bin.write(tokens.astype(self.dtype, copy=False).tobytes())
            self._lengths.append(len(tokens))
        self._document_indices.append(len(self._lengths))

    def _finalize(self) -> None:
        """Write the index and rename: .bin first, .idx last, so that a dataset with an .idx is complete."""
        lengths = np.frombuffer(self._lengths, "<i4")
        pointers = np.zeros(len(lengths), "<i8")
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self.dtype.itemsize
        code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
        with _writing(self.prefix):
            with open(f"{self.prefix}.idx{self._suffix}", "xb") as index:
                index.write(_HEADER.pack(MAGIC, VERSION, code, len(lengths), len(self._document_indices)))
                for section in (lengths, pointers, np.frombuffer(self._document_indices, "<i8")):
                    index.write(section.tobytes())
                for file in index, self._bin:
                    file.flush()
                    os.fsync(file.fileno())
            self._bin.close()
            Path(f"{self.prefix}.idx").unlink(missing_ok=True)  # the dataset before disappears before its .bin changes
            os.replace(f"{self.prefix}.bin{self._suffix}", f"{self.prefix}.bin")
            Path(f"{self.prefix}.json").unlink(missing_ok=True)
            if self.sidecar is not None:
                write_json(f"{self.prefix}.json", self.sidecar)
            os.replace(f"{self.prefix}.idx{self._suffix}", f"{self.prefix}.idx")


@_readable()
def read_sidecar(prefix: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Read PREFIX.json, which names the tokenizer of the dataset; None if there is none (another program made it)."""
    path = Path(f"{os.fspath(prefix)}.json")
    if not path.is_file():
        return None
    fix = "delete it or preprocess the data again"
    with errors_as(DataError, lambda error: f"{path}: not JSON ({error}); {fix}", ValueError):
        sidecar = read_json(path)
    for key, kind in {"tokenizer": str, "fingerprint": str, "vocab_size": int}.items():
        value = sidecar.get(key) if isinstance(sidecar, dict) else None
        if type(value) is not kind:
            raise DataError(f"{path}: {key}={value!r} is not {'text' if kind is str else 'an integer'}; {fix}")
    return sidecar


def check_index(dataset: IndexedDataset) -> None:
    """Read the whole index, in O(n).

    Raises DataError unless the sequences are in .bin in order and without gaps, as every writer of Megatron leaves
    them, and the document indices rise from 0 to the number of sequences.
    """
    end = 0
    for begin in range(0, len(dataset), _BLOCK_SEQUENCES):
        lengths, pointers = (array[begin : begin + _BLOCK_SEQUENCES] for array in (dataset.lengths, dataset.pointers))
        ends = end + np.cumsum(lengths, dtype=np.int64) * dataset.dtype.itemsize
        starts = np.concatenate([[end], ends[:-1]])
        wrong = np.flatnonzero((lengths < 0) | (pointers != starts))
        if len(wrong):
            i = wrong[0]
            why = f"{lengths[i]} tokens from byte {pointers[i]} on, where byte {starts[i]} is next"
            raise DataError(f"{dataset.prefix}.idx: sequence {begin + i} has {why}; {_DAMAGED}")
        end = int(ends[-1])
    indices, n = dataset.document_indices, len(dataset)
    falls = np.flatnonzero(indices[1:] < indices[:-1])
    if len(falls) or not len(indices) or indices[0] != 0 or indices[-1] != n:
        shown = indices[falls[0] : falls[0] + 2] if len(falls) else np.append(indices[:1], indices[-1:])
        place = falls[0] if len(falls) else "both ends"
        why = f"its document indices do not rise from 0 to {n}: {shown.tolist()} at {place}"
        raise DataError(f"{dataset.prefix}.idx: {why}; {_DAMAGED}")


def _read_header(prefix: str) -> tuple[np.dtype, int, int]:
    """Read the dtype and the numbers of sequences and document indices, checked against the size of PREFIX.idx."""
    path = f"{prefix}.idx"
    if not os.path.isfile(path):
        stem = glob.escape(prefix.removesuffix(".bin").removesuffix(".idx"))
        near = sorted(glob.glob(f"{stem}*.idx") + glob.glob(f"{stem}/*.idx"))
        fix = "give the prefix of a dataset, without .bin or .idx (tools/preprocess_data.py writes one)"
        fix = f"did you mean {near[0].removesuffix('.idx')}?" if near else fix
        raise DataError(f"{path}: no such file; {fix}")
    size = os.path.getsize(path)
    with open(path, "rb") as index:
        head = index.read(_HEADER.size)
    if head[: len(MAGIC)] != MAGIC[: len(head)]:
        why = f"begins with {head[:9]!r}, not {MAGIC!r}: no Megatron index"
        raise DataError(f"{path}: {why}; make one with tools/preprocess_data.py")
    truncated = f"{path}: {size} bytes, shorter than its header requires; it is truncated: copy or preprocess it again"
    if len(head) < _HEADER.size:
        raise DataError(truncated)
    _, version, code, num_sequences, num_indices = _HEADER.unpack(head)
    if version != VERSION:
        raise DataError(f"{path}: version {version}, only version {VERSION} is known; preprocess the data again")
    if code not in DTYPES:
        raise DataError(f"{path}: dtype code {code} is not one of 1 to {max(DTYPES)}; preprocess the data again")
    expected = _HEADER.size + 12 * num_sequences + 8 * num_indices
    if size < expected:
        raise DataError(truncated)
    if size not in (expected, expected + num_sequences):  # without or with modes
        fix = "it is damaged: copy or preprocess it again"
        raise DataError(f"{path}: {size - expected} bytes more than its header requires; {fix}")
    return DTYPES[code], num_sequences, num_indices


def _writing(prefix: str) -> AbstractContextManager[None]:
    fix = "choose a prefix in a folder that you may write, with room in it"
    return errors_as(ValueError, lambda error: f"{prefix}: cannot be written ({error}); {fix}", OSError)
