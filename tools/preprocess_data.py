"""Text in JSONL, Parquet or a Hugging Face dataset to a Megatron dataset: one token file pair per key.

    python tools/preprocess_data.py --input web.jsonl more.jsonl.zst --output-prefix data/web \\
        --tokenizer gpt2:tokenizers/gpt2 --workers 8 --append-eod
    -> data/web_text_document.bin, .idx, .json
    python tools/preprocess_data.py --input my.parquet saved/train --text-field body --output-prefix data/my \\
        --tokenizer hf:tokenizers/my --append-eod
    -> data/my_text_document.bin, .idx, .json

An input is a file of JSON lines, one of Parquet, or a folder that `datasets` wrote with save_to_disk (tools/rows.py).

The main process reads batches and writes tokens; worker processes parse and encode in between.  Batches come back in
order and only a few are under way at a time, so the output is the same for any number of workers and memory
stays bounded.  A worker that dies is an error, not a hang, and workers whose parent dies end by themselves.  Until all
is written the files have temporary names: an error or Ctrl-C leaves nothing; a kill -9 or a crash of the machine leaves
no dataset, but files PREFIX_KEY_document.*.partial, to be deleted by hand (another run may be writing such files).

Left out: splitting documents into sentences (for BERT), several output shards (run it once a shard and blend them).
"""

import argparse
import contextlib
import functools
import multiprocessing
import os
import queue
import shlex
import signal
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also without an installed minitron

from minitron.config.command import Parser, positive, run
from minitron.config.text import printable
from minitron.data.cache import Cache
from minitron.data.indexed import IndexedWriter, best_dtype
from minitron.interop.progress import progress_bar
from minitron.interop.tokenizers import load_tokenizer
from tools.rows import Batch, documents, files_of, read_batches

BATCHES_PER_WORKER = 3  # one at work, one waiting for it, one on the way back


class Job(NamedTuple):
    """What every worker needs to know."""

    tokenizer: str
    keys: tuple[str, ...]
    append_eod: bool


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON lines, also .gz, .xz, .zst; Parquet; folders of datasets' save_to_disk",
    )
    add("--output-prefix", required=True, help="PREFIX of PREFIX_KEY_document.bin and .idx")
    add("--tokenizer", required=True, help="bytes, gpt2:DIR, llama3:FILE, llama2:FILE or hf:DIR")
    add("--workers", type=positive(int), default=os.cpu_count(), help="processes that encode (all cores)")
    fields = parser.add_mutually_exclusive_group()
    fields.add_argument("--text-field", metavar="NAME", help="the field or column to encode, as PREFIX_text_document")
    fields.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="what to encode, each as PREFIX_KEY_document (text)",
    )
    add("--append-eod", action="store_true", help="end every document with the end-of-document token")
    add(
        "--check",
        action="store_true",
        help="try the tokenizer and the first megabyte of each input, in whole documents; write nothing",
    )
    options = parser.parse_args(argv)
    keys = options.json_keys if options.text_field is None else [options.text_field]
    names = None if options.text_field is None else ["text"]
    job = Job(options.tokenizer, tuple(keys), options.append_eod)
    preprocess(options.input, options.output_prefix, job, options.workers, options.check, names)


def preprocess(
    inputs: list[str], output_prefix: str, job: Job, workers: int, check: bool = False, names: list[str] | None = None
) -> None:
    """Encode all inputs, in order, into OUTPUT_PREFIX_NAME_document; names: as the keys, if none are given.

    Prints what they hold, and the command that trains on them.
    check: only try the tokenizer and the first batch of each input.
    Raises ValueError for any defect of them, and when one of the datasets would be without tokens.
    """
    prefixes = [f"{output_prefix}_{name}_document" for name in names or job.keys]
    files = files_of(inputs)
    check_outputs(prefixes)
    if workers > (most := 4 * (os.cpu_count() or 1)):
        raise ValueError(f"--workers {workers}: that many processes take all memory; use {most} at most")
    for key in job.keys:
        if job.keys.count(key) > 1:
            raise ValueError(f"--json-keys {' '.join(job.keys)}: {key!r} is there twice; name each key once")
    tokenizer = load_tokenizer(job.tokenizer, "--tokenizer")
    if check:
        for path in files:
            encode_batch(job, next(read_batches([path], job.keys)))
        return
    sidecar = {
        "tokenizer": job.tokenizer,
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "append_eod": job.append_eod,
    }
    total_bytes, num_tokens = sum(os.path.getsize(path) for path in files), dict.fromkeys(job.keys, 0)
    num_documents = dict.fromkeys(job.keys, 0)
    with contextlib.ExitStack() as stack:
        dtype = best_dtype(tokenizer.vocab_size)
        writers = [stack.enter_context(IndexedWriter(prefix, dtype, sidecar)) for prefix in prefixes]
        pool = stack.enter_context(Workers(workers, job))  # after the writers on the stack: they finalize without it
        bar = stack.enter_context(progress_bar(total_bytes, "B", "encoding"))
        for batch, encoded in _in_order(pool, read_batches(files, job.keys), workers * BATCHES_PER_WORKER):
            for key, writer, (tokens, lengths) in zip(job.keys, writers, encoded, strict=True):
                _write(writer, tokens, lengths)
                num_tokens[key] += sum(lengths)
                num_documents[key] += len(lengths)
            bar.update(batch.read_bytes)
        for key, count in num_tokens.items():
            if not count:
                raise ValueError(
                    f"--input {' '.join(inputs)}: not a token under the key {key!r}; give files with "
                    "documents that are not empty"
                )
    for key, prefix in zip(job.keys, prefixes, strict=True):
        counts = (
            f"{num_documents[key]:,} documents, {num_tokens[key]:,} tokens, {os.path.getsize(f'{prefix}.bin'):,} bytes"
        )
        print(f"{printable(prefix)}: {counts}; to train on them (a recipe before the keys trains its model):")
        keys = f"data.paths=[{prefix}]", f"data.tokenizer={job.tokenizer}", f"model.vocab_size={tokenizer.vocab_size}"
        print("python -m minitron.pretrain data.source=indexed", *(shlex.quote(printable(key)) for key in keys))


def check_outputs(prefixes: list[str]) -> None:
    """No output may be there: hours of encoding are not to be overwritten by a slip."""
    for prefix in prefixes:
        if os.path.exists(f"{prefix}.idx"):
            raise ValueError(f"{prefix}.idx exists already; delete it or choose another --output-prefix")


def encode_batch(job: Job, batch: Batch) -> list[tuple[bytes, list[int]]]:
    """For each key: the tokens of all documents end to end, as bytes of the dataset's dtype, and their counts."""
    tokenizer = _tokenizer(job.tokenizer)
    dtype = best_dtype(tokenizer.vocab_size)
    tokens, lengths = [[] for _ in job.keys], [[] for _ in job.keys]
    for document in documents(batch, job.keys):
        for key, ids, counts in zip(job.keys, tokens, lengths, strict=True):
            encoded = tokenizer.encode(document[key])
            if encoded and job.append_eod:
                encoded.append(tokenizer.eod)
            ids.append(np.array(encoded, dtype))
            counts.append(len(encoded))
    return [(b"".join(array.tobytes() for array in ids), counts) for ids, counts in zip(tokens, lengths, strict=True)]


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


@functools.lru_cache(maxsize=1)
def _tokenizer(spec: str):
    """The tokenizer of a worker process, loaded at its first batch."""
    return load_tokenizer(spec, cache=Cache("", first_on_node=False))  # the main process has tried it


if __name__ == "__main__":
    run(main)
