"""The dry run's memory against a real GPU's: the peak of one step, as torch's allocator counts it."""

import gc
from importlib.util import find_spec

import pytest
import torch

from layouts import config

if torch.cuda.is_available() and find_spec(
    "transformer_engine"
):  # before torch's cuDNN: minitron.kernels.kernels.choose_fp8
    import transformer_engine.pytorch  # noqa: F401

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Of cuBLAS, cuDNN and Transformer Engine, which a dry run leaves out, and the small change of an allocator.
TOLERANCE = 0.05
LLAMA_8B = dict(
    num_layers=3,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=128256,
    max_positions=8192,
)
GPT_175B = dict(
    family="gpt",
    num_layers=2,
    hidden_size=12288,
    ffn_hidden_size=49152,
    num_heads=96,
    num_kv_heads=None,
    vocab_size=51200,
    positions="learned",
    max_positions=2048,
    tie_embeddings=True,
)


@pytest.mark.parametrize(
    "model,seq_len,micro,gib", [(LLAMA_8B, 8192, 2, 70), (GPT_175B, 2048, 4, 120)], ids=["llama-8b", "gpt-175b"]
)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("fp8", ["none", "delayed", "block"])
def test_peak_memory_of_a_step(model, seq_len, micro, gib, recompute, fp8):
    from minitron.comm.mesh import Mesh
    from minitron.planner.dryrun.dryrun import dry_run, prepare, run_step

    if fp8 != "none":
        pytest.importorskip("transformer_engine")
    if torch.cuda.mem_get_info()[1] < gib * 2**30:
        pytest.skip(f"needs a GPU of {gib} GiB")
    cfg = config(
        {},
        dict(
            model=model,
            precision=dict(fp8=fp8),
            train=dict(seq_len=seq_len, micro_batch_size=micro, global_batch_size=2 * micro, recompute=recompute),
        ),
    )
    trainer = prepare(cfg, Mesh.offline(device="cuda"))
    run_step(trainer)  # compiles kernels and makes what is made once
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    run_step(trainer)
    torch.cuda.synchronize()
    real = torch.cuda.max_memory_allocated()
    del trainer
    gc.collect()  # parameters and their buckets refer to each other
    torch.cuda.empty_cache()
    report = dry_run(cfg, 1)
    dry = max(num_bytes for action, num_bytes in report.timeline if action != "build")
    of_step = report.memory["activations"] + report.memory["fp8 weights"]
    print(
        f"\n{real / 2**30:.2f} GiB on the GPU, {dry / 2**30:.2f} in the dry run: {100 * (dry / real - 1):+.1f} %; "
        f"of the step alone {(real - held) / 2**30:.2f} and {of_step / 2**30:.2f}"
    )
    assert dry == pytest.approx(real, rel=TOLERANCE)
