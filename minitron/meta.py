"""The kernels of torch's meta device, where tensors have shapes and no memory: what a dry run calls in a GPU's place.

Problem: a GPU's kernel allocates its results and nothing else, while its twin in minitron/plain.py makes a dozen tensors
on the way; whoever adds up what the twins allocate finds peaks that no GPU has. The idea: run the twins, which check
every shape, with their insides hidden:

    seen of add_norm on a GPU          total, y, statistics
    seen of plain.add_norm             float copies of x, delta, total, ..., and these three
    seen of hidden(plain.add_norm)     these three

Here is the contract of minitron/fused.py. Attention and FP8 hide their twins in the same way, where they are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from minitron import plain


def hidden(kernel: Callable) -> Callable:
    """`kernel`, of which a torch dispatch mode sees the results alone. It runs once for each combination of shapes.

    Arguments are tensors, tuples and what can be hashed. A result is new, or one of the arguments as it is.
    """
    known: dict = {}

    @wraps(kernel)
    def run(*args, **kwargs):
        leaves = tree_leaves((args, kwargs))
        key = *map(_signature, leaves), *kwargs
        if key not in known:
            with _disable_current_modes():
                results, structure = tree_flatten(kernel(*args, **kwargs))
            places = {id(x): i for i, x in enumerate(leaves)}
            known[key] = [places.get(id(x), _signature(x)) for x in results], structure
        recipes, structure = known[key]
        return tree_unflatten([leaves[r] if isinstance(r, int) else r and torch.empty_strided(*r[:2], dtype=r[2],
                               device="meta") for r in recipes], structure)

    return run


def _signature(x):
    return (x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x


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
