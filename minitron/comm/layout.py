"""The arithmetic of a layout [pp, dp, cp, tp], without torch: lines of ranks, and the process groups that they need.

The mesh makes these groups, and the planner counts them.
"""

from __future__ import annotations

import math


def spans(shape: tuple[int, int, int, int], local: int | None) -> dict[str, tuple[int, int]]:
    """Return (size, stride) of the axes that all ranks have: `size` ranks, each `stride` after the one before."""
    pp, dp, cp, tp = shape
    return {
        "pp": (pp, dp * cp * tp),
        "dp": (dp, cp * tp),
        "cp": (cp, tp),
        "tp": (tp, 1),
        "dp_cp": (dp * cp, tp),
        "in_node": (local or dp * cp, tp),
        "across_nodes": (dp * cp // local if local else 1, tp * (local or 1)),
        "world": (math.prod(shape), 1),
    }


def axes_of_groups(shape: tuple[int, int, int, int], local: int | None) -> dict[tuple[int, int, bool], list[str]]:
    """List the axes of each process group but that of tied_stages, by (size, stride, whether no other may share it).

    local: the ranks of dp_cp that a node has; None: dp_cp has one level.
    """
    sharing: dict[tuple[int, int, bool], list[str]] = {}
    for name, (size, stride) in spans(shape, local).items():
        if size > 1:
            sharing.setdefault((size, stride, name == "cp"), []).append(name)
    return sharing
