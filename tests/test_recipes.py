"""Every recipe in configs/ loads, passes its checks and builds, rank by rank, at its real size, without its GPUs."""

from pathlib import Path

import pytest
import torch

from minitron import attention, cli
from minitron.mesh import Mesh
from minitron.model.gpt import GPT
from minitron.pipeline.schedule import stage_layers

RECIPES = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))
# Parameters without the padding of the vocabulary, in billions, as their papers and model cards give them.
PUBLISHED = {"llama3_8b": 8.03, "llama31_70b": 70.6, "gpt3_175b": 174.6}


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
