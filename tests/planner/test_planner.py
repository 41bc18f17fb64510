"""minitron/planner: operations, bytes and seconds against plain twins, the search against trying everything."""

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts import DATA_PARALLEL
from minitron.comm.mesh import Mesh
from minitron.config import cli, flops, rules, schema
from minitron.data.build import build_datasets
from minitron.kernels.kernels import choose
from minitron.model.gpt import GPT
from minitron.parallel.layer_context import make_layer_context
from minitron.pipeline.schedule import BackwardWeight, Exchange, Forward, make, operations
from minitron.planner import fit as fit_module
from minitron.planner import search as search_module
from minitron.planner.fit import changes, nearest_fit
from minitron.planner.machine import SOFTWARE, Device, Fabric, Machine, choose_machine, read_machines
from minitron.planner.memory import Memory
from minitron.planner.plan import Step, plan
from minitron.planner.search import RECOMPUTE, search
from minitron.planner.simulate import simulate
from minitron.planner.work import FUSED_ATTENTION, StageTime, document_tokens, total

ROOT = Path(__file__).resolve().parents[2]
DEVICES, FABRICS = read_machines()
H100 = Machine(DEVICES["h100"], FABRICS["ndr400"])
OUTSIDE_GIB = 1.4  # what CUDA takes, and NCCL in a node whose ranks are all data ranks
# A GPU whose seconds are operations / 1e12, bytes / 1e12 and messages / 1e9, without any loss.
IDEAL = Machine(
    Device(
        "H100",
        "",
        memory_gib=80,
        context_gib=0,
        processors=1,
        gemm_tflops={"bf16": 1, "fp8": 1},
        unhidden=0,
        weight_grad={"bf16": 1, "fp8": 1},
        attention_tflops=1,
        half_keys=0,
        flash_tflops=1,
        flash_half_keys=0,
        copy_tb_s=1,
        pointwise=1,
        in_step=1,
        gap_seconds=0,
        launch_seconds=0,
        spread=0,
        source="",
    ),
    Fabric(
        gpus_per_node=8,
        cards_per_node=8,
        nvlink_gb_s=1,
        nvlink_seconds=0,
        copy_gb_s=1,
        barrier_seconds=0,
        network_gb_s=1,
        network_seconds=0,
        gpus_per_pod=8,
        uplinks=1,
        felt=1,
        copy_felt=1,
        piece_felt=1,
        source="",
    ),
)
SMALL = [
    "model.num_layers=8",
    "model.hidden_size=1024",
    "model.ffn_hidden_size=4096",
    "model.num_heads=8",
    "model.num_kv_heads=4",
    "model.vocab_size=8192",
    "model.max_positions=2048",
    "train.seq_len=2048",
    "train.micro_batch_size=1",
    "train.global_batch_size=16",
]
GPT3 = ["model.family=gpt", "model.positions=learned", "model.tie_embeddings=true", "model.num_kv_heads=null"]
QWEN = ["model.head_dim=256", "model.qkv_bias=true", "model.qk_norm=true"]


FP8_HEAD = "precision.fp8_head=true"


def recipe(name, *overrides):
    """A recipe, of the smaller models without the layout that it has."""
    plain = [] if name in ("gpt3_175b", "llama31_70b") else DATA_PARALLEL
    return cli.load([str(ROOT / "configs" / f"{name}.yaml"), *plain, *overrides])


# ---- what is counted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ([], GPT3, QWEN), ids=("llama", "gpt", "qwen"))
@pytest.mark.parametrize("layout", [(1, 1, 1, 1), (2, 1, 1, 1), (4, 2, 2, 1), (2, 4, 1, 2), (1, 2, 4, 2)])
def test_operations_of_all_stages_are_those_that_flops_counts(family, layout):
    """Of the products all, of the scores the half that the mask leaves, 14 for `full`'s 12."""
    tp, pp, vp, cp = layout
    keys = [f"parallel.{name}={value}" for name, value in zip(("tp", "pp", "vp", "cp"), layout)]
    cfg = cli.load(SMALL + family + keys)
    step = Step(cfg, tp * pp * cp, IDEAL)
    parts = sum((sum(pair, Counter()) for pair in step.parts), Counter())
    shape, s = cfg.model, cfg.train.seq_len
    scores = flops.full(shape, s) - flops.full(shape, s, squared_lengths=0)
    assert parts["gemm"] * 1e12 * tp * cp == pytest.approx(flops.full(shape, s, squared_lengths=0))
    assert parts["attention"] * 1e12 * tp * cp == pytest.approx(scores / 2 * 14 / 12)
    assert (parts["tp_exposed"] > 0) == (tp > 1) and (parts["cp_exposed"] > 0) == (cp > 1)


def test_what_frozen_weights_documents_and_recomputation_change():
    cfg, lora = cli.load(SMALL), ["finetune.kind=lora", "lora.targets=[q,v,down]"]
    documents = ["data.source=mock", "data.separate_documents=true", "data.document_length=512"]
    plain, frozen, packed = (StageTime(cli.load(SMALL + extra), IDEAL) for extra in ([], lora, documents))
    (forward, backward), (frozen_forward, of_frozen), (of_documents, _) = (
        w.block(False) for w in (plain, frozen, packed)
    )
    assert backward["gemm"] == pytest.approx(2 * forward["gemm"])
    assert of_frozen["gemm"] == pytest.approx(forward["gemm"])
    assert of_documents["attention"] == pytest.approx(
        forward["attention"] * document_tokens(packed.cfg) / cfg.train.seq_len
    )
    # An adapter reads x, and y, which it writes: q reads h and adds to h, v to half of that, down reads f, adds to h.
    h, f, size = cfg.model.hidden_size, cfg.model.ffn_hidden_size, 2 * cfg.train.seq_len
    assert (frozen_forward["pointwise"] - forward["pointwise"]) * 1e12 == pytest.approx(
        size * (h + 2 * (h + h // 2) + f + 2 * h)
    )
    # Its backward reads x for dA and for its dropout, and adds to dx; it reads dy for dB and for du.
    assert (of_frozen["pointwise"] - backward["pointwise"]) * 1e12 == pytest.approx(
        size * (3 * h + 2 * (h + h // 2) + 3 * f + 2 * h)
    )
    assert not frozen.embedding()[1]["pointwise"] and frozen.head()[1]["gemm"] == frozen.head()[0]["gemm"]
    full = StageTime(replace(cfg, train=replace(cfg.train, recompute="full")), IDEAL).block(False)
    assert total(full[1]) == pytest.approx(total(forward) + total(backward))
    selective = StageTime(replace(cfg, train=replace(cfg.train, recompute="selective")), IDEAL).block(False)
    assert total(backward) < total(selective[1]) < total(full[1])


@pytest.mark.parametrize("longest", [None, 64, 512, 1200, 2048, 5000])
def test_documents_are_as_long_as_the_random_ones(longest):
    """Tolerance: three times what the mean of 200 samples varies by, and the last document's end."""
    cfg = cli.load(
        [
            *SMALL,
            "data.source=mock",
            "data.separate_documents=true",
            f"data.document_length={'null' if longest is None else longest}",
        ]
    )
    s = cfg.train.seq_len
    samples = build_datasets(cfg.data, vocab_size=8192, seq_len=s, seed=1, train_samples=200, valid_samples=0).train
    starts = (samples[i].starts for i in range(200))
    squares = sum(float(np.square(np.diff([0, *x[x < s], s])).sum()) for x in starts) / 200
    assert document_tokens(cfg) == pytest.approx(squares / s, rel=0.06)
    assert document_tokens(cli.load(SMALL)) == s


def test_fp8_halves_products_of_blocks_and_not_of_the_head():
    machine = replace(IDEAL, device=replace(IDEAL.device, gemm_tflops={"bf16": 1, "fp8": 2}))
    bf16, fp8 = (
        StageTime(cli.load(SMALL + extra), machine)
        for extra in ([], ["precision.fp8=delayed", "precision.fp8_bf16_layers=1"])
    )
    assert fp8.block(True)[0]["gemm"] == pytest.approx(bf16.block(False)[0]["gemm"] / 2)
    assert fp8.head()[0]["gemm"] == bf16.head()[0]["gemm"]
    in_fp8 = StageTime(cli.load([*SMALL, "precision.fp8=delayed", "precision.fp8_head=true"]), machine)
    assert [x["gemm"] for x in in_fp8.head()] == pytest.approx([x["gemm"] / 2 for x in bf16.head()])
    m, t = fp8.model, fp8.cfg.train  # a cast reads 2 bytes, and writes 1 twice: x for the weight's gradient as well
    rows, values = t.seq_len * t.micro_batch_size, (m.hidden_size, m.padded_vocab_size)
    casts = [b["pointwise"] - a["pointwise"] for a, b in zip(bf16.head(), in_fp8.head())]
    assert casts == pytest.approx([machine.moved(4 * rows * n) for n in values])
    kept, cast = (fp8.stage(layers, False, False)[0]["gemm"] for layers in (range(0, 1), range(1, 2)))
    assert kept == pytest.approx(2 * cast)


def test_messages_cross_the_slowest_link_of_their_ring():
    f = FABRICS["ndr400"]
    near, far, joined = (H100.collective(2**30, ranks, stride) for ranks, stride in ((8, 1), (8, 8), (8, 4)))
    assert near == pytest.approx(2**30 * 7 / 8 / (f.nvlink_gb_s * 1e9) + 7 * f.nvlink_seconds)
    assert far == pytest.approx(2**30 * 7 / 8 / (f.network_gb_s * 1e9) + 7 * f.network_seconds)
    # Two ranks of the ring in each of four nodes, with two cards.
    assert joined == pytest.approx(
        2**30 * 7 / 8 / (2 * f.network_gb_s * 1e9) + 4 * f.nvlink_seconds + 3 * f.network_seconds
    )
    # Two ranks in one node, and the third alone in another.
    assert H100.collective(2**30, 3, 4) == pytest.approx(
        2**30 * 2 / 3 / (2 * f.network_gb_s * 1e9) + f.nvlink_seconds + f.network_seconds
    )
    assert H100.collective(2**30, 1, 1) == H100.message(2**30, 1, 1) == 0
    # Cards faster than NVLink are waited for by NVLink; a copy in a node by a barrier.
    cards = replace(H100, fabric=replace(f, network_gb_s=10 * f.nvlink_gb_s))
    assert cards.collective(2**30, 8, 8) == pytest.approx(2**30 * 7 / 8 / (f.nvlink_gb_s * 1e9) + 7 * f.network_seconds)
    assert H100.copy(2**30) == pytest.approx(2**30 / (f.copy_gb_s * 1e9) + f.barrier_seconds, rel=1e-9)
    d = H100.device
    assert H100.moved(2**30) == pytest.approx(2**30 / (d.copy_tb_s * 1e12 * d.pointwise))
    assert H100.copied(2**30) == pytest.approx(2**30 / (d.copy_tb_s * 1e12))


@settings(max_examples=50, deadline=None)
@given(st.tuples(*[st.sampled_from([128, 640, 2048, 8192, 12288])] * 3), st.booleans(), st.booleans())
def test_no_product_is_faster_than_its_rate_and_larger_ones_take_longer(shape, fp8, weight_grad):
    m, n, k = shape
    seconds = H100.product(m, n, k, fp8=fp8, weight_grad=weight_grad)
    assert 2 * m * n * k / seconds / 1e12 < H100.device.gemm_tflops["fp8" if fp8 else "bf16"]
    assert H100.product(2 * m, n, k, fp8=fp8, weight_grad=weight_grad) > seconds


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ([], GPT3, QWEN), ids=("llama", "gpt", "qwen"))
@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 2), (4, 4, 1)])
def test_parameters_are_those_of_the_model(family, layout):
    """Of every pipeline rank, counted in the real modules on the meta device."""
    tp, pp, vp = layout
    cfg = cli.load(SMALL + family + [f"parallel.tp={tp}", f"parallel.pp={pp}", f"parallel.vp={vp}"])
    memory = Memory(cfg, tp * pp, gpus_per_node=8)
    kernels = choose(cfg, "meta")
    for stage, layers in enumerate(memory.layers):
        mesh = Mesh.offline(tp * pp, stage % pp * tp, tp=tp, pp=pp, device="meta")
        chunk = GPT(
            cfg,
            mesh,
            make_layer_context(cfg, mesh, kernels),
            layers,
            first=stage == 0,
            last=stage == len(memory.layers) - 1,
        )
        assert memory.parameters(stage) == sum(p.numel() for p in chunk.parameters())


