"""FP8 casts and products by Transformer Engine: fast, and with the contract of kernels/fp8_torch.py.

Its cast reads a bf16 matrix once and writes both layouts and the amax in one kernel. Its GEMM adds to a float32 or bf16
gradient in place. Only its kernels are used, not its layers: our layers communicate, recompute and accumulate
gradients. Payloads are plain tensors. The library's tensor classes exist only inside a call. Products that add to
nothing use `torch._scaled_mm`, which calls the same cuBLAS kernel and takes the host less time.

Left out: its activations with casts (kernels/fused.py has its own), its casts with sums, which round a bias's
gradient to bf16, its norms with casts, and its communication overlap.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformer_engine.pytorch  # noqa: F401, loads the library that the next line needs
import transformer_engine_torch as tex
from torch import Tensor
from transformer_engine.pytorch.constants import DType, TE_DType
from transformer_engine.pytorch.quantized_tensor import Quantizer
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

from minitron.comm.mesh import Axis
from minitron.config.sizes import FP8_WORKSPACE_BYTES
from minitron.kernels.fp8_scales import FP8_DTYPES, LARGEST_SCALE, fp8_max
from minitron.kernels.fp8_torch import Operand, ScaleAndAmax, TorchFp8
from minitron.kernels.gemm import ABSENT, Payload

gemm = partial(tex.generic_gemm, comm_overlap=None, comm_type=None, extra_output=None, bulk_overlap=False, alpha=1.0)
E4M3 = torch.float8_e4m3fn
CODES = {E4M3: DType.kFloat8E4M3, torch.float8_e5m2: DType.kFloat8E5M2}


class TeFp8(TorchFp8):
    """One scale per tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.workspaces: dict[torch.cuda.Stream, Tensor] = {}

    def cast(self, x: Tensor, role: str, shared: Axis, known: ScaleAndAmax, columnwise: bool) -> Payload:
        scale, amax = known
        fp8_dtype, both = FP8_DTYPES[role], columnwise and shared.size == 1
        if scale is None:
            options: dict[str, Any] = dict(with_amax_reduction=shared.size > 1, amax_reduction_group=shared.group)
            options |= dict(columnwise=both, amax_epsilon=fp8_max(fp8_dtype) / LARGEST_SCALE)
            quantizer = Float8CurrentScalingQuantizer(CODES[fp8_dtype], x.device, **options)
        else:
            noted = torch.zeros_like(scale) if amax is None else amax
            quantizer = Float8Quantizer(scale, noted, CODES[fp8_dtype], columnwise=both)
        parts = _run(quantizer, x)
        scale_inv, transposed = parts["fp8_scale_inv"], parts["data_transpose"]
        if scale is None and amax is not None:
            own_amax = scale_inv * fp8_max(fp8_dtype)
            own_amax.masked_fill_(scale_inv <= 1 / LARGEST_SCALE, 0.0)  # the library's scale of a tensor of zeros
            torch.maximum(amax, own_amax, out=amax)
        if transposed is None:  # not asked for, or the FP8 GEMM of this GPU reads both layouts
            return Payload(parts["data"].view(fp8_dtype), scale_inv)
        return Payload(parts["data"].view(fp8_dtype), scale_inv, transposed.view(fp8_dtype), scale_inv)

    def transpose(self, values: Tensor) -> Tensor:
        return tex.fp8_transpose(values.view(torch.uint8), CODES[values.dtype], out=None).view(values.dtype)

    def multiply_into(self, out: Tensor, a: Operand, b: Operand, *, add: bool) -> None:
        self._gemm(a, b, out.dtype, out, None, add)

    def _gemm(
        self, a: Operand, b: Operand, dtype: torch.dtype, out: Tensor | None, bias: Tensor | None, add: bool
    ) -> Tensor:
        """Compute out (+)= a b^T + bias, summed in float32."""
        workspace = self._workspace(torch.cuda.current_stream(a.values.device.index))
        transposed, quantizer, gelu, gelu_input, grad, accurate = True, None, False, None, False, True
        operands = self._wrap(b), transposed, self._wrap(a), not transposed, out, quantizer, TE_DType[dtype]
        epilogue = bias, TE_DType[torch.bfloat16], gelu, gelu_input, grad
        return gemm(*operands, *epilogue, workspace, workspace.shape[0], add, accurate, beta=float(add))[0]

    def _workspace(self, stream: torch.cuda.Stream) -> Tensor:
        """Return the stream's workspace for cuBLAS. Products on two streams must not share one."""
        if stream not in self.workspaces:
            self.workspaces[stream] = torch.empty(FP8_WORKSPACE_BYTES, dtype=torch.uint8, device=stream.device)
        return self.workspaces[stream]

    def _wrap(self, x: Operand) -> Float8TensorStorage:
        data, code = x.values.view(torch.uint8), CODES[x.values.dtype]
        return Float8TensorStorage(data=data, fp8_scale_inv=x.scale, fp8_dtype=code, fake_dtype=torch.bfloat16)


class TeBlockFp8(TeFp8):
    """A scale for each 128 values along the summed dim, or for each 128 x 128 tile of a weight.

    It always sums in float32.
    """

    def multiply(
        self, a: Operand, b: Operand, dtype: torch.dtype, out: Tensor | None, bias: Tensor | None, fast: bool
    ) -> Tensor:
        return self._gemm(a, b, dtype, out, bias, add=False)

    def cast(self, x: Tensor, role: str, shared: Axis, known: ScaleAndAmax, columnwise: bool) -> Payload:
        options = dict(block_scaling_dim=2 if role == "weight" else 1, amax_epsilon=fp8_max(E4M3) / LARGEST_SCALE)
        parts = _run(Float8BlockQuantizer(CODES[E4M3], rowwise=True, columnwise=columnwise, **options), x)
        rows, other = parts["rowwise_data"].view(E4M3), parts["columnwise_data"]
        transposed = ABSENT if other is None else other.view(E4M3)
        return Payload(rows, parts["rowwise_scale_inv"], transposed, parts["columnwise_scale_inv"])

    def _wrap(self, x: Operand) -> Float8BlockwiseQTensorStorage:
        rowwise = dict(rowwise_data=x.values.view(torch.uint8), rowwise_scale_inv=x.scale)
        columnwise = dict(columnwise_data=None, columnwise_scale_inv=None)
        dtypes = dict(fp8_dtype=CODES[E4M3], fake_dtype=torch.bfloat16)
        return Float8BlockwiseQTensorStorage(**rowwise, **columnwise, **dtypes, quantizer=None, is_2D_scaled=x.block_2d)


def _run(quantizer: Quantizer, x: Tensor) -> dict[str, Any]:
    quantizer.internal = True  # plain storage instead of a tensor subclass
    return quantizer(x.contiguous()).get_metadata()
