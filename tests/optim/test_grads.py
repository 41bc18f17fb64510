"""Gradient buckets: the layout (hypothesis), the protocol with the layers, and sums equal to a single process.

The toy model here has real parameters but made-up gradients: every use of a parameter by sample i and sequence part j
adds coefficient * (parameter - target), both drawn from (use, step, i, j). So the gradient depends on the parameters
that the forward saw, the total over samples and parts is the same in every layout, and a single process can compute
it in a few lines.
"""

import itertools
import re
import zlib
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from layouts import full_gradients
from minitron.checkpoint.state import tensor_shards
from minitron.comm.collectives import all_reduce_
from minitron.comm.handle import Handle
from minitron.comm.mesh import Mesh
from minitron.config import sizes
from minitron.kernels.kernels import PLAIN
from minitron.kernels.param import ParamSpec, Shard, accumulate
from minitron.optim import buckets
from minitron.optim.buckets import ALIGNMENT, BucketKey, Gradients, plan_buckets
from minitron.optim.slices import ProcessGroupSliceComm
from minitron.testing import assert_close_rel

SAMPLES, PARTS = 4, 4  # of a global batch, of a sequence
SMALL_BUCKETS = 2000  # bytes: a few parameters each


@dataclass(frozen=True)
class Spec:
    """A parameter of the toy: its full shape, the sizes that tp splits along `dim` (None: replicated)."""

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    chunks: tuple[int, ...] = ()
    tied: bool = False

    @property
    def decay(self):
        return len(self.shape) > 1

    def shard(self, tp):
        return None if self.dim is None else Shard(self.dim, tp, self.chunks)

    def initial(self):
        return draw(self.shape, "initial", self.name)


UNITS = {
    "embedding": [Spec("embedding.weight", (24, 6), 0, (24,), tied=True), Spec("embedding.positions", (5, 6))],
    "block0": [
        Spec("block0.norm", (7,)),
        Spec("block0.qkv", (16, 7), 0, (8, 4, 4)),
        Spec("block0.bias", (16,), 0, (8, 4, 4)),
        Spec("block0.out", (6, 132), 1, (132,)),
    ],
    "block1": [
        Spec("block1.norm", (7,)),
        Spec("block1.qkv", (16, 7), 0, (8, 4, 4)),
        Spec("block1.out", (29, 44), 1, (44,)),
    ],
    "head": [Spec("head.norm", (301,))],
}
SPECS = {spec.name: spec for specs in UNITS.values() for spec in specs}
TIED = "embedding.weight"


