"""Every recipe in configs/ loads, passes its checks and builds, rank by rank, at its real size, without its GPUs."""

from contextlib import redirect_stdout
from io import StringIO
from math import prod
from pathlib import Path

import pytest

from minitron.comm.mesh import Mesh
from minitron.config import cli, rules
from minitron.kernels.kernels import choose
from minitron.model.gpt import GPT
from minitron.optim.lr import learning_rate
from minitron.parallel.layout import make_layout
from minitron.pipeline.schedule import stage_layers
from minitron.runtime.log import Log
from minitron.runtime.log_formats import Iteration

RECIPES = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
# Parameters without the padding of the vocabulary, in billions, as their papers and model cards give them.
PUBLISHED = {"llama3_8b": 8.03, "llama31_70b": 70.6, "llama31_405b": 405.85, "gpt3_175b": 174.6, "gpt3_175b_gke": 174.6,
             "llama3_8b_sft": 8.03, "llama3_8b_lora": 8.03}
# GPUs of the smallest published run of each, and its microbatches per step on every data-parallel rank.
JOBS = {"gpt3_175b": (128, 64), "gpt3_175b_gke": (256, 256), "gpt3_175b_jube": (384, 16), "gpt3_13b": (32, 256),
        "gpt3_13b_jube": (32, 256), "llama31_70b": (64, 64), "llama31_405b": (512, 64), "llama3_8b": (8, 16),
        "llama3_8b_sft": (8, 4), "llama3_8b_lora": (8, 4)}
# What the JUBE benchmark's job scripts hand to Megatron: the argument, our key, its value.
JUBE = """
    num-layers               model.num_layers               96 40
    hidden-size              model.hidden_size              12288 5120
    ffn-hidden-size          model.ffn_hidden_size          49152 20480
    num-attention-heads      model.num_heads                96 32
    seq-length               train.seq_len                  2048 2048
    max-position-embeddings  model.max_positions            2048 2048
    position-embedding-type  model.positions                rope rope
    init-method-std          model.init_std                 0.0048 0.02
    tensor-model-parallel    parallel.tp                    8 2
    pipeline-model-parallel  parallel.pp                    8 4
    micro-batch-size         train.micro_batch_size         1 1
    global-batch-size        train.global_batch_size        96 1024
    recompute-granularity    train.recompute                selective selective
    seed                     train.seed                     42 42
    fp16                     precision.dtype                fp16 fp16
    initial-loss-scale       precision.loss_scale           4096.0 4096.0
    loss-scale-window        precision.loss_scale_window    500 500
    hysteresis               precision.loss_scale_hysteresis  2 2
    adam-beta1, adam-beta2   optimizer.betas                (0.9,0.999) (0.9,0.999)
    adam-eps                 optimizer.eps                  1e-08 1e-08
    lr                       optimizer.lr                   0.0001 0.0001
    min-lr                   optimizer.min_lr               1e-05 1e-05
    lr-decay-style           optimizer.lr_schedule          cosine cosine
    lr-decay-samples         optimizer.decay_samples        126953125 126953125
    lr-warmup-samples        optimizer.warmup_samples       216320 216320
    clip-grad                optimizer.clip_grad            1.0 1.0
    weight-decay             optimizer.weight_decay         0.1 0.1
"""
# Lines of the logs that the benchmark publishes: samples consumed, seconds, learning rate, TFLOPs.
JUBE_LOGS = {"gpt3_175b_jube": [(960, 7.2310, "4.438E-07", 101.54), (1920, 5.3551, "8.876E-07", 137.10),
                                (2880, 5.6192, "1.331E-06", 130.66), (4800, 5.3247, "2.219E-06", 137.89)],
             "gpt3_13b_jube": [(10240, 35.8651, "4.734E-06", 199.03), (20480, 34.9991, "9.467E-06", 203.96),
                               (30720, 34.8709, "1.420E-05", 204.71), (40960, 35.3346, "1.893E-05", 202.02)]}


def recipe(name: str) -> str:
    return str(RECIPES[0].with_name(f"{name}.yaml"))


