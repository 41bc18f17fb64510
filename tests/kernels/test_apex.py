"""NVIDIA's apex as a kernel backend, on CPUs: how it is called, what is said where it is not built.

In its place stand two modules that compute in plain torch what its sources do (csrc/multi_tensor_adam.cu and
csrc/megatron/fused_weight_gradient_dense_cuda.cu), read memory as they do, and refuse what they would misread; in the
place of the Triton kernels their plain twins. Whether the real kernels agree is tests/gpu/test_kernels_gpu.py's to say.
"""

import importlib
import sys
from functools import partial
from types import ModuleType

import pytest
import torch

import minitron.kernels
from layouts import LLAMA, config, dataset_of
from minitron import train
from minitron.comm.mesh import Mesh
from minitron.config.schema import Config
from minitron.data.loader import Loader
from minitron.kernels import kernels, plain
from minitron.kernels.gemm import Gemm, Payload
from minitron.kernels.kernels import choose_apex
from minitron.kernels.param import GradSlot
from minitron.kernels.plain import AdamHyper, AdamState
from minitron.testing import assert_close_rel

CUDA = torch.device("cuda")
RANKS_ALONE = "tp: one rank, dp: one rank"


@pytest.fixture(autouse=True)
def no_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "minitron.kernels.fused", plain)
    monkeypatch.delattr(minitron.kernels, "fused", raising=False)
    monkeypatch.setattr(plain, "add_now", None, raising=False)


class FakeApex:
    """The two extension modules, and how often each kernel was called."""

    def __init__(self):
        self.products = self.updates = self.largest = 0  # the largest: of the tensors of an update
        self.modules = {"amp_C": ModuleType("amp_C"), "fused_weight_gradient_mlp_cuda": ModuleType("wgrad")}
        self.modules["amp_C"].multi_tensor_adam_capturable = self.adam
        self.modules["fused_weight_gradient_mlp_cuda"].wgrad_gemm_accum_fp32 = self.wgrad
        self.modules["fused_weight_gradient_mlp_cuda"].wgrad_gemm_accum_fp16 = partial(self.wgrad, half=True)

    def wgrad(self, input, d_output, d_weight, half=False):
        """d_weight += d_output^T input, sizes from input and from d_weight's rows, memory as it lies."""
        self.products += 1
        assert input.dtype == d_output.dtype != torch.float32
        assert d_weight.dtype == (input.dtype if half else torch.float32)
        (hidden, in_dim), out_dim = input.shape, d_weight.shape[0]
        x, dy = as_it_lies(input, hidden, in_dim).float(), as_it_lies(d_output, hidden, out_dim).float()
        as_it_lies(d_weight, out_dim, in_dim).add_(dy.t() @ x)

    def adam(
        self,
        chunk_size,
        noop_flag,
        tensor_lists,
        lr,
        beta1,
        beta2,
        epsilon,
        step,
        mode,
        bias_correction,
        weight_decay,
        inv_scale,
    ):
        self.updates += 1
        assert noop_flag.dtype == step.dtype == torch.int32 and lr.dtype == inv_scale.dtype == torch.float32
        assert noop_flag.numel() == step.numel() == lr.numel() == inv_scale.numel() == 1
        assert [type(x) for x in (chunk_size, mode, bias_correction)] == [int] * 3 and chunk_size > 0
        assert all(isinstance(x, float) for x in (beta1, beta2, epsilon, weight_decay))
        if noop_flag == 1:
            return
        for g, p, m, v in zip(*tensor_lists, strict=True):
            assert all(t.dtype == torch.float32 and t.is_contiguous() and t.shape == g.shape for t in (g, p, m, v))
            self.largest = max(self.largest, g.numel())
            g.mul_(inv_scale)
            grad = g if mode else g + weight_decay * p
            m.copy_(beta1 * m + (1 - beta1) * grad)
            v.copy_(beta2 * v + (1 - beta2) * grad * grad)
            corrections = [1 - beta ** int(step) if bias_correction else 1.0 for beta in (beta1, beta2)]
            update = m / corrections[0] / ((v / corrections[1]).sqrt() + epsilon)
            p.sub_(lr * (update + weight_decay * p if mode else update))


