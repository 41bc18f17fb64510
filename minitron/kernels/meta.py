"""Kernels for torch's meta device, whose tensors have shapes and no memory: a dry run's in place of a GPU's.

Problem: a GPU's kernel allocates its results and nothing else, its twin in kernels/plain.py a dozen tensors on the
way; whoever adds up what the twins allocate finds peaks that no GPU has. The idea: run the twins, which check every
shape, with their insides hidden:

    of add_norm on a GPU one sees          total, y, statistics
    of plain.add_norm                      these, and float copies of x, delta, total, ...
    of hidden(plain.add_norm)              these

And since nothing is computed, equal shapes have equal results: each twin runs once, and the thousands of layers of a
step cost little more than their allocations. Here is the contract of kernels/fused.py; attention and FP8 hide their
twins in the same way, where they are chosen. Left out: what a kernel allocates for its own use.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from minitron.kernels import plain


def hidden(kernel: Callable) -> Callable:
    """`kernel`, of which a torch dispatch mode sees the results alone: on the meta device, where it runs as `once`."""

    def unseen(*args, **kwargs):
        with _disable_current_modes():
            return kernel(*args, **kwargs)

    return once(unseen)


def once(function: Callable) -> Callable:
    """`function` run once for each combination of shapes: after that its results, on the meta device, are known.

    It has no other effects than on its arguments. Its arguments are tensors, lists, tuples and what can be hashed; its
    results, None or tensors, are new or arguments as they are. A function whose results are views runs every time.
    """
    known: dict = {}

    def run(*args, **kwargs):
        key = _signature(args), _signature((*kwargs.items(),))
        if key in known:
            return known[key](*args, **kwargs)
        result = function(*args, **kwargs)
        known[key] = _maker(result, tree_leaves((args, kwargs))) or function
        return result if known[key] is function else known[key](*args, **kwargs)

    return run


def _maker(result, arguments: list) -> Callable | None:
    """What makes results like these from arguments like these; None if that takes the function itself."""
    results, structure = tree_flatten(result)
    places = {id(x): i for i, x in enumerate(arguments) if isinstance(x, Tensor)}
    storages = {arguments[i].untyped_storage()._cdata for i in places.values()}
    recipe: list[tuple | int | None] = []  # of each result; holding a result itself would keep its storage alive
    for x in results:
        if x is None or id(x) in places:
            recipe.append(places.get(id(x)))
        elif isinstance(x, Tensor) and x.is_meta and x.untyped_storage()._cdata not in storages:
            recipe.append((x.shape, x.stride(), x.dtype))
        else:
            return None

    def make(*args, **kwargs):
        leaves = tree_leaves((args, kwargs))
        return tree_unflatten(
            [
                torch.empty_strided(*r[:2], dtype=r[2], device="meta")
                if isinstance(r, tuple)
                else None
                if r is None
                else leaves[r]
                for r in recipe
            ],
            structure,
        )

    return make


def _signature(x):
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.is_meta
    return tuple(map(_signature, x)) if isinstance(x, (tuple, list)) else (type(x), x)


cast = hidden(plain.cast)
largest = hidden(plain.largest)
transpose = hidden(plain.transpose)
add_norm = hidden(plain.add_norm)
add_norm_backward = hidden(plain.add_norm_backward)
swiglu_forward = hidden(plain.swiglu_forward)
swiglu_backward = hidden(plain.swiglu_backward)
swiglu_cast = hidden(plain.swiglu_cast)
swiglu_backward_cast = hidden(plain.swiglu_backward_cast)
split_heads_backward = hidden(plain.split_heads_backward)
merge_ = hidden(plain.merge_)
sum_parts = hidden(plain.sum_parts)
add_product = hidden(plain.add_product)
add_rows_ = hidden(plain.add_rows_)
softmax_sums = hidden(plain.softmax_sums)
softmax_gradient_ = hidden(plain.softmax_gradient_)
drop_elements = hidden(plain.drop_elements)


def split_heads(qkv: Tensor, sizes: tuple[int, int, int], rope: plain.Rope) -> tuple[Tensor, ...]:
    """Views of qkv, as the kernel's are: it turns q and k in place."""
    return qkv.split(sizes, 2)


def adamw_(states: list[plain.AdamState], *args, updated: Callable[[int], None]) -> None:
    """Allocates nothing; not remembered, since `updated` has effects."""
    with _disable_current_modes():
        plain.adamw_(states, *args, updated=updated)
