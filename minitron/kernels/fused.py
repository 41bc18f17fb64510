"""Triton kernels for what lies between the GEMMs: the functions of kernels/plain.py, by the same names and contracts.

Problem: on a GPU these operations cost nothing but memory traffic, and written as several torch operations each
intermediate makes a round trip to memory. At Llama-3 8B sizes that took a fifth of the step. The idea: one pass per
operation, everything in registers, arithmetic in float32 whatever the format in memory.

    kernel          tensors of the result's size that it reads and writes                           file
    add_norm        2 and 2, backward 3 and 1; with a cast 2, 1 and bytes                           fused_norm
    swiglu          2 and 1, backward 3 and 2                                                       fused_activations
    cast            1 and bytes: once by rows, once by columns                                      fused_casts
    gelu            backward 2 and 1; with a cast 1, backward 2, and bytes                          fused_casts
    rotate          1 and 1, in place; the backward also puts the gradients of q, k, v together     fused_activations
    dropout         1 and 1                                                                         fused_activations
    merge           2 and 1                                                                         fused_sums
    sum_parts       one for each part, and 1                                                        fused_sums
    square_sum      1 and 0                                                                         fused_sums
    add_rows        3 and 2, of the rows that a token has                                           fused_sums
    cross-entropy   1 and 0, backward 1 and 1 over the logits                                       fused_loss
    adamw           4 and 3, and the bf16 parameter                                                 fused_adamw
    cast_master     1 and 1 of bytes                                                                fused_adamw

This file names them all; it is imported where the device is CUDA and torch brings Triton. Attention with dropout, or
within documents, is in fused_attention.py, a backend of kernels/attention.py. No sum is made by atomic additions,
except the embedding's.
"""

from minitron.kernels.fused_activations import drop_elements as drop_elements
from minitron.kernels.fused_activations import split_heads as split_heads
from minitron.kernels.fused_activations import split_heads_backward as split_heads_backward
from minitron.kernels.fused_activations import swiglu_backward as swiglu_backward
from minitron.kernels.fused_activations import swiglu_forward as swiglu_forward
from minitron.kernels.fused_adamw import adamw_ as adamw_
from minitron.kernels.fused_adamw import cast_master as cast_master
from minitron.kernels.fused_casts import cast as cast
from minitron.kernels.fused_casts import gelu_backward as gelu_backward
from minitron.kernels.fused_casts import gelu_backward_cast as gelu_backward_cast
from minitron.kernels.fused_casts import gelu_cast as gelu_cast
from minitron.kernels.fused_casts import gelu_forward as gelu_forward
from minitron.kernels.fused_casts import swiglu_backward_cast as swiglu_backward_cast
from minitron.kernels.fused_casts import swiglu_cast as swiglu_cast
from minitron.kernels.fused_loss import softmax_gradient_ as softmax_gradient_
from minitron.kernels.fused_loss import softmax_sums as softmax_sums
from minitron.kernels.fused_norm import add_norm as add_norm
from minitron.kernels.fused_norm import add_norm_backward as add_norm_backward
from minitron.kernels.fused_sums import add_product as add_product
from minitron.kernels.fused_sums import add_rows_ as add_rows_
from minitron.kernels.fused_sums import merge_ as merge_
from minitron.kernels.fused_sums import square_sum as square_sum
from minitron.kernels.fused_sums import sum_parts as sum_parts
