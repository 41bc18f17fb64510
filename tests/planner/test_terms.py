"""What each term of a plan is worth, where a mistake would hide in larger ones: by hand, on a GPU without any loss."""

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_planner import GPT3, IDEAL, ROOT, SMALL

from minitron.comm.mesh import Mesh
from minitron.config import cli
from minitron.config.sizes import bucket_limit
from minitron.planner.machine import SOFTWARE
from minitron.planner.memory import COLLECTIVE_BYTES, GROUP_BYTES, NCCL_BYTES, PEER_BYTES, Memory, data_levels
from minitron.planner.plan import Step, no_room_for_graphs, plan
from minitron.planner.work import PACKED_KEYS, SHARES, StageTime, total
from minitron.train import build

FP8 = "precision.fp8=delayed"
LORA = ["finetune.kind=lora", "lora.targets=[q,down]"]
MEGATRON = replace(IDEAL, software=SOFTWARE["megatron"])


def with_device(**values):
    return replace(IDEAL, device=replace(IDEAL.device, **values))


def block(keys, machine=IDEAL, fp8=False):
    """Both passes of a block together."""
    forward, backward = StageTime(cli.load([*SMALL, *keys]), machine).block(fp8)
    return forward + backward


def test_attention_by_keys_and_head_dims():
    half = with_device(half_keys=1000)
    assert half.attention(1e12, 1000, 128) == pytest.approx(2) and half.attention(1e12, 4000, 64) == pytest.approx(1.25)
    # 96 channels cost what 128 do, 130 what 256 do; beyond that there is no kernel that pads.
    assert [IDEAL.attention(1e12, 1, d) for d in (96, 130, 512)] == pytest.approx([128 / 96, 256 / 130, 1])
    slow = with_device(in_step=0.5)
    assert slow.attention(1e12, 1, 128) == pytest.approx(2)


@pytest.mark.parametrize("kernel, seconds", [("auto", 1), ("cudnn", 1), ("flash", 3), ("flash-attn", 3)])
def test_attention_is_that_of_the_kernel_named(kernel, seconds):
    """Flash attention 2 at half the rate, of which 2,048 keys reach two thirds."""
    machine, keys = with_device(flash_tflops=0.5, flash_half_keys=1024), [f"model.attention={kernel}"]
    assert block(keys, machine)["attention"] == pytest.approx(seconds * block([])["attention"])


def test_packed_documents_take_what_flash_attention_takes_for_longer_ones():
    """But where another kernel is named; around a ring they are flash attention's."""
    flash, packed = {"flash_tflops": 0.5}, ["data.separate_documents=true"]
    plain = block(packed)["attention"]
    assert block(packed, with_device(**flash))["attention"] == pytest.approx(2 * plain)
    assert block([*packed, "model.attention=fused"], with_device(**flash))["attention"] == pytest.approx(2 * plain)
    assert block([*packed, "model.attention=cudnn"], with_device(**flash))["attention"] == pytest.approx(plain)
    slow = with_device(flash_half_keys=1e6)  # the rate is that of the keys
    assert block([*packed, "model.attention=flash"], slow)["attention"] == pytest.approx(
        PACKED_KEYS * block(packed, slow)["attention"], rel=0.01
    )
    assert block(["data.source=sft"], slow)["attention"] == block(packed, slow)["attention"]  # chats are documents
    ring = [*packed, "parallel.cp=2"]
    assert block(ring, slow)["attention"] == block([*ring, "model.attention=flash"], slow)["attention"]
    dropped = [*packed, "model.attention_dropout=0.1"]
    assert block(dropped, with_device(**flash))["attention"] == block(dropped)["attention"]
    theirs = replace(MEGATRON, device=replace(MEGATRON.device, **flash))
    assert block(packed, theirs)["attention"] == pytest.approx(plain)


@pytest.mark.parametrize("kernel, factors", [("auto", (2.1, 1.2)), ("flash", (1.15, 1.1))])
def test_dropout_costs_others_what_was_measured(kernel, factors):
    """A backward takes 2.5 forwards without it."""
    keys, longer = [f"model.attention={kernel}"], (factors[0] + 2.5 * factors[1]) / 3.5
    without, dropped = (block([*keys, f"model.attention_dropout={p}"], MEGATRON)["attention"] for p in (0, 0.1))
    assert dropped == pytest.approx(longer * without)


def test_products_by_rate_traffic_and_tiles():
    m, n, k = 256, 512, 1024
    operations = 2 * m * n * k / 1e12
    assert with_device(in_step=0.5).product(m, n, k, fp8=False) == pytest.approx(2 * operations)
    half = with_device(weight_grad={"bf16": 0.5, "fp8": 1})
    assert half.product(m, n, k, fp8=False, weight_grad=True) == pytest.approx(2 * operations)
    # 2 x 4 tiles of y on 16 processors, and 4 x 8 of dW on 64: half are idle.
    assert with_device(processors=16).product(m, n, k, fp8=False) == pytest.approx(2 * operations)
    assert with_device(processors=64).product(m, n, k, fp8=False, weight_grad=True) == pytest.approx(2 * operations)
    traffic = with_device(unhidden=1)
    for fp8, item in ((False, 2), (True, 1)):
        y, dw = (traffic.product(m, n, k, fp8=fp8, weight_grad=w) - operations for w in (False, True))
        assert y * 1e12 == pytest.approx(item * (m * k + n * k) + 2 * m * n)
        assert dw * 1e12 == pytest.approx(item * (m * k + m * n) + 8 * n * k)


