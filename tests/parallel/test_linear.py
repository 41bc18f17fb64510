"""From a layer to its product are three calls, back from the autograd function four: each call costs the host time."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import minitron
from layouts import config
from minitron.comm.mesh import Axis, Mesh
from minitron.kernels import fp8_torch, plain
from minitron.kernels.fp8 import Fp8State
from minitron.kernels.gemm import Gemm
from minitron.kernels.kernels import Kernels, choose_fp8
from minitron.kernels.param import GradSlot
from minitron.parallel.layer_context import LayerContext
from minitron.parallel.linear import ColumnParallelLinear, RowParallelLinear
from minitron.parallel.overlap import ProcessGroupComm

PACKAGE = str(Path(minitron.__file__).parent)
H, F = 32, 64


def spy(kernel, chains):
    """`kernel`, which notes the package's functions that are on the stack when it is called, outermost first."""

    def spied(*args, **kwargs):
        frame, names = sys._getframe(1), []
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        chains.append(names[::-1])
        return kernel(*args, **kwargs)

    return spied


def gemms_of(fp8: str, add_product):
    """A function that makes the product of one more layer."""
    if fp8 == "none":
        return lambda: Gemm(add_product)
    cfg, mesh = config({"model": {"num_layers": 1}, "precision": {"fp8": fp8, "fp8_backend": "torch"}}), Mesh.offline()
    state = Fp8State(cfg, range(1), False, mesh, Kernels(fp8=choose_fp8(cfg.precision, mesh.device)))
    return lambda: state.gemm(0)


@pytest.mark.parametrize("fp8", ["none", "delayed", "current"])
@pytest.mark.parametrize("bias", [False, True])
def test_three_calls_forward_and_four_backward(monkeypatch, fp8, bias):
    chains = []
    for owner, name in (torch, "mm"), (torch, "addmm"), (fp8_torch.TorchFp8, "multiply"):
        monkeypatch.setattr(owner, name, spy(getattr(owner, name), chains))
    make = gemms_of(fp8, spy(plain.add_product, chains))
    layout = LayerContext(ProcessGroupComm(Axis.single()), dtype=torch.bfloat16)
    layers = (
        ColumnParallelLinear(H, (F,), layout, std=0.1, bias=bias, gemm=make()),
        RowParallelLinear(F, H, layout, std=0.1, bias=bias, gemm=make()),
    )
    for param in nn.ModuleList(layers).parameters():
        nn.init.normal_(param)
        param.slot = GradSlot(torch.empty(param.shape), lambda: None)
    x = torch.randn(16, 2, H, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):  # main_grad is written, then added to
        inner = layers[0](x)
        y = layers[1](inner)
        forward, chains[:] = list(chains), []
        assert [chain[0] for chain in forward] == 2 * ["ParallelLinear.forward"]
        for chain in forward:
            assert len(chain) - 1 - chain.index("_Linear.forward") <= 3, " -> ".join(chain)
        y.backward(torch.randn_like(y))
        backward, chains[:] = list(chains), []
        assert [chain[:2] for chain in backward] == [
            ["_Linear.backward", f"{layer}.backward"] for layer in ("RowOp", "RowOp", "ColumnOp", "ColumnOp")
        ]
        for chain in backward:
            assert len(chain) - 1 <= 4, " -> ".join(chain)
