"""Write a small model as Megatron-core saves it (torch_dist): `python tests/write_megatron.py FOLDER gpt|llama`.

FOLDER/ckpt is the checkpoint, with the arguments that Megatron-LM puts into common.pt; FOLDER/twin.pt are the model's
tokens [b, s] and logits [b, s, v] on a CPU. tests/tools/test_convert_megatron.py runs it where megatron-core is there.
"""

import argparse
import contextlib
import os
import sys
from pathlib import Path


def main(folder: Path, kind: str) -> None:
    import torch
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29611")}
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_: None  # it waits for, and makes masks on, a device that is not there
        torch.cuda.current_device = lambda: "cpu"
        CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    torch.manual_seed(3)
    llama = kind == "llama"
    sizes = dict(num_layers=3, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48)
    more = dict(params_dtype=torch.float32, use_cpu_initialization=True, init_method_std=0.1)
    more |= dict(hidden_dropout=0.0, attention_dropout=0.0, bias_activation_fusion=not llama)
    if llama:
        more |= dict(num_query_groups=2, normalization="RMSNorm", gated_linear_unit=True, add_bias_linear=False)
        more |= dict(activation_func=torch.nn.functional.silu, layernorm_epsilon=1e-5)
    config = TransformerConfig(**sizes, **more)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=128,
        max_sequence_length=64,
        position_embedding_type="rope" if llama else "learned_absolute",
        rotary_base=500,
        share_embeddings_and_output_weights=not llama,
    ).eval()
    with torch.no_grad():  # vectors too, so that no weight could be exchanged unnoticed
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.1)
    args = argparse.Namespace(
        **sizes,
        num_query_groups=2 if llama else 1,
        group_query_attention=llama,
        padded_vocab_size=128,
        vocab_size=120,
        max_position_embeddings=64,
        position_embedding_type="rope" if llama else "learned_absolute",
        rotary_base=500,
        normalization=config.normalization,
        norm_epsilon=1e-5,
        swiglu=llama,
        bias_gelu_fusion=not llama,
        add_bias_linear=not llama,
        untie_embeddings_and_output_weights=llama,
        params_dtype=torch.bfloat16,
        attention_backend=AttnBackend.auto,
    )
    (folder / "ckpt").mkdir(parents=True)
    state = model.sharded_state_dict() | {"args": args, "iteration": 7, "checkpoint_version": 3.0}
    dist_checkpointing.save(state, str(folder / "ckpt"))
    tokens = torch.randint(0, 120, (2, 16))
    positions = torch.arange(16).expand(2, -1)
    mask = torch.ones(16, 16).tril().logical_not()[None, None]
    with torch.no_grad():
        logits = model(tokens, positions, mask)
    torch.save({"tokens": tokens, "logits": logits}, folder / "twin.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
