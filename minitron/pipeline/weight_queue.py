"""The queue of weight gradients that a BackwardInput leaves for its BackwardWeight.

Problem: a schedule that fills its bubble with weight gradients computes them later than the gradient of the input, but
autograd computes both at once. The idea: while a BackwardInput runs, the backward of a linear layer does not compute
its weight gradient. It queues the product, with the two matrices that the product reads:

    BackwardInput     layer 2: dx2, queue dW2 = dy2^T x2       layer 1: dx1, queue dW1
    BackwardWeight    dW2, dW1

Compared with an unsplit backward, the matrices live longer and all other activations are freed earlier, so the peak of
memory hardly changes. Recomputed activations stay allocated until the weight gradients have run. Gradients that are
sums over rows (norms, biases, embeddings) are cheap and are not queued. Under sequence parallelism the queue holds this
rank's rows of one of the matrices. They are gathered again for the product, while the previous product runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from minitron.comm.handle import Handle


class WeightGradient(NamedTuple):
    """begin() starts to gather a matrix; add(matrix) multiplies and adds the product to the weight's main_grad."""

    begin: Callable[[], Handle[Any]]
    add: Callable[[Any], object]


class WeightQueue:
    """Where layers queue products. deferring: true while a BackwardInput runs; layers must then queue."""

    def __init__(self) -> None:
        self.products: deque[WeightGradient] | None = None

    @property
    def deferring(self) -> bool:
        return self.products is not None

    def put(self, begin: Callable[[], Handle[Any]], add: Callable[[Any], object]) -> None:
        """Queue a product."""
        assert self.products is not None
        self.products.append(WeightGradient(begin, add))

    @contextmanager
    def collect(self) -> Iterator[deque[WeightGradient]]:
        """Let layers queue their products within the block; yield the queue."""
        products: deque[WeightGradient] = deque()
        self.products = products
        try:
            yield products
        finally:
            self.products = None


def run_queue(products: deque[WeightGradient]) -> None:
    """Run the products in order, each beside the communication of the next."""
    arriving = products[0].begin() if products else None
    while arriving is not None:
        add, matrix = products.popleft().add, arriving.wait()
        arriving = products[0].begin() if products else None
        add(matrix)