def as_it_lies(t, *shape):
    """What a kernel that is given t's address and no strides sees."""
    return torch.as_strided(t.detach(), shape, (shape[1], 1), t.storage_offset())


@pytest.fixture
def apex(monkeypatch):
    """(minitron.kernels.apex bound to fakes, the fakes); afterwards no module remembers them."""
    fake = FakeApex()
    for name, module in fake.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    forget()
    yield choose_apex("apex", CUDA), fake
    forget()


def forget():
    sys.modules.pop("minitron.kernels.apex", None)
    vars(minitron.kernels).pop("apex", None)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "param_dtype, grad_dtype",
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize("piece", [1 << 30, 300])  # of a tensor
def test_adamw(apex, monkeypatch, param_dtype, grad_dtype, piece):
    ops, fake = apex
    monkeypatch.setattr(ops, "PIECE", piece)
    hyper, reports = AdamHyper(1e-2, (0.9, 0.99), 1e-3), []
    states = {}
    for module in (ops, plain):
        masters = [randn(1000).to(param_dtype).float(), randn(77, seed=1).to(param_dtype).float()]
        states[module] = [
            AdamState(
                m,
                torch.empty_like(m, dtype=grad_dtype),
                torch.zeros_like(m),
                torch.zeros_like(m),
                m if param_dtype == torch.float32 else m.to(param_dtype),
                decay,
            )
            for m, decay in zip(masters, (0.1, 0.0))
        ]

    def updated(i):
        state = states[ops][i]
        assert torch.equal(state.param, state.master.to(param_dtype))
        reports.append(i)

    steps = 0
    for call, skipped in enumerate([1.0, 0.0, 0.0, 1.0, 0.0]):
        steps += 1 - skipped
        scalars = [torch.tensor(x) for x in (steps, 3.0 + call, skipped)]
        for module, report in ((ops, updated), (plain, lambda i: None)):
            before = [t.clone() for s in states[module] for t in (s.master, s.exp_avg, s.exp_avg_sq, s.param)]
            for i, s in enumerate(states[module]):
                s.grad.copy_(randn(s.grad.numel(), seed=10 * call + i))
            module.adamw_(states[module], *scalars, hyper, report)
            after = [t for s in states[module] for t in (s.master, s.exp_avg, s.exp_avg_sq, s.param)]
            assert all(map(torch.equal, before, after)) == bool(skipped)
        for mine, twin in zip(states[ops], states[plain]):
            for name in ("master", "exp_avg", "exp_avg_sq"):
                assert_close_rel(getattr(mine, name), getattr(twin, name), 1e-6, name)  # float32's rounding
    assert reports == [0, 1] * 5 and fake.updates == 10 and fake.largest == min(1000, piece)


