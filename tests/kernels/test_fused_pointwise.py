"""The Triton kernels without a cast, without a GPU: in Triton's interpreter, and compiled for one.

tests/gpu/test_kernels_gpu.py has the same checks in bf16, which the interpreter does not have. Casts, AdamW's cast of
masters, dropout and attention are in the other test_fused files.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from minitron.kernels import plain
from minitron.kernels.plain import AdamHyper, AdamState
from minitron.testing import assert_close_rel
from triton_cpu import compile_kernel, needs_triton, run_interpreted

pytestmark = needs_triton
CLOSE = 2e-6  # float32: exp, division and the order of a sum differ in the last bits


def test_in_tritons_interpreter():
    run_interpreted(__file__)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_twins(mine, twins, tolerance=CLOSE, what=""):
    """Compare tensors one by one; None equals None."""
    for i, (one, other) in enumerate(zip(mine, twins, strict=True)):
        assert (one is None) == (other is None), (what, i)
        if one is not None:
            assert one.dtype == other.dtype and one.shape == other.shape, (what, i)
            assert_close_rel(one, other, tolerance, f"{what} {i}")


def interpreted():
    # One multiprocessor: a program of the norm's backward has several rows, and one of the sum several blocks.
    gpu = SimpleNamespace(multi_processor_count=1, shared_memory_per_block_optin=2**17)
    with mock.patch("torch.cuda.get_device_properties", lambda device: gpu):
        for check in (norms, swiglu, heads, merged, sums, rows_added, cross_entropy, adamw):
            check()


def norms():
    from minitron.kernels import fused

    for layer_norm, with_delta, with_bias, with_dtotal, frozen, s, h in [
        (False, True, False, True, False, 7, 72),
        (False, False, False, False, True, 7, 72),
        (True, True, True, True, False, 7, 72),
        (True, False, False, False, True, 7, 72),
        (False, True, True, True, False, 7, 72),
        (True, True, True, True, False, 54, 136),  # a program of the sums has a second tile of rows, and there are two
    ]:
        what = layer_norm, with_delta, with_bias, with_dtotal, frozen, h
        x, weight = 3 + randn(s, 5, h), 1 + randn(h, seed=1)
        bias = randn(h, seed=2) if layer_norm else None
        delta = randn(5, s, h, seed=3).transpose(0, 1) if with_delta else None
        delta_bias = randn(h, seed=4) if with_bias else None
        mine, twins = (ops.add_norm((x, delta, delta_bias), weight, bias, 1e-5) for ops in (fused, plain))
        assert torch.equal(mine[0], twins[0]) and (with_delta or mine[0] is x)
        assert_twins(mine, twins, what=what)
        dy, dtotal = (randn(5, s, h, seed=seed).transpose(0, 1) for seed in (5, 6))
        dtotal = dtotal if with_dtotal else None
        inputs = dy, dtotal, *twins[::2], weight, with_bias, frozen
        assert_twins(*(ops.add_norm_backward(*inputs) for ops in (fused, plain)), what=what)
    q, weight, dqkv = 3 + randn(7, 2, 3, 16), 1 + randn(16, seed=1), randn(7, 2, 5, 16, seed=2)  # rows of one head
    mine, twins = (ops.add_norm((q, None, None), weight, None, 1e-6) for ops in (fused, plain))
    assert_twins(mine, twins, what="heads")
    inputs = dqkv[:, :, :3], None, *twins[::2], weight, False, False
    assert_twins(*(ops.add_norm_backward(*inputs) for ops in (fused, plain)), what="heads")


def swiglu():
    from minitron.kernels import fused

    for f in 48, 2100:  # one block, two
        x, dy = randn(3, 2, 2 * f), randn(3, 2, f, seed=1)
        assert_close_rel(fused.swiglu_forward(x), plain.swiglu_forward(x), CLOSE)
        for with_sums in False, True:
            twins, old = plain.swiglu_backward(dy, x, with_sums), x.clone()
            assert_twins(fused.swiglu_backward(dy, x, with_sums), twins, what=f)
            over = fused.swiglu_backward(dy, old, with_sums, over_x=True)
            assert_twins(over, twins, what=(f, "over x"))
            assert over[0].data_ptr() == old.data_ptr()


def heads():
    from minitron.kernels import fused
    from minitron.model.layers import rope_frequencies, rope_tables

    for sizes, rope_batch in [((4, 2, 2), 1), ((3, 3, 3), 2)]:
        qkv = randn(5, 2, sum(sizes), 16)
        positions = torch.randint(0, 100, (5, rope_batch), generator=torch.Generator().manual_seed(7))
        rope = rope_tables(positions, rope_frequencies(16, 100.0, None))
        assert_twins(*(ops.split_heads(qkv.clone(), sizes, rope) for ops in (fused, plain)), what=sizes)
        # attention returns gradients [b, n, s, d] in another order of memory
        grads = tuple(randn(2, n, 5, 16, seed=n).permute(2, 0, 1, 3) for n in sizes)
        assert_close_rel(*(ops.split_heads_backward(grads, rope) for ops in (fused, plain)), CLOSE)


def merged():
    from minitron.kernels import fused

    for d in 16, 24:
        # views, as the ring has them: the second half of the positions, and [s, b, n, d] seen as [b, n, s, d]
        lse, block_lse = (5 * randn(2, 3, 74))[..., 37:], 5 * randn(2, 3, 37, seed=1)
        out, block = (randn(74, 2, 3, d, seed=i).permute(1, 2, 0, 3)[:, :, 37:] for i in (2, 3))
        twin, twin_lse = out.clone(), lse.clone()
        fused.merge_(out, lse, block, block_lse)
        plain.merge_(twin, twin_lse, block, block_lse)
        assert_twins((out, lse), (twin, twin_lse), what=d)


def sums():
    from minitron.kernels import fused

    for parts, shape in [(2, (7, 48)), (4, (1, 5000))]:
        x = randn(parts, shape[0] + 1, shape[1])[:, 1:]  # pieces of longer parts
        assert_close_rel(fused.sum_parts(x), plain.sum_parts(x), CLOSE)
        onto, twin, out = x[0].clone(), x[0].clone(), torch.empty(shape, dtype=torch.float16)
        assert fused.sum_parts(x[1:], onto, out) is out and torch.equal(onto, twin)
        assert_close_rel(out, plain.sum_parts(x[1:], twin, torch.empty_like(out)), 1e-3)
        assert fused.sum_parts(x[1:], onto) is onto
        assert_close_rel(onto, plain.sum_parts(x[1:], twin), CLOSE)
    for n in 1, 4095, 4096 * 9 + 8:  # four programs at most
        x = randn(n)
        total = fused.square_sum(x)
        assert total.dtype == torch.float64 and total.shape == ()
        assert_close_rel(total, plain.square_sum(x.double()), 1e-12)
        x[n // 2] = float("inf")
        assert fused.square_sum(x).isinf() and fused.square_sum(x.fill_(float("nan"))).isnan()


def rows_added():
    from minitron.kernels import fused

    h = 2100  # two blocks, or three
    ids = torch.randint(0, 40, (3, 20), generator=torch.Generator().manual_seed(1)).t()
    rows = randn(3, 20, h).transpose(0, 1)
    assert_close_rel(*(ops.add_rows_(torch.ones(16, h), ids, 12, rows) for ops in (fused, plain)), CLOSE)
    for in_order, deterministic in (True, False), (False, True):  # the kernel has no order
        torch.use_deterministic_algorithms(deterministic)
        with mock.patch.object(plain, "add_rows_") as in_plain_torch:
            fused.add_rows_(torch.ones(16, h), ids, 12, rows, in_order)
        assert in_plain_torch.call_args.kwargs == {"in_order": True}
    torch.use_deterministic_algorithms(False)
    # A table of 16 bits: the sum of an id's rows in float32, rounded once.
    start = randn(16, h, seed=2).half()
    for first in 12, 0:  # the second rank's part of a vocabulary, and one that begins with id 0
        ids[0] = first
        expected = plain.add_rows_(start.float(), ids, first, rows)
        assert_close_rel(fused.add_rows_(start.clone(), ids, first, rows).float(), expected, 2.0**-11)


def cross_entropy():
    from minitron.kernels import fused

    for vocab, first, num_ids in [(96, 0, 96), (96, 0, 90), (128, 100, 61), (64, 100, 0), (9000, 0, 8500)]:
        what = f"{vocab} from {first}, {num_ids}"
        logits, labels = 3 * randn(6, 2, vocab), torch.arange(12).view(6, 2) * 19
        labels[0, 0] = first + num_ids - 1  # the last id that is here, and the first that is not
        labels[0, 1] = first + num_ids
        logits[1, :, num_ids - 1] = 14.0  # the largest of a row, in the last block
        logits[..., num_ids:] = float("inf")  # padding
        mine, twins = (ops.softmax_sums(logits, labels, first, num_ids) for ops in (fused, plain))
        if num_ids:
            assert_twins(mine, twins, what=what)
        else:  # infinities have no distance
            assert all(map(torch.equal, mine, twins)), what
        lse, dloss = 5 + randn(6, 2, seed=1), randn(6, 1, seed=2).expand(6, 2)
        inputs = labels, first, lse, dloss, num_ids
        grads = [ops.softmax_gradient_(logits.clone(), *inputs) for ops in (fused, plain)]
        assert not grads[0][..., num_ids:].any(), what
        assert_close_rel(*(grad[..., :num_ids] for grad in grads), CLOSE, what) if num_ids else None


def adamw():
    from minitron.kernels import fused

    hyper = AdamHyper(1.0, (0.9, 0.999), 1e-8)  # updates are larger than the masters
    for dtype in torch.float32, torch.float16:  # the parameter is the master, or a cast of it
        pairs, seen = [], []
        for n, decay in (5000, 0.1), (77, 0.0):
            masters = randn(n), randn(n)
            state = lambda own: (own, *torch.zeros(3, n), own if dtype == torch.float32 else own.to(dtype), decay)
            pairs.append([AdamState(*state(own)) for own in masters])
        for step in 1.0, 2.0, 3.0:
            for found in 1.0, 0.0:  # a step that is skipped, and one that is not
                numbers = [torch.tensor(number) for number in (step, 2.0, found)]
                before = [tensor.clone() for mine, _ in pairs for tensor in (mine.master, *mine[2:5])]
                for ops, states in zip((fused, plain), zip(*pairs)):
                    for state in states:
                        state.grad.copy_(randn(len(state.grad), seed=1) * step)
                    ops.adamw_(states, *numbers, hyper, seen.append)
                if found:
                    after = [tensor for mine, _ in pairs for tensor in (mine.master, *mine[2:5])]
                    assert all(map(torch.equal, before, after)), step
            for pair in pairs:
                assert_twins(*([s.master, s.exp_avg, s.exp_avg_sq] for s in pair), what=step)
                assert torch.equal(pair[0].param, pair[0].master.to(dtype))
        assert seen == [0, 1] * 12


# By kernel: its arguments that are no pointers to float32, its constants, and warps. The format of activations is bf16.
ACTIVATIONS = dict.fromkeys(("x", "y", "dy", "dx", "delta", "delta_bias", "weight", "bias", "total", "dtotal"), "*bf16")
ACTIVATIONS |= dict.fromkeys(("logits", "out", "block_out", "parts", "onto", "param"), "*bf16")
HOPPER = {
    "_add_norm": (dict(rows="i32", h="i32", eps="fp32"), dict(BLOCK=4096, scale=None, scale_inv=None, amax=None), 8),
    "_add_norm_backward": (dict(rows="i32", h="i32"), dict(BLOCK=4096, STAGES=2, mean=None), 8),
    "_norm_sums": (dict(rows="i32", h="i32"), dict(ROWS=32, BLOCK=128), 4),
    "_cast": (
        dict(m="i32", f="i32", rows="*bf16"),
        dict(OF="swiglu", M=1, F=2048) | dict.fromkeys(("scale", "scale_inv", "columns", "amax", "sums")),
        8,
    ),
    "_sum_parts": (dict(n="i32", stride="i32"), dict(PARTS=4, BLOCK=2048), 8),
    "_square_sums": (dict(n="i32", sums="*fp64"), dict(BLOCK=4096), 8),
    "_add_rows": (dict(ids="*i64", first="i32", size="i32", h="i32", rows="*bf16"), dict(BLOCK=2048), 8),
    "_add_sorted": (
        dict(ids="*i64", ends="*i32", order="*i64", first="i32", size="i32", h="i32", rows="*bf16", table="*bf16"),
        dict(BLOCK=1024),
        4,
    ),
    "_softmax_sums": (dict(labels="*i64", vocab="i32", num_ids="i32", first="i32"), dict(BLOCK=8192), 4),
    "_softmax_gradient": (dict(labels="*i64", vocab="i32", num_ids="i32", first="i32"), dict(BLOCK=4096), 8),
    "_drop_elements": (
        dict(counters="*i64", place="i32", first="i32", tokens="i32", h="i32", factor="fp32"),
        dict(THRESHOLD=2**31, ROWS=4, BLOCK=1024),
        8,
    ),
    "_add_now": (dict(total="*i64", sign="i32"), {}, 1),
}


@pytest.mark.parametrize("name", HOPPER)
def test_kernels_compile_for_hopper(name):
    from minitron.kernels import fused

    kernel, (types, values, warps) = getattr(fused, name), HOPPER[name]
    types = dict.fromkeys(kernel.arg_names, "*fp32") | ACTIVATIONS | types
    sizes = {"rows", "h", "f", "n", "vocab", "stride"}
    aligned = lambda argument, kind: kind[0] == "*" or argument in sizes
    compiled = compile_kernel(kernel, types, values, warps, aligned=aligned)
    assert compiled.metadata.shared <= 227 * 2**10
    if name != "_add_now":
        assert "ld.global.v4.b32" in compiled.asm["ptx"]  # 16 bytes a thread
    else:
        assert "globaltimer" in compiled.asm["ptx"]


if __name__ == "__main__":
    interpreted()
