"""Settings that libraries read from the environment when they load: to be made before torch is imported."""

from __future__ import annotations

from collections.abc import MutableMapping

DEFAULTS = {
    # Segments that grow do not fragment; the second is for recorded steps (runtime/graph.py): without it a recording
    # keeps every message between pipeline stages to its end, since another stream has read it.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,graph_capture_record_stream_reuse:True",
    # NCCL would register the buffers of recorded collectives, which segments that grow do not allow.
    "NCCL_GRAPH_REGISTER": "0",
}


def set_defaults(environ: MutableMapping[str, str]) -> None:
    """Set what is not set yet."""
    for name, value in DEFAULTS.items():
        environ.setdefault(name, value)
