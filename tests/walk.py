"""The pictures and excerpts of the walk in minitron/README.md, the table of names in configs/README.md, and the lists
of keys that editors and the chart read.

    PYTHONPATH=. python tests/walk.py       write them again, after the code, a key or names.yaml has changed

A block of the walk follows a comment that names it: `<!-- picture: mesh -->` or `<!-- code: Trainer.step -->`. A
function of this file returns the picture. An excerpt is a definition without its docstring. It is named by the end of
its dotted path, as in mistakes.toml.
"""

import ast
import re
import sys
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from types import NoneType
from typing import Literal, get_args, get_origin
from unittest import mock

import numpy as np
import yaml

from definitions import Sources
from minitron.comm.handle import Handle
from minitron.comm.mesh import AXES, Mesh
from minitron.config.cli import load
from minitron.config.describe import json_schema
from minitron.config.schema import Config, Shares, keys
from minitron.data.batch import Batch
from minitron.data.gpt import Sample
from minitron.data.loader import Loader
from minitron.optim import buckets as optim_buckets
from minitron.optim import slices
from minitron.optim.buckets import bucket_key, plan_buckets
from minitron.parallel.tiles import local_positions, ring_tiles
from minitron.pipeline.schedule import make
from minitron.planner.draw import draw_text
from minitron.planner.dryrun.dryrun import dry_run
from minitron.planner.simulate import simulate
from minitron.train import build

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "minitron" / "README.md"
KEYS_PAGE = ROOT / "configs" / "README.md"
NAMES = ROOT / "minitron" / "config" / "names.yaml"
CHART = ROOT / "launch" / "helm" / "files"
TABLE = re.compile(r"(?<=<!-- table: names -->\n)(?:\|.*\n)*")
TRAINERS = {"nemo": "NeMo, Megatron-LM", "trl": "TRL, PEFT, transformers", "torchtitan": "torchtitan"}
BLOCK = re.compile(r"<!-- (picture|code): (\S+) -->\n```\w*\n(.*?)```\n", re.DOTALL)
# The example of the walk: 16 ranks, two along each axis.
MODEL = "model.num_layers=2 model.hidden_size=16 model.num_heads=4 model.num_kv_heads=2 model.ffn_hidden_size=32"
SIZES = "model.vocab_size=60 model.vocab_multiple=8 train.seq_len=16 train.micro_batch_size=1 train.global_batch_size=8"
WORLD, LAYOUT = 16, "parallel.tp=2 parallel.cp=2 parallel.pp=2"
CFG = load([*MODEL.split(), *SIZES.split(), *LAYOUT.split(), "data.source=mock"])


