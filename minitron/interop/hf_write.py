"""Make the contents of an exported folder for transformers and PEFT: settings, and tensors under their names.

Both follow `tensor_map` of minitron/interop/hf.py, which also reads Hugging Face folders. PEFT
(github.com/huggingface/peft) keeps an adapter as adapter_config.json and adapter_model.safetensors, with a pair of
matrices for each module of the Hugging Face model. An adapter of the fused q, k, v becomes three with the same A:

    blocks.0.attention.qkv.adapter.a  -> base_model.model.model.layers.0.self_attn.{q,k,v}_proj.lora_A.weight
    blocks.0.attention.qkv.adapter.b.qkv, its rows of q, of k and of v -> ....{q,k,v}_proj.lora_B.weight

Left out: starting from an adapter of PEFT's; have PEFT merge it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from minitron.checkpoint.load import check_tensors
from minitron.checkpoint.weights import best_kind
from minitron.config import rules
from minitron.config.schema import ModelConfig
from minitron.interop.hf import FORMATS, ROPE_SCALING, FolderReader, tensor_map
from minitron.interop.weights import AdapterRows, MergedAdapter
from minitron.kernels.gemm import DTYPES


def settings_of(m: ModelConfig, dtype: str) -> dict:
    """Make the config.json of a model in a `dtype` of DTYPES, in the form that transformers 4 and 5 both read.

    Raises ValueError for a mixture of the families that transformers does not have.
    """
    rules.check_exportable(m)
    gpt = m.family == "gpt"
    kind = "gpt2" if gpt else "qwen3" if m.qk_norm else "qwen2" if m.qkv_bias else "llama"
    if kind == "llama" and m.hidden_size % m.num_heads:
        kind = "mistral"  # the same network; transformers' Llama requires that heads divide h
    fmt = FORMATS[kind]
    settings = {
        "architectures": [fmt.architecture],
        "model_type": kind,
        "torch_dtype": str(DTYPES[dtype]).removeprefix("torch."),
        "bos_token_id": None,
        "eos_token_id": None,
    }  # the ids are a tokenizer's, see hf_tokenizer.py; transformers' defaults are those of one model
    settings |= {key: getattr(m, field) for field, key in fmt.keys.items()} | fmt.fixed
    if gpt:
        settings |= dict.fromkeys(("resid_pdrop", "embd_pdrop"), m.hidden_dropout) | {"attn_pdrop": m.attention_dropout}
    else:
        settings |= {"attention_dropout": m.attention_dropout}
        s = m.rope_scaling
        scaling = s and {"rope_type": "llama3"} | {key: getattr(s, field) for field, key in ROPE_SCALING.items()}
        settings |= {"head_dim": m.head_width, "num_key_value_heads": m.kv_heads}
        settings |= {"rope_theta": m.rope_theta, "rope_scaling": scaling}
    return settings


def export(
    m: ModelConfig, read: Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, tensor) of the whole model, one at a time, in the order of `tensor_map`.

    read(global name, start, shape) -> that box.
    """
    for name, parts in tensor_map(m).items():
        row = 0
        for part in parts:
            tensor = read(name, (row, 0)[: len(part.shape)], part.shape)
            yield part.name, (tensor.t() if part.across else tensor).contiguous()
            row += part.shape[0]


def peft(adapter: MergedAdapter, base: str) -> tuple[dict, Iterator[tuple[str, Tensor]]]:
    """Make adapter_config.json and the tensors of adapter_model.safetensors. base: see peft_base. Raises ValueError."""
    pairs = list(_modules(adapter))
    lora, gpt = adapter.cfg.lora, adapter.cfg.model.family == "gpt"
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "bias": "none",
        # GPT-2 has a c_proj in attention and another one in the MLP
        "target_modules": sorted({".".join(module.split(".")[-2 if gpt else -1 :]) for module, *_ in pairs}),
        "fan_in_fan_out": gpt,
        "inference_mode": True,
    }
    tensors = (
        (f"base_model.model.{module}.lora_{side}.weight", tensor.contiguous())
        for module, name, part, rows in pairs
        for side, tensor in zip("AB", adapter.factors(name, part, rows, scaled=False))
    )
    return settings, tensors


def peft_base(adapter: MergedAdapter, named: str | None) -> str:
    """Return the Hugging Face folder of an adapter's base: `named`, the base itself, or its export beside it.

    Raises ValueError if there is none, or if it holds other weights: the first row of each tensor is compared.
    """
    base, fix = adapter.base, "give --hf-base HF_FOLDER"
    places = [Path(named)] if named else [base.path, base.path.with_name(f"{base.path.name}-hf")]
    folder = next((place.expanduser().absolute() for place in places if (place / "config.json").exists()), None)
    if folder is None:
        why = f"PEFT opens a Hugging Face folder, and the base is known as {base.path} alone"
        raise ValueError(f"{why}; export it (python tools/convert_hf.py export {base.path} HF_FOLDER) and {fix}")
    theirs = FolderReader(folder, adapter.cfg.model.vocab_multiple)
    check_tensors(theirs, {name: list(base.shape(name)) for name in base.names() if best_kind(base, name)}, fix)
    for name in theirs.names():
        first, row = (0,) * len(theirs.shape(name)), (1, *theirs.shape(name)[1:])
        pair = (reader.read(name, best_kind(reader, name), first, row).float() for reader in (base, theirs))
        if not torch.allclose(*pair, rtol=2**-7, atol=1e-7):  # an export is rounded to bf16
            raise ValueError(
                f"{folder} has another {name} than {base.path}, beside which it was trained; {fix} of that"
            )
    return str(folder)


def _modules(adapter: MergedAdapter) -> Iterator[tuple[str, str, AdapterRows, slice]]:
    """Yield (Hugging Face module, minitron's weight, the target that covers it, its rows of that target's B)."""
    for name, stack in tensor_map(adapter.cfg.model).items():
        row = 0
        for module in stack:
            end = row + module.shape[0]
            for part in adapter.parts_of(name):
                if part.start <= row and end <= part.start + part.size:
                    yield (module.name.removesuffix(".weight"), name, part, slice(row - part.start, end - part.start))
                elif part.start < end and row < part.start + part.size:
                    raise ValueError(
                        f"{adapter.path} has an adapter of {part.b} alone, which is a part of "
                        f"{module.name} in a Hugging Face model; export merged weights instead"
                    )
            row = end
