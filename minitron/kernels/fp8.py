"""FP8 products of the linear layers: which tensor is cast when, and with which scale.

Problem: an FP8 GEMM takes half the time of a bf16 one, but a cast reads and writes memory like any other pass, an
8-bit number spans few magnitudes, and a scale that follows the data costs a pass or a collective of its own. The idea:

    every tensor is cast once, for all products that read it       x: forward, weight gradient
                                                                   dy: input and weight gradient
    weights are cast once per optimizer step, not per microbatch   `Fp8States.advance` drops the casts
    what ranks gather is the cast                                  half the traffic, one scale for all of them
    norms and activations cast what they compute, activations'     one pass less each, where the scale is known before
    gradients too, which are summed for the bias there

and three ways to a scale, the number that brings a tensor's largest magnitude to the limit of its format:

    current    look first, then cast: two passes, and a collective where ranks share a scale
    delayed    the scale comes from the largest magnitude of the last 16 steps; the cast also finds the new magnitude.
               All magnitudes of a rank enter their histories in one collective per step.
    block      a scale for each 128 values of a row: nothing to share or to remember, but slower products

    Delayed, limit 448, magnitudes of the last steps 2.0, 3.5, 1.4: scale 448 / 3.5 = 128; a value of 4.0 in this step
    saturates at 3.5, and the next step's scale is 448 / 4.0.

A recomputed forward pass casts the same values with the same scale and notes the same magnitude again, so recomputation
needs no special case. In the first step of a run there is no history, and delayed scaling works as current does.
With precision.fp8_params the optimizer casts the weight (fp8_scales.py). This file transposes it.
precision.fp8_bf16_layers at both ends of the model stay in the model's own format, and the head without
precision.fp8_head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from minitron.comm.mesh import Axis, Mesh
from minitron.config.schema import PrecisionConfig
from minitron.config.sizes import fp8_layers
from minitron.kernels.fp8_scales import KINDS, ROLES, DelayedScaling, KeptInFp8, WeightScales, advance
from minitron.kernels.fp8_torch import Operand, TensorScaling
from minitron.kernels.gemm import ALONE, DTYPES, Activation, CastInto, Gemm, Payload
from minitron.kernels.param import Param, add_gradient

GEMMS_PER_LAYER = 4  # of a transformer block: qkv, out, up, down


class Fp8Gemm(Gemm):
    """The products of one linear layer in FP8. It keeps the weight's cast until the weight changes.

    dtype: of outputs and input gradients. scaling: has the scales of x, weight and dy, as its tensors `first` to
    `first` + 2; None: the backend finds them. kept: the scale of a weight that the optimizer keeps as FP8 bytes; None:
    this object casts the weight. frozen: the weight never changes, so it is cast once, by its own magnitude, without a
    history.
    """

    def __init__(
        self,
        backend: TensorScaling,
        dtype: torch.dtype,
        scaling: DelayedScaling | None = None,
        first: int = 0,
        kept: KeptInFp8 | None = None,
        frozen: bool = False,
    ):
        self.backend, self.dtype, self.scaling, self.first, self.kept = backend, dtype, scaling, first, kept
        self._weight: Payload | None = None
        self._frozen = frozen

    @property
    def history(self) -> Tensor | None:
        """[HISTORY, 3] magnitudes of x, weight and dy, a view, for a checkpoint; None without delayed scaling."""
        return None if self.scaling is None else self.scaling.history[:, self.first : self.first + len(ROLES)]

    def quantize(self, x: Tensor, gathered: Axis = ALONE, *, columns: bool, record: bool) -> Payload:
        return self.backend.cast(x, "x", gathered, *self._scale("x", record), columns)

    def cast_before(self, record: bool) -> CastInto | None:
        return self._cast_into("x", record)

    def quantize_grad(self, dy: Tensor, gathered: Axis = ALONE, *, columns: bool) -> Payload:
        return self.backend.cast(dy, "dy", gathered, *self._scale("dy", True), columns)

    def forward(self, x: Payload, weight: Tensor, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        w = self._quantized(weight)
        a, b = Operand(x.rows, x.rows_scale), Operand(w.rows, w.rows_scale, True)
        return self.backend.multiply(a, b, self.dtype, out=out, bias=bias, fast=True)

    def input_grad(self, dy: Payload, weight: Tensor, out: Tensor | None = None) -> Tensor:
        a, b = Operand(dy.rows, dy.rows_scale), self._columns(self._quantized(weight), True)
        return self.backend.multiply(a, b, self.dtype, out=out, bias=None, fast=False)

    def weight_grad(self, weight: Param, dy: Payload, x: Payload) -> Tensor | None:
        return add_gradient(weight, partial(self.backend.multiply_into, a=self._columns(dy), b=self._columns(x)))

    def prepare(self, weight: Tensor) -> None:
        self._quantized(weight)

    def quantize_activation(self, inner: Tensor, act: Activation, *, columns: bool, record: bool) -> Payload:
        into = self._cast_into("x", record, columns)
        if into is None:
            return self.quantize(act.forward(inner), columns=columns, record=record)
        return act.forward(inner, into)

    def quantize_activation_grad(
        self, dy: Tensor, inner: Tensor, act: Activation, *, columns: bool, sums: bool
    ) -> tuple[Payload, Tensor | None]:
        into = self._cast_into("dy", True, columns)
        if into is None:
            dx, total = act.backward(dy, inner, sums)
            return self.quantize_grad(dx, columns=columns), total
        return act.backward(dy, inner, sums, into)

    def drop_casts(self) -> None:
        """Drop the weight's cast, since the weight has changed."""
        if not self._frozen:
            self._weight = None

    def _quantized(self, weight: Tensor) -> Payload:
        if self._weight is None and self.kept is not None and weight.dtype == KINDS["weight"]:
            inverse, rows = self.kept.inverse, weight.detach()
            self._weight = Payload(rows, inverse, self.backend.transpose(rows), inverse)
        elif self._weight is None:
            known = (None, None) if self._frozen else self._scale("weight", True)
            self._weight = self.backend.cast(weight.detach(), "weight", ALONE, *known, True)
        return self._weight

    def _scale(self, role: str, record: bool) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if self.scaling is None else self.scaling.of(self.first + ROLES.index(role), record)

    def _cast_into(self, role: str, record: bool, columns: bool = False) -> CastInto | None:
        """Return how a kernel casts its result; None if only the result itself gives the scale."""
        if self.scaling is None or self.scaling.cold:
            return None
        scale, amax = self._scale(role, record)
        assert scale is not None
        return CastInto(scale, amax, KINDS[role], columns)

    def _columns(self, x: Payload, tiled: bool = False) -> Operand:
        if x.columns is not None:
            return Operand(x.columns, x.columns_scale, tiled)
        return Operand(self.backend.transpose(x.rows), x.rows_scale)  # gathered rows, with one scale


