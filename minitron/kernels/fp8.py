"""FP8 products of the linear layers: which tensor is cast when, and with which scale.

Problem: an FP8 GEMM takes half the time of a bf16 one. But a cast reads and writes memory like any other pass. An 8-bit
number spans few magnitudes, so each tensor needs a scale. Finding it costs another pass or a collective. The idea:

    cast every tensor once, for all products that read it           x: forward, weight gradient
                                                                    dy: input gradient, weight gradient
    cast weights once per optimizer step, not per microbatch        `Fp8States.end_step` drops the casts
    gather the cast                                                 half the traffic, one scale for all ranks
    cast in the kernels of norms, activations and their gradients   one pass less, if the scale is already known

A scale brings a tensor's largest magnitude (amax) to the largest value of its format. There are three ways to find it:

    current    read the tensor, then cast it: two passes, and a collective if ranks share the scale
    delayed    from the amax of the last 16 steps. The cast also computes the new amax. All amax of a rank enter their
               histories in one collective per step.
    block      one scale for each 128 values of a row: no collective and no history, but slower products

    Delayed, largest value 448, amax of the last steps 2.0, 3.5, 1.4: scale 448 / 3.5 = 128. A value of 4.0 in this step
    saturates at 3.5, and the next step's scale is 448 / 4.0.

A recomputed forward pass casts the same values with the same scale, and adds the same amax to a maximum. So
recomputation needs no special case. The first step of a run has no history, so delayed scaling works like current
scaling there. With precision.fp8_params the optimizer casts the weight (fp8_scales.py), and this file transposes it.
The first and last precision.fp8_bf16_layers blocks stay in the model's own format, and so does the head without
precision.fp8_head. Some steps count the values that casts round to 0 or saturate (fp8_counts.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from minitron.comm.mesh import Axis, Mesh
from minitron.config.schema import Config
from minitron.config.sizes import fp8_layers, fp8_names
from minitron.kernels.fp8_counts import CastCounts
from minitron.kernels.fp8_scales import FP8_DTYPES, ROLES, DelayedScaling, Fp8WeightScale, WeightScales, roll_histories
from minitron.kernels.fp8_torch import Operand, ScaleAndAmax, TorchFp8
from minitron.kernels.gemm import ALONE, DTYPES, Activation, CastInto, Gemm, Payload, Product
from minitron.kernels.kernels import Kernels
from minitron.kernels.param import Param, add_gradient


@dataclass(eq=False)
class Fp8Gemm(Gemm):
    """The products of one linear layer in FP8. It keeps the weight's cast until the weight changes.

    dtype: that of outputs and input gradients. scaling: holds the scales of x, weight and dy at the indices `first`,
    `first` + 1 and `first` + 2; None: the backend computes them. fp8_scale: of a weight that the optimizer keeps as FP8
    bytes; None: this object casts the weight. frozen: the weight never changes, so it is cast once, with a scale from
    the weight itself. counts: those of the run's casts. name: this layer's name in counts.
    """

    backend: TorchFp8
    dtype: torch.dtype
    scaling: DelayedScaling | None = None
    first: int = 0
    fp8_scale: Fp8WeightScale | None = None
    frozen: bool = False
    name: str = ""
    counts: CastCounts = field(default_factory=CastCounts)
    _weight: Payload | None = field(default=None, init=False)

    @property
    def history(self) -> Tensor | None:
        """[HISTORY, 3] amax of x, weight and dy for a checkpoint, a view; None without delayed scaling."""
        return None if self.scaling is None else self.scaling.history[:, self.first : self.first + len(ROLES)]

    def quantize(self, x: Tensor, gather_axis: Axis = ALONE, *, columnwise: bool, update_history: bool) -> Payload:
        return self._cast(x, "x", gather_axis, self._scale("x", update_history), columnwise)

    def producer_cast(self, update_history: bool) -> CastInto | None:
        return self._cast_into("x", update_history)

    def quantize_grad(self, dy: Tensor, gather_axis: Axis = ALONE, *, columnwise: bool) -> Payload:
        return self._cast(dy, "dy", gather_axis, self._scale("dy", True), columnwise)

    def forward(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        w = self._quantized(weight)
        return self._product(Operand(w.rowwise, w.rowwise_scale, block_2d=True), bias, fast=True)

    def input_grad(self, weight: Tensor) -> Product:
        return self._product(self._columnwise(self._quantized(weight), block_2d=True), None, fast=False)

    def _product(self, weight: Operand, bias: Tensor | None, fast: bool) -> Product:
        def product(x: Payload, out: Tensor | None = None) -> Tensor:
            a = Operand(x.rowwise, x.rowwise_scale)
            return self.backend.multiply(a, weight, self.dtype, out=out, bias=bias, fast=fast)

        return product

    def weight_grad(self, weight: Param, dy: Payload, x: Payload) -> Tensor | None:
        return add_gradient(weight, partial(self.backend.multiply_into, a=self._columnwise(dy), b=self._columnwise(x)))

    def quantize_activation(self, inner: Tensor, act: Activation, *, columnwise: bool, update_history: bool) -> Payload:
        into = self._cast_into("x", update_history, columnwise)
        y = act.forward(inner, into)
        return self.quantize(y, columnwise=columnwise, update_history=update_history) if into is None else y

    def quantize_activation_grad(
        self, dy: Tensor, inner: Tensor, act: Activation, *, columnwise: bool, sums: bool
    ) -> tuple[Payload, Tensor | None]:
        into = self._cast_into("dy", True, columnwise)
        dx, total = act.backward(dy, inner, sums, into, over_x=True)
        return self.quantize_grad(dx, columnwise=columnwise) if into is None else dx, total

    def drop_casts(self) -> None:
        """Drop the weight's cast, since the weight has changed."""
        if not self.frozen:
            self._weight = None

    def _quantized(self, weight: Tensor) -> Payload:
        if self._weight is None and self.fp8_scale is not None and weight.dtype == FP8_DTYPES["weight"]:
            scale_inv, rows = self.fp8_scale.scale_inv, weight.detach()
            self._weight = Payload(rows, scale_inv, self.backend.transpose(rows), scale_inv)
        elif self._weight is None:
            known: ScaleAndAmax = (None, None) if self.frozen else self._scale("weight", True)
            self._weight = self._cast(weight.detach(), "weight", ALONE, known, True)
        return self._weight

    def _cast(self, x: Tensor, role: str, shared: Axis, known: ScaleAndAmax, columnwise: bool) -> Payload:
        cast = self.backend.cast(x, role, shared, known, columnwise)
        if self.counts.on:
            self.counts.add(self.name, role, x, cast.rowwise, cast.rowwise_scale)
        return cast

    def _scale(self, role: str, update_history: bool) -> ScaleAndAmax:
        if self.scaling is None:
            return None, None
        return self.scaling.scale_and_amax(self.first + ROLES.index(role), update_history)

    def _cast_into(self, role: str, update_history: bool, columnwise: bool = False) -> CastInto | None:
        """Return how a kernel casts its result; None if the result itself is needed, for its scale or for counts."""
        if self.scaling is None or not self.scaling.has_history or self.counts.on:
            return None
        scale, amax = self._scale(role, update_history)
        assert scale is not None
        return CastInto(scale, amax, FP8_DTYPES[role], columnwise)

    def _columnwise(self, x: Payload, block_2d: bool = False) -> Operand:
        if x.columnwise is not None:
            return Operand(x.columnwise, x.columnwise_scale, block_2d)
        return Operand(self.backend.transpose(x.rowwise), x.rowwise_scale)  # gathered, with one scale


