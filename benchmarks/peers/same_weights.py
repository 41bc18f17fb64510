"""Megatron-core's model with minitron's weights: for curves that begin at the same point."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minitron.config.schema import ModelConfig
from minitron.interop import hf
from minitron.interop.convert_megatron import BLOCK, LAYERS, REST, arranged


@torch.no_grad()
def copy_weights(named: dict[str, Tensor], model: nn.Module, m: ModelConfig) -> None:
    """Write minitron's weights, whole and by name, into a GPTModel of one rank; m is the model of both.

    Raises ValueError if one of the two has a parameter that the other has not.
    """
    theirs = dict(model.named_parameters())
    for name, shape in hf.global_shapes(m).items():
        if name in REST:
            places = [REST[name]]
        else:
            _, layer, rest = name.split(".", 2)
            places = [f"{LAYERS}{layer}.{place}" for place in BLOCK[rest]]
        place = next((place for place in places if place in theirs), None)
        if place is None or theirs[place].shape != named[name].shape:
            raise ValueError(f"Megatron-core's model has no {places[0]} {list(shape)}, which minitron's has")
        order = torch.arange(shape[0])  # which of its rows is ours
        if ".attention.qkv." in name:
            order = arranged(order, name, order.shape, m, place)
        weight = theirs.pop(place)
        weight[order.to(weight.device)] = named[name].to(weight.device, weight.dtype)
    if theirs:
        raise ValueError(f"Megatron-core's model has {', '.join(theirs)}, which minitron's has not")
