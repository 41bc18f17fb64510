"""The KV cache on a GPU: a step with it equals a full forward, to the rounding of the format."""

import pytest
import torch

from layouts import LLAMA, config, whole_model
from minitron.comm.mesh import Mesh
from minitron.model.init import initialise
from minitron.testing import assert_close_rel
from tools import generate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


# bf16 rounds every activation to 2^-9, and 8 blocks add their errors
@pytest.mark.parametrize("dtype, tolerance", [("bf16", 5e-2), ("fp32", 1e-5)])
def test_a_cached_step_equals_a_full_forward(dtype, tolerance):
    cfg = config(
        LLAMA, {"model": {"hidden_size": 128}, "precision": {"dtype": dtype}, "data": {"separate_documents": True}}
    )
    device = torch.device("cuda", 0)
    model = whole_model(cfg, Mesh.offline(device=device)).eval()
    initialise([model], seed=3)
    tokens = [7, 3, 80, 3, 11]
    with generate.cached(model):
        cached = [generate.next_logits(model, tokens, 0)]
        for token in (5, 60, 2, 41):
            tokens.append(token)
            cached.append(generate.next_logits(model, [token], len(tokens) - 1))
    for n, logits in enumerate(cached, 5):
        assert_close_rel(logits, generate.next_logits(model, tokens[:n], 0), tolerance)
