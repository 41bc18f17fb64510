"""JSONL text to a Megatron dataset: one token file pair per key.

    python tools/preprocess_data.py --input web.jsonl more.jsonl.zst --output-prefix data/web \\
        --tokenizer gpt2:tokenizers/gpt2 --workers 8 --append-eod
    -> data/web_text_document.bin, .idx, .json

The main process reads lines in batches and writes tokens; worker processes parse and encode in between.  Batches come
back in order and only a few are under way at a time, so the output is the same for any number of workers and memory
stays bounded.  A worker that dies is an error, not a hang, and workers whose parent dies end by themselves.  Until all
is written the files have temporary names: an error or Ctrl-C leaves nothing; a kill -9 or a crash of the machine leaves
no dataset, but files PREFIX_KEY_document.*.partial, to be deleted by hand (another run may be writing such files).

Left out: splitting documents into sentences (for BERT), several output shards (run it once a shard and blend them).
"""

import argparse
import contextlib
import functools
import gzip
import json
import lzma
import multiprocessing
import os
import queue
import signal
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import zstandard
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also without an installed minitron

from minitron.data.indexed import IndexedWriter, best_dtype
from minitron.data.tokenizers import load_tokenizer
from tools.command import Parser, run

BATCH_BYTES = 1 << 20
READ_BYTES = 1 << 17
BATCHES_PER_WORKER = 3  # one at work, one waiting for it, one on the way back


class Batch(NamedTuple):
    """Lines of one file; first_line: number of lines[0], from 1; read_bytes: of the file, since the batch before."""

    path: str
    first_line: int
    lines: list[bytes]
    read_bytes: int


class Job(NamedTuple):
    """What every worker needs to know."""

    tokenizer: str
    keys: tuple[str, ...]
    append_eod: bool


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help="JSON lines; also .gz, .xz, .zst")
    parser.add_argument("--output-prefix", required=True, help="PREFIX of PREFIX_KEY_document.bin and .idx")
    parser.add_argument("--tokenizer", required=True, help="bytes, gpt2:DIR, llama3:FILE or llama2:FILE")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that encode (all cores)")
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="what to encode (text)")
    parser.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    parser.add_argument(
        "--check", action="store_true", help="try the tokenizer and the first megabyte of each input, and write nothing"
    )
    options = parser.parse_args(argv)
    job = Job(options.tokenizer, tuple(options.json_keys), options.append_eod)
    preprocess(options.input, options.output_prefix, job, options.workers, options.check)


def preprocess(inputs: list[str], output_prefix: str, job: Job, workers: int, check: bool = False) -> None:
    """Encode all inputs, in order, into OUTPUT_PREFIX_KEY_document.

    check: only try the tokenizer and the first batch of each input.
    Raises ValueError for any defect of them, and when one of the datasets would be without tokens.
    """
    prefixes = [f"{output_prefix}_{key}_document" for key in job.keys]
    check_files(inputs, prefixes)
    if workers < 1:
        raise ValueError(f"--workers {workers}: at least one process has to encode; use 1 or more")
    for key in job.keys:
        if job.keys.count(key) > 1:
            raise ValueError(f"--json-keys {' '.join(job.keys)}: {key!r} is there twice; name each key once")
    tokenizer = load_tokenizer(job.tokenizer, "--tokenizer")
    if check:
        for path in inputs:
            encode_batch(job, next(read_batches([path])))
        return
    sidecar = {
        "tokenizer": job.tokenizer,
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "append_eod": job.append_eod,
    }
    total_bytes, num_tokens = sum(os.path.getsize(path) for path in inputs), dict.fromkeys(job.keys, 0)
    with contextlib.ExitStack() as stack:
        dtype = best_dtype(tokenizer.vocab_size)
        writers = [stack.enter_context(IndexedWriter(prefix, dtype, sidecar)) for prefix in prefixes]
        pool = stack.enter_context(Workers(workers, job))  # after the writers on the stack: they finalize without it
        bar = stack.enter_context(tqdm(total=total_bytes, unit="B", unit_scale=True, desc="encoding"))
        for batch, encoded in _in_order(pool, read_batches(inputs), workers * BATCHES_PER_WORKER):
            for key, writer, (tokens, lengths) in zip(job.keys, writers, encoded, strict=True):
                _write(writer, tokens, lengths)
                num_tokens[key] += sum(lengths)
            bar.update(batch.read_bytes)
        for key, count in num_tokens.items():
            if not count:
                raise ValueError(
                    f"--input {' '.join(inputs)}: not a token under the key {key!r}; give files with "
                    "documents that are not empty"
                )


def check_files(inputs: list[str], prefixes: list[str]) -> None:
    """Every input must be there, and no output: hours of encoding are not to be overwritten by a slip."""
    for path in inputs:
        if not os.path.isfile(path):
            raise ValueError(f"{path}: no such input file; correct --input")
    for prefix in prefixes:
        if os.path.exists(f"{prefix}.idx"):
            raise ValueError(f"{prefix}.idx exists already; delete it or choose another --output-prefix")


def read_batches(inputs: list[str]) -> Iterator[Batch]:
    """Batches of about BATCH_BYTES of text; a batch never spans two files."""
    for path in inputs:
        with _opened(path) as raw:
            reported, number, first, lines, size = 0, 0, 1, [], 0
            try:
                for number, line in enumerate(_lines(path, raw), start=1):
                    lines.append(line)
                    size += len(line)
                    if size >= BATCH_BYTES:
                        position = raw.tell()
                        yield Batch(path, first, lines, position - reported)
                        reported, first, lines, size = position, number + 1, [], 0
            except (EOFError, OSError, lzma.LZMAError, zlib.error, zstandard.ZstdError) as error:
                raise ValueError(
                    f"{path}: cannot be read after line {number} ({error}); the file is damaged: copy it again"
                ) from error
            yield Batch(path, first, lines, raw.tell() - reported)


