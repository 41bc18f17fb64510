"""What a checkpoint holds of a trainer, as boxes of global tensors.

It is each rank's slices of the optimizer's float32 masters and moments, fp16's loss scale, the FP8 histories, and the
history of `train.rerun`. No more is needed: parameters are rounded or cast masters, dropout hashes counters, and
the order of the data follows from the data and the number of samples consumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from minitron.checkpoint.boxes import TensorShard, boxes_of_range, to_global, whole_shape
from minitron.kernels.fp8 import Fp8Gemm
from minitron.model.gpt import GPT, Head
from minitron.optim.buckets import Gradients
from minitron.optim.rerun import Rerun
from minitron.optim.scaler import LossScaler
from minitron.optim.zero1 import Zero1Optimizer
from minitron.parallel.linear import ParallelLinear


class State(NamedTuple):
    """The parts of a trainer that have a state. base_fingerprint: that of frozen weights, which are not saved."""

    chunks: Sequence[GPT]
    optimizer: Zero1Optimizer
    scaler: LossScaler
    base_fingerprint: str | None = None
    rerun: Rerun | None = None

    def slices(self) -> dict[str, list[Tensor]]:
        """Map each kind to one flat slice per bucket."""
        o = self.optimizer
        return {"master": o.masters, "exp_avg": o.exp_avg, "exp_avg_sq": o.exp_avg_sq}

    def scalars(self) -> dict[str, Tensor]:
        """Map names in the index to 0-d tensors, the same on every rank."""
        return {"optimizer_steps": self.optimizer.steps, **self.scaler.state()}

    def facts(self) -> dict[str, Any]:
        """Map names in the index to values in host memory, the same on every rank."""
        return {"base": self.base_fingerprint} | ({} if self.rerun is None else {"rerun": self.rerun.state()})

    @staticmethod
    def histories(chunk: GPT) -> Iterator[TensorShard]:
        """Yield the chunk's FP8 magnitudes by layer: views, the same on every rank of tp and dp_cp."""
        for name, module in chunk.named_modules():
            gemm = module.op.gemm if isinstance(module, (ParallelLinear, Head)) else None
            if isinstance(gemm, Fp8Gemm) and gemm.history is not None:
                yield TensorShard(name, "fp8_history", tuple(gemm.history.shape), (0, 0), gemm.history)


def tensor_shards(gradients: Gradients, slices: Mapping[str, Sequence[Tensor]]) -> Iterator[TensorShard]:
    """Yield this rank's slices as boxes of global tensors: views, to copy from or into.

    slices: kind -> one flat tensor per bucket, laid out as the optimizer's; an empty one leaves the bucket out.
    """
    for part in gradients.owned():
        shape, split, at = tuple(part.param.shape), part.param.spec.shard, 0
        global_shape = whole_shape(shape, split)
        for box in boxes_of_range(shape, part.offset, part.offset + part.numel):
            begin, at = at, at + prod(box.shape)
            for kind, flat in slices.items():
                if len(flat[part.bucket]):
                    view = part.of(flat)[begin:at].view(box.shape)
                    for cut, start in to_global(box, split):
                        yield TensorShard(part.name, kind, global_shape, start, view[cut.within(box)])