@pytest.mark.parametrize(
    "dtype, grad_dtype",
    [*((dtype, torch.float32) for dtype in (torch.bfloat16, torch.float16, torch.float32)), [torch.bfloat16] * 2],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_weight_gradient(apex, dtype, grad_dtype, transposed):
    ops, fake = apex
    m, n, k = 12, 8, 20
    weights, reports = [torch.nn.Parameter(randn(n, k).to(dtype)) for _ in range(2)], []
    gemms = Gemm(ops.add_product), Gemm(plain.add_product)
    for w in weights:  # main_grad lies somewhere inside of a bucket
        w.slot = GradSlot(
            torch.full((3 * n * k,), float("nan"), dtype=grad_dtype)[n * k : 2 * n * k].view(n, k),
            lambda: reports.append(1),
        )
    for i in range(3):
        dy, x = randn(m, n, seed=i).to(dtype), randn(m, k, seed=9 + i).to(dtype)
        if transposed:
            dy, x = (t.t().contiguous().t() for t in (dy, x))
        for w, gemm in zip(weights, gemms):
            assert gemm.weight_grad(w, Payload(dy), Payload(x)) is None and not w.slot.overwrite
        assert_close_rel(*(w.slot.main_grad.float() for w in weights), 1e-6)
    assert len(reports) == 6 and fake.products == (0 if dtype == torch.float32 else 2)  # the first one overwrites
    bare = torch.nn.Parameter(randn(n, k).to(dtype))
    bare.slot = None
    assert torch.equal(gemms[0].weight_grad(bare, Payload(dy), Payload(x)), dy.t() @ x)


def losses(cfg):
    trainer = train.build(cfg, Mesh.offline(1))
    loader = Loader(dataset_of(cfg), cfg, trainer.mesh)
    result = [
        trainer.step(loader.step(step * cfg.train.global_batch_size, step), cfg.optimizer.lr).read()
        for step in range(cfg.train.steps)
    ]
    loader.close()
    return trainer, result


def test_a_run_uses_it_for_every_weight_and_says_so(apex, monkeypatch):
    _, fake = apex
    # on CPUs, where it could not run
    monkeypatch.setattr(kernels, "choose_apex", lambda asked, device: choose_apex(asked, CUDA))
    bf16 = {"precision": {"dtype": "bf16"}, "model": {"num_layers": 2}}
    own, expected = losses(config(LLAMA, bf16))
    assert own.describe().endswith(f"kernels: plain, {RANKS_ALONE}") and not fake.products and not fake.updates
    cfg = config(LLAMA, bf16, {"train": {"kernels": "apex"}})
    trainer, actual = losses(cfg)
    assert trainer.describe().endswith(f"kernels: apex, {RANKS_ALONE}")
    t, matrices = cfg.train, 4 * cfg.model.num_layers + 1  # qkv, out, up, down of each block, and the head
    assert fake.products == t.steps * (t.global_batch_size // t.micro_batch_size - 1) * matrices
    assert fake.updates == t.steps * len(trainer.gradients.buckets)
    for mine, twin in zip(actual, expected):  # masters differ by float32's rounding: at times a bf16 weight does too
        assert mine == pytest.approx(twin, rel=1e-3)


# ---- errors -------------------------------------------------------------------------------------------------------


def test_it_needs_a_gpu():
    message = "^train.kernels=apex runs on CUDA devices, not on cpu; use train.kernels=auto$"
    with pytest.raises(ValueError, match=message):
        kernels.choose(config({"train": {"kernels": "apex"}}), torch.device("cpu"))


def without_capturable():
    fake = FakeApex()
    del fake.modules["amp_C"].multi_tensor_adam_capturable
    return fake.modules


@pytest.mark.parametrize(
    "modules, reason",
    [
        ({"amp_C": None, "fused_weight_gradient_mlp_cuda": None, "apex": None}, ".*amp_C.*"),
        ({"amp_C": None, "fused_weight_gradient_mlp_cuda": None, "apex": ModuleType("apex")}, ".*amp_C.*"),  # PyPI's
        (FakeApex().modules | {"fused_weight_gradient_mlp_cuda": None}, ".*fused_weight_gradient_mlp_cuda.*"),
        (without_capturable(), "cannot import name 'multi_tensor_adam_capturable'.*"),  # an old one
    ],
    ids=["absent", "another project's", "half built", "too old"],
)
def test_apex_that_is_not_there_is_one_line(monkeypatch, modules, reason):
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    forget()
    message = (
        rf"^train.kernels=apex cannot load the extensions of NVIDIA's apex \({reason}\); build them with .*pip "
        r"install .*github.com/NVIDIA/apex.* \(`apex` on PyPI is another project\), or use train.kernels=auto$"
    )
    with pytest.raises(ValueError, match=message) as error:
        kernels.choose(config({"train": {"kernels": "apex"}}), CUDA)
    assert "\n" not in str(error.value)
    assert "minitron.kernels.apex" not in sys.modules


def test_nothing_of_it_is_touched_unless_asked_for(monkeypatch):
    for name in ("amp_C", "fused_weight_gradient_mlp_cuda", "apex"):
        monkeypatch.setitem(sys.modules, name, None)
    forget()
    assert Config().train.kernels == "auto" and choose_apex("auto", CUDA) is None
    with pytest.raises(ImportError):
        importlib.import_module("minitron.kernels.apex")