def _opened(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error}); correct --input or its permissions") from error


def encode_batch(job: Job, batch: Batch) -> list[tuple[bytes, list[int]]]:
    """For each key: the tokens of all documents end to end, as bytes of the dataset's dtype, and their counts."""
    tokenizer = _tokenizer(job.tokenizer)
    dtype = best_dtype(tokenizer.vocab_size)
    tokens, lengths = [[] for _ in job.keys], [[] for _ in job.keys]
    for number, line in enumerate(batch.lines, start=batch.first_line):
        if not line.strip():
            continue
        document = _parse(line, job.keys, f"{batch.path}: line {number}")
        for key, ids, counts in zip(job.keys, tokens, lengths, strict=True):
            encoded = tokenizer.encode(document[key])
            if encoded and job.append_eod:
                encoded.append(tokenizer.eod)
            ids.append(np.array(encoded, dtype))
            counts.append(len(encoded))
    return [(b"".join(array.tobytes() for array in ids), counts) for ids, counts in zip(tokens, lengths, strict=True)]


def _parse(line: bytes, keys: tuple[str, ...], where: str) -> dict:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}); write one object a line, in UTF-8") from error
    for key in keys:
        if not isinstance(document, dict) or not isinstance(document.get(key), str):
            raise ValueError(f"{where} has no text under the key {key!r}; correct the line or --json-keys")
        try:
            document[key].encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where}: {key!r} is no Unicode text ({error}); write surrogate pairs or the characters"
            ) from error
    return document


def _write(writer: IndexedWriter, tokens: bytes, lengths: list[int]) -> None:
    """Append the documents of a batch.  A document without tokens gets no sequence, as in Megatron."""
    array, begin = np.frombuffer(tokens, writer.dtype), 0
    for length in lengths:
        writer.add_document([array[begin : begin + length]] if length else [])
        begin += length


class Workers(contextlib.AbstractContextManager):
    """Processes that encode, each with a pipe of its own and a thread that waits at its end.

    A ProcessPoolExecutor has one pipe for the results of all: if a worker is killed while it writes there, the others
    keep the pipe open, and whoever reads waits for the rest for ever.  A pipe of its own ends with its worker.
    """

    def __init__(self, count: int, job: Job):
        spawn = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # else the first process starts it, which lets signals through again
        self.processes, self.idle, self.threads = [], queue.SimpleQueue(), ThreadPoolExecutor(count)
        for _ in range(count):
            here, there = spawn.Pipe()
            self.processes.append(spawn.Process(target=_work, args=(there, job), daemon=True))
            with _without_interrupts():
                self.processes[-1].start()
            there.close()
            self.idle.put(here)

    def submit(self, batch: Batch) -> Future:
        return self.threads.submit(self._encode, batch)

    def __exit__(self, *_) -> None:
        for process in self.processes:
            process.terminate()  # a thread that waits for it sees its pipe end
        self.threads.shutdown(cancel_futures=True)

    def _encode(self, batch: Batch) -> list:
        pipe = self.idle.get()
        try:
            pipe.send(batch)
            result = pipe.recv()
        except (EOFError, OSError) as error:
            raise ValueError(
                "an encoding process was killed; it may have run out of memory: use fewer --workers"
            ) from error
        finally:
            self.idle.put(pipe)
        if isinstance(result, ValueError):
            raise result
        return result


def _work(pipe: Connection, job: Job) -> None:
    """A worker process, until its parent ends, however it ends."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            batch = pipe.recv()
            try:
                result = encode_batch(job, batch)
            except ValueError as error:
                result = error
            pipe.send(result)


def _in_order(pool: Workers, batches: Iterator[Batch], limit: int) -> Iterator[tuple[Batch, list]]:
    """Encode batches in the pool, at most `limit` under way; yields (batch, result) in the order of the batches."""
    under_way = deque()
    for batch in batches:
        under_way.append((batch, pool.submit(batch)))
        if len(under_way) == limit:
            done, future = under_way.popleft()
            yield done, future.result()
    for done, future in under_way:
        yield done, future.result()


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ctrl-C reaches every process of a terminal; those started in here never hear it and are ended by this one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _lines(path: str, raw: BinaryIO) -> Iterable[bytes]:
    match Path(path).suffix:
        case ".gz":
            return gzip.GzipFile(fileobj=raw)
        case ".xz":
            return lzma.LZMAFile(raw)
        case ".zst":
            return _zstandard_lines(raw)
    return raw


def _zstandard_lines(raw: BinaryIO) -> Iterator[bytes]:
    """Lines of any number of frames.  zstandard's own reader would take a truncated file for a whole one."""
    rest, frame, compressed = b"", None, raw.read(READ_BYTES)
    while compressed:
        frame = frame or zstandard.ZstdDecompressor().decompressobj()
        *lines, rest = (rest + frame.decompress(compressed)).split(b"\n")
        yield from lines
        compressed = frame.unused_data or raw.read(READ_BYTES)
        frame = None if frame.eof else frame
    if frame:
        raise EOFError("it ends inside a frame")
    yield rest


@functools.lru_cache(maxsize=1)
def _tokenizer(spec: str):
    """The tokenizer of a worker process, loaded at its first batch."""
    return load_tokenizer(spec)


if __name__ == "__main__":
    run(main)
