"""From JSONL to a trained model, on real text of any size: `python benchmarks/dataset.py FOLDER --bytes 1e9`.

The text is what this machine has: sources, headers and documentation under its system and Python folders, one document
a file, dealt out to four JSONL shards in the layout of The Pile. Where there is less than asked for, it starts
again from the first file. Then, by the commands that a user types:

    launch/generate_dataset.sh    once for every number of processes: documents and MB a second, and how that grows; on
                                  a machine with other work too, the CPU time says what the others cannot take away
    launch/check_dataset.sh       every byte; beside it, documents decoded and compared with their text
    minitron.pretrain             a small Llama on the blend 4:3:2:1 of the four; the loss it gets down to
    the blend                     which part each of the run's samples came from: within one sample of its share

Appends a record of kind "dataset". The tokenizer is SentencePiece BPE, trained on Python's standard library. Text is
deleted at the end, datasets too, unless --keep. Left out: reading from a shared file system, which no laptop has.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder

import numpy as np

from benchmarks import record
from minitron.config import cli
from minitron.data.cache import Cache
from minitron.data.corpus import build_corpus
from minitron.data.indexed import IndexedDataset
from minitron.data.tokenizers import Tokenizer
from minitron.interop.tokenizers import load_tokenizer

SHARDS, WEIGHTS = 4, (4, 3, 2, 1)
SUFFIXES = {".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".c", ".js", ".pm"}
LEAST_CHARACTERS, MOST_CHARACTERS = 200, 1_000_000
CONFIG = (
    "data.source=indexed",
    "model.vocab_size={vocab_size}",
    "train.steps={steps}",
    "train.seq_len=256",
    "train.micro_batch_size=8",
    "train.global_batch_size=16",
    "optimizer.warmup_steps=10",
    "precision.dtype=fp32",
    "model.num_layers=2",
)
COMPARED = 500  # documents of each shard


def texts(roots: list[Path]) -> Iterator[str]:
    """The text files below `roots`, whole, in a fixed order; what is short, huge or no UTF-8 is left out."""
    for root in roots:
        for folder, folders, files in os.walk(root):
            folders.sort()
            for name in sorted(files):
                path = Path(folder, name)
                if path.suffix in SUFFIXES and path.is_file() and path.stat().st_size <= 4 * MOST_CHARACTERS:
                    try:
                        text = path.read_text(encoding="utf-8")
                    except (UnicodeDecodeError, PermissionError):
                        continue
                    if LEAST_CHARACTERS <= len(text) <= MOST_CHARACTERS:
                        yield text


def write_shards(folder: Path, roots: list[Path], num_bytes: int) -> dict:
    """FOLDER/train/00.jsonl to 03.jsonl of `num_bytes` in all: {"bytes", "documents", "rounds"}."""
    (folder / "train").mkdir(parents=True)
    files = [open(folder / "train" / f"{i:02d}.jsonl", "w", encoding="utf-8") for i in range(SHARDS)]
    written = documents = rounds = 0
    shards = cycle(files)
    while written < num_bytes:
        before = documents
        for text in texts(roots):
            written += next(shards).write(json.dumps({"text": text, "meta": {}}) + "\n")
            documents += 1
            if written >= num_bytes:
                break
        rounds += 1
        if documents == before:
            raise ValueError(
                f"--roots {' '.join(map(str, roots))}: no text of these kinds: "
                f"{' '.join(sorted(SUFFIXES))}; name other folders"
            )
    for file in files:
        file.close()
    return {"bytes": written, "documents": documents, "rounds": rounds}


def script(name: str, *arguments: str, **variables: str) -> tuple[float, float, str]:
    """Seconds, CPU seconds and output of a script in launch/. Raises ValueError, with what it said, if it fails."""
    start, cpu = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        ["bash", str(record.ROOT / "launch" / name), *arguments],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise ValueError(f"launch/{name} failed: {done.stdout[-2000:]}")
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = spent.ru_utime - cpu.ru_utime + spent.ru_stime - cpu.ru_stime
    return time.perf_counter() - start, cpu_seconds, done.stdout


def compare(prefix: str, shard: Path, tokenizer: Tokenizer) -> int:
    """How many of the first documents of a shard were compared with their tokens, decoded. Raises ValueError."""
    dataset = IndexedDataset(prefix)
    with open(shard, encoding="utf-8") as lines:
        for i, line in zip(range(COMPARED), lines):
            tokens = dataset.get(i).tolist()
            if tokens[-1] != tokenizer.eod or tokenizer.decode(tokens[:-1]) != json.loads(line)["text"]:
                raise ValueError(f"document {i} of {shard} does not come back from {prefix}")
    return min(COMPARED, len(dataset))


def train(paths: str, tokenizer: str, vocab_size: int, steps: int, folder: Path) -> dict:
    """First and last loss of a small Llama on the blend, and each part's share of the samples it read."""
    keys = [key.format(vocab_size=vocab_size, steps=steps) for key in CONFIG]
    keys += [f"data.paths={paths}", f"data.tokenizer={tokenizer}", f"data.cache_dir={folder / 'cache'}"]
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "minitron.pretrain", *keys, f"log.dir={folder / 'run'}", "log.every=50"],
        cwd=record.ROOT,
        check=True,
    )
    seconds = time.perf_counter() - start
    rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [row["loss"] for row in rows if row["kind"] == "step"]
    [index] = (folder / "cache").glob("blend-*/part.npy")  # the run's own order: which part each sample is from
    parts = np.load(index)
    drawn, share = np.bincount(parts, minlength=SHARDS), len(parts) * np.array(WEIGHTS) / sum(WEIGHTS)
    if np.abs(drawn - share).max() > 1:
        raise ValueError(f"of {len(parts)} samples the blend drew {drawn.tolist()}, not {share.tolist()}")
    return {
        "steps": steps,
        "train_seconds": seconds,
        "first_loss": losses[0],
        "last_loss": float(np.mean(losses[-10:])),
        "blend_weights": list(WEIGHTS),
        "blend_samples": drawn.tolist(),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="where text and datasets go (three times the bytes)")
    parser.add_argument("--bytes", type=float, default=1e8, help="of JSONL (default 1e8)")
    parser.add_argument(
        "--roots",
        type=Path,
        nargs="+",
        help="folders of text (default: Python's and the system's)",
        default=[Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]
        + [Path("/usr/share"), Path("/usr/include"), Path("/usr/lib")],
    )
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        default=sorted({1, os.cpu_count()}),
        metavar="N",
        help="numbers of processes to preprocess with, one after another (default: 1 and all cores)",
    )
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--keep", action="store_true", help="leave text and datasets there")
    record.add_options(parser)
    args = parser.parse_args(argv)
    work = args.folder / "dataset-benchmark"
    if work.exists():
        parser.error(f"{work} exists; delete it, or name another folder")
    with cli.user_errors():
        try:
            run(args, work)
        finally:
            if not args.keep:
                shutil.rmtree(work, ignore_errors=True)


