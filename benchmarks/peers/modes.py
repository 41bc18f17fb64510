"""The ways in which Megatron-core can be run, as its own settings; compare.py tries those that a case has.

A mode is a sum of parts, `graph+native-loss`, and `eager` is the empty one. No library is imported here.
"""

PARTS = {
    "eager": {},
    # The whole iteration replayed as one CUDA graph, but for the optimizer's step; from core 0.19 on.
    "graph": {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []},
    "tp-overlap": {"tp_comm_overlap": True},  # Transformer Engine's user buffers
    "a2a": {"cp_comm_type": "a2a"},  # else the ring, p2p
    "native-loss": {"cross_entropy_fusion_impl": "native"},  # else Transformer Engine's
}
ALWAYS, WITH_TP, WITH_CP = ("eager", "graph"), ("tp-overlap", "graph+tp-overlap"), ("a2a", "graph+a2a")


def modes_of(tp: int, cp: int) -> list[str]:
    """The modes of a layout, all with Transformer Engine's loss."""
    return [*ALWAYS, *(WITH_TP if tp > 1 else ()), *(WITH_CP if cp > 1 else ())]


def settings(mode: str) -> dict:
    """The settings of a mode. Raises ValueError for a part that is none."""
    if unknown := [part for part in mode.split("+") if part not in PARTS]:
        raise ValueError(f"--mode {mode} has {unknown[0]}; use parts of {', '.join(PARTS)}, joined by +")
    return {key: value for part in mode.split("+") for key, value in PARTS[part].items()}
