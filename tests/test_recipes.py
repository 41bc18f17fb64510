"""Every recipe in configs/ loads, passes its checks and builds, rank by rank, at its real size, without its GPUs."""

from math import prod
from pathlib import Path

import pytest
import torch

from minitron import attention, cli
from minitron.mesh import Mesh
from minitron.model.gpt import GPT
from minitron.optim.lr import learning_rate
from minitron.pipeline.schedule import stage_layers

RECIPES = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))
# Parameters without the padding of the vocabulary, in billions, as their papers and model cards give them.
PUBLISHED = {"llama3_8b": 8.03, "llama31_70b": 70.6, "llama31_405b": 405.85, "gpt3_175b": 174.6, "gpt3_175b_gke": 174.6,
             "llama3_8b_sft": 8.03, "llama3_8b_lora": 8.03}
# GPUs of the smallest published run of each, and its microbatches per step on every data-parallel rank.
JOBS = {"gpt3_175b": (128, 64), "gpt3_175b_gke": (256, 256), "gpt3_175b_jube": (384, 16), "gpt3_13b": (32, 256),
        "llama31_70b": (64, 64), "llama31_405b": (512, 64), "llama3_8b": (8, 16),
        "llama3_8b_sft": (8, 4), "llama3_8b_lora": (8, 4)}


def chunks_of(cfg, mesh) -> list[GPT]:
    """This pipeline rank's chunks on the meta device: real shapes, no memory."""
    backend = attention.choose("reference", "meta", torch.float32, cfg.model.head_dim)
    stages = stage_layers(cfg.model.num_layers, mesh.pp.size, cfg.parallel.vp, cfg.parallel.layers_per_stage)
    mine = range(mesh.pp.rank, len(stages), mesh.pp.size)
    return [GPT(cfg, mesh, backend, stages[i], first=i == 0, last=i == len(stages) - 1) for i in mine]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_builds_on_every_pipeline_and_tensor_rank(path):
    cfg = cli.load([str(path)])
    p = cfg.parallel
    world = p.tp * p.pp * p.cp
    cfg.check(world, capability=(9, 0))
    names, total = set(), 0
    for rank in range(world):
        mesh = Mesh.offline(world, rank, tp=p.tp, pp=p.pp, cp=p.cp, device="meta")
        if mesh.cp.rank:
            continue  # context ranks hold the same parameters
        for chunk in chunks_of(cfg, mesh):
            for param in chunk.parameters():
                names.add(param.global_name)
                copies = p.tp if param.shard is None else 1
                second = param.tied and chunk.embedding is None
                total += 0 if second else param.numel() / copies
    assert sum(name.endswith("attention.qkv.weight") for name in names) == cfg.model.num_layers
    padding = cfg.model.padded_vocab_size - cfg.model.vocab_size
    total -= padding * cfg.model.hidden_size * (1 if cfg.model.tie_embeddings else 2)
    if path.stem in PUBLISHED:
        assert total / 1e9 == pytest.approx(PUBLISHED[path.stem], rel=2e-3)


@pytest.mark.parametrize("fp8", [False, True], ids=["own dtype", "fp8"])
@pytest.mark.parametrize("name", JOBS)
def test_job_builds_at_its_number_of_gpus(name, fp8):
    """Along every axis its first, middle and last rank. FP8 is one override, two for the job in fp16."""
    recipe = str(next(path for path in RECIPES if path.stem == name))
    overrides = ["precision.fp8=delayed"] + ["precision.dtype=bf16"] * (name == "gpt3_175b_jube") if fp8 else []
    cfg, (world, microbatches) = cli.load([recipe, *overrides]), JOBS[name]
    cfg.check(world, capability=(9, 0))
    if fp8:  # Transformer Engine builds on GPUs only
        cfg = cli.load([recipe, *overrides, "precision.fp8_backend=torch"])
    p, dp = cfg.parallel, cfg.dp(world)
    sizes = p.pp, dp, p.cp, p.tp
    assert prod(sizes) == world and cfg.num_microbatches(dp) == microbatches
    middle = [size // 2 for size in sizes]
    places = {(*middle[:i], rank, *middle[i + 1:]) for i, size in enumerate(sizes) for rank in (0, size - 1)}
    for place in {tuple(middle)} | places if not fp8 else {(0, 0, 0, 0), tuple(size - 1 for size in sizes)}:
        rank = 0
        for size, coordinate in zip(sizes, place, strict=True):
            rank = rank * size + coordinate
        mesh = Mesh.offline(world, rank, tp=p.tp, pp=p.pp, cp=p.cp, device="meta")
        assert (mesh.pp.rank, mesh.dp.rank, mesh.cp.rank, mesh.tp.rank) == place
        chunks = chunks_of(cfg, mesh)
        layers = {param.global_name.split(".attention")[0] for chunk in chunks for param in chunk.parameters()
                  if "attention.qkv.weight" in param.global_name}
        stages = stage_layers(cfg.model.num_layers, p.pp, p.vp, p.layers_per_stage)
        assert len(layers) == sum(map(len, stages[mesh.pp.rank::p.pp]))


def test_learning_rates_are_those_that_the_documents_log():
    """The JUBE log's rates at 960 and 4800 samples, and that of the GKE dllogger record of step 47."""
    jube, gke = (cli.load([str(RECIPES[0].with_name(f"gpt3_175b_{name}.yaml"))]) for name in ("jube", "gke"))
    for samples, logged in ((960, "4.438E-07"), (1920, "8.876E-07"), (2880, "1.331E-06"), (4800, "2.219E-06")):
        rate = learning_rate(jube.optimizer, samples, global_batch_size=96, total_steps=jube.train.steps)
        assert f"{rate:.3E}" == logged
    rate = learning_rate(gke.optimizer, 47 * 2048, global_batch_size=2048, total_steps=gke.train.steps)
    assert rate == pytest.approx(0.000036782606912311167, rel=1e-6)
