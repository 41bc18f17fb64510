"""A rank alone on a GPU: replayed and eager steps on finite values, in layouts that communicate in different ways."""

from importlib.util import find_spec

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOY = [
    "configs/llama3_8b.yaml",
    "model.num_layers=4",
    "model.hidden_size=512",
    "model.ffn_hidden_size=1024",
    "model.num_heads=8",
    "model.vocab_size=1000",
    "train.seq_len=512",
    "train.global_batch_size=64",
    "parallel.vp=1",
]
LAYOUTS = [
    (16, 0, "tp: copies beside products", ["parallel.tp=4", "parallel.pp=2", "parallel.vp=2"]),
    (16, 15, "tp: copies beside products", ["parallel.tp=4", "parallel.pp=2", "parallel.vp=2"]),
    (4, 1, "dp: copies between GPUs", ["parallel.pp=1"]),
    (64, 33, "dp: collectives", ["parallel.pp=4", "parallel.tp=2", "parallel.cp=2"]),
    (4, 2, "tp: one rank", ["parallel.pp=1", "parallel.cp=2", "parallel.cp_style=ulysses"]),
]


@pytest.mark.parametrize("graph", ["on", "off"])
@pytest.mark.parametrize("fp8", ["none", "delayed"])
@pytest.mark.parametrize("world, rank, communicates, keys", LAYOUTS)
def test_a_rank_trains_alone(world, rank, communicates, keys, fp8, graph, capfd):
    from benchmarks import one_rank

    if fp8 != "none" and not find_spec("transformer_engine"):
        pytest.skip("needs Transformer Engine")
    options = ["--world", str(world), "--rank", str(rank), "--graph", graph, "--alone", "--microbatches", "4"]
    row = one_rank.main([*TOY, *keys, f"precision.fp8={fp8}", *options])
    assert communicates in capfd.readouterr().out
    assert row["replayed"] == (graph == "on") and 0 < row["grad_norm"] < 1000
    assert row["loss"] is None or 0 < row["loss"] < 12
    assert 0 < row["busy_seconds"] and 0 < row["device_gib"] and 0 < row["host_seconds"] <= row["step_seconds"]
    assert 0 < row["update_host_seconds"] < row["step_seconds"]
    passes = row["microbatches"] * sum(row["forward_seconds"] + row["backward_seconds"])
    assert 0 < passes + row["ends_seconds"] + row["update_seconds"] < 1.05 * row["step_seconds"]
    if graph == "on":
        assert row["nodes"] > 0 and 0 < row["capture_seconds"] < 20