def draw(shape, *key):
    seed = zlib.crc32("/".join(map(str, key)).encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def gradient(spec, seen, use, step, samples, parts, shard=None):
    """Sum over samples and parts of coefficient * (seen - target), for the part of the parameter that `shard`
    cuts."""
    total = torch.zeros_like(seen)
    for sample in samples:
        for part in parts:
            coefficient = draw(spec.shape, "coefficient", use, step, sample, part)
            target = draw(spec.shape, "target", use, step, sample, part)
            if shard is not None:
                coefficient, target = shard.cut(coefficient), shard.cut(target)
            total += coefficient.abs() * (seen - target)
    return total


class Unit(nn.Module):
    """Parameters of one unit. The forward notes what it saw; the backward adds gradients and reports them, last
    first."""

    def __init__(self, name, tp, dtype, tied=None, sum_over_tp=True):
        super().__init__()
        self.uses = {}  # use -> (spec, parameter)
        for spec in UNITS[name]:
            shard = spec.shard(tp)
            param = nn.Parameter((spec.initial() if shard is None else shard.cut(spec.initial())).to(dtype))
            param.spec = ParamSpec(
                spec.name, shard, spec.decay, tied=spec.tied, sum_over_tp=shard is None and tp.size > 1 and sum_over_tp
            )
            param.slot = None
            self.register_parameter(spec.name.split(".")[1], param)
            self.uses[spec.name] = spec, param
        if tied is not None:
            self.tied = tied
            self.uses["head.weight"] = SPECS[TIED], tied

    def forward(self):
        self.seen = {use: param.detach().float() for use, (_, param) in self.uses.items()}

    def backward(self, step, sample, parts, scale):
        for use, (spec, param) in reversed(self.uses.items()):
            mine = range(PARTS) if param.spec.shard is not None else parts
            grad = scale * gradient(spec, self.seen[use], use, step, [sample], mine, param.spec.shard)
            assert accumulate(param, grad) is None


class Chunk(nn.Module):
    def __init__(self, names, mesh, dtype, sequence_parallel=True):
        super().__init__()
        self.parts = nn.ModuleDict()
        for name in names:
            tied = None
            if name == "head":
                first = (
                    self.parts["embedding"]
                    if "embedding" in self.parts
                    else Unit("embedding", mesh.tp, dtype, sum_over_tp=sequence_parallel)
                )
                tied = first.weight
            self.parts[name] = Unit(name, mesh.tp, dtype, tied, sequence_parallel)
        if {"embedding", "head"} <= set(names):
            tied.spec = replace(tied.spec, uses=2)

    def units(self):
        return iter(self.parts.values())


class Toy:
    """The toy on this rank's place in the mesh: chunks, gradient buffers, and one training step's forward and
    backward."""

    def __init__(
        self, mesh, *, vp=1, sequence_parallel=True, overlap=True, dtype=torch.float32, grad_dtype=torch.float32
    ):
        self.mesh = mesh
        names, stages = list(UNITS), mesh.pp.size * vp
        each = len(names) // stages
        mine = [mesh.pp.rank + i * mesh.pp.size for i in range(vp)]
        self.chunks = [
            Chunk(names[stage * each : (stage + 1) * each], mesh, dtype, sequence_parallel) for stage in mine
        ]
        self.gradients = Gradients(
            self.chunks, mesh, PLAIN, overlap=overlap, dtype=grad_dtype, bucket_bytes=SMALL_BUCKETS
        )
        tp, data = mesh.tp, mesh.dp_cp
        self.parts = range(tp.rank, PARTS, tp.size) if sequence_parallel else range(PARTS)
        self.samples = range(data.rank, SAMPLES, data.size)

    def accumulate(self, step, scale=1.0, poison=0.0):
        """Every microbatch's forward and backward. `poison` is added to one gradient of this rank."""
        poisoned = next(self.chunks[0].parameters())
        for sample in self.samples:
            for chunk in self.chunks:
                for unit in chunk.units():
                    unit()
            for index, chunk in reversed(list(enumerate(self.chunks))):
                self.gradients.begin_backward(index, last=sample == self.samples[-1])
                if sample == self.samples[0] and index == 0:
                    poisoned.slot.main_grad.zero_().view(-1)[0] = poison
                    poisoned.slot.overwrite = False
                for unit in reversed(list(chunk.units())):
                    unit.backward(step, sample, self.parts, scale)


def twin_gradients(seen, step):
    """{name: whole gradient} of a single process whose forward saw the parameters `seen`."""
    return {
        name: sum(
            gradient(spec, seen[name], use, step, range(SAMPLES), range(PARTS))
            for use in ([name, "head.weight"] if spec.tied else [name])
        )
        for name, spec in SPECS.items()
    }


def cut(name, full, tp):
    shard = SPECS[name].shard(tp)
    return full if shard is None else shard.cut(full)


# (world, mesh arguments, other arguments of the toy): every axis alone, pairs, interleaved chunks
LAYOUTS = [
    (1, {}, {}),
    (2, {}, {}),
    (2, {"cp": 2}, {}),
    (2, {"tp": 2}, {}),
    (2, {"tp": 2}, {"sequence_parallel": False}),
    (2, {"pp": 2}, {}),
    (2, {"pp": 2}, {"vp": 2}),
    (4, {}, {}),
    (4, {"tp": 2}, {}),
    (4, {"tp": 2, "pp": 2}, {"vp": 2}),
    (4, {"cp": 2, "pp": 2}, {}),
]


# ---- layout ---------------------------------------------------------------------------------------------------------

keys = st.builds(BucketKey, st.sampled_from([torch.float32, torch.bfloat16]), *[st.booleans()] * 4)


@settings(deadline=None)  # other work on the machine is no failure
@given(
    st.lists(st.tuples(st.integers(1, 3000), keys), min_size=1, max_size=30),
    st.integers(1, 20000),
    st.integers(1, 6),
    st.sampled_from([1, 1, 2, 3]),
    st.sampled_from([2, 4]),
)
def test_every_element_lies_in_exactly_one_slice(params, bucket_bytes, ranks, nodes, itemsize):
    params = [(f"p{i}", numel, kind) for i, (numel, kind) in enumerate(params)]
    plans = plan_buckets(params, bucket_bytes, nodes * ranks, itemsize, nodes)
    seen = {name: [0] * numel for name, numel, _ in params}
    for plan in plans:
        assert plan.size % (nodes * ranks * ALIGNMENT) == 0
        for rank in range(nodes * ranks):
            mine = plan.slice_of(rank)
            for span, first, last in plan.owned(rank):
                assert mine.start <= first < last <= mine.stop
                for i in range(first - span.start, last - span.start):
                    seen[span.name][i] += 1
    assert all(set(counts) == {1} for counts in seen.values())
    kind_of = {name: kind for name, _, kind in params}
    order = [int(span.name[1:]) for plan in plans for span in plan.spans]
    for plan in plans:
        assert {kind_of[span.name] for span in plan.spans} == {plan.key}
        assert not plan.key.tied or len(plan.spans) == 1
        assert all(span.start % ALIGNMENT == 0 for span in plan.spans)
        assert all(a.start + a.numel <= b.start for a, b in zip(plan.spans, plan.spans[1:]))
        closed = plan.spans[:-1]  # only the last parameter may bring a bucket to its limit
        assert not closed or (closed[-1].start + closed[-1].numel) * itemsize < bucket_bytes
    for kind in set(kind_of.values()):  # reverse forward order within a kind, across its buckets
        of_kind = [i for i in order if kind_of[f"p{i}"] == kind]
        assert of_kind == sorted(of_kind, reverse=True)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("ranks, cp, in_a_bucket", [(1, 1, 4), (2, 2, 4), (4, 1, 4), (6, 1, 6), (8, 4, 8), (32, 1, 24)])
def test_buckets_grow_with_the_data_ranks_so_that_slices_keep_their_bytes(
    monkeypatch, itemsize, ranks, cp, in_a_bucket
):
    """24 parameters of `SLICE_BYTES` each: a bucket has four of them, or as many as there are data ranks."""
    monkeypatch.setattr(sizes, "SLICE_BYTES", ALIGNMENT * itemsize)
    monkeypatch.setattr(sizes, "BUCKET_BYTES", 4 * sizes.SLICE_BYTES)
    layer, dtype = nn.Module(), {2: torch.bfloat16, 4: torch.float32}[itemsize]
    for i in range(24):
        layer.register_parameter(f"p{i}", nn.Parameter(torch.zeros(ALIGNMENT)))
        layer.get_parameter(f"p{i}").spec = ParamSpec(f"p{i}")
    layer.units = lambda: [layer]
    gradients = Gradients([layer], Mesh.offline(ranks, cp=cp), PLAIN, overlap=True, dtype=dtype)
    assert [len(bucket.params) for bucket in gradients.buckets] == [in_a_bucket] * (24 // in_a_bucket)
    assert all(len(bucket.grad_slice) >= ALIGNMENT for bucket in gradients.buckets)


def test_slices_of_a_bucket_of_many_elements_cover_it():
    key, sizes_of = BucketKey(torch.float32, True, False, False, False), {"a": 2**31 + 1, "b": 2**32 + 3}
    (plan,) = plan_buckets([(name, numel, key) for name, numel in sizes_of.items()], 2**40, 2048)
    parts = [part for rank in range(2048) for part in plan.owned(rank)]
    assert plan.size > 2**32 and all(first < last for _, first, last in parts)
    for name, numel in sizes_of.items():
        assert sum(last - first for span, first, last in parts if span.name == name) == numel


def test_buckets_of_few_data_ranks_have_one_size():
    most = sizes.BUCKET_BYTES // sizes.SLICE_BYTES
    assert {sizes.bucket_limit(ranks) for ranks in (1, 2, most)} == {sizes.BUCKET_BYTES}
    assert sizes.bucket_limit(2 * most) == 2 * sizes.BUCKET_BYTES


def test_parameters_move_into_the_buffers_and_keep_their_values():
    toy = Toy(Mesh.offline(), dtype=torch.bfloat16)
    for bucket in toy.gradients.buckets:
        for name, param in bucket.params.items():
            assert torch.equal(param, SPECS[name].initial().bfloat16())
            assert param.untyped_storage().data_ptr() == bucket.data.untyped_storage().data_ptr()
            assert param.slot.main_grad.untyped_storage().data_ptr() == bucket.grad.untyped_storage().data_ptr()
            assert param.slot.main_grad.dtype == torch.float32 and param.grad is None
        assert bucket.grad_slice.data_ptr() == bucket.grad.data_ptr()  # one data rank: no copy


# ---- sums -----------------------------------------------------------------------------------------------------------


def reduced_gradients(mesh_args, toy_args, overlap):
    mesh = Mesh.create(**mesh_args)
    toy = Toy(mesh, overlap=overlap, **toy_args)
    toy.accumulate(step=0)
    toy.gradients.finish()
    toy.accumulate(step=1)  # nothing of the first step is left in it
    started = [not bucket.reduction.done for bucket in toy.gradients.buckets]
    assert started == [overlap and mesh.dp_cp.size > 1] * len(started)
    toy.gradients.finish()
    square_sum = toy.gradients.square_sum()
    all_reduce_(square_sum, mesh.world)
    return full_gradients(toy.gradients), square_sum


@pytest.mark.parametrize("world, mesh_args, toy_args", LAYOUTS)
@pytest.mark.parametrize("overlap", [True, False])
def test_sums_and_norm_equal_a_single_process(ranks, world, mesh_args, toy_args, overlap):
    expected = twin_gradients({name: spec.initial() for name, spec in SPECS.items()}, step=1)
    names = set()
    for rank, (gradients, square_sum) in enumerate(ranks(world, reduced_gradients, mesh_args, toy_args, overlap)):
        mesh = Mesh.offline(world, rank, **mesh_args)
        for name, value in gradients.items():  # float32 sums of 16 terms in another order
            assert_close_rel(value, cut(name, expected[name], mesh.tp), 1e-6, name)
        expected_sum = sum(value.double().square().sum() for value in expected.values())
        assert_close_rel(square_sum, expected_sum, 1e-6, "square sum")
        names |= gradients.keys()
    assert names == SPECS.keys()


def gradients_in_bf16(mesh_args, overlap):
    """{name: (the float32 gradients that were added here, in order, the sum that came of them)}, and its norm."""
    mesh, added, original = Mesh.create(**mesh_args), {}, accumulate
    toy = Toy(mesh, overlap=overlap, dtype=torch.bfloat16, grad_dtype=torch.bfloat16)

    def note(param, grad):
        added.setdefault(param.spec.name, []).append(grad.clone())
        return original(param, grad)

    for step in range(2):  # the second one overwrites the first
        added.clear()
        with mock.patch.dict(Unit.backward.__globals__, accumulate=note):
            toy.accumulate(step)
        toy.gradients.finish()
    assert all(bucket.grad.dtype == torch.bfloat16 for bucket in toy.gradients.buckets)
    square_sum = toy.gradients.square_sum()
    all_reduce_(square_sum, mesh.world)
    return {name: (added[name], total) for name, total in full_gradients(toy.gradients).items()}, square_sum


@pytest.mark.parametrize("mesh_args", [{}, {"cp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_in_bf16_are_rounded_once_for_each_microbatch(ranks, mesh_args, overlap):
    """Bit for bit a count by hand. Sums over ranks are float32: of data ranks, and of two copies of a tied weight."""
    results = ranks(2, gradients_in_bf16, mesh_args, overlap)
    own, squares = [], torch.zeros((), dtype=torch.float64)
    for gradients, _ in results:
        own.append({})
        for name, (added, _) in gradients.items():
            total = added[0].bfloat16()
            for grad in added[1:]:
                total = (total.float() + grad).bfloat16()
            own[-1][name] = total
    for rank, (gradients, _) in enumerate(results):
        for name, (added, total) in gradients.items():
            assert not torch.equal(total.float(), sum(added))
            together = {"tp": SPECS[name].dim is None, "pp": name == TIED}.get(next(iter(mesh_args), ""), True)
            expected = own[0][name].float() + own[1][name].float() if together else own[rank][name]
            assert total.dtype == expected.dtype and torch.equal(total, expected), name
            if rank == 0 or not together:
                squares += expected.double().square().sum()
    for _, square_sum in results:
        assert_close_rel(square_sum, squares, 1e-12, "square sum")


def owned_parts(mesh_args):
    toy = Toy(Mesh.create(**mesh_args))
    for param in (p for chunk in toy.chunks for p in chunk.parameters()):
        param.slot.main_grad.copy_(draw(param.shape, param.spec.name))
    slices = [bucket.grad_slice for bucket in toy.gradients.buckets]
    return [(part.name, part.offset, part.of(slices)) for part in toy.gradients.owned()]


def test_owned_parts_tell_where_a_slice_belongs(ranks):
    pieces = [piece for rank in ranks(4, owned_parts, {"cp": 2}) for piece in rank]
    assert len(pieces) > len(SPECS)  # some parameter straddles two ranks
    for name, spec in SPECS.items():
        mine = sorted((piece for piece in pieces if piece[0] == name), key=lambda piece: piece[1])
        assert [offset for _, offset, _ in mine] == [sum(v.numel() for _, _, v in mine[:i]) for i in range(len(mine))]
        assert torch.equal(torch.cat([values for _, _, values in mine]), draw(spec.shape, name).flatten())


def saved_shards(mesh_args):
    toy = Toy(Mesh.create(**mesh_args))
    for param in (p for chunk in toy.chunks for p in chunk.parameters()):
        whole, shard = draw(SPECS[param.spec.name].shape, param.spec.name), param.spec.shard
        param.slot.main_grad.copy_(whole if shard is None else shard.cut(whole))
    slices = [bucket.grad_slice for bucket in toy.gradients.buckets]
    kinds = {"master": slices, "exp_avg": [2 * values for values in slices]}
    return [shard._replace(tensor=shard.tensor.clone()) for shard in tensor_shards(toy.gradients, kinds)]


@pytest.mark.parametrize("mesh_args", [{"cp": 2}, {"tp": 2}], ids=str)
def test_boxes_to_save_hold_each_element_where_it_belongs(ranks, mesh_args):
    """Slices end within rows. Parameters that tp does not split are there twice."""
    found = [shard for rank in ranks(4, saved_shards, mesh_args) for shard in rank]
    for (name, spec), (kind, factor) in itertools.product(SPECS.items(), (("master", 1), ("exp_avg", 2))):
        total, count = torch.zeros(spec.shape), torch.zeros(spec.shape)
        for shard in (shard for shard in found if (shard.name, shard.kind) == (name, kind)):
            place = tuple(slice(first, first + n) for first, n in zip(shard.start, shard.tensor.shape, strict=True))
            total[place] += shard.tensor
            count[place] += 1
            assert shard.global_shape == spec.shape
        assert (count == (2 if "tp" in mesh_args and spec.dim is None else 1)).all(), name
        assert torch.equal(total / count, factor * draw(spec.shape, name)), name


# ---- protocol -------------------------------------------------------------------------------------------------------


def test_a_unit_waits_for_exactly_the_buckets_of_its_parameters():
    toy = Toy(Mesh.offline(2))  # two data ranks; nothing is sent here
    for name, unit in toy.chunks[0].parts.items():
        for bucket in toy.gradients.buckets:
            bucket.gather = Handle(waits=[lambda: None])
        unit()
        needed = {param.spec.name for param in unit.parameters()}
        waited = [b.gather.done for b in toy.gradients.buckets]
        assert waited == [bool(needed & b.params.keys()) for b in toy.gradients.buckets], name
        assert not all(waited)


def test_gathers_start_in_the_order_of_the_forward():
    toy = Toy(Mesh.offline(2))
    position = {name: i for i, name in enumerate(SPECS)}
    first_needed = [min(position[name] for name in bucket.params) for bucket in toy.gradients.buckets]
    assert first_needed == sorted(first_needed)


def test_a_parameter_that_never_reports_is_named():
    toy = Toy(Mesh.offline())
    toy.gradients.begin_backward(0, last=True)
    for param in toy.chunks[0].parameters():
        for _ in range(param.spec.uses - (param.spec.name == "block0.norm")):
            param.slot.report()
    with pytest.raises(AssertionError, match="no gradient came for block0.norm$"):
        toy.gradients.finish()


def test_a_tied_weight_reports_both_of_its_uses():
    toy = Toy(Mesh.offline())
    toy.gradients.begin_backward(0, last=True)
    for param in toy.chunks[0].parameters():
        param.slot.report()
    with pytest.raises(AssertionError, match=f"no gradient came for {re.escape(TIED)}$"):
        toy.gradients.finish()


def test_a_parameter_that_reports_too_often_is_named():
    toy = Toy(Mesh.offline())
    norm = next(p for p in toy.chunks[0].parameters() if p.spec.name == "block0.norm")
    norm.slot.report()  # before the last backward nobody counts
    toy.gradients.begin_backward(0, last=True)
    norm.slot.report()
    with pytest.raises(AssertionError, match="block0.norm reported more gradients than its uses=1"):
        norm.slot.report()


class OneByOne(ProcessGroupSliceComm):
    """As between GPUs, a reduction waits for the one before. Outside of a pass that did not run, its never come."""

    before, ran = Handle(), True

    def reduce(self, buffer, out):
        self.before.wait()
        self.before, handle = (
            Handle(waits=[lambda ran=self.ran: ran == self.ran or pytest.fail("it never comes")]) for _ in range(2)
        )
        return handle

    def reduced(self):
        self.before = Handle()


@pytest.mark.parametrize("units", range(len(UNITS) + 1))
def test_a_pass_that_was_given_up_leaves_nothing_for_the_next(monkeypatch, units):
    """A recording failed after so many units of its last backward: the next eager step has the sums of its own."""
    monkeypatch.setattr(buckets, "choose_slice_comm", lambda nbytes, *args: OneByOne(*args))
    toy = Toy(Mesh.offline())
    (chunk,) = toy.chunks
    for unit in chunk.units():
        unit()
    toy.gradients.slice_comm.ran = False
    toy.gradients.begin_backward(0, last=True)
    for unit in list(reversed(list(chunk.units())))[:units]:
        unit.backward(7, 0, toy.parts, 1.0)
    toy.gradients.reset()
    toy.gradients.slice_comm.ran = True
    toy.accumulate(step=0)
    toy.gradients.finish()
    expected = twin_gradients({name: spec.initial() for name, spec in SPECS.items()}, 0)
    for name, gradient in full_gradients(toy.gradients).items():
        assert_close_rel(gradient, expected[name], 1e-6, name)


def test_a_step_without_a_last_backward_is_an_error():
    with pytest.raises(AssertionError, match="no last backward was announced for the chunk of embedding"):
        Toy(Mesh.offline()).gradients.finish()


def test_names_are_unique_over_the_chunks_of_a_rank():
    mesh = Mesh.offline()
    chunks = [Chunk(["block0"], mesh, torch.float32) for _ in range(2)]
    with pytest.raises(AssertionError, match="names repeat over chunks"):
        Gradients(chunks, mesh, PLAIN, overlap=False)


@pytest.mark.parametrize("units", [["block0", "block1"], ["block1", "block0"]])
def test_what_is_copied_to_float32_has_space_for_the_largest_bucket_of_all_chunks(units):
    mesh = Mesh.offline(2)
    chunks = [Chunk([unit], mesh, torch.bfloat16) for unit in units]
    made = Gradients(chunks, mesh, PLAIN, overlap=False, dtype=torch.bfloat16, bucket_bytes=SMALL_BUCKETS)
    assert len(made.slice_comm.wide) == max(bucket.plan.size for bucket in made.buckets)


def test_the_norm_of_a_large_bucket_is_exact():
    """A float32 sum over a bucket of 10 million elements was 4e-4 off, so one process and two clipped differently."""
    layer = nn.Linear(4000, 2500, bias=False)
    layer.units = lambda: [layer]
    layer.weight.spec, layer.weight.slot = ParamSpec("weight"), None
    gradients = Gradients([layer], Mesh.offline(), PLAIN, overlap=True)
    (bucket,) = gradients.buckets
    bucket.grad_slice.normal_(0.0, 1e-3, generator=torch.Generator().manual_seed(0))
    expected = float(bucket.grad_slice.double().square().sum())
    assert float(gradients.square_sum()) == pytest.approx(expected, rel=1e-12)


def with_equal_copies(dtype: torch.dtype, few: int) -> bool:
    """Tell whether a norm is refused whose gradient has so many nonzero elements, equal on both ranks."""
    toy = Toy(Mesh.create(tp=2), grad_dtype=dtype)
    slices = [bucket.grad_slice for bucket in toy.gradients.buckets]
    for part in toy.gradients.owned():
        part.of(slices).fill_(1.0 + toy.mesh.tp.rank)
        if part.name == "block0.norm":
            part.of(slices).zero_()[:few] = 1.0
        elif part.name == "block1.norm":  # its sum is 0 on both ranks, and its norm is not the same
            part.of(slices)[1::2] *= -1.0
            part.of(slices)[-1] = 0.0
    try:
        toy.gradients._refuse_equal_copies()
    except ValueError as error:
        assert str(error).startswith("block0.norm: ")
        return True
    return False


@pytest.mark.parametrize("dtype, by_chance", [(torch.float32, 0), (torch.bfloat16, 2)])
def test_few_gradients_may_be_equal_by_chance(ranks, dtype, by_chance):
    """Two bf16 numbers are equal with a chance of about 2^-7, three pairs of them less than once in a million."""
    for few in (by_chance, by_chance + 1):
        assert ranks(2, with_equal_copies, dtype, few) == [few > by_chance] * 2
