"""The best layout that a search finds for each published recipe works: the trainer's own code runs a step of it."""

from pathlib import Path

import pytest

from minitron.config import cli
from minitron.planner.dryrun.dryrun import choose_ranks, dry_run
from minitron.planner.machine import Machine, read_machines
from minitron.planner.memory import Memory
from minitron.planner.search import search

ROOT = Path(__file__).parents[2]
DEVICES, FABRICS = read_machines()
PUBLISHED = [  # recipe, GPUs, their kind, samples
    ("gpt3_175b", 128, "h100", 256),
    ("llama31_70b", 64, "h100", 128),
    ("llama3_8b_sft", 8, "h100", 32),
    ("llama3_8b_lora", 8, "h100", 32),
    ("gpt3_13b_jube", 32, "a100-40gb", 1024),
    ("gpt3_175b_jube", 384, "a100-40gb", 96),
    ("llama31_405b", 512, "h100", 256),
]


ROWS = [
    pytest.param(*row, id=row[0], marks=[pytest.mark.slow] * bool({"175b", "70b", "405b"} & {*row[0].split("_")}))
    for row in PUBLISHED
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe, world, device, batch", ROWS)
def test_the_best_layout_of_a_recipe_runs_dry_and_needs_the_memory_planned(recipe, world, device, batch):
    """On its first, middle, last and fullest pipeline rank; within 3 % of the plan, as every layout is."""
    cfg = cli.load([str(ROOT / f"configs/{recipe}.yaml"), f"train.global_batch_size={batch}"])
    machine = Machine(DEVICES[device], FABRICS[DEVICES[device].fabric])
    best = search(cfg, world, machine, 1, smaller=False).best[0]
    pp = best.cfg.parallel.pp
    memory = Memory(best.cfg, world, gpus_per_node=1)  # a dry run knows no node's shared memory
    fullest, _ = memory.peak()
    for rank in choose_ranks("first,middle,last,fullest", pp, world, fullest):
        report = dry_run(best.cfg, world, rank)
        planned = memory.bytes_by_part(rank // (world // pp))
        workspaces = 33 * 2**20 + 32 * 2**20  # libraries' own, which no dry run sees
        assert report.peak_bytes == pytest.approx(planned.total(), rel=0.03, abs=workspaces)
