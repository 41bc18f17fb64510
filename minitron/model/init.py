"""The same initial weights in every layout.

A parameter's values depend on the seed and on its name in the whole model, never on the rank. Each parameter has a
generator, from which every rank draws the full tensor and keeps its slice. So ranks draw tp times the numbers, once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import nn

from minitron.kernels.param import params_of
from minitron.runtime.room import room_for


@torch.no_grad()
def initialise(chunks: Iterable[nn.Module], seed: int) -> None:
    """Fill every parameter of this rank's chunks: normal with its `std`, or its constant `fill`."""
    for chunk in chunks:
        for param in params_of(chunk):
            spec = param.spec
            if spec.std is None:
                param.fill_(spec.fill)
                continue
            digest = hashlib.sha256(f"{seed}/{spec.name}".encode()).digest()
            generator = torch.Generator("cpu" if param.is_meta else param.device)
            generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            shape = list(param.shape)
            if spec.shard is not None:
                shape[spec.shard.dim] = sum(spec.shard.chunks)
            with room_for(f"the first values of {spec.name}"):
                full = torch.empty(shape, dtype=torch.float32, device=param.device)
                full.normal_(0.0, spec.std, generator=generator)
                param.copy_(full if spec.shard is None else spec.shard.cut(full))