@pytest.mark.parametrize(
    "keys, software, kernels",
    [
        ([], "minitron", 50),
        ([FP8], "minitron", 50 + 14),
        (["parallel.cp=2"], "minitron", 50 + 25),
        (["parallel.cp=4"], "minitron", 50 + 25),
        (["parallel.tp=4"], "minitron", 50 + 2 * 44),
        (["parallel.tp=4"], "megatron", 50 + 60),
        (LORA, "minitron", 50 + 2 * 8),
        (["model.qk_norm=true"], "minitron", 50 + 15),
    ],
)
def test_a_kernel_costs_a_gap(keys, software, kernels):
    """As results/recipes.md counted them, with 37 % in the forward."""
    machine = replace(with_device(gap_seconds=1.0), software=SOFTWARE[software])
    cfg = cli.load([*SMALL, *keys])
    for gaps, none, share in zip(
        StageTime(cfg, machine).block(FP8 in keys),
        StageTime(cfg, replace(machine, device=IDEAL.device)).block(FP8 in keys),
        (0.37, 0.63),
    ):
        assert gaps["pointwise"] - none["pointwise"] == pytest.approx(kernels * share)


@pytest.mark.parametrize("tuned, kernels", [([], 50), (LORA, 50 + 2 * 8)])
@pytest.mark.parametrize("recompute, share", [("none", SHARES[1]), ("selective", SHARES[1]), ("full", sum(SHARES))])
def test_only_whole_recomputation_launches_the_forward_again(recompute, share, tuned, kernels):
    machine = with_device(launch_seconds=1.0)
    cfg = cli.load([*SMALL, *tuned, "train.cuda_graph=off", f"train.recompute={recompute}"])
    _, backward = StageTime(cfg, machine).block(False)
    _, busy = StageTime(replace(cfg, train=replace(cfg.train, cuda_graph="auto")), machine).block(False)
    assert backward["host"] == pytest.approx(kernels * share - total(busy))


@pytest.mark.parametrize(
    "targets, norms, activations",
    [(None, 2, 1), ("q", 1, 0), ("o", 0, 0), ("gate,up", 1, 0), ("down", 0, 1), ("k,v,up,down", 2, 1)],
)
def test_selective_recomputation_makes_again_what_trained_weights_read(targets, norms, activations):
    """A norm reads h and writes h, the activation reads 2 f and writes f. Beside frozen weights adapters read them."""
    keys = [] if targets is None else ["finetune.kind=lora", f"lora.targets=[{targets}]"]
    more = block([*keys, "train.recompute=selective"])["pointwise"] - block(keys)["pointwise"]
    h, f, t = 1024, 4096, 2048
    assert more * 1e12 == pytest.approx(2 * t * (norms * 2 * h + activations * 3 * f))


def test_the_forward_of_a_head_in_pieces_makes_the_gradients():
    """All that the two passes of a whole head take; and each piece after the first reads W twice, and adds to dW."""
    cfg, machine = cli.load([*SMALL]), with_device(unhidden=1)
    whole = StageTime(cfg, machine)
    tokens, m = whole.tokens, cfg.model
    forward, backward = StageTime(cli.load([*SMALL, f"model.head_piece={tokens // 4}"]), machine).head()
    norm = 4 * m.hidden_size * tokens * 2 / 1e12
    assert dict(backward) == {"pointwise": pytest.approx(norm)}
    again = 3 * m.padded_vocab_size * m.hidden_size * (2 * 2 + 2 * 4) / 1e12
    expected = sum(whole.head(), start=Counter()) + Counter(gemm=again, pointwise=-norm)
    assert dict(forward) == {part: pytest.approx(seconds) for part, seconds in expected.items()}


def test_without_sequence_parallelism_messages_are_all_reduces():
    """Of twice the bytes: two forward and two backward of a block, the head's, the table's two halves."""
    cfg = cli.load([*SMALL, "parallel.tp=2", "parallel.sequence_parallel=false"])
    m, t = cfg.model, cfg.train
    crossing = t.global_batch_size * 2 * m.hidden_size * t.seq_len / 2 / 1e9
    assert plan(cfg, 2, IDEAL).seconds["tp_exposed"] == pytest.approx((8 * m.num_layers + 2 + 2) * crossing)


