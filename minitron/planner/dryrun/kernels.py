"""Kernels for torch's meta device, whose tensors have shapes and no memory: a dry run calls them instead of a GPU's.

Problem: a dry run adds up what a step allocates. A GPU's kernel allocates its results only. The same function in
kernels/plain.py also allocates a dozen temporaries, and so shows peaks that no GPU has. The idea: run the plain
functions, which check every shape, and hide their temporaries:

    allocated by add_norm on a GPU         total, y, statistics
    by plain.add_norm                      these, and float copies of x, delta, total, ...
    by unobserved(plain.add_norm)          these, as far as a dry run can see

Nothing is computed, so equal shapes have equal results: each function runs once for each shape, and the thousands of
layers of a step cost little more than their allocations. This module has the functions of kernels/plain.py; `choose`
hides the temporaries of attention and FP8, too. Left out: what a GPU's kernel allocates for its own use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from minitron.config.schema import Config
from minitron.kernels import kernels, plain
from minitron.kernels.attention import REFERENCE, ForwardResult, Grads, Options
from minitron.kernels.fp8_torch import TorchBlockFp8, TorchFp8
from minitron.kernels.gemm import Gemm
from minitron.kernels.kernels import Kernels

Function = Callable[..., Any]


def choose(cfg: Config) -> Kernels:
    """Choose kernels as on a GPU; they allocate what those of the GPU allocate. Raises ValueError as there."""
    chosen = kernels.choose(cfg, "meta")
    attend, fp8 = chosen.attention, chosen.fp8
    if attend.name != "reference":
        attend = replace(attend, forward=unobserved(_attention_forward), backward=unobserved(_attention_backward))
    if fp8 is not None and cfg.precision.fp8_backend == "te":
        fp8 = _like_transformer_engine(cfg.precision.fp8 == "block")
    gemm = Gemm(unobserved(plain.add_product))
    return Kernels(attend, sys.modules[__name__], gemm, adamw_, fp8, counts=chosen.counts)


def _attention_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> ForwardResult:
    """Compute attention by the formulas. Results get the strides of q, as in the kernels of GPUs."""
    out, lse, saved = REFERENCE.forward(q, k, v, options)
    return torch.empty_like(q).copy_(out), lse, saved


def _attention_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Grads:
    grads = REFERENCE.backward(dout, q, k, v, *rest)
    dq, dk, dv = (torch.empty_like(x).copy_(grad) for x, grad in zip((q, k, v), grads))
    return dq, dk, dv


def _like_transformer_engine(block: bool) -> TorchFp8:
    """Make a backend that allocates what Transformer Engine would."""
    fp8 = TorchBlockFp8() if block else TorchFp8(sys.modules[__name__])
    for name in ("cast", "multiply", "multiply_into")[not block :]:  # the cast by tensors has a collective inside
        setattr(fp8, name, unobserved(getattr(fp8, name)))
    return fp8


def unobserved(kernel: Function) -> Function:
    """Wrap a kernel of the meta device so that torch's dispatch modes see only its results. Cached by shape."""

    def unseen(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return kernel(*args, **kwargs)

    return cached_by_shape(unseen)


def cached_by_shape(function: Function) -> Function:
    """Wrap `function` so that it runs once for each combination of shapes; later calls allocate the results alone.

    Its arguments are tensors, lists, tuples and hashable values, and it changes nothing but them. Its results are None,
    new tensors on the meta device, or arguments. A function that returns views runs every time.
    """
    known: dict[object, Function] = {}

    def run(*args: Any, **kwargs: Any) -> Any:
        key = _signature(args), _signature((*kwargs.items(),))
        if key in known:
            return known[key](*args, **kwargs)
        result = function(*args, **kwargs)
        known[key] = _maker(result, tree_leaves((args, kwargs))) or function
        return result if known[key] is function else known[key](*args, **kwargs)

    return run


def _maker(result: Any, arguments: list[Any]) -> Function | None:
    """Return a function that makes results like these from arguments like these; None if it had to compute them."""
    results, structure = tree_flatten(result)
    tensors = [(id(x), i) for i, x in enumerate(arguments) if isinstance(x, Tensor)]
    places = dict(tensors)
    if len(places) < len(tensors):
        return None  # one tensor is two arguments, so a result that is this tensor could be either
    storages = {arguments[i].untyped_storage()._cdata for i in places.values()}
    recipe: list[Any] = []  # id, shape, stride and dtype of each result, or its place among the arguments
    for x in results:
        if x is None or id(x) in places:
            recipe.append(places.get(id(x)))
        elif isinstance(x, Tensor) and x.is_meta and x.untyped_storage()._cdata not in storages:
            recipe.append((id(x), x.shape, x.stride(), x.dtype))
        else:
            return None

    def make(*args: Any, **kwargs: Any) -> Any:
        leaves, made = tree_leaves((args, kwargs)), dict[int, Tensor]()

        def result_of(item: Any) -> Any:
            if item is None or isinstance(item, int):
                return item if item is None else leaves[item]
            number, shape, stride, dtype = item
            if number not in made:  # one tensor may be several results, as the scale of a cast is
                made[number] = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            return made[number]

        return tree_unflatten(map(result_of, recipe), structure)

    return make


def _signature(x: Any) -> object:
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.is_meta
    return tuple(map(_signature, x)) if isinstance(x, (tuple, list)) else (type(x), x)


UNOBSERVED = (
    "cast cast_master largest transpose add_norm add_norm_backward "
    "swiglu_forward swiglu_backward gelu_forward gelu_backward "
    "split_heads_backward merge_ sum_parts square_sum add_product add_rows_ "
    "softmax_sums softmax_gradient_ drop_elements"
)
globals().update((name, unobserved(getattr(plain, name))) for name in UNOBSERVED.split())


def split_heads(qkv: Tensor, sizes: tuple[int, int, int], rope: plain.Rope) -> tuple[Tensor, ...]:
    """Return views of qkv, as a GPU's kernel does, which turns q and k in place."""
    return qkv.split(sizes, 2)


def adamw_(*args: Any, **kwargs: Any) -> None:
    """Run the plain update unseen, each time, since `updated` has effects."""
    with _disable_current_modes():
        plain.adamw_(*args, **kwargs)
