"""Check whether a job would run: layout, memory, data, tokenizer, weights and disk, in seconds and without GPUs.

    python tools/check_job.py configs/gpt3_175b.yaml train.global_batch_size=256 --world 128 --device h100
    helm template NAME launch/helm -f values.yaml ... | python tools/check_job.py --manifests --device h100

A line for each part: `ok`, `wrong` with the fix, or `?` if it cannot be checked from here; exit status 1 if a part is
wrong. These are the checks of the run itself, which read what it reads before its first step, and the memory is the
planner's. Of much data they read a part, and the line names what they have not read (tools/check_data.py reads a
dataset in full). launch/check.sh asks for a job of launch/ with all its variables.
"""

import argparse
import itertools
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also without an installed minitron

from minitron.config import rules
from minitron.config.batch import consumed_of, trained_after
from minitron.config.command import Parser, run
from minitron.config.files import errors_as, size_of
from minitron.config.schema import Config, changed
from minitron.config.text import parse_mapping, printable
from minitron.data.build import (
    SCAN_BYTES,
    TRAIN,
    VALID,
    check_maker,
    check_tokens,
    check_vocabulary,
    parse_paths,
    split_part,
)
from minitron.data.gpt import count_tokens
from minitron.data.indexed import IndexedDataset
from minitron.data.sft import encode_row
from minitron.data.tokenizers import Tokenizer, UnusableTemplate
from minitron.interop import base as weights
from minitron.interop.rows import read_rows
from minitron.interop.tokenizers import load_tokenizer
from minitron.planner.command import layout as described
from minitron.planner.failures import state_bytes
from minitron.planner.fit import memory_options, nearest_fit
from minitron.planner.machine import DEVICES, Machine, choose_machine
from minitron.planner.plan import plan

READ_TOKENS = 1 << 31  # of .bin files, after which others are not read
READ_BYTES, READ_ROWS = 64 << 20, 1000  # of fine-tuning data, of which more is tokenized in minutes


class Unseen(ValueError):
    """What cannot be checked from here, in words."""


class Job(NamedTuple):
    cfg: Config
    world: int
    machine: Machine
    in_pods: bool  # its files lie where pods alone see them


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("config", nargs="*", metavar="CONFIG", help="YAML files and section.key=value, as the trainer takes them")
    add("--world", type=int, help="GPUs in all")
    add("--device", default="h100", help="of the table of devices: h100, h200, a100, ... (default: h100)")
    add("--fabric", help="of the same table (default: the device's usual one)")
    add("--devices", type=Path, default=DEVICES, metavar="FILE", help="the table (default: planner/devices.json)")
    add("--manifests", action="store_true", help="read the job from stdin, as `helm template` prints launch/helm's")
    add("--skip", action="append", default=[], choices=CHECKS, help="leave a part out; may be given again")
    o = parser.parse_intermixed_args(argv)
    if o.manifests != (o.world is None) or o.manifests and o.config:
        raise ValueError("give CONFIG and --world, or --manifests without them")
    machine = choose_machine(o.device, o.fabric, path=o.devices)
    wrong = False
    try:
        cfg, world = from_manifests(sys.stdin.read()) if o.manifests else (weights.load(o.config), o.world)
    except ValueError as error:
        if o.manifests and isinstance(error, weights.NotHere):
            say("?", "keys", f"pods alone see the base, so nothing else was checked: {error}")
            return
        say("wrong", "keys", error)
        raise SystemExit(1) from None
    job = Job(cfg, world, machine, o.manifests)
    for part, check in CHECKS.items():
        if part in o.skip:
            continue
        try:
            say("ok", part, check(job))
        except Unseen as why:
            say("?", part, why)
        except ValueError as error:
            say("wrong", part, error)
            wrong = True
    if wrong:
        raise SystemExit(1)


def say(mark: str, part: str, text: object) -> None:
    print(f"{mark:<6} {part:<10} {printable(' '.join(str(text).split()))}", flush=True)


def from_manifests(text: str) -> tuple[Config, int]:
    """Read configuration and number of GPUs from the chart's ConfigMap and Job."""
    try:
        documents = {document["kind"]: document for document in yaml.safe_load_all(text) if document}
    except (yaml.YAMLError, TypeError, KeyError):
        documents = {}
    if not {"ConfigMap", "Job"} <= documents.keys():
        raise ValueError("stdin holds no manifests of launch/helm; pipe `helm template NAME launch/helm ...` into this")
    container = documents["Job"]["spec"]["template"]["spec"]["containers"][0]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    origin = "config.yaml of the ConfigMap"
    tree = parse_mapping(documents["ConfigMap"]["data"]["config.yaml"], origin)
    cfg = weights.load(container.get("args", []), [(tree, origin)])
    return cfg, int(env["NNODES"]) * int(env["GPUS_PER_NODE"])