class Fp8State:
    """What FP8 keeps for a model chunk: its GEMMs, and the scales of their tensors.

    layers: the blocks of the chunk. head: whether the chunk has the head. kernels: FP8's casts and products, and the
    GEMM of layers without FP8.
    """

    def __init__(self, cfg: Config, layers: Sequence[int], head: bool, mesh: Mesh, kernels: Kernels):
        precision = cfg.precision
        self.dtype, self.kernels, self.frozen = DTYPES[precision.dtype], kernels, cfg.finetune.kind == "lora"
        self.names = fp8_names(cfg, layers, head)
        self.layers = [i for i in layers if i in fp8_layers(precision, cfg.model.num_layers)]
        self.head = head and precision.fp8_head
        self.gemms: list[Fp8Gemm] = []
        self.scaling = self.weights = None
        if self.names and precision.fp8 == "delayed":
            self.scaling = DelayedScaling(ROLES * len(self.names), (mesh.tp, mesh.dp_cp), mesh.device)
        if self.layers and precision.fp8_params:
            self.weights = WeightScales(len(self.names) - self.head, self.scaling, mesh.device)

    def gemm(self, layer: int) -> Gemm:
        """Make the GEMM of the next linear layer of block `layer`."""
        fp8_scale = None if self.weights is None else self.weights.of(len(self.gemms))
        return self._make(fp8_scale) if layer in self.layers else self.kernels.gemm

    def head_gemm(self) -> Gemm:
        """Make the GEMM of the head, after those of the blocks. Its weight stays in bf16: it may be the embedding's."""
        return self._make(None) if self.head else self.kernels.gemm

    def _make(self, fp8_scale: Fp8WeightScale | None) -> Fp8Gemm:
        assert self.kernels.fp8 is not None
        first, name, counts = len(ROLES) * len(self.gemms), self.names[len(self.gemms)], self.kernels.counts
        options = fp8_scale, self.frozen, name, counts
        self.gemms.append(Fp8Gemm(self.kernels.fp8, self.dtype, self.scaling, first, *options))
        return self.gemms[-1]


class Fp8States:
    """The FP8 states of all chunks of a rank."""

    def __init__(self, states: Sequence[Fp8State]):
        self.states = states

    def end_step(self) -> None:
        """Drop the weights' casts and move the step's amax to the histories, just before the optimizer's update.

        With delayed scaling collective over tp and dp_cp.
        """
        self.drop_casts()
        if scalings := [state.scaling for state in self.states if state.scaling is not None]:
            roll_histories(scalings)

    def drop_casts(self) -> None:
        """Drop the weights' casts. A training step must begin without them."""
        for gemm in chain.from_iterable(state.gemms for state in self.states):
            gemm.drop_casts()