def sample() -> str:
    """Which samples and positions of the first step each dp and cp rank reads."""
    rows = []
    for rank in range(WORLD // 2):
        mesh = offline(rank)
        if mesh.tp.rank == 0:
            batches = first_step(CFG, mesh)
            drawn = "  ".join(str(batch.tokens[0, 0].item()) for batch in batches)
            positions = ranges(batches[0].order.tolist())
            rows.append(f"dp {mesh.dp.rank} cp {mesh.cp.rank}    samples {drawn}    positions {positions}")
    return "\n".join(rows)


def mesh() -> str:
    """The ranks of the example by their coordinates."""
    cells = []
    for rank in range(0, WORLD, 2):
        here = offline(rank)
        place = "   ".join(f"{name} {getattr(here, name).rank}" for name in AXES[:-1])
        cells.append(f"{place}   ranks {here.tp.ranks[0]:2} {here.tp.ranks[1]:2}")
    rows = [f"{first}      {second}" for first, second in zip(cells, cells[len(cells) // 2 :])]
    last = offline(5)
    axes = ", ".join(f"{name} {getattr(last, name).ranks}" for name in (*AXES, "dp_cp"))
    return "\n".join([*rows, "", f"rank 5: {axes}"])


def parameters() -> str:
    """How the weights of a layer are cut over tp."""
    chunk = build(load([*MODEL.split(), *SIZES.split()]), offline(0, 2, tp=2)).chunks[0]
    rows = []
    for name, param in chunk.blocks["0"].named_parameters():
        shard, whole = param.spec.shard, list(param.shape)
        cut = "whole on each rank"
        if shard is not None:
            whole[shard.dim] *= 2
            cut = f"dim {shard.dim} in parts of {', '.join(map(str, shard.chunks))}, each halved"
        rows.append(f"{name:22} {str(whole):9} -> {str(list(param.shape)):9} {cut}")
    return "\n".join(rows)


# What each collective of a layer moves, in the order of the calls.
MOVED = {
    "forward": ["input of qkv", "output of out", "input of up", "output of down"],
    "backward": [
        *["gradient of down's output", "input of up, again", "gradient of up's input"],
        *["gradient of out's output", "input of qkv, again", "gradient of qkv's input"],
    ],
}


def collectives() -> str:
    """The tensor-parallel collectives of one layer for one microbatch, with the shape that each rank puts in."""
    sizes = "model.num_layers=3 parallel.pp=3 parallel.tp=2 train.global_batch_size=1"
    cfg, rows = load([*MODEL.split(), *SIZES.split(), *sizes.split()]), []
    records, h = dry_run(cfg, world=6, rank=2).collectives, cfg.model.hidden_size
    for action, moved in MOVED.items():
        of_action = [record for record in records if type(record.action).__name__.lower() == action]
        for record, what in zip(of_action, moved, strict=True):
            shape = f"[{record.num_bytes // record.dtype.itemsize // h}, 1, {h}]"
            rows.append(f"{action:8} {record.kind:14} {shape:11} {what}")
    return "\n".join(rows)


def attention() -> str:
    """Which keys each query of the example sees, and from which step of the ring they come."""
    s, cp = CFG.train.seq_len, 2
    cells = np.full((s, s), ".")
    for rank in range(cp):
        queries = local_positions(s, cp, rank, "ring")
        for step in range(cp):
            source = (rank - step) % cp
            keys = local_positions(s, cp, source, "ring")
            for tile in ring_tiles(s, cp, rank, source, None):
                seen = np.ix_(queries[tile.queries], keys[tile.keys])
                cells[seen] = str(step)
    cells[np.triu_indices(s, 1)] = "."
    owner = {int(p): rank for rank in range(cp) for p in local_positions(s, cp, rank, "ring")}
    return "\n".join(f"rank {owner[i]}  query {i:2}  {' '.join(row)}" for i, row in enumerate(cells))


def pipeline() -> str:
    """The schedule of the example: forwards 0a, backwards 0A."""
    return draw_text(simulate(make(2, 1, CFG.num_microbatches(2), "1f1b"), 1.0, 2.0, 0.0, None))


# The calls of one weight gradient, from the layer's backward to the reduce-scatter.
CALLS = {
    "RowOp.backward": "computes the input's gradient, then the weight's",
    "Gemm.weight_grad": "passes on the product dy^T x, as a function that adds it to a tensor",
    "add_gradient": "calls this function with main_grad; a step's first product overwrites it",
    "Bucket.report": "is slot.report; counts the gradient in the chunk's last backward",
    "Bucket.reduce": "is called by the report of the bucket's last gradient",
    "ProcessGroupSliceComm.reduce": "sums over dp_cp: at once, or within a node and then between nodes",
    "reduce_scatter_into": "starts the sum of grad_slice; Gradients.finish waits for it",
}


def weight_gradient() -> str:
    """The calls of a weight gradient that completes a bucket, as they are on the stack at the reduce-scatter."""
    stack, cfg = [], load([*MODEL.split(), *SIZES.split(), "data.source=mock"])

    def reduce_scatter_into(*_, **__):
        frame, names = sys._getframe(), []
        while frame is not None:
            names.append((frame.f_code.co_qualname.rpartition(".<locals>.")[2], Path(frame.f_code.co_filename)))
            frame = frame.f_back
        first = next((i for i, (name, _) in enumerate(names) if name == "RowOp.backward"), -1)
        stack[:] = stack or names[: first + 1][::-1]
        return Handle()

    with (
        mock.patch.object(optim_buckets, "bucket_limit", lambda _: 1),
        mock.patch.object(slices, "reduce_scatter_into", reduce_scatter_into),
    ):
        trainer = build(cfg, offline(0, 1, tp=1))
        trainer.runner.forward_backward(first_step(cfg, trainer.mesh))
    homes = [*(home.relative_to(ROOT / "minitron") for _, home in stack[:-1]), Path("comm/collectives.py")]
    return "\n".join(f"{name:29} {home!s:20} {CALLS[name]}" for (name, _), home in zip(stack, homes))


def buckets() -> str:
    """Who updates which elements of the first stage's largest bucket."""
    chunk = build(load([*MODEL.split(), *SIZES.split()]), offline(0, 2, tp=2)).chunks[0]
    named = [(name, param.numel(), bucket_key(param)) for name, param in chunk.named_parameters()]
    plan = max(plan_buckets(named, 1 << 20, 4), key=lambda plan: plan.size)
    rows = []
    for rank in range(plan.ranks):
        mine = plan.slice_of(rank)
        rows.append(f"dp_cp {rank} sums and updates elements {mine.start} to {mine.stop}:")
        owned = [f"{span.name}[{first - span.start}:{last - span.start}]" for span, first, last in plan.owned(rank)]
        rows += [f"    {' '.join(f'{part:38}' for part in owned[i : i + 2])}".rstrip() for i in range(0, len(owned), 2)]
    return "\n".join(rows)


class Numbered:
    """Sample i consists of the tokens i, so that a batch shows what it was made of."""

    def __len__(self):
        return CFG.train.global_batch_size

    def __getitem__(self, i):
        return Sample(np.full(CFG.train.seq_len + 1, i), np.zeros(0, np.int64))


def first_step(cfg: Config, mesh: Mesh) -> list[Batch]:
    """A rank's microbatches of the first step."""
    loader = Loader(Numbered(), cfg, mesh)
    batches = loader.step(0, 1)
    loader.close()
    return batches


def offline(rank: int, world: int = WORLD, **sizes: int) -> Mesh:
    return Mesh.offline(world, rank, **(sizes or dict(tp=2, cp=2, pp=2)))


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5, 6] -> "0-2, 5-6"."""
    ends = [i for i, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1]
    return ", ".join(f"{numbers[i]}-{numbers[j - 1]}" for i, j in pairwise([0, *ends, len(numbers)]))


def excerpt(name: str, sources: Sources) -> str:
    """A definition of the package without its docstring. Raises ValueError unless one has that name."""
    found = sources.named(name)
    if len(found) != 1:
        raise ValueError(f"{len(found)} definitions are named {name}, not one; write more of its dotted path")
    file, start, end = found[0]
    text = dedent(file.read_text()[start:end])
    body = ast.parse(text).body[0].body
    if ast.get_docstring(ast.parse(text).body[0]):
        lines = text.splitlines(keepends=True)
        del lines[body[0].lineno - 1 : body[0].end_lineno]
        text = "".join(lines)
    return text.strip("\n") + "\n"


def rendered(page: str) -> str:
    """The page with all its blocks made again."""
    sources = Sources(ROOT, [str(file.relative_to(ROOT)) for file in sorted((ROOT / "minitron").rglob("*.py"))])

    def block(match: re.Match) -> str:
        kind, name, _ = match.groups()
        text = globals()[name]().rstrip() + "\n" if kind == "picture" else excerpt(name, sources)
        return f"<!-- {kind}: {name} -->\n```{'text' if kind == 'picture' else 'python'}\n{text}```\n"

    return BLOCK.sub(block, page)


def names() -> str:
    """What other trainers call our keys, and what no key does: a row each."""
    rows = [["here", *TRAINERS.values()], ["---"] * (1 + len(TRAINERS))]
    for ours, theirs in yaml.safe_load(NAMES.read_text()).items():
        rows.append([ours if " " in ours else f"`{ours}`", *(theirs.get(name, "") for name in TRAINERS)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def takes_of(types: tuple) -> str:
    """What a key takes, in the words of keys.txt: int|auto|null for `int | Literal["auto"] | None`."""
    words = {str: "text", Shares: "text", NoneType: "null", int: "int", float: "float", bool: "bool"}
    found = []
    for kind in types:
        literals = get_args(kind) if get_origin(kind) is Literal else ()
        found += literals or ["list" if get_origin(kind) is tuple else words.get(kind, "section")]
    return "|".join(found)


def lists_of_keys() -> dict[Path, str]:
    """Return the text of each file: the JSON schema, a line a key (its types, and others' names for it), and the names
    that no key stands for."""
    takes = {key: takes_of(types) for key, types, _ in keys()}
    for section in {name.rpartition(".")[0] for name in takes if name.count(".") > 1} - takes.keys():
        takes[section] = "section|null"
    rows = yaml.safe_load(NAMES.read_text())
    theirs = {row: " ".join(dict.fromkeys(" ".join(trainers.values()).split())) for row, trainers in rows.items()}
    lines = [f"{name} {takes[name]} {theirs.get(name, '')}".rstrip() for name in sorted(takes)]
    answers = {row: some for row, some in theirs.items() if row not in takes}
    return {
        ROOT / "configs" / "schema.json": json_schema() + "\n",
        CHART / "keys.txt": "\n".join(lines) + "\n",
        CHART / "answers.yaml": yaml.safe_dump(answers, sort_keys=False, width=10**6),
    }


if __name__ == "__main__":
    for file, text in lists_of_keys().items():
        file.write_text(text)
    PAGE.write_text(rendered(PAGE.read_text()))
    KEYS_PAGE.write_text(TABLE.sub(lambda _: names(), KEYS_PAGE.read_text()))
