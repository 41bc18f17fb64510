"""Kernels for torch's meta device, whose tensors have shapes and no memory: in a dry run they stand for a GPU's.

Problem: a dry run adds up what a step allocates. A GPU's kernel allocates its results and nothing else, but the same
function in kernels/plain.py allocates a dozen tensors on the way, and so shows peaks that no GPU has. The idea: run the
plain functions, which check every shape, and hide what they allocate on the way:

    allocated by add_norm on a GPU         total, y, statistics
    by plain.add_norm                      these, and float copies of x, delta, total, ...
    by hidden(plain.add_norm)              these, as far as a dry run can see

And since nothing is computed, equal shapes have equal results: each function runs once for each shape, and the
thousands of layers of a step cost little more than their allocations. This file has the functions of kernels/plain.py;
attention and FP8 hide theirs in the same way, where they are chosen. Left out: what a GPU's kernel allocates for its
own use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from minitron.kernels import plain

Function = Callable[..., Any]


def hidden(kernel: Function) -> Function:
    """Wrap a kernel so that torch dispatch modes see its results alone; on the meta device, where it runs as `once`."""

    def unseen(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return kernel(*args, **kwargs)

    return once(unseen)


def once(function: Function) -> Function:
    """Wrap `function` so that it runs once for each combination of shapes; later calls allocate the results alone.

    It must have no other effects than on its arguments, which are tensors, lists, tuples and what can be hashed. Its
    results are None, new tensors on the meta device, or arguments as they are; a function that returns views is run
    every time.
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
    """Return a function that makes results like these from arguments like these; None if it would have to compute."""
    results, structure = tree_flatten(result)
    tensors = [(id(x), i) for i, x in enumerate(arguments) if isinstance(x, Tensor)]
    places = dict(tensors)
    if len(places) < len(tensors):
        return None  # one of them is there twice, so a result does not tell which it is
    storages = {arguments[i].untyped_storage()._cdata for i in places.values()}
    recipe: list[Any] = []  # shape, stride and dtype of each result, or its place among the arguments
    for x in results:
        if x is None or id(x) in places:
            recipe.append(places.get(id(x)))
        elif isinstance(x, Tensor) and x.is_meta and x.untyped_storage()._cdata not in storages:
            recipe.append((x.shape, x.stride(), x.dtype))
        else:
            return None

    def make(*args: Any, **kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))

        def result_of(item: Any) -> Any:
            if isinstance(item, int):
                return leaves[item]
            return None if item is None else torch.empty_strided(*item[:2], dtype=item[2], device="meta")

        return tree_unflatten(map(result_of, recipe), structure)

    return make


def _signature(x: Any) -> object:
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.is_meta
    return tuple(map(_signature, x)) if isinstance(x, (tuple, list)) else (type(x), x)


HIDDEN = (
    "cast cast_master largest transpose add_norm add_norm_backward "
    "swiglu_forward swiglu_backward swiglu_cast swiglu_backward_cast "
    "gelu_forward gelu_backward gelu_cast gelu_backward_cast "
    "split_heads_backward merge_ sum_parts square_sum add_product add_rows_ "
    "softmax_sums softmax_gradient_ drop_elements"
)
globals().update((name, hidden(getattr(plain, name))) for name in HIDDEN.split())


def split_heads(qkv: Tensor, sizes: tuple[int, int, int], rope: plain.Rope) -> tuple[Tensor, ...]:
    """Return views of qkv, as a GPU's kernel does, which turns q and k in place."""
    return qkv.split(sizes, 2)


def adamw_(*args: Any, **kwargs: Any) -> None:
    """Run the plain update unseen, each time: `updated` has effects."""
    with _disable_current_modes():
        plain.adamw_(*args, **kwargs)