def chunks_of(cfg, mesh) -> list[GPT]:
    """This pipeline rank's chunks on the meta device: real shapes, no memory."""
    layout = make_layout(cfg, mesh, choose(cfg, mesh.device))
    stages = stage_layers(cfg.model.num_layers, mesh.pp.size, cfg.parallel.vp, cfg.parallel.layers_per_stage)
    mine = range(mesh.pp.rank, len(stages), mesh.pp.size)
    return [GPT(cfg, mesh, layout, stages[i], first=i == 0, last=i == len(stages) - 1) for i in mine]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_builds_on_every_pipeline_and_tensor_rank(path):
    cfg = cli.load([str(path), "precision.fp8=none"])
    p = cfg.parallel
    world = p.tp * p.pp * p.cp
    rules.check(cfg, world, capability=(9, 0))
    names, total = set(), 0
    for rank in range(world):
        mesh = Mesh.offline(world, rank, tp=p.tp, pp=p.pp, cp=p.cp, device="meta")
        if mesh.cp.rank:
            continue  # context ranks hold the same parameters
        for chunk in chunks_of(cfg, mesh):
            for param in chunk.parameters():
                names.add(param.spec.name)
                copies = p.tp if param.spec.replicated else 1
                second = param.spec.tied and chunk.embedding is None
                total += 0 if second else param.numel() / copies
    assert sum(name.endswith("attention.qkv.weight") for name in names) == cfg.model.num_layers
    padding = cfg.model.padded_vocab_size - cfg.model.vocab_size
    total -= padding * cfg.model.hidden_size * (1 if cfg.model.tie_embeddings else 2)
    if path.stem in PUBLISHED:
        assert total / 1e9 == pytest.approx(PUBLISHED[path.stem], rel=2e-3)


@pytest.mark.parametrize("fp8", [False, True], ids=["16 bit", "fp8"])
@pytest.mark.parametrize("name", JOBS)
def test_job_builds_on_each_of_its_gpus(name, fp8):
    """Each is one override at most, FP8 two for the jobs in fp16."""
    overrides = ["precision.fp8=delayed"] if fp8 else ["precision.fp8=none"]
    overrides += ["precision.dtype=bf16"] if fp8 and name.endswith("jube") else []
    cfg, (world, microbatches) = cli.load([recipe(name), *overrides]), JOBS[name]
    rules.check(cfg, world, capability=(9, 0))
    if fp8:  # Transformer Engine builds on GPUs only
        cfg = cli.load([recipe(name), *overrides, "precision.fp8_backend=torch"])
    p, dp = cfg.parallel, cfg.dp(world)
    assert prod((p.tp, p.pp, p.cp, dp)) == world and cfg.num_microbatches(dp) == microbatches
    stages = stage_layers(cfg.model.num_layers, p.pp, p.vp, p.layers_per_stage)
    for rank in range(world):
        mesh = Mesh.offline(world, rank, tp=p.tp, pp=p.pp, cp=p.cp, device="meta")
        assert ((mesh.pp.rank * dp + mesh.dp.rank) * p.cp + mesh.cp.rank) * p.tp + mesh.tp.rank == rank
        layers = {param.spec.name.split(".attention")[0] for chunk in chunks_of(cfg, mesh)
                  for param in chunk.parameters() if "attention.qkv.weight" in param.spec.name}
        assert len(layers) == sum(map(len, stages[mesh.pp.rank::p.pp]))


@pytest.mark.parametrize("size, column", [("175b", -2), ("13b", -1)])
def test_jube_recipes_are_its_job_scripts(size, column):
    cfg = cli.load([recipe(f"gpt3_{size}_jube")])
    for line in JUBE.split("\n")[1:-1]:
        *_, key, _, _ = line.split()
        section, name = key.split(".")
        assert str(getattr(getattr(cfg, section), name)).replace(" ", "") == line.split()[column], key


@pytest.mark.parametrize("name", JUBE_LOGS)
def test_jube_recipes_log_what_the_benchmark_does(name):
    """Its learning rates, and its TFLOPs at its step times: they pin the padded vocabulary, and that selective
    recomputation counts as a forward pass."""
    cfg = cli.load([recipe(name)])
    world, batch = JOBS[name][0], cfg.train.global_batch_size
    for samples, seconds, rate, tflops in JUBE_LOGS[name]:
        assert f"{learning_rate(cfg.optimizer, samples, global_batch_size=batch, total_steps=50):.3E}" == rate
        it = Iteration(samples // batch, samples, 1.0, 1.0, 1.0, 1.0, seconds)
        with redirect_stdout(StringIO()) as out, Log(cfg, world - 1, world) as log:
            log.iteration(it)
        assert float(out.getvalue().split("TFLOPs: ")[1].split()[0]) == pytest.approx(tflops, abs=0.0101)


@pytest.mark.parametrize("name", ["gpt3_175b", "gpt3_175b_gke"])
def test_nemo_s_learning_rate_is_that_of_its_document(name):
    """Of the dllogger record of step 47."""
    cfg = cli.load([recipe(name), "train.global_batch_size=2048"])
    rate = learning_rate(cfg.optimizer, 47 * 2048, global_batch_size=2048, total_steps=cfg.train.steps)
    assert rate == pytest.approx(0.000036782606912311167, rel=1e-6)
