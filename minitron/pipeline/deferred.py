"""Weight gradients put off: what a BackwardInput leaves for its BackwardWeight.

Problem: a schedule that fills its bubble with weight gradients computes them later than the gradient of the input, but
autograd asks for both at once. The idea: its graph is not cut. While a BackwardInput runs, the backward of a linear
layer hands in the product that makes its weight gradient, with the two matrices that it reads, and returns without it:

    BackwardInput     layer 2: dx2, hand in dW2 = dy2^T x2       layer 1: dx1, hand in dW1
    BackwardWeight    dW2, dW1

So the matrices live longer, and all else that the forward has kept is freed: together about as much as before.
Recomputed activations stay allocated until the weight gradients have run. Gradients that are sums over rows (norms,
biases, embeddings) are not worth a delay. Under sequence parallelism one of the two matrices is a rank's rows, which
are gathered for the product, again, beside the product before it: what waits are the rows alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol


class Arriving(Protocol):
    """A matrix under way between ranks."""

    def wait(self) -> Any: ...


class Product(NamedTuple):
    """add(begin().wait()) adds a weight's gradient to its main_grad; begin() may communicate."""

    begin: Callable[[], Arriving]
    add: Callable[[Any], object]


class Deferred:
    """The place where layers hand in products. holding: whether they are to."""

    def __init__(self) -> None:
        self.products: deque[Product] | None = None

    @property
    def holding(self) -> bool:
        return self.products is not None

    def put(self, begin: Callable[[], Arriving], add: Callable[[Any], object]) -> None:
        """Hand in a product for later."""
        assert self.products is not None
        self.products.append(Product(begin, add))

    @contextmanager
    def collect(self) -> Iterator[deque[Product]]:
        """Let layers hand in their products inside; yields where they are put."""
        products: deque[Product] = deque()
        self.products = products
        try:
            yield products
        finally:
            self.products = None


def run(products: deque[Product]) -> None:
    """Run the products in the order in which they were handed in, each beside the communication of the next."""
    arriving = products[0].begin() if products else None
    while arriving is not None:
        add, matrix = products.popleft().add, arriving.wait()
        arriving = products[0].begin() if products else None
        add(matrix)
