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

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from minitron import plain


def hidden(kernel: Callable) -> Callable:
    """`kernel`, of which a torch dispatch mode sees the results alone."""

    @wraps(kernel)
    def run(*args, **kwargs):
        with _disable_current_modes():
            result = kernel(*args, **kwargs)
        return tree_map_only(Tensor, Tensor.detach, result)  # allocates nothing, and is seen

    return run


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
adamw_ = hidden(plain.adamw_)


def split_heads(qkv: Tensor, sizes: tuple[int, int, int], rope: plain.Rope) -> tuple[Tensor, ...]:
    """Views of qkv, as the kernel's are: it turns q and k in place."""
    return qkv.split(sizes, 2)
