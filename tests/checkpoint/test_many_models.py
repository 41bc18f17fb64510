"""No model is taken for another: configurations of many families load and equal transformers, or are refused by a key.

Each configuration is made by transformers' own class, with tiny sizes, all in one process. The oracle is what
transformers computes from the same folder: a folder is refused in one line that names the key or the tensor, or the
logits are equal. A family that minitron does not have is also disguised: its folder says that it is a Llama, a Mistral
or a Qwen. Then its other keys and its tensors are all that shows the difference.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from layouts import whole_model
from minitron.checkpoint.format import CheckpointError
from minitron.comm.mesh import Mesh
from minitron.config import cli
from minitron.config.schema import ModelConfig
from minitron.interop import hf
from minitron.testing import assert_close_rel
from test_convert_hf import GPT2, LLAMA, SCALED, batch_of, error_of, folders, model_of, single, whole  # noqa: F401

TOLERANCE = 1e-5  # both compute in float32; sums run in another order
ROPE = {"rope_theta": 500.0, "rope_type": "default"}


def scaled(kind: str, **more) -> dict:
    return {"rope_parameters": ROPE | {"rope_type": kind, "factor": 4.0} | more}


LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}
WINDOWS = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}
# family -> its configurations; None: it loads. Otherwise the key by whose name it is refused.
OURS: dict[str, list[tuple[dict, str | None]]] = {
    "llama": [
        ({}, None),
        ({"num_key_value_heads": None}, None),
        ({"tie_word_embeddings": True, **SCALED}, None),
        ({"head_dim": 12}, None),
        ({"rms_norm_eps": 1e-2, "rope_parameters": ROPE}, None),
        ({"pretraining_tp": 2, "attention_dropout": 0.1, "use_cache": False}, None),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        (scaled("linear"), "rope_type"),
        (scaled("dynamic"), "rope_type"),
        (scaled("yarn"), "rope_type"),
        (scaled("longrope", **LONG), "rope_type"),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
    "mistral": [
        ({"sliding_window": None}, None),
        ({"sliding_window": None, "num_attention_heads": 6, "head_dim": 8}, None),
        ({"sliding_window": None, "tie_word_embeddings": True, "rope_parameters": ROPE}, None),
        ({}, "sliding_window"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"sliding_window": None, "hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": None, **scaled("yarn")}, "rope_type"),
    ],
    "qwen2": [
        ({}, None),
        ({"tie_word_embeddings": True, "rope_parameters": ROPE}, None),
        ({"sliding_window": 8, "max_window_layers": 1}, None),
        ({"head_dim": 12}, None),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "use_sliding_window"),
        ({"use_sliding_window": True, **WINDOWS}, "use_sliding_window"),
        (scaled("yarn"), "rope_type"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
    ],
    "qwen3": [
        ({"head_dim": 8}, None),
        ({"head_dim": 12, "tie_word_embeddings": True}, None),
        ({}, None),
        ({"num_key_value_heads": None, **SCALED}, None),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True, **WINDOWS}, "use_sliding_window"),
        (scaled("dynamic"), "rope_type"),
    ],
    "gpt2": [
        ({}, None),
        ({"n_inner": 80, "tie_word_embeddings": False}, None),
        ({"activation_function": "relu"}, "activation_function"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"add_cross_attention": True}, "add_cross_attention"),
    ],
}
CASES = [(kind, keys, refused) for kind, cases in OURS.items() for keys, refused in cases]
# Decoders of other networks, each with the sizes of LLAMA where its class has these keys.
OTHERS = (
    "apertus arcee bitnet cohere cohere2 deepseek_v3 diffllama doge dots1 ernie4_5 exaone4 falcon gemma gemma2 "
    "gemma3_text glm glm4 gpt_bigcode gpt_neo gpt_neox gptj granite helium hunyuan_v1_dense iquestcoder jais2 "
    "ministral mixtral nanochat nemotron olmo olmo2 olmo3 opt persimmon phi phi3 qwen2_moe qwen3_moe qwen3_next "
    "seed_oss smollm3 stablelm starcoder2"
).split()


def named(kind: str, keys: dict) -> transformers.PretrainedConfig:
    return transformers.AutoConfig.for_model(kind, **(GPT2 if kind == "gpt2" else LLAMA) | keys)


def settings_of(config: transformers.PretrainedConfig) -> dict:
    """What save_pretrained writes of it."""
    return json.loads(config.to_json_string())


def saved(config: transformers.PretrainedConfig, folder: Path, **changes) -> Path:
    """A folder of a model with random weights, vectors too; its config.json with these keys."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape) * 0.1)
    model.save_pretrained(folder)
    text = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(text))
    return folder


