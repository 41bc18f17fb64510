"""On every GPU rank: toy models whose steps are replayed as graphs, held bit by bit against eager ones.

torchrun --nproc-per-node N tests/gpu/run_graphs.py [PATTERN ...]    prints a row per layout, exits 1 if one differs

PATTERN, `--part` and `--nodes` are those of run_layouts.py; "'batches'" takes the rows whose batch size changes in the
run. `--replays 100` replays a step 100 times instead of 4.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from minitron.runtime.environment import DEFAULTS

os.environ.update(DEFAULTS | os.environ)  # as a run does, before torch is loaded
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to be deterministic

import torch
import torch.distributed as dist
from run_layouts import BIG, FAMILIES, FORMATS, LAYOUTS, begin, chosen, make, parser

from layouts import adapters_that_do_something
from minitron.config.batch import batch_stages, final, trained_after
from minitron.data.loader import Loader
from minitron.data.mock import MockDataset
from minitron.pipeline import replay as graph
from minitron.train import build

STEPS = graph.WARM_UP + 2  # of a batch size that another one follows: the last two are replayed
LAYERS = 3  # without a pipeline: the first, one in between and the last
BATCHES = {
    "ramp": dict(batch_ramp=(4, 4, 4 * STEPS)),  # 4 samples a step, then 8
    "schedule": dict(batch_schedule=((0, 8), (8 * STEPS, 2), (10 * STEPS, 8))),
}
SCHEDULED = [
    (1, dict(batches="ramp")),
    (1, dict(batches="schedule", dropout=0.1)),
    (2, dict(batches="ramp")),
    (2, dict(batches="schedule")),  # 4, 1 and 4 microbatches a rank
    (2, dict(batches="ramp", pp=2, vp=2)),
    (2, dict(batches="schedule", pp=2, schedule="zb-h1")),
    (2, dict(batches="schedule", pp=2, dropout=0.1)),
]


def train(base: dict, name: str, layout: dict, device: torch.device, world: int, replays: int, cuda_graph: str):
    """Return the figures of each step and evaluation, those of the weights at the end, and what was recorded.

    Recorded: whether each batch size was, and the last recording's graphs, nodes and seconds. None if steps are eager.
    """
    layout = dict(layout)
    batches = BATCHES.get(layout.pop("batches", None), {})
    layers = BIG["num_layers"] if "pp" in layout else LAYERS
    keys = dict(cuda_graph=cuda_graph, eval_every=1, deterministic=True) | batches
    cfg, mesh = make(base, name, layout, device, world, layers, **keys)
    sizes = len(batch_stages(cfg.train))
    steps = STEPS * (sizes - 1) + graph.WARM_UP + replays
    with adapters_that_do_something():
        trainer = build(cfg, mesh)
    data = MockDataset(1000, 512, 8 * steps, 1, document_length=120.0)
    loader, others, figures, eager = Loader(data, cfg, mesh), Loader(data, final(cfg), mesh), [], 0
    for step in range(steps):
        trained = trained_after(cfg.train, step)
        if step % STEPS == STEPS - 1:  # between two replayed steps of each size
            figures.append(trainer.evaluate(others.step(trained, step)).tolist())
        figures.append(trainer.step(loader.step(trained, step), 1e-3 * (1 + step)).read())
        eager += not trainer.runner.replaying
    loader.close(), others.close()
    trainer.gradients.wait_parameters()
    figures.append([p.float().double().sum().item() for chunk in trainer.chunks for p in chunk.parameters()])
    recorded, runner = None, trainer.runner
    if isinstance(runner, graph.Replay):
        recorded, last = (False, 0, 0, 0.0), runner.training
        if last is not None:
            recorded = eager == sizes * graph.WARM_UP, len(last.graphs), last.nodes, last.seconds
    runner.close()
    return figures, recorded


def stays_eager(layout: dict) -> bool:
    """Whether the host has to know where documents begin."""
    across = layout.get("cp", 1) > 1 and layout.get("cp_style") != "ulysses"
    return layout.get("separate", False) and (across or "attention_dropout" in layout)


def rows_of(world: int) -> list[tuple]:
    """List (family, format, layout)."""
    rows = []
    for layout in (layout for size, layout in LAYOUTS + SCHEDULED if size == world):
        few = {"lora", "recompute", "dropout", "separate", "batches"} & layout.keys()
        names = [name for name in FORMATS if name in ("bf16", "fp8 delayed") or not (few or name == "fp32")]
        if not layout.get("split"):  # with one stage a graph is a microbatch
            rows += [(family, name, layout) for family in FAMILIES for name in names]
    return rows


def main() -> None:
    options, begun = parser(), time.monotonic()
    options.add_argument("--replays", type=int, default=4, help="of a step (default 4)")
    args = options.parse_args()
    torch.use_deterministic_algorithms(True)
    rank, world, device = begin(args.nodes)
    rows, off = chosen(args, rows_of(world)), 0
    for family, name, layout in rows:
        eager, _ = train(FAMILIES[family], name, layout, device, world, args.replays, "off")
        replayed, recorded = train(FAMILIES[family], name, layout, device, world, args.replays, "on")
        on, graphs, nodes, seconds = recorded or (stays_eager(layout), 0, 0, 0.0)
        same = torch.tensor(on and eager == replayed, dtype=torch.int32, device=device)
        dist.all_reduce(same, op=dist.ReduceOp.MIN)
        off += not same
        if rank == 0:
            differs = next((i for i, (a, b) in enumerate(zip(eager, replayed)) if a != b), None)
            text = f"{graphs} graphs of {nodes} nodes, recorded in {seconds:.2f} s"
            if not same:
                text += f"; replaying {on}, first difference at {differs}" + (
                    f": {eager[differs]} {replayed[differs]}"[:300] if differs is not None else ""
                )
            print(f"{'ok  ' if same else 'FAIL'} {family} {name} world {world} {layout}: {text}", flush=True)
    if rank == 0:
        print(f"{len(rows)} rows in {time.monotonic() - begun:.0f} s, {off} off")
    dist.destroy_process_group()
    sys.exit(off > 0)


if __name__ == "__main__":
    main()