class Fp8State:
    """What FP8 keeps for a model chunk: its GEMMs, and the scales of their tensors.

    layers: the blocks of the chunk, of num_layers in the model. head: whether the chunk has the head. backend: FP8's
    casts and products, None without FP8. ordinary: the GEMM of layers without FP8. frozen: the weights never change.
    """

    def __init__(
        self,
        precision: PrecisionConfig,
        layers: Sequence[int],
        num_layers: int,
        head: bool,
        mesh: Mesh,
        backend: TensorScaling | None,
        ordinary: Gemm,
        frozen: bool = False,
    ):
        self.dtype, self.ordinary = DTYPES[precision.dtype], ordinary
        self.backend, self.frozen = backend, frozen
        self.layers = [i for i in layers if i in fp8_layers(precision, num_layers)]
        self.head = head and precision.fp8_head
        self.gemms: list[Fp8Gemm] = []
        self.scaling = self.weights = None
        if (self.layers or self.head) and precision.fp8 == "delayed":
            roles = ROLES * (GEMMS_PER_LAYER * len(self.layers) + self.head)
            self.scaling = DelayedScaling(roles, (mesh.tp, mesh.dp_cp), mesh.device)
        if self.layers and precision.fp8_params:
            self.weights = WeightScales(GEMMS_PER_LAYER * len(self.layers), self.scaling, mesh.device)

    def gemm(self, layer: int) -> Gemm:
        """Make the GEMM of one more linear layer of block `layer`."""
        kept = None if self.weights is None else self.weights.of(len(self.gemms))
        return self._make(kept) if layer in self.layers else self.ordinary

    def head_gemm(self) -> Gemm:
        """Make the GEMM of the head, after those of the blocks. Its weight, maybe the embedding's, is kept in bf16."""
        return self._make(None) if self.head else self.ordinary

    def _make(self, kept: KeptInFp8 | None) -> Fp8Gemm:
        assert self.backend is not None
        first = len(ROLES) * len(self.gemms)
        self.gemms.append(Fp8Gemm(self.backend, self.dtype, self.scaling, first, kept, self.frozen))
        return self.gemms[-1]

    def drop_casts(self) -> None:
        """Drop the weights' casts: the next product casts its weight anew."""
        for gemm in self.gemms:
            gemm.drop_casts()


class Fp8States:
    """The FP8 states of all chunks of a rank."""

    def __init__(self, states: Sequence[Fp8State]):
        self.states = states

    def advance(self) -> None:
        """Drop the weights' casts and move the magnitudes of the step to the histories, just before the update.

        Collective over tp and dp_cp with delayed scaling.
        """
        self.drop_casts()
        if scalings := [state.scaling for state in self.states if state.scaling is not None]:
            advance(scalings)

    def drop_casts(self) -> None:
        """Drop the FP8 casts of weights: every training step begins without them."""
        for state in self.states:
            state.drop_casts()