def our_logits(reader: hf.FolderReader, batch) -> torch.Tensor:
    tree = {"model": reader.config["model"], "precision": {"dtype": "fp32"}, "train": {"seq_len": 32}}
    model = whole_model(cli.from_tree(tree, "here"), Mesh.offline(1))
    with torch.no_grad():
        for param in model.parameters():
            shape = reader.shape(param.spec.name)
            param.copy_(reader.read(param.spec.name, "param", (0,) * len(shape), shape))
        return model.logits(batch)[..., : reader.model.vocab_size].transpose(0, 1)


def assert_equals_transformers(folder: Path) -> None:
    reader, batch = hf.FolderReader(folder, vocab_multiple=1), batch_of(90)
    twin = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        assert_close_rel(our_logits(reader, batch), twin.eval()(batch.tokens.T).logits, TOLERANCE, "logits")


def refusal(settings: dict) -> str | None:
    """The key by which config.json is refused; None: it is not. The error is one line with the key's value."""
    try:
        hf.model_config(settings, "config.json")
    except ValueError as error:
        assert "\n" not in str(error)
        found = re.match(r"config\.json: ([\w.]+)( is missing|=)", str(error))
        assert found, str(error)
        return found[1]
    return None


# ---- the families that minitron has ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, keys, refused", CASES)
def test_a_configuration_is_loaded_or_refused_by_its_key(kind, keys, refused):
    """In each of the forms in which versions of transformers write it."""
    config = named(kind, keys)
    forms = list(forms_of(config))
    assert {refusal(form) for form in forms} == {refused}
    if refused is None:
        first, *others = (hf.model_config(form, "here") for form in forms)
        assert all(other == first for other in others)


def forms_of(config: transformers.PretrainedConfig) -> Iterator[dict]:
    """Yield the config.json that transformers 5 writes, all of its keys, and what transformers 4 wrote."""
    new = settings_of(config)
    yield new
    yield json.loads(config.to_json_string(use_diff=False))
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "dtype")}
    old |= {"torch_dtype": "bfloat16", "transformers_version": "4.42.0"}
    if rope := dict(new.get("rope_parameters") or {}):
        old["rope_theta"] = rope.pop("rope_theta")
        if (part := rope.pop("partial_rotary_factor", None)) is not None:
            old["partial_rotary_factor"] = part
        old["rope_scaling"] = None if rope.get("rope_type") == "default" else rope
    yield old
    if config.model_type == "llama" and config.head_dim * config.num_attention_heads == config.hidden_size:
        added_later = {"head_dim": None, "attention_bias": False, "mlp_bias": False}
        yield {key: value for key, value in old.items() if value != added_later.get(key, ...) or key not in added_later}
    if not getattr(config, "use_sliding_window", True) and "layer_types" in old:
        plain = {key: value for key, value in old.items() if key != "layer_types"}
        yield plain | {"sliding_window": 32768, "max_window_layers": 28, "use_mrope": False}


@pytest.mark.parametrize("kind, keys", [(kind, keys) for kind, keys, refused in CASES if refused is None])
def test_what_loads_equals_transformers(kind, keys, tmp_path):
    assert_equals_transformers(saved(named(kind, keys), tmp_path))


def test_keys_that_are_missing_have_the_values_of_transformers():
    """Those of the family's own class: a Mistral without sliding_window has a window, and a Qwen 3 heads of 128."""
    for kind in ("llama", "mistral", "qwen2", "qwen3"):
        optional = hf.FORMATS[kind].absent.keys() - {"sliding_window"}
        sizes = {key: value for key, value in LLAMA.items() if key not in optional} | {
            "num_attention_heads": 32,
            "hidden_size": 64,
        }
        window = {"sliding_window": None} if kind == "mistral" else {}
        model = hf.model_config({"model_type": kind} | sizes | window, "here")
        twin = transformers.AutoConfig.for_model(kind, **sizes, **window)
        assert model.kv_heads == twin.num_key_value_heads and model.max_positions == twin.max_position_embeddings
        assert model.norm_eps == twin.rms_norm_eps and model.tie_embeddings == twin.tie_word_embeddings
        width = getattr(twin, "head_dim", None) or twin.hidden_size // twin.num_attention_heads
        assert model.head_width == width and model.rope_theta == twin.rope_parameters["rope_theta"]
    assert refusal({"model_type": "mistral"} | LLAMA) == "sliding_window"


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gpt2"])
@pytest.mark.parametrize("value", [True, False, 0, 1.0, "", [], {}, "on"])
def test_an_unknown_key_is_refused_by_name_unless_it_is_null(kind, value):
    keys = {"sliding_window": None} if kind == "mistral" else {}
    settings = settings_of(named(kind, keys))
    assert refusal(settings | {"a_key_of_tomorrow": None}) is None
    assert refusal(settings | {"a_key_of_tomorrow": value}) == "a_key_of_tomorrow"


