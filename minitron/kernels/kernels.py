"""Every kernel of a run, chosen once: one object that is made when a run is built and handed down.

Problem: a run chooses its attention, its pointwise kernels, its FP8 library and its AdamW. Choosing
them once reports errors before the model is built, and lets all chunks of a model share one workspace. The idea:
`choose` reads the configuration and the device, in one place; a layer gets a `Kernels` and does not test what a device
can do.

    device   ops                     attention                    products             FP8
    cuda     fused (Triton)          cuDNN, flash, flash-attn,    torch, or apex       Transformer Engine, or torch
                                     fused (with dropout)
    cpu      plain (torch)           flash, reference             torch                torch
    meta     meta (shapes alone)     shapes alone                 shapes alone         shapes alone: a dry run
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from minitron.config.schema import Config
from minitron.kernels import attention, fp8, meta, plain
from minitron.kernels.fp8_torch import TensorScaling
from minitron.kernels.gemm import DTYPES, Gemm


@dataclass(frozen=True)
class Kernels:
    """The kernels of a run.

    ops: the module of pointwise kernels, under the contract of kernels/plain.py. gemm: products in the model's own
    format. adamw_: the optimizer's update. fp8: the casts and products of precision.fp8, None without it; one for the
    whole run, since it may hold a workspace.
    """

    attention: attention.Backend = attention.REFERENCE
    ops: ModuleType = plain
    gemm: Gemm = field(default_factory=lambda: Gemm(plain.add_product))
    adamw_: Callable[..., None] = plain.adamw_
    fp8: TensorScaling | None = None

    @property
    def names(self) -> str:
        """The chosen kernels, for the log."""
        module = self.adamw_.__module__.removeprefix("minitron.kernels.").removesuffix("_adamw")
        return f"attention: {self.attention.name}, kernels: {module}"


PLAIN = Kernels()


def choose(cfg: Config, device: torch.device | str) -> Kernels:
    """Choose the kernels of a run. Raises ValueError if those asked for cannot run on this device."""
    device, m = torch.device(device), cfg.model
    backend = None
    if cfg.precision.fp8 != "none":  # first: Transformer Engine cannot load behind torch's own cuDNN
        backend = fp8.choose_backend(cfg.precision, device)
    ops = choose_ops(device)
    apex = choose_apex(cfg.train.kernels, device) or ops
    dtype, p = DTYPES[cfg.precision.dtype], cfg.parallel
    places = dict(documents=cfg.data.separate_documents, ring=p.cp > 1 and p.cp_style != "ulysses")
    attend = attention.choose(m.attention, device, dtype, m.head_dim, m.attention_dropout, **places)
    return Kernels(attend, ops, Gemm(apex.add_product), apex.adamw_, backend)


def choose_ops(device: torch.device) -> ModuleType:
    """Choose the pointwise kernels of a device: fused on CUDA, meta in a dry run, else plain."""
    if device.type != "cuda":
        return meta if device.type == "meta" else plain
    from minitron.kernels import fused

    return fused


def gpu_clock(device: torch.device) -> Callable[[Tensor, int], None] | None:
    """Return what adds the time to a total on a GPU (`fused.add_now`); None elsewhere."""
    if device.type != "cuda":
        return None
    from minitron.kernels.fused import add_now

    return add_now


def choose_apex(kernels: str, device: torch.device) -> ModuleType | None:
    """Return kernels/apex.py if train.kernels asks for it. Raises ValueError if it cannot run here."""
    if kernels != "apex" or device.type == "meta":
        return None
    if device.type != "cuda":
        raise ValueError(f"train.kernels=apex runs on CUDA devices, not on {device.type}; use train.kernels=auto")
    try:
        from minitron.kernels import apex
    except ImportError as error:
        raise ValueError(
            f"train.kernels=apex cannot load the extensions of NVIDIA's apex ({error}); build them with "
            "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation "
            "git+https://github.com/NVIDIA/apex.git (`apex` on PyPI is another project), or use "
            "train.kernels=auto"
        ) from error
    return apex