# ---- the parts: each returns what is fine about it, or raises --------------------------------------------------------


def layout(job: Job) -> str:
    rules.check(job.cfg, job.world)
    rules.check_batch_sizes(job.cfg, job.world)
    return described(job.cfg, job.world)


def memory(job: Job) -> str:
    try:
        rules.check(job.cfg, job.world)
    except ValueError:
        raise Unseen("not planned before the layout is right") from None
    try:
        planned = plan(job.cfg, job.world, job.machine)
    except ValueError as error:
        raise Unseen(f"not planned: {error}") from None
    if not planned.fits:
        raise ValueError(nearest_fit(planned, job.cfg, memory_options(planned)))
    gpu, room = job.machine.device.gpu, planned.room_gib
    step = f"a step takes about {planned.step_seconds:.2f} s"
    return f"{planned.memory_gib:.1f} of the {room:.1f} GiB that {gpu} leaves, as planned; {step}"


def data(job: Job) -> str:
    cfg, d = job.cfg, job.cfg.data
    if d.source in ("mock", "corpus"):
        return "random tokens: data.source=mock" if d.source == "mock" else "the Python standard library's sources"
    _seen(job, "data.paths", d.paths)
    tokens = _tokenizer(cfg)
    return (_sft if d.source == "sft" else _indexed)(cfg, tokens)


def _indexed(cfg: Config, tokenizer: Tokenizer | None) -> str:
    """Open and read each pair of files, and see who made it and whether each part of the split makes a sample."""
    prefixes, total, unread = parse_paths(cfg.data.paths)[0], 0, 0
    for prefix in prefixes:
        file = IndexedDataset(prefix)
        check_maker(prefix, cfg.data.tokenizer, tokenizer, cfg.model.vocab_size)
        for part in (TRAIN, VALID) if cfg.train.eval_every else (TRAIN,):
            count_tokens(file, split_part(file, cfg.data.split, part), cfg.train.seq_len)
        if file.num_bin_bytes <= SCAN_BYTES and total <= READ_TOKENS:
            check_tokens(file, cfg.model.vocab_size)
        else:
            unread += 1
        total += file.num_bin_bytes // file.dtype.itemsize
    trained = trained_after(cfg.train, cfg.train.steps)
    needed = consumed_of(cfg.data.skip_samples, trained) * cfg.train.seq_len
    files = f"{len(prefixes)} pair{'s' * (len(prefixes) > 1)} of files"
    rest = f"; the ids of {unread} were not read: tools/check_data.py reads them" if unread else ""
    often = f": each about {needed / total:.0f} times" if needed > 1.5 * total else ""
    return f"{files}, {total:,} tokens, {'and' if often else 'of which'} the run reads {needed:,}{often}{rest}"


def _sft(cfg: Config, tokenizer: Tokenizer | None) -> str:
    """Tokenize and pack all files as the run does, in a folder that is then deleted; of many bytes the first rows."""
    paths = [path for paths in (cfg.data.paths, cfg.data.valid_paths) for path in parse_paths(paths, grouped=True)[0]]
    files, total = [path for path in paths if path != "docstrings"], 0
    for path in files:
        with errors_as(ValueError, lambda error: f"data.paths: {path} cannot be read ({error.strerror})", OSError):
            total += size_of(path)
    found = (
        f"{len(files)} file{'s' * (len(files) != 1)} of questions and answers" if files else "docstrings of Python's"
    )
    if tokenizer is None or len(files) < len(paths):
        return f"{found}, not read: the run makes its corpus first"
    if total > READ_BYTES:
        bad = [line for path in files for line in _bad_rows(cfg, path, tokenizer)]
        if len(bad) == READ_ROWS * len(files):
            raise ValueError(f"{bad[0]}; none of the first {READ_ROWS:,} rows is right: correct the files")
        if bad and cfg.data.bad_lines == "error":
            raise ValueError(f"{bad[0]}; data.bad_lines=skip leaves such rows out")
        found += f" of {total >> 20:,} MiB, of each the first {READ_ROWS:,} rows; the others were not read"
        return found + (f"; {len(bad):,} bad rows are left out: {bad[0]}" if bad else "")
    try:
        from minitron.pretrain import build_data  # which loads torch
    except ImportError as error:
        raise Unseen(f"{found}: {error}; name the job's own Python") from None
    with tempfile.TemporaryDirectory() as folder:
        built = build_data(changed(cfg, data=dict(cache_dir=folder)))
    return f"{found}, all read: {built.note}; the run reads {len(built.train):,} samples"