# ---- all others ------------------------------------------------------------------------------------------------------


@cache
def other(kind: str) -> transformers.PretrainedConfig:
    """A configuration of the family, tiny, with the names of sizes that its class has."""
    plain = transformers.AutoConfig.for_model(kind)
    sizes = LLAMA | {key: value for key, value in GPT2.items() if hasattr(plain, key)}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    tiny = {
        "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "first_k_dense_replace": 2,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "ffn_dim": 48, "word_embed_proj_dim": 32, "attention_types": [[["global"], 2]], "num_heads": 4, "num_layers": 2,
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "sliding_window": 8, "n_shared_experts": 1, "keep_window_size": 8, "head_dim": 8,
    }  # fmt: skip
    sizes |= {key: value for key, value in tiny.items() if key in plain.to_dict()}
    return transformers.AutoConfig.for_model(kind, **sizes)


@pytest.mark.parametrize("kind", OTHERS)
def test_another_family_is_refused_by_its_name(kind):
    assert refusal(settings_of(other(kind))) == "model_type"


@pytest.mark.slow
@pytest.mark.parametrize("disguise", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", OTHERS)
def test_another_family_that_says_it_is_ours_is_refused_or_is_the_same_network(kind, disguise, tmp_path, capsys):
    """Refused by a key or a tensor, or what transformers computes from this very folder."""
    changes = {"model_type": disguise} | ({"sliding_window": None} if disguise == "mistral" else {})
    folder = saved(other(kind), tmp_path, **changes)
    try:
        hf.FolderReader(folder)
    except CheckpointError as error:
        line = str(error)
        assert "\n" not in line and line.startswith(str(folder))
        print(f"{kind} as {disguise}: {line.removeprefix(str(folder))[:150]}")
        return
    assert_equals_transformers(folder)
    print(f"{kind} as {disguise}: the same network")


def test_the_defaults_of_minitron_are_no_model_of_these():
    """A field that no key sets keeps its default: the three of Qwen are off for all others."""
    for kind, fmt in hf.FORMATS.items():
        assert fmt.own.keys() <= {"qkv_bias", "qk_norm"} and not (ModelConfig().qkv_bias or ModelConfig().qk_norm), kind


# ---- tensors of one model --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first, rest", [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "float16")])
def test_parts_of_two_formats_are_read_in_one_that_holds_both(folders, tmp_path, first, rest):  # noqa: F811
    """q and gate in one format, k, v and up in another: the fused matrix loses nothing of either."""
    state = {
        name: tensor.to(getattr(torch, rest if re.search(r"\.(k|v|up)_proj\.", name) else first))
        for name, tensor in model_of("llama").state_dict().items()
    }
    save_file(state, tmp_path / "model.safetensors")
    shutil.copy(folders("llama") / "config.json", tmp_path)
    reader = hf.FolderReader(tmp_path)
    assert (
        reader.precision == "fp32"
        and reader.dtype("blocks.0.attention.out.weight", "param") == state["lm_head.weight"].dtype
    )
    for name in "blocks.0.attention.qkv.weight", "blocks.0.mlp.up.weight":
        expected = torch.cat([state[part.name].float() for part in hf.tensor_map(reader.model)[name]])
        assert torch.equal(whole(reader, name).float(), expected), name


@pytest.mark.parametrize("row", [0, 40, 89])
def test_a_tied_head_that_differs_in_any_row_is_refused(folders, tmp_path, monkeypatch, row):  # noqa: F811
    monkeypatch.setattr(hf, "BLOCK_ROWS", 32)

    def untie(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][row] += 1

    folder = single(folders("llama-tied"), tmp_path / "hf", untie)
    assert "lm_head.weight differs from the embedding" in error_of(hf.FolderReader, folder)