def run(args: argparse.Namespace, work: Path) -> None:
    corpus = Path(build_corpus(Cache(work / "corpus"), args.vocab_size).prefix).parent
    tokenizer = f"llama2:{corpus / 'tokenizer.model'}"
    text = write_shards(work / "text", args.roots, int(args.bytes))
    print(
        f"{text['bytes'] / 1e6:.0f} MB in {text['documents']} documents, files read {text['rounds']} time(s)",
        flush=True,
    )

    stage, variables = work / "stage", {"STAGE_PATH": str(work / "stage"), "TOKENIZER": tokenizer, "VENV": sys.prefix}
    for unwanted in ("CONTAINER", "SLURM_PARTITION", "FILES"):
        os.environ.pop(unwanted, None)
    rates = {}
    for workers in args.workers:
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir(parents=True)
        seconds, cpu_seconds, _ = script(
            "generate_dataset.sh", "gpt3", str(work / "text"), WORKERS=str(workers), **variables
        )
        rates[workers] = {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "mb_per_second": text["bytes"] / 1e6 / seconds,
            "documents_per_second": text["documents"] / seconds,
        }
        print(
            f"{workers} process(es): {seconds:.1f} s, {rates[workers]['mb_per_second']:.2f} MB/s, "
            f"{rates[workers]['documents_per_second']:.0f} documents/s, CPU time {cpu_seconds:.1f} s",
            flush=True,
        )
    check_seconds, _, said = script("check_dataset.sh", "gpt3", **variables)
    print(said.splitlines()[-1], f"({check_seconds:.1f} s)", flush=True)

    prefixes = [str(stage / "gpt3-dataset" / f"my-gpt3_{i:02d}_text_document") for i in range(SHARDS)]
    loaded = load_tokenizer(tokenizer)
    compared = sum(
        compare(prefix, work / "text" / "train" / f"{i:02d}.jsonl", loaded) for i, prefix in enumerate(prefixes)
    )
    blend = ",".join(f"{weight},'{prefix}'" for weight, prefix in zip(WEIGHTS, prefixes, strict=True))
    trained = train(f"[{blend}]", tokenizer, loaded.vocab_size, args.steps, work)
    tokens = sum(IndexedDataset(prefix).num_tokens for prefix in prefixes)
    fewest, most = min(rates), max(rates)
    speedup = rates[fewest]["seconds"] / rates[most]["seconds"]
    record.append(
        args,
        "dataset",
        {
            **text,
            "tokens": tokens,
            "vocab_size": loaded.vocab_size,
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0],
            "workers": rates,
            "speedup": speedup,
            "check_seconds": check_seconds,
            "documents_compared": compared,
            **trained,
        },
    )
    print(
        f"{most} process(es) are {speedup:.2f} times as fast as {fewest}; {compared} documents came back as they "
        f"were; loss {trained['first_loss']:.3f} -> {trained['last_loss']:.3f}; blend {trained['blend_samples']}"
    )


if __name__ == "__main__":
    main()
