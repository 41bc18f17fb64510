"""Choose every kernel of a run once: attention, pointwise kernels, FP8 library, AdamW.

Choosing them here reports errors before the model is built, and all chunks of a model share one workspace. `choose`
reads the configuration and the device. A layer gets the result, a `Kernels`, and does not test what a device can do.

    device   ops                     attention                    products             FP8
    cuda     fused (Triton)          cuDNN, flash, flash-attn,    torch, or apex       Transformer Engine, or torch
                                     fused (with dropout)
    cpu      plain (torch)           flash, reference             torch                torch
    meta     those of the CPU, but attention has the name of the GPU's kernel; planner/dryrun/kernels.py hides
             temporaries
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from minitron.config.installed import pip_install
from minitron.config.schema import Config, PrecisionConfig
from minitron.config.sizes import fp8_names
from minitron.kernels import attention, plain
from minitron.kernels.fp8_counts import CastCounts
from minitron.kernels.fp8_torch import TorchBlockFp8, TorchFp8
from minitron.kernels.gemm import DTYPES, Gemm


@dataclass(frozen=True)
class Kernels:
    """The kernels of a run.

    ops: the module of pointwise kernels, with the contract of kernels/plain.py. gemm: products in the model's own
    format. adamw_: the optimizer's update. fp8: the casts and products of precision.fp8; None if it is none. add_now:
    adds a GPU's clock to a total (`fused.add_now`); None without a GPU. counts: what FP8 casts lose.
    """

    attention: attention.Backend = attention.REFERENCE
    ops: ModuleType = plain
    gemm: Gemm = field(default_factory=lambda: Gemm(plain.add_product))
    adamw_: Callable[..., None] = plain.adamw_
    fp8: TorchFp8 | None = None
    add_now: Callable[[Tensor, int], None] | None = None
    counts: CastCounts = field(default_factory=CastCounts)

    @property
    def names(self) -> str:
        """The chosen kernels, for the log."""
        return f"attention: {self.attention.name}, kernels: {self.adamw_.__module__.rpartition('.')[2]}"


PLAIN = Kernels()


def choose(cfg: Config, device: torch.device | str) -> Kernels:
    """Choose the kernels of a run. Raises ValueError if the configuration asks for one that cannot run on `device`."""
    device, m, p = torch.device(device), cfg.model, cfg.parallel
    # FP8 first: Transformer Engine cannot load after torch's own cuDNN.
    backend = None if cfg.precision.fp8 == "none" else choose_fp8(cfg.precision, device)
    ops: ModuleType = plain
    add_now: Callable[[Tensor, int], None] | None = None
    if device.type == "cuda":
        from minitron.kernels import fused

        ops, add_now = fused, fused.add_now
    apex = choose_apex(cfg.train.kernels, device) or ops
    places = dict(documents=cfg.data.separates, ring=p.cp > 1 and p.cp_style != "ulysses")
    dtype = DTYPES[cfg.precision.dtype]
    attend = attention.choose(m.attention, device, dtype, m.head_width, m.attention_dropout, **places)
    names = fp8_names(cfg, range(m.num_layers), head=True) if cfg.log.numerics_every else []
    return Kernels(attend, ops, Gemm(apex.add_product), apex.adamw_, backend, add_now, CastCounts(names, device))


def choose_fp8(precision: PrecisionConfig, device: torch.device) -> TorchFp8:
    """Choose the casts and products of precision.fp8. Raises ValueError if precision.fp8_backend cannot run here.

    Call it before anything uses cuDNN. Some machines have two copies of cuDNN, torch's and the system's. Transformer
    Engine fails to load there if torch has loaded its own.
    """
    block = precision.fp8 == "block"
    if precision.fp8_backend == "te" and device.type != "meta":
        if device.type != "cuda":
            fix = "use precision.fp8_backend=torch or precision.fp8=none"
            raise ValueError(f"precision.fp8_backend=te runs on CUDA devices, not on {device.type}; {fix}")
        try:
            from minitron.kernels import fp8_te
        except (ImportError, OSError) as error:  # OSError: a CUDA library of another version was loaded before
            fix = f"{pip_install('fp8', '--no-build-isolation')}, or use precision.fp8_backend=torch"
            raise ValueError(f"precision.fp8_backend=te cannot load Transformer Engine ({error}); {fix}") from error
        return fp8_te.TeBlockFp8() if block else fp8_te.TeFp8()
    if block and precision.fp8_backend == "torch" and device.type != "cpu":
        fix = "use precision.fp8_backend=te, or precision.fp8=delayed or current"
        raise ValueError(f"precision.fp8_backend=torch has blocks for CPUs only, where it checks them; {fix}")
    return TorchBlockFp8() if block else TorchFp8()


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