@pytest.mark.parametrize("tuned", [[], LORA])
def test_a_scatter_in_pieces_ends_in_a_sum(tuned):
    """Two of a block's forward, two of its backward: each reads the pieces of all rows and writes a rank's."""
    keys, h, t = [*tuned, "parallel.tp=2"], 1024, 2048
    more = block(keys)["pointwise"] - block([*keys, "parallel.overlap_tp=false"])["pointwise"]
    assert more * 1e12 == pytest.approx(4 * 2 * h * (t + t // 2))


@pytest.mark.parametrize("cp", [2, 4])
def test_ulysses_exchanges_queries_keys_values_and_outputs(cp):
    parts = block([f"parallel.cp={cp}", "parallel.cp_style=ulysses"])
    q, kv, tokens = 8 * 128, 4 * 128, 2048 // cp
    exchanged = 2 * tokens * (q + kv + kv + q) * (cp - 1) / cp
    assert parts["cp_exposed"] * 1e9 == pytest.approx(2 * exchanged)


@pytest.mark.parametrize("style, factor", [("ring", 2 * 3 / 4), ("ulysses", 1)])
def test_a_ring_calls_attention_over_shorter_sequences(style, factor):
    """With half_keys as long as the sequence: half of it fills the kernel to a third, all of it to a half."""
    half = with_device(half_keys=2048)
    whole, shared = block([], half), block(["parallel.cp=2", f"parallel.cp_style={style}"], half)
    assert shared["attention"] == pytest.approx(factor * whole["attention"] / 2)


@pytest.mark.parametrize("cp", [2, 4])
def test_a_ring_of_transformer_engine_sums_gradients_in_the_dtype_of_keys(cp):
    """Each rank's keys and values go round twice, and their gradients once and home; minitron's of 4 in float32."""
    kv, hops = 2 * 4 * 128 * 2 * 2048 // cp, cp - 1
    for machine, item in ((MEGATRON, 1), (IDEAL, 1 if cp == 2 else 2)):
        parts = block([f"parallel.cp={cp}"], machine)
        # What kernels do not hide shows; the last hop of the gradients always.
        assert (parts["cp_hidden"] + parts["cp_exposed"]) * 1e9 == pytest.approx((2 * hops + (hops + 1) * item) * kv)


@pytest.mark.parametrize("style", ["ring", "allgather", "ulysses"])
def test_unfused_attention_is_shared_by_the_ranks_of_context_parallelism(style):
    keys = ["model.attention=reference"]
    whole, shared = block(keys), block([*keys, "parallel.cp=2", f"parallel.cp_style={style}"])
    assert shared["attention"] == pytest.approx(whole["attention"] / 2)


def test_transformer_engine_casts_activations_and_scales_adapters_by_kernels_of_their_own():
    """FP8: the activation and its gradients written in bf16 and read again. Of an adapter: x twice, y thrice."""
    f, h, t = 4096, 1024, 2048

    def more(keys, fp8=False):
        return (block(keys, MEGATRON, fp8)["pointwise"] - block(keys, IDEAL, fp8)["pointwise"]) * 1e12

    assert more([FP8], True) - more([]) == pytest.approx(2 * 2 * f * t + 2 * 2 * 2 * f * t)
    for tp in (1, 2):  # q of h to h, down of f to h: the one's outputs and the other's inputs are split, the rest rows
        split, adapters = [f"parallel.tp={tp}"], 2 * t * ((2 * h + 3 * h) + (2 * f + 3 * h)) / tp
        assert more([*LORA, *split]) - more(split) == pytest.approx(2 * adapters)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_adapters_read_and_add_to_what_a_tensor_parallel_rank_has(tp):
    """q of h to h, down of f to h. Forward x and y, which is written; backward x for dA, dropout and dx, dy twice."""
    h, f, t, split = 1024, 4096, 2048, ["parallel.tp=" + str(tp), "parallel.overlap_tp=false"]
    passes = [(h + 2 * h) + (f + 2 * h), (3 * h + 2 * h) + (3 * f + 2 * h)]
    both = [StageTime(cli.load([*SMALL, *split, *tuned]), IDEAL).block(False) for tuned in ([], LORA)]
    for plain, tuned, passed in zip(*both, passes):
        assert (tuned["pointwise"] - plain["pointwise"]) * 1e12 == pytest.approx(2 * t * passed / tp)


def test_tensor_parallel_ranks_of_several_nodes_send_no_pieces():
    far = replace(IDEAL, fabric=replace(IDEAL.fabric, gpus_per_node=2))
    assert block(["parallel.tp=4"], far) == block(["parallel.tp=4", "parallel.overlap_tp=false"], far) | {
        part: seconds for part, seconds in block(["parallel.tp=4"], far).items() if part.startswith("tp_")
    }


def test_a_head_in_pieces_reads_the_table_for_each_piece_of_the_gather_or_of_the_head():
    """Of two pieces of a head and three of a gather, the forward has three anyway, the backward two and not one."""
    machine, tokens = with_device(unhidden=1), 2048
    whole, cut = (
        sum(StageTime(cli.load([*SMALL, "parallel.tp=4", *keys]), machine).head(), start=Counter())["gemm"]
        for keys in ([], [f"model.head_piece={tokens // 2}"])
    )
    assert (cut - whole) * 1e12 == pytest.approx((2 + 2 * 4) * 8192 // 4 * 1024)


@pytest.mark.parametrize("style, rate", [("ulysses", 2), ("ring", 1)])
def test_context_parallel_ranks_that_tensor_parallelism_keeps_apart_share_the_network(style, rate):
    """Four of every second GPU, two in each node: a ring of all has the cards of both, a message that of one."""
    fabric = replace(IDEAL.fabric, gpus_per_node=4, cards_per_node=4, network_gb_s=0.25, nvlink_gb_s=1)
    parts = block(["parallel.tp=2", "parallel.cp=4", f"parallel.cp_style={style}"], replace(IDEAL, fabric=fabric))
    q, kv, tokens = 512, 256, 512
    exchanged = 2 * 2 * tokens * (2 * q + 2 * kv) * 3 / 4
    hops = (2 * 3 + 4 * 2) * 2 * 2 * kv * tokens  # keys and values twice, float32 gradients and home
    moved = exchanged if style == "ulysses" else hops
    assert (parts["cp_exposed"] + parts["cp_hidden"]) * 1e9 == pytest.approx(moved / (0.25 * rate))


def test_each_layer_of_a_stage_has_its_own_format():
    time = StageTime(cli.load([*SMALL, FP8, "precision.fp8_bf16_layers=2"]), IDEAL)
    for layers, fp8 in ((range(2), 0), (range(1, 5), 3), (range(4, 8), 2)):
        kinds = [time.block(True)] * fp8 + [time.block(False)] * (len(layers) - fp8)
        for found, expected in zip(time.stage(layers, False, False), zip(*kinds)):
            assert found == pytest.approx(sum(expected, Counter()))


UNEVEN = ["parallel.pp=2", "parallel.vp=2", "parallel.layers_per_stage=[1,2,4,1]"]


@pytest.mark.parametrize("stages, keys", [((0,), []), ((0, 2), UNEVEN), ((1, 3), UNEVEN)])
@pytest.mark.parametrize("dtype, size", [("fp32", 4), ("bf16", 2)])
def test_megatron_s_update_zeroes_scales_and_copies(dtype, size, stages, keys):
    """Of all gradients once zero and a first sum that is read; of the rank's shard a scale and the masters' copy.

    Its shard of gradients has their format; ours is float32.
    """
    cfg = cli.load([*SMALL, f"optimizer.grad_dtype={dtype}", *keys])
    ours, theirs = (Step(cfg, 4 * cfg.parallel.pp, machine) for machine in (IDEAL, MEGATRON))
    trained = sum(map(ours.memory.trained, stages))
    assert ours.memory.shards == 4
    more = (theirs.update_seconds(stages[0]) - ours.update_seconds(stages[0])) * 1e12
    assert more == pytest.approx(2 * size * trained + (2 * size + 4 + 2 * (size - 4)) * trained / 4)


@pytest.mark.parametrize("tp", [1, 2])
def test_megatron_s_ends_add_a_whole_table_and_keep_the_logits(tp):
    cfg = cli.load([*SMALL, f"parallel.tp={tp}"])
    ours, theirs = (StageTime(cfg, machine) for machine in (IDEAL, MEGATRON))
    table = cfg.model.padded_vocab_size // tp * cfg.model.hidden_size
    logits = cfg.model.padded_vocab_size // tp * ours.tokens
    for end, forward, backward in (("embedding", 0, 2 * 2 + 2 * 4), ("head", 2 * logits, 0)):
        more = [
            (after["pointwise"] - before["pointwise"]) * 1e12
            for before, after in zip(getattr(ours, end)(), getattr(theirs, end)())
        ]
        assert more == pytest.approx([forward, backward * (table if end == "embedding" else 0)])


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tuned, columns", [([], 1), (LORA, 0)])
def test_casts_write_columns_only_for_weight_gradients(tuned, columns, tp):
    """A cast of bf16 reads 2 bytes and writes 1, and 1 more of columns; SwiGLU is the same pass as its cast.

    Four tensors of a rank's rows are gathered, and get their columns, read and written, afterwards.
    """
    f, h, nd, w, t = 4096 // tp, 1024, 1024 // tp, 2048 // tp, 2048
    casts = 2 * (2 + 1 + columns) * 2 * h * t // tp + (2 + 1 + columns) * (nd + w) * t
    casts += 4 * 2 * h * t if tp > 1 and columns else 0
    swiglu = (2 * 2 * f + (1 + columns) * f) * t + (2 * 3 * f + (1 + columns) * 2 * f) * t
    plain = 2 * 3 * f * t + 2 * 5 * f * t
    tuned = [*tuned, f"parallel.tp={tp}"]
    difference = block([*tuned, FP8], fp8=True)["pointwise"] - block(tuned)["pointwise"]
    assert difference * 1e12 == pytest.approx(casts + swiglu - plain)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tuned, columns", [([], 1), (LORA, 0)])
def test_a_head_in_fp8_casts_its_input_and_the_gradient_of_the_logits(tuned, columns, tp):
    def seconds(*keys):
        cfg = cli.load([*SMALL, *tuned, FP8, f"parallel.tp={tp}", *keys])
        return sum(StageTime(cfg, IDEAL).head(), start=Counter())["pointwise"]

    cast = (1024 + 8192) // tp * 2048  # a rank's rows of the one, its columns of the other
    assert (seconds("precision.fp8_head=true") - seconds()) * 1e12 == pytest.approx((2 + 1 + columns) * cast)


@pytest.mark.parametrize("keys, biases", [(GPT3, 3 * 1024 + 4096 + 2 * 1024), (["model.qkv_bias=true"], 2048), ([], 0)])
def test_frozen_weights_have_no_gradients_of_biases(keys, biases):
    """Those of q, k, v, the MLP's columns, and rows, which are read twice. An adapter of up reads h and adds f."""
    lora = ["finetune.kind=lora", "lora.targets=[up]"]
    more = block([*keys, *lora])["pointwise"] - block(keys)["pointwise"]
    assert more * 1e12 == pytest.approx(2 * 2048 * (4 * 1024 + 4 * 4096 - biases))


@pytest.mark.parametrize("tuned", [[], LORA])
@pytest.mark.parametrize("piece", [None, 512])
def test_weight_gradients_are_put_off_but_by_the_first_stage_and_by_a_head_in_pieces(tuned, piece):
    keys = ["parallel.pp=2", "parallel.schedule=zb-h1", f"model.head_piece={piece or 'null'}"]
    work = StageTime(cli.load([*SMALL, *tuned, *keys]), IDEAL)
    first, inner, last = (
        sum(work.stage(range(2), *ends), start=Counter())["deferred"]
        for ends in ((True, False), (False, False), (False, True))
    )
    h, f, t = 1024, 4096, 2048
    products = 2 * t * (h * 2 * h + h * h + 3 * h * f)
    passes = 2 * t * ((h + h) + (f + h))  # what adapters of q and of down read once more
    assert first == 0 and inner * 1e12 == pytest.approx(2 * (passes if tuned else products))
    assert (last - inner) * 1e12 == pytest.approx(0 if tuned or piece else 2 * t * h * 8192)


@pytest.mark.parametrize("layout", [["parallel.tp=2"], ["parallel.tp=2", "parallel.sequence_parallel=false"]])
def test_frozen_weights_have_one_backward_also_where_weight_gradients_are_put_off(layout):
    """Only what adapters put off is another time."""
    time = StageTime(cli.load([*SMALL, *LORA, *layout, "parallel.pp=2", "parallel.schedule=zb-h1"]), IDEAL)
    (forward, split), (same, whole) = time.block(False, True), time.block(False, False)
    assert forward == same and split.pop("deferred") > 0 and split == whole


@pytest.mark.parametrize("dtype, size", [("fp32", 4), ("bf16", 2)])
def test_the_last_bucket_and_the_first_gather_are_waited_for(dtype, size):
    """However long the backward is, its last bucket leaves when it is over; and the first forward needs a bucket."""
    cfg = cli.load([*SMALL, "train.global_batch_size=8", f"optimizer.grad_dtype={dtype}"])
    step = Step(cfg, 2, replace(IDEAL, fabric=replace(IDEAL.fabric, felt=0, copy_felt=0)))
    count = step.memory.trained(0)
    reduce, gather, share = size * count / 2 / 1e9, 2 * count / 2 / 1e9, bucket_limit(2) / (size * count)
    assert 0 < share < 1
    step.forward = [1e9]
    exposed, hidden = step._data_rank(0, {0: [0.0, 100.0, 200.0]}, 200.0)
    assert exposed == pytest.approx(share * (reduce + gather)) and exposed + hidden == pytest.approx(reduce + gather)
    step.forward = [gather / 2]  # the second half of the gather is late
    exposed, _ = step._data_rank(0, {0: [0.0, 100.0, 200.0]}, 200.0)
    assert exposed == pytest.approx(share * reduce + max(share, 0.5) * gather)
    # A backward shorter than its reduction: what is left of it.
    exposed, _ = step._data_rank(0, {0: [gather, 100.0, 100.0 + reduce / 4]}, 100.0 + reduce / 4)
    assert exposed == pytest.approx(max(3 / 4, share) * reduce)


def test_chunks_queue_for_their_reductions_and_gathers():
    """Three chunks of a rank: gathers in their order, reductions in that in which backwards begin."""
    keys = ["parallel.pp=2", "parallel.vp=3", "parallel.layers_per_stage=[1,1,2,1,2,1]"]
    step = Step(cli.load([*SMALL, *keys]), 4, replace(IDEAL, fabric=replace(IDEAL.fabric, felt=0, copy_felt=0)))
    counts = [step.memory.trained(stage) for stage in (0, 2, 4)]
    reduce, gather = ([size * count / 2 / 1e9 for count in counts] for size in (4, 2))
    shares = [min(1, bucket_limit(2) / (4 * count)) for count in counts]

    def exposed(forwards, backwards=((0, 0), (0, 0), (0, 0)), makespan=1e9, forward_seconds=1e9):
        step.forward = [forward_seconds] * 6
        chunks = {i: [at, *backward] for i, (at, backward) in enumerate(zip(forwards, backwards))}
        return step._data_rank(0, chunks, makespan)[0]

    for late in range(3):  # only this chunk's forward is early: all gathers up to its first bucket's
        needed = sum(gather[:late]) + shares[late] * gather[late]
        assert exposed([0.0 if i == late else 1e6 for i in range(3)]) == pytest.approx(needed)
        none = exposed([0.0 if i == late else 1e6 for i in range(3)], forward_seconds=1e-9)
        assert none == pytest.approx(sum(gather[: late + 1]), abs=1e-8)
    # Each backward begins while the reductions of the later chunks run; or long after them.
    starts = [100 + reduce[2] / 2 + reduce[1] / 2, 100 + reduce[2] / 2, 100.0]
    busy = exposed([1e6] * 3, [(start, start) for start in starts], starts[0])
    assert busy == pytest.approx(100 + sum(reduce) - starts[0])
    apart = exposed([1e6] * 3, [(300.0, 300.1), (200.0, 200.1), (100.0, 100.1)], 300.1)
    assert apart == pytest.approx(max(reduce[0] - 0.1, shares[0] * reduce[0]))


@pytest.mark.parametrize("keys", [[], ["precision.fp8=delayed", "precision.fp8_params=true"], LORA])
@pytest.mark.parametrize("rank", [0, 1])
def test_data_ranks_exchange_what_every_chunk_has(keys, rank):
    """Of the last stage also the head; of FP8 weights a byte is gathered, and all of a gradient is reduced."""
    uneven = ["parallel.pp=2", "parallel.vp=2", "parallel.layers_per_stage=[1,2,4,1]", "parallel.overlap_grads=false"]
    step = Step(cli.load([*SMALL, *keys, *uneven]), 4, IDEAL)
    memory, stages = step.memory, (rank, rank + 2)
    sizes = [4 * memory.trained(stage) + memory.gathered_bytes(stage) for stage in stages]
    assert memory.shards == 2 and sizes[0] != sizes[1]
    exposed, hidden = step._data_rank(rank, {chunk: [0.0, 1.0, 2.0] for chunk in range(2)}, 2.0)
    assert hidden == 0 and exposed == pytest.approx(sum(sizes) / 2 / 1e9)
    other, _ = step._data_rank(1 - rank, {chunk: [0.0, 1.0, 2.0] for chunk in range(2)}, 2.0)
    assert step.exposed_at_least() == max(exposed, other) > min(exposed, other)


@pytest.mark.parametrize("pp, vp", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("tied", [True, False])
def test_every_stage_reduces_the_matrices_that_it_trains(tied, pp, vp):
    """A tied table is the first and the last stage's, once if they are one."""
    cfg = cli.load([*SMALL, f"model.tie_embeddings={tied}", f"parallel.pp={pp}", f"parallel.vp={vp}", "parallel.tp=2"])
    memory = Memory(cfg, 2 * pp, gpus_per_node=8)
    h = cfg.model.hidden_size
    for stage, layers in enumerate(memory.layers):
        norms = 2 * h * len(layers) + h * (stage == pp * vp - 1)
        assert sum(memory._matrices(stage)) == memory.trained(stage) - norms


@pytest.mark.parametrize("world", [2, 64, 128, 256])
def test_what_is_waited_for_is_a_bucket_of_that_many_data_ranks(world):
    """The last of the run's own buckets to be reduced, and its first to be gathered, but for one parameter."""
    cfg = cli.load([*SMALL, f"train.global_batch_size={world}", "precision.dtype=bf16"])
    step = Step(cfg, world, replace(IDEAL, fabric=replace(IDEAL.fabric, felt=0, copy_felt=0)))
    step.forward = [1e9]
    exposed, hidden = step._data_rank(0, {0: [0.0, 1e6, 2e6]}, 2e6)
    trained = 4 * step.memory.trained(0)
    waited = trained * exposed / (exposed + hidden)
    buckets = [
        bucket for bucket in build(cfg, Mesh.offline(world, device="meta")).gradients.buckets if bucket.key.decay
    ]
    tables = [[4 * span.numel for span in bucket.plan.spans] for bucket in buckets]
    vectors = trained - sum(map(sum, tables))
    for nbytes in tables[1:] or tables:  # of several, the first has what the others left
        assert sum(nbytes) - max(map(max, tables)) <= waited <= sum(nbytes) + vectors


@pytest.mark.parametrize(
    "software, per_node, tp, share",
    [("minitron", 8, 1, 0.5), ("minitron", 1, 1, 0.25), ("minitron", 4, 2, 0.5), ("minitron", 2, 2, 0.25)]
    + [("megatron", 8, 1, 0.25)],
)
def test_gradients_are_felt_as_copies_in_a_node_of_our_software_alone(software, per_node, tp, share):
    keys = [*SMALL, "train.global_batch_size=64", f"parallel.tp={tp}"]
    none = replace(IDEAL, software=SOFTWARE[software])
    fabric = replace(IDEAL.fabric, gpus_per_node=per_node, cards_per_node=per_node, network_gb_s=100, nvlink_gb_s=100)
    free, felt = (
        plan(cli.load(keys), 2 * tp, replace(none, fabric=replace(fabric, felt=a, copy_felt=b))).seconds["dp_hidden"]
        for a, b in ((0, 0), (0.25, 0.5))
    )
    assert free > 0 and felt == pytest.approx((1 - share) * free)


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("memory, size", [("fp32", 4), ("bf16", 2)])
def test_gradients_in_bf16_travel_in_levels(memory, size, wire):
    """Two nodes of four GPUs. In levels 3/4 travel in the node as they are, and half of a quarter between nodes."""
    dtypes = [f"optimizer.accumulate_dtype={memory}", f"optimizer.reduce_dtype={wire}"]
    cfg = cli.load([*SMALL, *dtypes, "parallel.overlap_grads=false", "train.global_batch_size=64"])
    fabric = replace(IDEAL.fabric, gpus_per_node=4, cards_per_node=4, nvlink_gb_s=8, network_gb_s=1)
    found = plan(cfg, 8, replace(IDEAL, fabric=fabric))
    trained = found.sizes.trained(0)
    ring, levels = (4 + 2) * 7 / 8 / 4, (size + 2) * 3 / 4 / 8 + (2 + 2) / 4 / 2
    assert found.seconds["dp_exposed"] == pytest.approx((levels if wire == "bf16" else ring) * trained / 1e9)


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("memory, size", [("fp32", 4), ("bf16", 2)])
def test_gradients_travel_in_levels_beside_tensor_parallelism(memory, size, wire):
    """Two nodes of four GPUs, two of which have one shard: a ring has both cards of a node, a level between nodes one.

    Without levels a node's gradients leave it, so they are sent in float32.
    """
    dtypes = [f"optimizer.accumulate_dtype={memory}", f"optimizer.reduce_dtype={wire}", "parallel.overlap_grads=false"]
    cfg = cli.load([*SMALL, *dtypes, "parallel.tp=2"])
    fabric = replace(IDEAL.fabric, gpus_per_node=4, cards_per_node=4, nvlink_gb_s=8, network_gb_s=1)
    found = plan(cfg, 8, replace(IDEAL, fabric=fabric))
    ring, levels = (4 + 2) * 3 / 4 / 2, (size + 2) / 2 / 8 + (2 + 2) / 2 / 2
    moved = (levels if wire == "bf16" else ring) * found.sizes.trained(0)
    assert found.seconds["dp_exposed"] == pytest.approx(moved / 1e9)


@pytest.mark.parametrize("per_node, rate", [(8, 1), (4, 0.25)])
def test_a_message_between_stages_leaves_a_node_that_one_stage_fills(per_node, rate):
    fabric = replace(IDEAL.fabric, gpus_per_node=per_node, cards_per_node=per_node, network_gb_s=0.25)
    step = Step(cli.load([*SMALL, "parallel.tp=2", "parallel.pp=2"]), 8, replace(IDEAL, fabric=fabric))
    assert step.transfer_seconds * 1e9 == pytest.approx(2 * 1024 * 2048 // 2 / rate)


@pytest.mark.parametrize("cp, more", [(1, 0), (2, 8 * 1024 * 2 * 1024)])
def test_only_ulysses_keeps_the_output_of_attention_twice(cp, more):
    """Before its exchange, and as the input of the next product; a ring's is one tensor. 1,024 tokens a rank."""
    ring, ulysses = (
        Memory(cli.load([*SMALL, f"parallel.cp={cp}", f"parallel.cp_style={style}"]), 2, gpus_per_node=8).saved(0)
        for style in ("ring", "ulysses")
    )
    assert ulysses - ring == more


@pytest.mark.parametrize(
    "peaks, graphs, eager, stays",
    [
        ((10, 8), (0, 0), False, False),
        ((10, 8), (1, 0), False, True),
        ((10, 8), (0, 4), False, True),  # a rank with less memory and longer graphs
        ((8, 10), (2, 0), False, False),
        ((8, 10), (3, 0), False, True),
        ((8, 10), (3, 0), True, False),
        ((8, 11), (3, 0), False, False),  # too large in any case
    ],
)
def test_one_rank_without_room_for_graphs_keeps_all_eager(peaks, graphs, eager, stays):
    memory = SimpleNamespace(
        cfg=cli.load([*SMALL, "parallel.pp=2"]),
        bytes_by_part=lambda rank: Counter(all=peaks[rank] << 30),
        graph=lambda rank: graphs[rank] << 30,
        communicators=lambda: 1 << 30,
    )
    machine = replace(with_device(memory_gib=11.5, context_gib=0.5), software=replace(IDEAL.software, eager=eager))
    assert no_room_for_graphs(memory, machine) == stays


@pytest.mark.parametrize(
    "tp, per_node, shards, wire, levels",
    [
        (1, 8, 16, "bf16", (8, 2)),
        (2, 8, 16, "bf16", (4, 4)),
        (2, 8, 16, "fp32", (16, 1)),
        (2, 8, 4, "bf16", (4, 1)),
        (2, 8, 6, "bf16", (6, 1)),  # no whole number of nodes
        (8, 4, 2, "bf16", (1, 2)),
    ],
)
def test_the_data_ranks_of_a_node(tp, per_node, shards, wire, levels):
    cfg = cli.load([*SMALL, f"parallel.tp={tp}", f"optimizer.reduce_dtype={wire}"])
    assert data_levels(cfg, shards, per_node) == levels


@pytest.mark.parametrize(
    "world, keys, groups, collectives, peers",
    [
        (1, [], 0, 0, 0),
        (8, [], 1, 1, 0),  # the data ranks are the world
        (8, ["parallel.tp=2"], 3, 3, 0),
        (8, ["parallel.tp=2", "parallel.pp=2"], 4, 4, 1),
        (16, ["parallel.pp=4"], 3, 3, 2),
        (16, ["parallel.pp=4", "model.tie_embeddings=true"], 4, 4, 2),
        (16, ["parallel.pp=2", "model.tie_embeddings=true"], 3, 3, 1),  # the pipeline's two ranks
        (16, ["parallel.tp=2", "parallel.cp=2"], 5, 3, 1),  # nothing runs over dp alone, and messages around the ring
        (16, ["parallel.cp=4"], 3, 1, 2),
        (16, ["parallel.cp=4", "parallel.cp_style=ulysses", "parallel.pp=2"], 5, 3, 4),
        (16, ["parallel.cp=4", "parallel.cp_style=allgather"], 3, 2, 0),
        (32, ["optimizer.reduce_dtype=bf16"], 3, 3, 0),  # and a node, and ranks of equal place
    ],
)
def test_what_nccl_takes(world, keys, groups, collectives, peers):
    memory = Memory(cli.load([*SMALL, *keys]), world, gpus_per_node=8)
    each = GROUP_BYTES * groups + COLLECTIVE_BYTES * collectives + PEER_BYTES * peers
    assert memory.communicators() == (NCCL_BYTES + each if world > 1 else 0)


def test_what_nccl_takes_was_measured():
    """What the first group, collective and message take beyond later ones is NCCL's code."""
    for line in (ROOT / "benchmarks" / "results" / "results.jsonl").read_text().splitlines():
        if (row := json.loads(line))["kind"] == "nccl" and row["nodes"] == 1:
            break
    found: dict[str, list[int]] = {}
    for one in row["mib"]:
        found.setdefault(one["first"], []).append(round(one["mib"]))
    made, first, message = (found[name] for name in ("made", "all-reduce", "message, peer 1 of 1"))
    assert max(made[1:]) << 20 == GROUP_BYTES and max(first[1:]) << 20 == COLLECTIVE_BYTES
    assert max(message[1:]) << 20 == PEER_BYTES
    assert sum(of[0] - max(of[1:]) for of in (made, first, message)) << 20 == NCCL_BYTES
    whole = NCCL_BYTES + len(made) * GROUP_BYTES + len(first) * COLLECTIVE_BYTES + len(message) * PEER_BYTES
    assert whole == pytest.approx(row["mib_of_all"] * 2**20, rel=0.01)


COUNTED = [FP8, "log.dir=unused", "log.numerics_every=10"]


@pytest.mark.parametrize(
    "keys, inner, counted",
    [
        ([], 1, 0),
        (["train.recompute=selective"], 2, 0),
        ([FP8], 3, 0),
        (LORA, 3, 0),
        (COUNTED, 3, 2),
        ([*COUNTED, "precision.fp8_bf16_layers=3"], 1, 0),  # of which this stage has two
        ([*GPT3, FP8], 2, 0),
        ([*LORA[:1], "train.recompute=selective"], 1, 0),  # no adapter reads the activation
        ([*GPT3, *LORA[:1]], 1, 0),
        ([*GPT3, *LORA[:1], "lora.targets=[down]"], 2, 0),
        ([*GPT3, *COUNTED], 2, 1),
    ],
)
def test_what_a_backward_needs_beyond_what_was_saved(keys, inner, counted):
    """Gradients of a rank's rows, two gathered tensors, and gradients inside of the MLP. Counting compares float32."""
    memory = Memory(cli.load([*SMALL, *keys, "parallel.tp=2", "parallel.pp=4"]), 8, gpus_per_node=8)
    h, f, tokens = 1024, 4096 // 2, 2048
    expected = 2 * 2 * h * tokens // 2 + 2 * 2 * h * tokens + 2 * inner * f * tokens + 4 * counted * f * tokens
    workspaces = (32 << 20) + (33 << 20) * (FP8 in keys)
    assert memory._backward_extra(0) == expected + workspaces
    full = Memory(
        cli.load([*SMALL, *keys, "parallel.tp=2", "parallel.pp=4", "train.recompute=full"]), 8, gpus_per_node=8
    )
    less = f * 2 * tokens if keys == ["train.recompute=selective"] else 0
    block = memory._block("none", FP8 in keys and inner > 1)
    assert full._backward_extra(0) == memory._backward_extra(0) + block - less


@pytest.mark.parametrize("tuned, share", [([], 2), (LORA, 1)])
def test_weight_gradients_that_wait_are_of_casts_but_for_adapters(tuned, share):
    keys = [*SMALL, *tuned, "parallel.pp=2", "parallel.schedule=zb-h1"]
    plain, cast = (Memory(cli.load([*keys, *fp8]), 2, gpus_per_node=8).deferred(0) for fp8 in ([], [FP8]))
    assert plain == share * cast > 0


@pytest.mark.parametrize("tuned", [[], LORA])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_both_ends_of_a_pipeline_hold_the_float32_sum_of_a_tied_table_s_copies(tuned, pp):
    """Where gradients are in bf16 and no data rank has a float32 slice of them; a frozen table has no gradient."""
    keys = [*SMALL, *tuned, f"parallel.pp={pp}", "optimizer.accumulate_dtype=bf16"]
    tied, untied = (
        Memory(cli.load([*keys, f"model.tie_embeddings={value}"]), pp, gpus_per_node=8) for value in ("true", "false")
    )
    table = 0 if tuned else tied.cfg.model.padded_vocab_size * tied.cfg.model.hidden_size
    expected = [-2 * table] if pp == 1 else [4 * table, *[0] * (pp - 2), 4 * table]  # one rank has one copy less
    assert [tied.lasting_parts(rank)[1] - untied.lasting_parts(rank)[1] for rank in range(pp)] == expected


@pytest.mark.parametrize("fp8, read", [("delayed", 4), ("current", 8)])
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_an_update_casts_what_every_chunk_has_in_fp8(fp8, read, head, kept):
    """Chunks of 1 and 4, and of 2 and 1 layers; the first and the last of all are in bf16, and on rank 1 the head.

    A cast of bf16 reads 2 bytes and writes two of one. A weight kept as FP8 bytes has one and a transpose: its master,
    shared by two data ranks, is read, for the current scale also for its maximum, and one byte is written.
    """
    keys = ["parallel.pp=2", "parallel.vp=2", "parallel.layers_per_stage=[1,2,4,1]", "precision.fp8_bf16_layers=1"]
    keys += [f"precision.fp8={fp8}", f"precision.fp8_head={head}", f"precision.fp8_params={kept}"]
    step = Step(cli.load([*SMALL, *keys]), 4, IDEAL)
    h, f, vocabulary = 1024, 4096, 8192
    matrices = h * (1024 + 2 * 512) + h * h + 3 * h * f
    for rank, (blocks, table) in enumerate(((4, 0), (2, vocabulary * h * head))):
        trained = sum(map(step.memory.trained, (rank, rank + 2)))
        updated, cast = (26 + 2 * 4) * trained / 2, 4 * (blocks * matrices + table)
        if kept:
            updated, cast = updated + (read - 1) * blocks * matrices / 2, cast - 2 * blocks * matrices
        assert step.update_seconds(rank) * 1e12 == pytest.approx(updated + cast)


def test_memory_of_buffers_between_gpus_of_a_node():
    """An operand of each kind of product twice: rows of a rank and of all."""
    cfg = cli.load([*SMALL, *GPT3, "parallel.tp=2", "parallel.overlap_grads=false"])
    far, near = (Memory(cfg, 2, gpus_per_node=n).bytes_by_part(0)["messages"] for n in (1, 8))
    assert near - far == 2 * 2 * 1024 * (1024 + 2048)


@pytest.mark.parametrize("cp, style, pairs", [(1, "ring", 1), (2, "ring", 4), (2, "allgather", 4), (2, "ulysses", 2)])
def test_dropout_of_unfused_attention_keeps_three_more_matrices(cp, style, pairs):
    """Of float32 scores: the mask, what is dropped, and its gradient. Ulysses splits heads, others both sides."""
    keys = [*SMALL, "model.attention=reference", f"parallel.cp={cp}", f"parallel.cp_style={style}"]
    plain, dropped = (
        Memory(cli.load([*keys, f"model.attention_dropout={p}"]), cp, gpus_per_node=8).bytes_by_part(0)["working"]
        for p in (0, 0.1)
    )
    assert dropped - plain == 3 * 4 * 8 * 2048**2 // pairs


def test_memory_counts_the_layers_of_every_chunk_in_their_formats():
    """Stages of 1, 2, 4 and 1 layers, of which 0, 1, 3 and 0 are in FP8: alone and split backwards leave less in it."""
    memory = Memory(cli.load([*SMALL, *UNEVEN, FP8, "precision.fp8_bf16_layers=2"]), 2, gpus_per_node=8)
    for left in (memory.saved, memory.deferred):
        wide = left(0)
        narrow = left(1) - wide
        assert 0 < narrow < wide and left(2) == wide + 3 * narrow
    nodes = 150 * memory.microbatches
    assert [memory.graph(rank) - (350 << 20) for rank in range(2)] == [8192 * nodes * layers for layers in (5, 3)]


@pytest.mark.parametrize("keys", [[], [FP8, "precision.fp8_head=true"], ["parallel.tp=2"]])
def test_a_piece_larger_than_a_microbatch_is_one_piece(keys):
    one, more = (plan(cli.load([*SMALL, *keys, f"model.head_piece={n}"]), 2, IDEAL) for n in (2048, 8192))
    assert one.memory == more.memory and one.seconds == more.seconds


@pytest.mark.parametrize("tuned", [[], LORA, [*GPT3, *LORA], GPT3])
@pytest.mark.parametrize("memory, wire", [("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "bf16")])
@pytest.mark.parametrize(
    "tp, per_node, overlap", [(1, 8, True), (1, 2, True), (2, 4, True), (4, 2, True), (2, 4, False)]
)
def test_memory_of_messages_by_hand(tuned, memory, wire, tp, per_node, overlap):
    """Two chunks of unequal layers on each of two ranks, four data ranks.

    Received rows of six messages; operands of products twice, in a node; twice a piece of each other data rank's bytes,
    in a node; between nodes a slice of the largest bucket in bf16, of float32 gradients and of their sum; a float32 sum
    of bf16 gradients that are not copied.
    """
    keys = ["model.num_layers=10", "parallel.pp=2", "parallel.vp=2", "parallel.layers_per_stage=[1,2,6,1]"]
    keys += [f"parallel.tp={tp}", f"parallel.overlap_grads={overlap}"]
    keys += [f"optimizer.accumulate_dtype={memory}", f"optimizer.reduce_dtype={wire}"]
    sizes = Memory(cli.load([*SMALL, *keys, *tuned]), 8 * tp, gpus_per_node=per_node)
    m, h, f, size = sizes.cfg.model, 1024, 4096, {"fp32": 4, "bf16": 2}[memory]
    gated, frozen = m.family == "llama", LORA[0] in tuned
    table, tokens = 8192 * h // tp, 2048
    block = [x // tp for x in (f * h, (2 if gated else 1) * f * h, h * h, h * (h + 2 * m.kv_heads * 128))]

    def largest_bucket(stage):
        filled = [[]]
        matrices = [*[table] * (stage == 3), *block * (1, 2, 6, 1)[stage], *[table] * (stage == 0)]
        for numel in [sizes.trained(stage)] if frozen else matrices:
            if size * sum(filled[-1]) >= 256 << 20:
                filled.append([])
            filled[-1].append(numel)
        positions = 2048 * h * (stage == 0 and not gated and not frozen)
        return max(positions, *map(sum, filled))

    beside = max(1, per_node // tp)  # data ranks in a node
    local = beside if wire == "bf16" and beside < 4 else 4
    copied = overlap and 1 < local <= per_node // tp
    for rank in range(2):
        stages = (rank, rank + 2)
        expected = 6 * 2 * h * tokens // tp
        if 1 < tp <= per_node:
            expected += 2 * 2 * h * (tokens // tp + tokens)
        if copied:
            moved = sum(size * sizes.trained(stage) + 2 * sizes.trained(stage) for stage in stages)
            expected += 2 * (local - 1) * min(64 << 20, moved // local)
        largest = max(map(largest_bucket, stages))
        if local < 4:
            expected += largest // local * 2 * (2 if size == 4 else 1)
        if local > 1 and size == 2 and not copied:
            expected += 4 * largest
        assert sizes.bytes_by_part(rank)["messages"] == expected