def _bad_rows(cfg: Config, path: str, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield what is wrong with each of the first READ_ROWS rows of a file that the run could not use."""
    for number, row in itertools.islice(read_rows(path), READ_ROWS):
        try:
            encode_row(row, tokenizer, cfg.data.special_tokens_in_text, Counter())
        except UnusableTemplate:  # no row's fault
            raise
        except ValueError as error:
            yield f"{path}: row {number} {error}"


def tokenizer(job: Job) -> str:
    if job.cfg.data.tokenizer == "corpus":
        return "none needed" if job.cfg.data.source == "mock" else "made with the corpus"
    _seen(job, "data.tokenizer", [job.cfg.data.tokenizer.partition(":")[2]])
    found = load_tokenizer(job.cfg.data.tokenizer)
    check_vocabulary(found.vocab_size, f"data.tokenizer={job.cfg.data.tokenizer}", job.cfg.model.vocab_size)
    return f"{job.cfg.data.tokenizer}, {found.vocab_size:,} ids"


def _tokenizer(cfg: Config) -> Tokenizer | None:
    """The tokenizer, or None where there is none of its own or it cannot be read: the next line says so."""
    try:
        return None if cfg.data.tokenizer == "corpus" else load_tokenizer(cfg.data.tokenizer)
    except ValueError:
        raise Unseen("its tokenizer cannot be read, see below") from None


def base(job: Job) -> str:
    path = job.cfg.finetune.base or job.cfg.checkpoint.load
    if path is None and job.cfg.finetune.kind is None:
        return "none: the weights are new"
    _seen(job, "the weights", [path or ""])
    try:
        from minitron.checkpoint.load import open_base  # which loads torch
        from minitron.interop.weights import open_weights
    except ImportError as error:
        raise Unseen(f"{path}: {error}; name the job's own Python") from None
    return f"{open_base(job.cfg, open_weights).path} holds this model's weights"


def disk(job: Job) -> str:
    """Check that what is written can be, and that checkpoints have room: 12 bytes of each trained parameter."""
    cfg, c = job.cfg, job.cfg.checkpoint
    places = {"checkpoint.dir": c.dir, "log.dir": cfg.log.dir}
    if cfg.data.source != "mock":
        places["data.cache_dir"] = cfg.data.cache_dir
    _seen(job, "the disk", [place or "" for place in places.values()])
    for key, place in places.items():
        if place is not None and not ((there := existing(place)).is_dir() and os.access(there, os.W_OK | os.X_OK)):
            raise ValueError(f"{key}={place} cannot be made: {there} is no folder to write in; name another")
    if c.dir is None:
        return "no checkpoints: checkpoint.dir=null"
    one = state_bytes(cfg)
    saves = 1 if not c.every else c.keep + 1 if c.every == "auto" else -(-cfg.train.steps // c.every)
    count = min(saves, c.keep + 1 if c.keep else saves)  # the oldest goes when a new one is whole
    free, there = shutil.disk_usage(existing(c.dir)).free, existing(c.dir)
    size = f"{one / 1e9:,.1f} GB" if one >= 1e9 else f"{one / 1e6:,.1f} MB"
    needs = f"{count} checkpoint{'s' * (count > 1)} of {size}"
    if free >= count * one:
        return f"{needs}, and {free / 1e9:,.0f} GB are free in {there}"
    line = f"{there} has {free / 1e9:,.1f} GB free, and {needs} may be there at once; free some, or set checkpoint.dir"
    if c.every is None:
        raise Unseen(f"{line} (it saves only if it is stopped before its end)")
    raise ValueError(line)


def existing(place: str) -> Path:
    """Return the path itself, or the nearest above it that is there."""
    path = Path(place).expanduser().absolute()
    return next(above for above in (path, *path.parents) if os.path.lexists(above))


def _seen(job: Job, what: str, paths: object) -> None:
    if job.in_pods and any(isinstance(path, str) and "/" in path for path in paths):
        raise Unseen(f"{what}: pods alone see what lies there")


CHECKS: dict[str, Callable[[Job], str]] = {
    "layout": layout,
    "memory": memory,
    "data": data,
    "tokenizer": tokenizer,
    "base": base,
    "disk": disk,
}

if __name__ == "__main__":
    run(main)