COUNTING = "log.dir=unused", "log.numerics_every=100"  # what casts lose
LONG = "model.max_positions=32768", "train.seq_len=32768", "data.document_length=null", "data.separate_documents=false"


# Tolerance: what waits between stages and inside of an operation is counted by its largest moment, not by its own.
@pytest.mark.sampled(
    3,
    "llama3_8b_lora optimizer.grad_dtype=bf16",
    "llama3_8b model.num_layers=2 model.head_piece=4096",
    "qwen3_8b_lora lora.targets=[q,v,down]",
    "llama3_8b model.num_layers=2 model.head_piece=2048 parallel.pp=2 parallel.schedule=zb-h1",
    "llama3_8b parallel.pp=4 parallel.schedule=zb-h1 precision.fp8=delayed precision.fp8_head=true",
    " ".join(["llama3_8b_lora", *LONG, "model.head_piece=2048", "train.recompute=full"]),
)
@pytest.mark.parametrize(
    "layout",
    [
        ("llama3_8b", 1, ["model.num_layers=4"]),
        ("llama3_8b", 8, ["model.num_layers=8", "parallel.tp=2", "parallel.pp=2", "parallel.vp=2", "parallel.cp=2"]),
        ("llama3_8b", 4, ["model.num_layers=4", "parallel.tp=2", "parallel.cp=2", "parallel.cp_style=ulysses"]),
        ("llama3_8b", 2, ["model.num_layers=4", "train.recompute=selective", "precision.fp8=delayed"]),
        (
            "llama3_8b",
            4,
            ["model.num_layers=8", "parallel.pp=4", "parallel.layers_per_stage=[3,2,2,1]", "train.recompute=full"],
        ),
        ("gpt3_13b", 8, ["model.num_layers=8", "parallel.tp=2", "parallel.pp=4", "parallel.sequence_parallel=false"]),
        ("gpt3_13b", 2, ["model.num_layers=4", "parallel.tp=1", "parallel.pp=2", "precision.fp8=delayed"]),
        ("gpt3_13b", 2, ["model.num_layers=4", "parallel.pp=2", "precision.fp8=delayed", *COUNTING]),
        ("llama3_8b", 2, ["model.num_layers=4", "parallel.pp=2", "precision.fp8=delayed", *COUNTING]),
        ("gpt3_175b", 128, ["precision.fp8=delayed", "train.global_batch_size=16"]),
        ("llama31_70b", 64, ["precision.fp8=delayed"]),
        ("llama31_70b", 64, ["precision.fp8=delayed", "precision.fp8_head=true"]),
        ("llama3_8b", 1, ["model.num_layers=2", "precision.fp8=current", "precision.fp8_head=true"]),
        ("llama3_8b_lora", 1, ["precision.fp8=delayed", "precision.fp8_head=true"]),
        ("llama3_8b_lora", 1, []),
        ("llama3_8b_lora", 1, ["precision.fp8=delayed", "lora.targets=[q,v,gate,down]", "train.recompute=selective"]),
        ("llama3_8b_lora", 4, ["parallel.tp=2", "parallel.pp=2", "lora.targets=[q,v,o,gate,up,down]"]),
        ("llama3_8b_lora", 4, ["parallel.tp=2", "parallel.cp=2", "parallel.cp_style=ulysses", "lora.targets=[k,o]"]),
        ("gpt3_13b", 4, ["parallel.tp=2", "parallel.pp=2", "finetune.kind=lora", "optimizer.grad_dtype=fp32"]),
        ("gpt3_13b", 4, ["model.num_layers=4", "parallel.pp=2", "optimizer.grad_dtype=bf16"]),
        ("llama31_70b", 64, ["precision.fp8=delayed", "optimizer.grad_dtype=bf16"]),
        ("llama3_8b_lora", 2, ["optimizer.grad_dtype=bf16"]),
        ("gpt3_13b", 4, ["model.num_layers=4", "parallel.pp=4", "optimizer.accumulate_dtype=bf16"]),
        ("llama3_8b", 4, ["model.num_layers=4", "parallel.cp=2", "optimizer.accumulate_dtype=bf16"]),
        ("llama3_8b", 4, ["model.num_layers=4", "optimizer.reduce_dtype=bf16"]),
        ("llama31_70b", 64, ["precision.fp8=delayed", "optimizer.grad_dtype=bf16", "precision.fp8_params=true"]),
        ("gpt3_13b", 4, ["model.num_layers=6", "parallel.pp=2", "precision.fp8=current", "precision.fp8_params=true"]),
        ("llama3_8b", 4, ["parallel.pp=4", "parallel.schedule=zb-h1"]),
        ("llama3_8b", 4, ["parallel.tp=2", "parallel.pp=2", "precision.fp8=delayed", "parallel.schedule=zb-h1"]),
        (
            "llama3_8b",
            4,
            ["parallel.pp=4", "parallel.schedule=zb-h1", "precision.fp8=delayed", "precision.fp8_head=true"],
        ),
        ("llama3_8b", 4, ["parallel.pp=4", "train.recompute=selective", "parallel.schedule=zb-h1"]),
        ("llama3_8b", 4, ["parallel.pp=4", "train.recompute=full", "parallel.schedule=zb-h1"]),
        (
            "gpt3_175b",
            16,
            [
                "parallel.tp=4",
                "parallel.pp=4",
                "parallel.vp=1",
                "parallel.cp=1",
                "model.num_layers=8",
                "parallel.schedule=zb-h1",
            ],
        ),
        ("llama3_8b_lora", 4, ["parallel.pp=4", "parallel.schedule=zb-h1"]),
        ("llama3_8b", 1, ["model.num_layers=2", "model.head_piece=4096"]),
        ("llama3_8b", 2, ["model.num_layers=4", "model.head_piece=1024", "parallel.tp=2"]),
        ("llama3_8b", 1, ["model.num_layers=2", "model.head_piece=1024", "precision.fp8=current", FP8_HEAD]),
        ("llama3_8b", 2, ["model.num_layers=2", "model.head_piece=2048", "parallel.pp=2", "parallel.schedule=zb-h1"]),
        ("llama3_8b_lora", 1, ["model.head_piece=2048", "train.recompute=selective"]),
        ("qwen3_8b_lora", 1, ["lora.targets=[q,v,down]"]),
        ("qwen3_8b_sft", 2, ["model.num_layers=4", "parallel.tp=2"]),
        ("qwen3_8b_sft", 2, ["model.num_layers=4", "parallel.pp=2", "train.recompute=selective"]),
        ("qwen3_8b_sft", 2, ["model.num_layers=4", "parallel.pp=2", "parallel.schedule=zb-h1", "model.qkv_bias=true"]),
        ("qwen3_8b_sft", 1, ["model.num_layers=4", "precision.fp8=delayed", "model.head_dim=256"]),
        ("qwen3_8b_sft", 2, ["model.num_layers=4", "train.recompute=full"]),
        ("llama3_8b", 2, ["model.num_layers=2", "model.attention=reference", "parallel.cp=2"]),
        (
            "llama3_8b",
            2,
            ["model.num_layers=2", "model.attention=reference", "parallel.cp=2", "parallel.cp_style=ulysses"],
        ),
        ("llama3_8b_lora", 1, [*LONG, "model.head_piece=2048", "train.recompute=full"]),
    ],
    ids=lambda layout: " ".join([layout[0], *layout[2]]),
)
def test_memory_is_what_the_trainer_allocates(layout):
    """Against the dry run's walk over a step, on the first and the last pipeline rank."""
    dryrun = pytest.importorskip("minitron.planner.dryrun.dryrun")
    name, world, overrides = layout
    cfg = recipe(name, "train.global_batch_size=8", *overrides)
    memory, pp = Memory(cfg, world, gpus_per_node=1), cfg.parallel.pp  # the walk shares no memory between ranks
    for rank in {0, pp - 1}:
        walked, formula = dryrun.dry_run(cfg, world, rank * (world // pp)).memory, memory.bytes_by_part(rank)
        for part in ("parameters", "gradients", "optimizer", "fp8 weights"):
            assert formula[part] == pytest.approx(walked[part], rel=0.01), part
        assert formula.total() == pytest.approx(
            sum(walked.values()), rel=0.01 if cfg.model.head_piece and pp == 1 else 0.03
        )


@pytest.mark.parametrize("pp, vp, microbatches", [(4, 2, 9), (4, 2, 12), (4, 1, 9), (2, 2, 6)])
def test_the_peak_is_that_of_all_operations_of_a_step(pp, vp, microbatches):
    keys = f"parallel.pp={pp} parallel.vp={vp} train.global_batch_size={microbatches} train.micro_batch_size=1"
    memory = Memory(cli.load([*SMALL, "model.num_layers=8", *keys.split()]), pp, gpus_per_node=1)
    for rank in range(pp):
        working = [memory._backward_extra(stage) for stage in memory.stages(rank)]
        every = memory.activations(rank, operations(pp, vp, microbatches, rank, "1f1b"))
        bytes_held = [
            after if isinstance(op, Forward) else max(before, after) + working[op.chunk] for op, before, after in every
        ]
        assert sum(memory._at_peak(rank)) == max(bytes_held)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_queue_of_weight_gradients_holds_this_rank_s_part_of_both_matrices(sequence_parallel):
    """Four blocks in bf16. Under sequence parallelism the rows of the other matrix are split, too."""
    keys = (
        "parallel.tp=2",
        "parallel.pp=2",
        "parallel.schedule=zb-h1",
        f"parallel.sequence_parallel={sequence_parallel}",
    )
    memory = Memory(cli.load([*SMALL, *keys]), 4, gpus_per_node=8)
    h, f, qkv, tokens = 1024, 4096, 1024 + 2 * 512, 2048
    rows = tokens // 2 if sequence_parallel else tokens  # of x of a column-parallel layer, of dy of a row-parallel one
    inner = qkv // 2 + h // 2 + 2 * f // 2 + f // 2  # dy of qkv, x of out, dy of gate and up, x of down
    assert memory.deferred(0) == 4 * 2 * (inner * tokens + 4 * h * rows)


def test_the_search_counts_lasting_bytes_for_each_division_of_layers():
    """One search and one after another: each has other bytes than those before it."""
    keys = [*SMALL, "model.num_layers=11"]
    searched = search_module._Search(cli.load(keys), 8, H100, 1, False, search_module.tqdm(disable=True))
    found = []
    for layout in (
        "pp=1",
        "tp=2",
        "pp=2",
        "pp=4",
        "pp=4 vp=2",
        "pp=4 layers_per_stage=[2,3,3,3]",
        "pp=4 layers_per_stage=[1,4,3,3]",
        "tp=2 pp=4",
    ):
        cfg = cli.load([*keys, *(f"parallel.{key}" for key in layout.split())])
        memory = Memory(cfg, 8, gpus_per_node=8)
        found.append(searched.lasting(cfg, memory))
        assert found[-1] == sum(memory.lasting_parts(0)), layout
    assert len(set(found[:4])) == 4 and len(set(found[3:])) == 4  # the middle two of the last have two layers each


def test_a_node_shares_memory():
    cfg = cli.load([*SMALL, "parallel.tp=2"])
    far, near = (Memory(cfg, 4, gpus_per_node=n).bytes_by_part(0) for n in (1, 8))
    assert near["messages"] > far["messages"] == 0
    for tuned in ([], ["finetune.kind=lora"]):  # two stages, no larger than a rank's half of 4 + 2 bytes an element
        alone, beside = (
            Memory(cli.load([*SMALL, *tuned, f"parallel.overlap_grads={overlap}"]), 2, gpus_per_node=8).bytes_by_part(0)
            for overlap in ("false", "true")
        )
        assert beside["messages"] - alone["messages"] == 2 * min(64 << 20, 6 * (beside["gradients"] // 4) // 2)
    half, whole = (
        Memory(
            cli.load([*SMALL, "finetune.kind=lora", f"optimizer.grad_dtype={dtype}"]), 2, gpus_per_node=8
        ).bytes_by_part(0)
        for dtype in ("bf16", "fp32")
    )
    assert half["gradients"] == whole["gradients"] // 2 + whole["gradients"] // 2  # two ranks: a slice in float32 each
    assert half["messages"] == whole["messages"] * 4 // 6


def test_a_recorded_step_needs_more_for_its_kernels_and_its_pool():
    """As measured on single ranks, within 0.2 GiB; with one stage three graphs do for all."""
    measured = recorded_and_eager()
    assert len(measured) >= 5
    for (name, keys, world, rank, fp8, microbatches), more_gib in measured.items():
        cfg = cli.load([str(ROOT / "configs" / f"{name}.yaml"), *keys, f"precision.fp8={fp8}", "train.eval_every=0"])
        batch = microbatches * cfg.dp(world) * cfg.train.micro_batch_size
        memory = Memory(replace(cfg, train=replace(cfg.train, global_batch_size=batch)), world, gpus_per_node=1)
        graph = memory.graph(rank * cfg.parallel.pp // world)
        layers = -(-cfg.model.num_layers // cfg.parallel.pp)  # none of these is a rank that has fewer
        assert memory.microbatches == microbatches
        assert graph == 8192 * 150 * layers * microbatches + (350 << 20)
        assert graph / 2**30 > more_gib - 0.2, name
        fragments = name == "llama31_405b" and "parallel.pp=8" in keys  # its eager step held some
        assert graph / 2**30 < more_gib + 0.2 or fragments, name
    keys = [*SMALL, "train.micro_batch_size=1"]
    one, many, evaluated, off, unwatched, counting, both = (
        Memory(cli.load([*keys, *more]), 1, gpus_per_node=8)
        for more in (
            ["train.global_batch_size=3"],
            ["train.global_batch_size=32"],
            ["train.global_batch_size=32", "train.eval_every=5"],
            ["train.cuda_graph=off"],
            ["train.global_batch_size=3", *COUNTING],
            ["train.global_batch_size=3", *COUNTING, "precision.fp8=current"],
            ["train.global_batch_size=3", *COUNTING, "precision.fp8=current", "train.eval_every=5"],
        )
    )
    layers = one.cfg.model.num_layers
    assert unwatched.graph(0) == one.graph(0) == counting.graph(0) - 8192 * (150 + 400) * 3 * layers
    assert one.graph(0) == many.graph(0) == evaluated.graph(0) - 8192 * 150 * layers and off.graph(0) == 0
    assert both.graph(0) - counting.graph(0) == evaluated.graph(0) - many.graph(0)


def recorded_and_eager() -> dict[tuple, float]:
    """GiB that a single rank with graphs took more than without, by recipe, keys, world, rank, format, microbatches.

    Not of 175B in FP8: its eager row is of an older version.
    """
    rows: dict[tuple, dict] = {}
    for line in (ROOT / "benchmarks" / "results" / "results.jsonl").read_text().splitlines():
        if (row := json.loads(line))["kind"] == "one_rank":
            numbers = (row[name] for name in ("world", "rank", "fp8", "microbatches"))
            key = row["recipe"], tuple(row["keys"]), *numbers
            rows.setdefault(key, {})[row["graph"]] = row["device_gib"]
    both = {key: pair["on"] - pair["off"] for key, pair in rows.items() if len(pair) == 2}
    return {key: more for key, more in both.items() if key[0] != "gpt3_175b" or key[4] == "none"}


@pytest.mark.parametrize("sizes", [(1, 1, 3), (2, 1, 5), (4, 3, 8), (3, 2, 7), (4, 1, 6, "zb-h1")])
def test_operations_are_the_actions_of_the_schedule_without_messages(sizes):
    for rank, actions in enumerate(make(*sizes).ranks):
        computed = [action for action in actions if type(action) is not Exchange]
        # repr leaves out what the schedule adds: an action's messages
        assert list(map(repr, operations(*sizes[:3], rank, *sizes[3:]))) == list(map(repr, computed))


# ---- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["parallel.pp=4", "parallel.vp=2"],
        ["parallel.tp=2", "parallel.cp=2"],
        ["parallel.pp=2", "parallel.layers_per_stage=[3,5]", "precision.fp8=delayed"],
        ["data.source=mock", "data.separate_documents=true"],
    ],
)
def test_parts_add_up_to_the_step(overrides):
    cfg = cli.load([*SMALL, *overrides])
    job, step = plan(cfg, 8, H100), Step(cfg, 8, H100)
    schedule = make(cfg.parallel.pp, cfg.parallel.vp, step.microbatches)
    timeline = simulate(schedule, step.forward, step.backward, step.transfer_seconds)
    rest = sum(job.seconds[part] for part in ("dp_exposed", "optimizer", "stragglers"))
    assert job.timeline == timeline and job.step_seconds == pytest.approx(timeline.makespan + rest)
    assert all(seconds > -1e-9 for seconds in job.seconds.values())
    t, peak = cfg.train, flops.peak_tflops("H100", cfg.precision.fp8 != "none")
    squares = t.seq_len * document_tokens(cfg)
    operations = t.global_batch_size * flops.full(cfg.model, t.seq_len, squares)
    assert job.mfu_percent == pytest.approx(100 * operations / job.step_seconds / 8 / (peak * 1e12))
    assert job.tokens_per_second == pytest.approx(t.global_batch_size * t.seq_len / job.step_seconds)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["parallel.tp=2", "precision.fp8=delayed"],
        ["parallel.layers_per_stage=[1,2,3,2]", "train.recompute=full"],
        ["finetune.kind=lora"],
    ],
)
def test_a_split_backward_on_paper(overrides):
    """The same work but for the gathers that come twice, a smaller bubble, and weight gradients of their own length."""
    whole, split = (
        cli.load([*SMALL, "parallel.pp=4", *overrides, f"parallel.schedule={kind}"]) for kind in ("1f1b", "zb-h1")
    )
    before, after = plan(whole, 8, H100), plan(split, 8, H100)
    step = Step(split, 8, H100)
    assert step.at_least() <= after.step_seconds and after.seconds["bubble"] < before.seconds["bubble"]
    assert (after.step_seconds < before.step_seconds) or "finetune.kind=lora" in overrides
    pieces = 1.01 if "parallel.tp=2" in overrides else 1  # dx of columns, scattered in pieces, reads weights again
    assert before.seconds["gemm"] <= after.seconds["gemm"] <= pieces * before.seconds["gemm"]
    assert before.seconds["deferred"] == 0
    deferred = {}
    for event in after.timeline.events:
        if type(event.action) is BackwardWeight:
            deferred.setdefault(event.rank, event.end - event.start)
    assert deferred == pytest.approx({rank: step.parts[rank][1]["deferred"] for rank in (1, 2, 3)})
    if "finetune.kind=lora" not in overrides:
        assert all(
            0.15 * step.backward[rank] < seconds < 0.55 * step.backward[rank] for rank, seconds in deferred.items()
        )


@pytest.mark.parametrize("name, fp8", [("llama3_8b", "none"), ("llama3_8b", "delayed"), ("gpt3_13b", "none")])
@pytest.mark.parametrize("tp", [1, 4])
def test_what_is_put_off_takes_no_more_than_what_the_forward_left(name, fp8, tp):
    """So a rank holds pp microbatches at most, as the first does in 1F1B; but what was to be recomputed is there."""
    keys = ["parallel.pp=4", f"parallel.tp={tp}", f"precision.fp8={fp8}", "parallel.schedule=zb-h1"]
    memory, light = (
        Memory(recipe(name, *keys, f"train.recompute={recompute}"), 16, gpus_per_node=8)
        for recompute in ("none", "full")
    )
    for stage in range(4):
        assert 0.4 * memory.saved(stage) < memory.deferred(stage) <= memory.saved(stage)
        assert light.deferred(stage) == memory.deferred(stage)
    whole = Memory(recipe(name, *keys[:-1], "train.recompute=none"), 16, gpus_per_node=8)
    held, first = memory.bytes_by_part(1)["activations"], whole.bytes_by_part(0)["activations"]
    assert whole.bytes_by_part(1)["activations"] < held <= first * 1.001


def counted_by_hand(cfg, world) -> dict:
    """Seconds of a step on IDEAL by part, of a layout of one stage: operations and bytes / 1e12, messages / 1e9."""
    m, p, t = cfg.model, cfg.parallel, cfg.train
    llama, fp8 = m.family == "llama", cfg.precision.fp8 != "none"
    dp = world // (p.tp * p.cp)
    microbatches = t.global_batch_size // (t.micro_batch_size * dp)
    tokens = t.seq_len * t.micro_batch_size // p.cp
    rows = tokens // p.tp  # between products, under sequence parallelism
    h, f, d, v = m.hidden_size, m.ffn_hidden_size // p.tp, m.head_width, m.padded_vocab_size // p.tp
    q, kv = m.num_heads * d // p.tp, m.kv_heads * d // p.tp
    inner = (2 if llama else 1) * f  # what the first product of the MLP makes
    matrices = h * (q + 2 * kv) + h * q + h * inner + h * f  # elements

    # bytes; read + written, in bf16 unless it says otherwise
    norms, norms_back = 2 * (2 + 2) * 2 * h * rows, 2 * (3 + 1) * 2 * h * rows
    turned = 2 * 2 * (q + kv) * tokens if llama else 0  # q and k
    side_by_side = 2 * 2 * (q + 2 * kv) * tokens  # dq, dk, dv
    activation, activation_back = 2 * (inner + f) * tokens, 2 * (f + inner + inner) * tokens
    biases = 0 if llama else 2 * f * tokens + 2 * 2 * h * rows
    if m.biased_qkv:
        biases += 2 * (q + 2 * kv) * tokens
    normed = 0
    if m.qk_norm:  # q and k are copied, normed and joined with v; the backward also reads them, and joins dq, dk, dv
        copies, joins = 2 * 2 * (q + kv) * tokens, 2 * 2 * (q + 2 * kv) * tokens
        normed = (copies + 2 * 2 * (q + kv) * tokens + joins) + (copies + 2 * 3 * (q + kv) * tokens + joins)
    pieces = 2 * 2 * h * (tokens + rows) if p.tp > 1 else 0  # two scatters end in a sum
    merges = (p.cp - 1) * 3 * 2 * q * tokens  # of the ring: two outs read, one written
    casts = casts_back = 0
    if fp8:  # reads 2 bytes, writes 1 of rows and 1 of columns; SwiGLU is one pass with its cast
        casts, casts_back = 4 * (2 * h * rows + q * tokens), 4 * (2 * h * rows + (q + 2 * kv) * tokens)
        casts_back += 8 * h * tokens if p.tp > 1 else 0  # columns of what was gathered, in four products
        if llama:
            activation, activation_back = (2 * inner + 2 * f) * tokens, (2 * (f + inner) + 2 * inner) * tokens
        else:
            casts, casts_back = casts + 4 * f * tokens, casts_back + 4 * inner * tokens
    dropped, dropped_back = (2 * 5 * 2 * h * rows, 2 * 2 * 2 * h * rows) if m.hidden_dropout else (0, 0)
    blocks = (
        norms
        + norms_back
        + turned
        + side_by_side
        + activation
        + activation_back
        + biases
        + normed
        + 2 * pieces
        + 2 * merges
        + casts
        + casts_back
        + dropped
        + dropped_back
    )
    if t.recompute == "selective":  # both norms, read and written, and the activation
        blocks += 2 * 2 * 2 * h * rows + 2 * (inner + f) * tokens
    head = 2 * (4 * h * rows + v * tokens) + 2 * (4 * h * rows + 2 * v * tokens)
    gradient = {"fp32": 4, "bf16": 2}[cfg.optimizer.accumulates_in]
    reduced = 4 if dp * p.cp > 1 else gradient
    table = 3 * 2 * h * tokens + 5 * gradient * h * tokens

    pairs = t.micro_batch_size * t.seq_len**2 / 2 / p.cp
    products = 6 * matrices * m.num_layers * tokens + 6 * h * v * tokens
    crossing = 2 * h * tokens * (p.tp - 1) / p.tp  # a message over tp
    # a block's forward has 4 messages, its backward these and both inputs again; the head 1 and 2, the table 1 and 1
    over_tp = crossing * (10 * m.num_layers + 5)
    if fp8:  # gathered as casts: forward 2, backward 2 inputs and 2 dy
        over_tp -= crossing / 2 * 6 * m.num_layers
    hop = 2 * 2 * kv * tokens  # keys and values, to the next rank
    sums = 2 * hop if p.cp > 2 else hop  # float32 beyond two terms
    kernels = 4 * q * pairs / 1e12  # of the forward; the backward takes 2.5 of it
    # Keys and values go round twice; their gradients take every step of the second round, and one more, to come home.
    over_cp = (p.cp - 1) * hop + (p.cp - 1) * hop + p.cp * sums if p.cp > 1 else 0
    vectors = (2 * h if llama else 6 * h + f) + (q + 2 * kv) * m.biased_qkv + 2 * d * m.qk_norm
    tables = v * h * (1 if m.tie_embeddings else 2) + (m.max_positions * h if m.positions == "learned" else 0)
    trained = m.num_layers * (matrices + vectors) + tables + (1 if llama else 2) * h
    shards = dp * p.cp
    cast_weights = 4 * matrices * m.num_layers if fp8 else 0
    gathered, written = 2 * trained, 2 * trained
    if cfg.precision.fp8_params:  # of these weights bytes travel; masters are read, for a maximum too, bytes transposed
        gathered -= matrices * m.num_layers
        written += (1 + 4 * (1 if cfg.precision.fp8 == "delayed" else 2) - 2) * matrices * m.num_layers
        cast_weights = 2 * matrices * m.num_layers
    return {
        "gemm": microbatches * products / 1e12,
        "attention": microbatches * m.num_layers * 3.5 * kernels * (FUSED_ATTENTION if m.attention_dropout else 1),
        "pointwise": microbatches * (m.num_layers * blocks + head + table) / 1e12,
        "tp_exposed": microbatches * over_tp / 1e9,
        "tp_hidden": 0.0,
        "cp_exposed": microbatches * m.num_layers * over_cp / 1e9,
        "cp_hidden": 0.0,
        "pp_exposed": 0.0,
        "bubble": 0.0,
        "dp_exposed": (gradient * trained + gathered) * (shards - 1) / shards / 1e9,
        "dp_hidden": 0.0,
        "stragglers": 0.0,
        "optimizer": (((2 * reduced + 8 + 16) * trained + written) / shards + cast_weights) / 1e12,
    }


@pytest.mark.parametrize(
    "world, overrides",
    [
        (1, []),
        (4, ["parallel.tp=2"]),
        (8, ["parallel.cp=4"]),
        (4, ["parallel.tp=2", "parallel.cp=2"]),
        (1, GPT3),
        (2, [*GPT3, "model.hidden_dropout=0.1"]),
        (1, [*GPT3, "model.attention_dropout=0.1"]),
        (4, [*GPT3, "parallel.tp=2", "precision.fp8=delayed"]),
        (2, ["precision.fp8=delayed"]),
        (2, ["parallel.tp=2", "precision.fp8=delayed"]),
        (2, ["train.recompute=selective"]),
        (2, ["parallel.tp=2", "train.recompute=selective"]),
        (2, [*GPT3, "parallel.tp=2", "model.hidden_dropout=0.1"]),
        (2, ["optimizer.grad_dtype=bf16"]),
        (4, [*GPT3, "parallel.tp=2", "precision.fp8=delayed", "optimizer.grad_dtype=bf16"]),
        (4, ["parallel.tp=2", "precision.fp8=delayed", "precision.fp8_params=true"]),
        (2, [*GPT3, "precision.fp8=current", "precision.fp8_params=true"]),
        (4, [*QWEN, "parallel.tp=2"]),
        (4, [*QWEN, "parallel.cp=2", "precision.fp8=delayed"]),
        (2, [*QWEN, "train.recompute=selective"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_every_part_of_a_step_is_what_a_count_by_hand_gives(world, overrides):
    """A term counted twice in one part would show in no sum of the parts, and in no search."""
    cfg = cli.load([*SMALL, *overrides])
    seconds, counted = plan(cfg, world, IDEAL).seconds, counted_by_hand(cfg, world)
    assert seconds.keys() <= counted.keys()
    for part, value in counted.items():
        assert seconds[part] == pytest.approx(value, rel=1e-9, abs=1e-12), part


def test_which_messages_hide_behind_products():
    """In a node all but the table's two. Between nodes, of a block, the forward's four and the two gathers of dy stand
    alone, and the head's gather."""
    slow = replace(
        IDEAL,
        device=replace(IDEAL.device, gemm_tflops={"bf16": 0.01}),
        fabric=replace(IDEAL.fabric, felt=0, piece_felt=0, network_gb_s=1),
    )
    far = replace(slow, fabric=replace(slow.fabric, gpus_per_node=1, cards_per_node=1))
    cfg = cli.load([*SMALL, "parallel.tp=2"])
    m, t = cfg.model, cfg.train
    message = 2 * m.hidden_size * t.seq_len / 2 / 1e9 * t.global_batch_size
    for machine, exposed in ((slow, 2), (far, 6 * m.num_layers + 3)):
        seconds = plan(cfg, 2, machine).seconds
        assert seconds["tp_exposed"] == pytest.approx(exposed * message)
        assert seconds["tp_hidden"] == pytest.approx((10 * m.num_layers + 5 - exposed) * message)


@pytest.mark.parametrize("tp, software", [(2, "minitron"), (4, "minitron"), (8, "minitron"), (4, "megatron")])
@pytest.mark.parametrize("ratio", [0.25, 1.0, 3.0])
def test_what_pieces_leave_exposed(tp, software, ratio):
    """A whole product of 1 s, and a whole message of `ratio` s, whose parts travel while parts are multiplied.

    With two ranks half of the product needs no copy: what the copy of the other half, ratio / 2, takes beyond 0.5 s is
    waited for. With more ranks the same by a clock of small steps.
    """
    machine = replace(IDEAL, fabric=replace(IDEAL.fabric, felt=0, piece_felt=0), software=SOFTWARE[software])
    work = StageTime(cli.load([*SMALL, f"parallel.tp={tp}"]), machine)
    num_bytes = ratio * 1e9 / work.tokens  # a token
    ranks = [1] * tp if software == "megatron" else [1, *(2**i for i in range(tp.bit_length() - 1))]
    for gather in (True, False):
        parts = Counter()
        work._add_needed(parts, num_bytes, 1.0, gather=gather)
        assert parts["tp_exposed"] + parts["tp_hidden"] == pytest.approx(ratio * (tp - 1) / tp)
        multiplied = copied = 0.0
        for i, count in enumerate(ranks if gather else ranks[::-1]):
            own = i == 0 if gather else i + 1 == len(ranks)
            if gather:  # the copies in a row; a piece is multiplied when it is there
                copied += 0 if own else ratio * count / tp
                multiplied = max(multiplied, copied) + count / tp
            else:
                multiplied += count / tp
                copied = max(copied, multiplied) + (0 if own else ratio * count / tp)
        assert parts["tp_exposed"] == pytest.approx(max(multiplied, copied) - 1)
        if tp == 2:
            assert parts["tp_exposed"] == pytest.approx(max(0, ratio / 2 - 0.5))


def test_each_piece_reads_the_weight():
    machine = replace(IDEAL, device=replace(IDEAL.device, unhidden=1))
    whole, pieces = (machine.product(256, 512, 1024, fp8=False, pieces=n) for n in (1, 3))
    assert (pieces - whole) * 1e12 == pytest.approx(2 * 2 * 512 * 1024)


def test_what_is_hidden_is_felt():
    """Copies in a node by shares of their own, NCCL's collectives by another; a ring's by NCCL's."""
    keys = [*SMALL, "train.global_batch_size=64"]
    for extra, share, part in (
        (["parallel.tp=2"], "piece_felt", "tp"),
        (["parallel.tp=2", "parallel.overlap_grads=false"], "felt", "tp"),
        (["parallel.cp=2"], "felt", "cp"),
        ([], "copy_felt", "dp"),
    ):
        none = replace(H100.fabric, felt=0.0, copy_felt=0.0, piece_felt=0.0)
        if share == "felt" and part == "tp":
            none = replace(none, gpus_per_node=1, cards_per_node=1)
        some = replace(none, **{share: 0.25})
        before, after = (plan(cli.load([*keys, *extra]), 2, replace(H100, fabric=f)).seconds for f in (none, some))
        moved = 0.25 * before[f"{part}_hidden"]
        assert before[f"{part}_hidden"] > 0 and after[f"{part}_hidden"] == pytest.approx(
            0.75 * before[f"{part}_hidden"]
        )
        assert after[f"{part}_exposed"] - before[f"{part}_exposed"] == pytest.approx(moved)


def test_the_slowest_of_many_gpus():
    """The expected largest of n normal numbers, against a million draws; a step waits for it."""
    machine = replace(IDEAL, device=replace(IDEAL.device, spread=0.01))
    draws = np.random.RandomState(0).standard_normal((4000, 128))
    for n in (2, 8, 128):
        assert machine.slowest(n) == pytest.approx(0.01 * draws[:, :n].max(1).mean(), rel=0.05)
    assert machine.slowest(1) == 0 and machine.slowest(16384) == pytest.approx(0.01 * 3.97, rel=0.02)
    cfg = cli.load(SMALL)
    alone, together = plan(cfg, 8, IDEAL), plan(cfg, 8, machine)
    assert together.seconds["stragglers"] == pytest.approx(machine.slowest(8) * alone.timeline.makespan)
    assert together.step_seconds == pytest.approx(alone.step_seconds + together.seconds["stragglers"])


def test_the_host_is_waited_for_only_where_it_launches_every_step():
    machine = replace(IDEAL, device=replace(IDEAL.device, launch_seconds=1.0, gap_seconds=0.0))
    cfg = cli.load([*SMALL, "train.global_batch_size=4"])
    off = replace(cfg, train=replace(cfg.train, cuda_graph="off"))
    recorded, eager, by_name = (
        plan(cfg, 1, machine),
        plan(off, 1, machine),
        plan(cfg, 1, replace(machine, software=SOFTWARE["minitron-eager"])),
    )
    assert recorded.seconds["host"] == 0 and eager.seconds == by_name.seconds
    # 50 launches a block, of a second each, but for what its kernels take anyway; not those of the model's ends.
    work = StageTime(cfg, machine)
    busy = sum(total(parts) for parts in work.block(False))
    assert eager.seconds["host"] == pytest.approx(4 * cfg.model.num_layers * (50 - busy))
    fast = replace(machine, device=replace(machine.device, launch_seconds=1e-9))
    assert plan(off, 1, fast).seconds["host"] == 0


def test_megatron_moves_more_and_recomputes_attention():
    """Of each block: sums apart from norms, forward 2 h and backward 4 h; rotary positions copied once more."""
    ours, theirs = (
        StageTime(cli.load([*SMALL, "train.recompute=selective"]), replace(IDEAL, software=SOFTWARE[name]))
        for name in ("minitron", "megatron")
    )
    plain = StageTime(cli.load(SMALL), IDEAL)
    m, tokens = plain.model, plain.tokens
    (forward, backward), (megatrons, megatrons_back) = plain.block(False), theirs.block(False)
    q, kv = m.num_heads * m.head_width, m.kv_heads * m.head_width
    assert (megatrons["pointwise"] - forward["pointwise"]) * 1e12 == pytest.approx(2 * 2 * m.hidden_size * tokens)
    assert (megatrons_back["pointwise"] - backward["pointwise"]) * 1e12 == pytest.approx(
        (4 * 2 * m.hidden_size + 2 * 2 * (q + kv)) * tokens
    )
    assert megatrons_back["attention"] == pytest.approx(backward["attention"] + forward["attention"])
    assert ours.block(False)[1]["attention"] == backward["attention"]


@pytest.mark.parametrize("software, item, passes, back", [("minitron", 4, 6, 10), ("megatron", 2, 4, 6)])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_unfused_attention_writes_its_scores(software, item, passes, back, dropout):
    """Two products of whole matrices forward, four backward, and passes over every score."""
    keys = [*SMALL, "model.attention=reference", f"model.attention_dropout={dropout}"]
    work = StageTime(cli.load(keys), replace(IDEAL, software=SOFTWARE[software]))
    m, s = work.model, work.cfg.train.seq_len
    product, scores = 2 * m.num_heads * s * s * m.head_width, item * m.num_heads * s * s
    more = 2 if dropout else 0
    forward, backward = work.block(False)
    assert forward["attention"] * 1e12 == pytest.approx(2 * product + (passes + more) * scores)
    assert backward["attention"] * 1e12 == pytest.approx(4 * product + (back + more) * scores)


def test_nodes_with_fewer_cards_share_them():
    few = replace(H100, fabric=replace(H100.fabric, cards_per_node=4))
    rate = H100.fabric.network_gb_s
    assert (H100.network_gb_s, few.network_gb_s) == (rate, rate / 2)
    assert replace(H100, fabric=replace(H100.fabric, cards_per_node=16)).network_gb_s == rate  # a GPU alone has one
    assert few.message(2**30, 2, 8) == pytest.approx(2**30 / (rate / 2 * 1e9) + few.fabric.network_seconds)
    latency = 4 * few.fabric.nvlink_seconds + 3 * few.fabric.network_seconds  # two ranks in each of four nodes
    assert few.collective(2**30, 8, 4) == pytest.approx(2**30 * 7 / 8 / (rate * 1e9) + latency)


def test_rings_share_what_leads_out_of_a_pod():
    """Pods of 64 GPUs whose uplinks take a quarter of what their cards send, 16 cards' worth."""
    f = replace(H100.fabric, gpus_per_pod=64, uplinks=0.25)
    pods, card = replace(H100, fabric=f), f.network_gb_s * 1e9

    def bus(ranks, stride):
        latency = (ranks - 1) * f.network_seconds
        return 2**30 * (ranks - 1) / ranks / (pods.collective(2**30, ranks, stride) - latency) / card

    # 8 rings of stride 8 have 8 ranks each in a pod: each gets 2 cards' worth, and needs one.
    assert bus(16, 8) == pytest.approx(1)
    # 16 rings of stride 16, of 4 ranks a pod: one each. 32 of 2 ranks: half. 64, and more, of one rank: a quarter.
    assert [bus(8, stride) for stride in (16, 32, 64, 128)] == pytest.approx([1, 0.5, 0.25, 0.25])
    assert bus(2, 32) == pytest.approx(1)  # that ring is inside of a pod
    # Of a pod's 64 GPUs the last 16, or 32, or all, send their message to the next pod.
    times = [pods.message(2**30, 8, stride) - f.network_seconds for stride in (16, 32, 64)]
    assert [2**30 / seconds / card for seconds in times] == pytest.approx([1, 0.5, 0.25])


def test_what_stages_wait_for_is_the_bubble_and_their_messages():
    cfg = cli.load([*SMALL, "parallel.pp=2", "parallel.layers_per_stage=[3,5]"])
    step, seconds = Step(cfg, 2, IDEAL), plan(cfg, 2, IDEAL).seconds
    work = [step.work.stage(range(3), True, False), step.work.stage(range(3, 8), False, True)]
    times = [[total(pair[i]) for pair in work] for i in (0, 1)]
    schedule = make(2, 1, cfg.train.global_batch_size)
    message = 2 * cfg.model.hidden_size * cfg.train.seq_len / 1e9
    alone, together = (simulate(schedule, *times, x).makespan for x in (0.0, message))
    assert seconds["pp_exposed"] == pytest.approx(together - alone) and together > alone
    assert seconds["bubble"] == pytest.approx(alone - cfg.train.global_batch_size * (times[0][1] + times[1][1]))


def test_a_message_between_stages_is_one_hidden_vector_a_token():
    """Counted by hand, in its two places: a step of two stages and one microbatch has two on its way, one after
    another."""
    cfg = cli.load([*SMALL, "parallel.pp=2", "parallel.layers_per_stage=[4,4]", "train.global_batch_size=1"])
    message = 2 * cfg.model.hidden_size * cfg.train.seq_len / 1e9
    assert Step(cfg, 2, IDEAL).transfer_seconds == pytest.approx(message)
    assert plan(cfg, 2, IDEAL).seconds["pp_exposed"] == pytest.approx(2 * message)


@pytest.mark.parametrize("cp, item", [(2, 2), (4, 4)])
def test_the_ring_moves_keys_values_and_their_gradients(cp, item):
    """cp - 1 hops of keys and values in each pass, and cp of the sums of their gradients, float32 beyond two terms."""
    work = StageTime(cli.load([*SMALL, f"parallel.cp={cp}"]), IDEAL)
    kv = 2 * work.model.kv_heads * work.model.head_width * work.tokens  # elements
    forward, backward = work.block(False)
    assert forward["cp_exposed"] * 1e9 == pytest.approx((cp - 1) * 2 * kv)
    assert backward["cp_exposed"] * 1e9 == pytest.approx((cp - 1) * 2 * kv + cp * item * kv)


def test_the_bubble_of_equal_stages_is_the_one_of_the_theory():
    """With nothing but blocks: the ends of the model would make stages unequal."""
    cfg = cli.load([*SMALL, "parallel.pp=4", "parallel.vp=2"])
    step = Step(cfg, 4, IDEAL)
    step.parts = [step.work.stage(layers, False, False) for layers in step.memory.layers]
    step.forward, step.backward = ([total(pair[i]) for pair in step.parts] for i in (0, 1))
    assert step.timeline(0.0).bubble == pytest.approx((4 - 1) / (2 * step.microbatches))


def test_gradients_hide_behind_the_backward_unless_told_otherwise():
    cfg = cli.load([*SMALL, "train.global_batch_size=64"])
    hidden, alone = (
        plan(replace(cfg, parallel=replace(cfg.parallel, overlap_grads=overlap)), 16, H100) for overlap in (True, False)
    )
    both = hidden.seconds["dp_hidden"] + hidden.seconds["dp_exposed"]
    assert alone.seconds["dp_exposed"] == pytest.approx(both) and not alone.seconds["dp_hidden"]
    assert hidden.step_seconds < alone.step_seconds


def test_devices_that_cannot():
    a100 = Machine(DEVICES["a100"], FABRICS["hdr200"])
    for value, other in (("fp8=delayed", "fp8=none"), ("dtype=fp32", "dtype=bf16")):
        message = f"precision.{value} has no rate in the table of A100; use precision.{other}"
        with pytest.raises(ValueError, match=message):
            plan(cli.load([*SMALL, f"precision.{value}"]), 8, a100)
    unknown = replace(H100, device=replace(H100.device, gpu="RTX 9000"))
    assert plan(cli.load(SMALL), 8, unknown).mfu_percent is None


def test_a_table_s_names_may_have_capitals(tmp_path):
    path = tmp_path / "devices.json"
    path.write_text(
        json.dumps({"devices": {"My-H100": vars(DEVICES["h100"])}, "fabrics": {"Mine": vars(FABRICS["ndr400"])}})
    )
    for names in ("my-h100", "mine"), ("My-H100", "MINE"):
        chosen = choose_machine(*names, path=path)
        assert (chosen.device, chosen.fabric) == (DEVICES["h100"], FABRICS["ndr400"])


def test_a_broken_table_of_devices_is_one_line(tmp_path):
    path = tmp_path / "devices.json"
    h100 = vars(DEVICES["h100"])
    wrong = (
        {"gemm_tflops": 820},
        {"gemm_tflops": {"fp8": 1600}},
        {"weight_grad": {"bf16": 1}},
        {"copy_tb_s": 0},
        {"memory_gib": None},
        {"half_keys": -1},
    )
    tables = [
        {},
        {"devices": [], "fabrics": {}},
        {"devices": {"x": {"gpu": "H100"}}, "fabrics": {}},
        *({"devices": {"x": h100 | values}, "fabrics": {}} for values in wrong),
    ]
    for text in ("{", *map(json.dumps, tables)):
        path.write_text(text)
        with pytest.raises(
            ValueError, match="devices.json is not a table of devices .*; it needs `devices` with gpu, "
        ):
            read_machines(path)
    path.write_text(json.dumps({"devices": {"x": h100 | {"reserved_gib": 3.0}}, "fabrics": {}}))
    with pytest.raises(ValueError, match="reserved_gib has become context_gib, without NCCL's memory: write 0.5"):
        read_machines(path)
    with pytest.raises(ValueError, match="is not a table of devices"):
        read_machines(tmp_path / "none.json")


def test_constants_not_measured_are_scaled_as_their_source_says():
    """Of the H100 by its kernels beside the H200's; its copies are measured. Of the A100 by what others measured."""
    h200, h100 = DEVICES["h200"], DEVICES["h100"]
    for name, products, attention in (
        ("h100", 1.02, 0.975),
        ("a100", 267.9 / 792.1, 312 / 989),
        ("a100-40gb", 267.9 / 792.1, 312 / 989),
    ):
        device = DEVICES[name]
        assert device.gemm_tflops["bf16"] == pytest.approx(h200.gemm_tflops["bf16"] * products, rel=0.005)
        assert device.attention_tflops == pytest.approx(h200.attention_tflops * attention, rel=0.005)
        assert (device.unhidden, device.pointwise, device.in_step, device.half_keys, device.spread) == (
            h200.unhidden,
            h200.pointwise,
            h200.in_step,
            h200.half_keys,
            h200.spread,
        )
    assert h100.gemm_tflops["fp8"] == pytest.approx(h200.gemm_tflops["fp8"] * 1.03, rel=0.005)
    assert (h100.flash_tflops, h100.flash_half_keys) == (
        pytest.approx(h200.flash_tflops * 0.99, rel=0.005),
        h200.flash_half_keys,
    )
    for name, memory in ("a100", 2.0), ("a100-40gb", 1.555):
        device = DEVICES[name]
        assert device.copy_tb_s == pytest.approx(h200.copy_tb_s * memory / 4.8, rel=0.005)
        # On the A100 flash attention 2 is as fast as cuDNN's kernels.
        assert (device.flash_tflops, device.flash_half_keys) == (device.attention_tflops, device.half_keys)
    assert FABRICS["hdr200"].copy_gb_s == pytest.approx(FABRICS["ndr400"].copy_gb_s * 300 / 450, rel=0.005)
    assert FABRICS["hdr200"].nvlink_gb_s == pytest.approx(FABRICS["ndr400"].nvlink_gb_s * 300 / 450, rel=0.005)


# ---- the search ------------------------------------------------------------------------------------------------------


def layouts(cfg, world, machine):
    """All layouts that a search can reach, the given one first, without recomputation."""
    given = replace(cfg, train=replace(cfg.train, recompute="none"))
    yield given
    for family in search_module.families(cfg, world, machine):
        members = search_module.Family(family, world, machine).pipelines()
        yield from (member for member in members if member != search_module.listed(given))


def everything(cfg, world, machine):
    """Every plan that fits: the search's plain twin.

    A layout takes the first recomputation that fits, and more as long as its steps stay eager.
    """
    for layout in layouts(cfg, world, machine):
        try:
            rules.check(layout, world)
        except ValueError:
            continue
        plans = (
            plan(replace(layout, train=replace(layout.train, recompute=recompute)), world, machine)
            for recompute in RECOMPUTE
        )
        for fitting in (job for job in plans if job.fits):
            yield fitting
            if not fitting.stays_eager:
                break


@pytest.mark.sampled(4, "2.4-none")
@pytest.mark.parametrize("memory_gib, recompute", [(8.0, "none"), (2.4, "none"), (2.0, "none"), (8.0, "full")])
def test_the_search_finds_what_trying_everything_finds(memory_gib, recompute):
    """Also from a configuration that recomputes more than it needs to: the search never tried less than that."""
    cfg = cli.load([*SMALL, f"train.recompute={recompute}"])
    machine = replace(H100, device=replace(H100.device, memory_gib=memory_gib + OUTSIDE_GIB))
    found, every = search(cfg, 8, machine, count=3, smaller=False), list(everything(cfg, 8, machine))
    fastest = sorted(job.step_seconds for job in every)[:3]
    assert [job.step_seconds for job in found.best] == pytest.approx(fastest)
    fitting = {repr(job.cfg) for job in every}
    assert all(repr(cfg) in fitting for cfg, _ in found.others)
    known = {repr(job.cfg): job.step_seconds for job in every}
    assert all(seconds <= known[repr(cfg)] * (1 + 1e-9) for cfg, seconds in found.others)
    best = {repr(replace(one.cfg, train=replace(one.cfg.train, recompute="none"))) for one in found.best}
    looked_at = len(best) + len(found.others) + sum(found.reasons.values())
    assert looked_at == sum(1 for _ in layouts(cfg, 8, machine))
    assert any("rule" in reason for reason in found.reasons)
    assert any("too large" in reason for reason in found.reasons) == (memory_gib < 8)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("memory_gib", [8.0, 2.4])
def test_what_less_memory_costs_is_what_trying_everything_finds(memory_gib):
    """Each is the fastest that fits into nine tenths of the one before, of all layouts and all they may recompute."""
    cfg, machine = cli.load(SMALL), replace(H100, device=replace(H100.device, memory_gib=memory_gib + OUTSIDE_GIB))
    found = search(cfg, 8, machine, count=1).smaller
    assert found[0].step_seconds == search(cfg, 8, machine, count=1, smaller=False).best[0].step_seconds
    every = []
    for layout in layouts(cfg, 8, machine):
        for recompute in RECOMPUTE:
            tried = replace(layout, train=replace(layout.train, recompute=recompute))
            try:
                rules.check(tried, 8)
            except ValueError:
                continue
            if (job := plan(tried, 8, machine)).fits:
                every.append(job)
    assert len(found) > 1
    for one, less in zip(found, found[1:]):
        assert one.step_seconds < less.step_seconds and less.memory_gib < search_module.MEMORY_STEP * one.memory_gib
        fastest = min(j.step_seconds for j in every if j.memory_gib < search_module.MEMORY_STEP * one.memory_gib)
        assert less.step_seconds <= fastest * search_module.BOUND_SLACK


def test_uneven_stages_are_found_where_layers_do_not_divide():
    """Of 126 layers, the hand-written stages, which have a layer less beside the embedding and the head."""
    cfg = recipe("llama31_405b", "train.global_batch_size=512")
    given = cfg.parallel.layers_per_stage
    assert given in search_module.divisions(126, cfg.parallel.pp, cfg.parallel.vp, 0.1, 0.7)
    plain = replace(cfg, parallel=replace(cfg.parallel, layers_per_stage=None))
    family = search_module.Family(plain, 512, H100)
    assert any(member.parallel.layers_per_stage == given for member in family.pipelines())


@pytest.mark.slow
def test_chunks_are_tried_where_a_rank_lacks_a_layer():
    """Llama 3.1 70B on 64 GPUs: 80 layers on 44 stages are 0.4 % faster than any equal ones."""
    cfg = recipe("llama31_70b", "train.global_batch_size=128")
    best = search(cfg, 64, H100, count=1, smaller=False).best[0]
    p = cfg.parallel
    every = []
    for vp in range(1, 80 // p.pp + 1):
        parallel = replace(best.cfg.parallel, tp=p.tp, pp=p.pp, cp=1, vp=vp, schedule="1f1b", layers_per_stage=None)
        every.append(plan(replace(best.cfg, parallel=parallel), 64, H100))
    assert best.step_seconds <= min(job.step_seconds for job in every if job.fits) * (1 + 1e-9)


@pytest.mark.parametrize(
    "num_layers, pp, vp, first, last", [(7, 3, 1, 0.2, 1.5), (9, 2, 2, 0.1, 1.2), (10, 4, 2, 0.0, 0.7)]
)
def test_level_stages_leave_the_slowest_rank_as_little_as_any_stages(num_layers, pp, vp, first, last):
    def most(counts):
        loads = [sum(counts[rank::pp]) for rank in range(pp)]
        return max(load + first * (rank == 0) + last * (rank == pp - 1) for rank, load in enumerate(loads))

    ways = (c for c in itertools.product(range(1, num_layers), repeat=pp * vp) if sum(c) == num_layers)
    tried = search_module.divisions(num_layers, pp, vp, first, last)
    assert min(most(c) for c in tried if c is not None) == pytest.approx(min(map(most, ways)))


def test_stages_written_out_as_the_default_has_them_are_one_layout():
    """They were listed twice, once as given and once as null."""
    cfg = cli.load([*SMALL, "parallel.pp=4", "parallel.layers_per_stage=[2,2,2,2]"])
    found = search(cfg, 8, H100, count=1000)
    planned = [*(job.cfg for job in found.best), *(cfg for cfg, _ in found.others)]
    default = replace(cfg, parallel=replace(cfg.parallel, layers_per_stage=None))
    assert cfg in planned and default not in planned
    assert sum(1 for _ in layouts(cfg, 8, H100)) == sum(1 for _ in layouts(default, 8, H100))


def test_layouts_left_out_as_alike_differ_in_nothing_that_is_planned():
    """With count beyond all layouts, each schedule is planned with each tp that fits."""
    found = search(cli.load(SMALL), 8, H100, count=1000)
    planned = {(job.cfg.parallel.schedule, job.cfg.parallel.tp) for job in found.best}
    assert planned >= set(itertools.product(("1f1b", "zb-h1"), (1, 2, 4)))
    jobs = [(job.cfg.parallel, job.cfg.train, job.step_seconds, job.memory_gib) for job in found.best]
    alike = Counter(repr((replace(parallel, cp_style="ring"), *same)) for parallel, *same in jobs)
    assert set(alike.values()) == {1} and found.reasons["planned as another parallel.cp_style"] > 0


@pytest.mark.parametrize("num_layers, pp, found", [(8, 2, [1, 2, 3, 4]), (126, 8, [1, 2, 4, 8]), (7, 3, [1, 2]),
                                                   (80, 4, [1, 2, 3, 4, 5, 7, 10, 11, 20])])  # fmt: skip
def test_the_chunks_that_are_tried(num_layers, pp, found):
    """Numbers of layers are tried whose stages would be equal with at most two layers more on each rank."""
    assert search_module._interleaved(num_layers, pp) == found


@pytest.mark.parametrize(
    "sizes, found",
    [
        ((9, 1, 1, 0.1, 1.0), []),
        ((10, 2, 1, 0.0, 0.0), [(4, 6)]),  # one less than the default's on the first rank
        ((16, 4, 1, 0.1, 0.9), [(3, 4, 5, 4)]),  # of equal ranks a later one has more
        ((10, 4, 1, 0.1, 1.2), [(3, 3, 3, 1)]),
        ((12, 2, 2, 0.5, 1.5), [(3, 4, 3, 2), (2, 4, 4, 2)]),
    ],
)
def test_the_stages_that_are_tried(sizes, found):
    assert search_module.divisions(*sizes) == [None, *found]


@pytest.mark.parametrize("layers", [1, 8])
def test_the_families_of_a_world(layers):
    """Each once: ranks of up to two nodes, and of up to 64 parts of a sequence; what one rank cannot differ in is kept.

    The given values are tried, too, and first.
    """
    keys = [f"model.num_layers={layers}", "parallel.cp_style=allgather", "parallel.sequence_parallel=false"]
    cfg = cli.load([*SMALL, *keys, "parallel.tp=2", "train.micro_batch_size=3", "train.recompute=full"])
    world = 128
    machine = replace(H100, fabric=replace(H100.fabric, gpus_per_node=2))
    found = list(search_module.families(cfg, world, machine))
    expected = Counter()
    for tp, cp, size in itertools.product((1, 2, 4), (1, 2, 4, 8, 16, 32, 64), (1, 2, 3, 4, 8)):
        for style, split in itertools.product(("ring", "allgather", "ulysses"), (True, False)):
            if tp * cp <= world and (cp > 1 or style == "allgather") and (tp > 1 or not split):
                kinds = ["1f1b", "zb-h1"] if layers > 1 and tp * cp < world else ["1f1b"]
                expected.update((tp, cp, style, split, kind, size) for kind in kinds)
    assert Counter((p.tp, p.cp, p.cp_style, p.sequence_parallel, p.schedule, t.micro_batch_size)
                   for p, t in ((one.parallel, one.train) for one in found)) == expected  # fmt: skip
    assert (found[0].parallel.tp, found[0].parallel.cp_style, found[0].train.micro_batch_size) == (1, "allgather", 3)
    for one in found:
        parallel = dict(tp=one.parallel.tp, cp=one.parallel.cp, cp_style=one.parallel.cp_style, pp=1, vp=1)
        parallel |= dict(sequence_parallel=one.parallel.sequence_parallel, schedule=one.parallel.schedule)
        train = dict(micro_batch_size=one.train.micro_batch_size, recompute="none")
        assert one == schema.changed(cfg, parallel=parallel, train=train)


def test_what_a_family_costs_in_two_formats():
    """The first and the last of four layers are in bf16."""
    keys = ["model.num_layers=4", "precision.fp8=delayed", "precision.fp8_bf16_layers=1"]
    family = search_module.Family(cli.load([*SMALL, *keys]), 1, H100)
    (f, b), (g, c) = (family_work.block(fp8) for family_work in [StageTime(family.cfg, H100)] for fp8 in (False, True))
    wide, narrow = total(f) + total(b), total(g) + total(c)
    costs = family.costs("none")
    assert costs.layers == pytest.approx([0, wide, wide + narrow, wide + 2 * narrow, 2 * wide + 2 * narrow])
    assert (costs.least, costs.most) == tuple(sorted((total(f) / wide, total(g) / narrow)))


@pytest.mark.parametrize("kind", ["1f1b", "zb-h1"])
def test_what_a_family_costs_and_its_pipelines(kind):
    """A block as it is computed at least, with its backward whole or split; pp are all that ranks and layers allow."""
    cfg = cli.load([*SMALL, "model.num_layers=4", "parallel.tp=2", "parallel.pp=2", f"parallel.schedule={kind}"])
    family, splits = search_module.Family(cfg, 8, H100), (False, True) if kind == "zb-h1" else (False,)
    for recompute in RECOMPUTE:
        work = StageTime(replace(cfg, train=replace(cfg.train, recompute=recompute)), H100)
        blocks = [work.block(False, split) for split in splits]
        costs, both = family.costs(recompute), [total(f) + total(b) for f, b in blocks]
        assert costs.layers == pytest.approx([n * min(both) for n in range(5)])
        assert costs.embedding == pytest.approx(sum(map(total, work.embedding())))
        assert costs.head == pytest.approx(min(sum(map(total, work.head(split))) for split in splits))
        shares = [total(f) / x for (f, _), x in zip(blocks, both)]
        assert (costs.least, costs.most) == (min(shares), max(shares))
        assert costs.deferred == max(b["deferred"] / x for (_, b), x in zip(blocks, both))
    assert {member.parallel.pp for member in family.pipelines()} == ({2, 4} if kind == "zb-h1" else {1, 2, 4})


@pytest.mark.parametrize("count, smaller, limit", [(1, False, 2), (3, False, 4), (1, True, 2.1), (3, True, 4)])
def test_no_layout_beyond_the_last_one_shown_is_planned(count, smaller, limit):
    searched = search_module._Search(cli.load(SMALL), 8, H100, count, smaller, search_module.tqdm(disable=True))
    searched.fastest = [search_module.Candidate(seconds, None, None) for seconds in (2, 3, 4, 5)]
    assert searched.limit == pytest.approx(limit)
    searched.count = 5
    assert searched.limit == float("inf")


def test_a_reason_names_the_whole_rule():
    cfg = cli.load([*SMALL, "model.hidden_size=32", "model.num_kv_heads=2", "precision.fp8=delayed"])
    reasons = search(cfg, 2, H100, count=40).reasons
    assert "breaks a rule of the rows of the q, k, v matrix / tp" in reasons


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_the_bound_is_never_above_the_step(data):
    tp, cp, pp = (data.draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    vp = data.draw(st.sampled_from([1, 2])) if pp > 1 else 1
    keys = [f"parallel.{name}={value}" for name, value in (("tp", tp), ("cp", cp), ("pp", pp), ("vp", vp))]
    if pp > 1 and vp == 1:
        keys.append(f"parallel.schedule={data.draw(st.sampled_from(['1f1b', 'zb-h1']))}")
    cfg, world = cli.load([*SMALL, *keys, f"train.global_batch_size={2 * data.draw(st.integers(1, 9))}"]), tp * cp * pp
    step = plan(cfg, world, H100).step_seconds * (1 + 1e-9)
    assert Step(cfg, world, H100).at_least() <= step
    quick, family = Step(cfg, world, H100), search_module.Family(cfg, world, H100)
    assert quick.whole_seconds(quick.timeline(quick.transfer_seconds)) == pytest.approx(step)
    assert quick.at_least() + quick.exposed_at_least() <= step
    assert family.member_at_least(cfg) + quick.update_seconds(quick.slowest) + quick.exposed_at_least() <= step
    assert family.at_least() <= family.member_at_least(cfg) * (1 + 1e-9) and family.member_at_least(cfg) <= step


@pytest.mark.slow
@pytest.mark.parametrize("name, world", [pytest.param("gpt3_175b", 128, marks=pytest.mark.slow), ("llama31_70b", 64)])
def test_the_search_is_at_least_as_fast_as_the_published_layout(name, world):
    cfg = recipe(name, f"train.global_batch_size={2 * world}")
    given_plan, found = plan(cfg, world, H100), search(cfg, world, H100, count=1)
    assert given_plan.fits and found.best[0].fits
    assert found.best[0].step_seconds <= given_plan.step_seconds


# ---- a job that does not fit -----------------------------------------------------------------------------------------


def followed(cfg, text):
    """The (configuration, number of GPUs or None) that a remedy asks for."""
    words = text.split("; use ")[1].split()
    gpus = int(words[0]) if words[1:2] == ["GPUs"] else None
    return cli.load([*cfg, *(word for word in words if "=" in word)]), gpus


@pytest.mark.parametrize("memory_gib, number", [(2.5, 1), (0.9, 2)])
def test_the_remedy_fits_and_nothing_nearer_or_faster_does(monkeypatch, memory_gib, number):
    """The fastest: by the least seconds that a step of it can take."""
    arguments = [*SMALL, "train.micro_batch_size=2"]
    monkeypatch.setattr(Memory, "communicators", lambda self: 0)  # nearly all of so small a GPU
    machine = replace(H100, device=replace(H100.device, memory_gib=memory_gib + 0.5))
    job = plan(cli.load(arguments), 8, machine)
    assert not job.fits
    text = nearest_fit(job, job.cfg)
    assert f"{job.memory_gib:.1f} GiB do not fit into the {memory_gib:.1f} GiB that H100 leaves" in text
    part, size = job.memory.most_common(1)[0]
    assert f"the largest part is {part}, {size / 2**30:.1f} GiB" in text
    cfg, gpus = followed(arguments, text)
    assert gpus is None and plan(cfg, 8, machine).fits
    changed = len(changes(job.cfg, cfg))
    assert changed == number
    fitting = [(len(changes(job.cfg, other.cfg)), other) for other in everything(job.cfg, 8, machine)]
    assert min(distance for distance, _ in fitting) == changed

    def least_seconds(found):
        timed = schema.changed(found.cfg, train=dict(cuda_graph="off")) if found.stays_eager else found.cfg
        return Step(timed, 8, machine).at_least()

    as_near = [least_seconds(other) for distance, other in fitting if distance == changed]
    assert len(as_near) > 1 and least_seconds(plan(cfg, 8, machine)) <= min(as_near)


@pytest.mark.parametrize("kind, layers", [("1f1b", 6), ("zb-h1", 6), ("1f1b", 4)])
def test_the_layouts_that_a_remedy_is_chosen_from(kind, layers):
    """All that keep the rules, of stages that are equal or a rank's only one; the configuration's own is the first."""
    keys = [
        f"model.num_layers={layers}",
        "parallel.pp=2",
        f"parallel.layers_per_stage=[{layers - 1},1]",
        f"parallel.schedule={kind}",
    ]
    cfg, sizes = cli.load([*SMALL, *keys]), (1, 2, 4, 8)
    found, expected = list(fit_module.plain_layouts(cfg, 8, H100)), [repr(cfg)]
    for tp, cp, pp, vp, size in itertools.product(sizes, sizes, range(1, 7), range(1, 7), sizes):
        schedule = kind if pp > 1 and vp == 1 else "1f1b"
        parallel = replace(cfg.parallel, tp=tp, cp=cp, pp=pp, vp=vp, schedule=schedule, layers_per_stage=None)
        layout = replace(cfg, parallel=parallel, train=replace(cfg.train, micro_batch_size=size))
        if (vp == 1 or layers % (pp * vp) == 0) and (pp > 1 or vp == 1) and fit_module.keeps_rules(layout, 8):
            expected.append(repr(layout))
    kept = [repr(layout) for layout in found if fit_module.keeps_rules(layout, 8)]
    assert found[0] == cfg and sorted(kept) == sorted(expected) and len(expected) > 20


def test_a_key_that_breaks_a_rule_is_no_remedy():
    """2,046 positions cannot be divided among four ranks, though that would need less memory."""
    keys = ["train.seq_len=2046", "parallel.tp=4", "parallel.sequence_parallel=false"]
    found = fit_module.memory_options(plan(cli.load([*SMALL, *keys]), 4, H100))
    assert found
    for remedy, option in found:
        rules.check(cli.load([*SMALL, *keys, *remedy]), 4)
        assert option.memory_gib < plan(cli.load([*SMALL, *keys]), 4, H100).memory_gib


def test_what_is_to_be_changed_is_written_as_the_command_line_takes_it():
    """Uneven stages are given up by null, which Python calls None."""
    uneven = [*SMALL, "parallel.pp=2", "parallel.layers_per_stage=[7,1]"]
    machine = replace(H100, device=replace(H100.device, memory_gib=4.0))
    job = plan(cli.load(uneven), 8, machine)
    text = nearest_fit(job, job.cfg)
    assert not job.fits and " parallel.layers_per_stage=null" in text
    assert plan(followed(uneven, text)[0], 8, machine).fits


@pytest.mark.slow
def test_the_remedy_takes_more_gpus_where_it_has_to(monkeypatch):
    arguments = [*SMALL, "train.global_batch_size=256"]
    monkeypatch.setattr(Memory, "communicators", lambda self: 0)  # more than this model on all GPUs
    machine = replace(H100, device=replace(H100.device, memory_gib=1.05))
    job = plan(cli.load(arguments), 1, machine)
    cfg, gpus = followed(arguments, nearest_fit(job, job.cfg))
    assert gpus > 1 and plan(cfg, gpus, machine).fits
    assert not list(everything(job.cfg, gpus // 2, machine))
    tiny = replace(H100, device=replace(H100.device, memory_gib=0.501))
    with monkeypatch.context() as patch:
        patch.setattr(fit_module, "MICRO_BATCHES", (1,))
        job = plan(cli.load(SMALL), 1, tiny)
        assert "GPUs fits either: use a smaller model, or another device" in nearest_fit(job, job.cfg)
    assert job.room_gib == pytest.approx(0.001)
