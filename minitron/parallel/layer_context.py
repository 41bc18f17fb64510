"""The parallel context of a layer: its communication, its kernels and the format of its parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from minitron.comm.mesh import Axis, Mesh
from minitron.comm.shared_memory import can_access_peers
from minitron.config.schema import Config
from minitron.config.sizes import in_pieces
from minitron.kernels.fp8_scales import Fp8WeightScale
from minitron.kernels.gemm import DTYPES
from minitron.kernels.kernels import PLAIN, Kernels
from minitron.kernels.param import Param, ParamSpec, Shard, new_parameter
from minitron.parallel.overlap import ProcessGroupComm, SymmetricMemoryComm
from minitron.pipeline.weight_queue import WeightQueue


@dataclass(frozen=True)
class LayerContext:
    """What the layers of a rank share.

    comm: communication over the tensor-parallel axis. kernels: of the run. dtype, device: of the parameters.
    weight_queue: the queue of weight gradients, if the schedule splits the backward.
    """

    comm: ProcessGroupComm = field(default_factory=lambda: ProcessGroupComm(Axis.single()))
    kernels: Kernels = PLAIN
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    weight_queue: WeightQueue = field(default_factory=WeightQueue)

    @property
    def axis(self) -> Axis:
        """The tensor-parallel ranks."""
        return self.comm.axis

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations between layers are split over tp along the sequence."""
        return self.comm.sequence_parallel

    def parameter(
        self,
        shape: tuple[int, ...],
        shard: Shard | None = None,
        *,
        std: float | None = None,
        fill: float = 0.0,
        per_head: bool = False,
        whole_sequence: bool = False,
        fp8_scale: Fp8WeightScale | None = None,
    ) -> Param:
        """Make this rank's part of a parameter of full `shape`, cut by `shard` (None: replicated over tp).

        std: of its normal initialisation; None fills it with `fill`. Matrices decay, vectors do not. The gradient of a
        replicated parameter is summed over tp if each rank computes only a part of it. What a rank computes:

                                   under sequence parallelism    without
            (neither)              its tokens' part: summed      the whole gradient
            whole_sequence=True    the whole gradient            the whole gradient
            per_head=True          its heads' part: summed       its heads' part: summed

        fp8_scale: see ParamSpec.
        """
        summed = shard is None and self.axis.size > 1 and (per_head or (self.sequence_parallel and not whole_sequence))
        spec = ParamSpec(shard=shard, decay=len(shape) > 1, std=std, fill=fill, sum_over_tp=summed, fp8_scale=fp8_scale)
        return new_parameter(shape, spec, self.dtype, self.device)


def make_layer_context(cfg: Config, mesh: Mesh, kernels: Kernels) -> LayerContext:
    """Make the context that all chunks of a rank share, with the fastest communication that can run.

    Collective over tp.
    """
    p, dtype = cfg.parallel, DTYPES[cfg.precision.dtype]
    if in_pieces(mesh.tp.size, p.sequence_parallel, p.overlap_tp) and can_access_peers(mesh.tp, mesh.device):
        comm: ProcessGroupComm = SymmetricMemoryComm(mesh.tp, mesh.device, dtype, kernels.ops.sum_parts)
    else:
        comm = ProcessGroupComm(mesh.tp, p.sequence_parallel, p.overlap_tp)
    return LayerContext(comm, kernels, dtype, mesh.device)
