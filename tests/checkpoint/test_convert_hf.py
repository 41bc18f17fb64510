"""Hugging Face folders both ways: logits and weights equal transformers', whatever cannot be converted is one line."""

import dataclasses
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from layouts import whole_model
from minitron.checkpoint.boxes import TensorShard
from minitron.checkpoint.reader import Reader
from minitron.comm.mesh import Mesh
from minitron.config import cli, rules
from minitron.config.schema import Config, ModelConfig, RopeScaling
from minitron.data.batch import Batch
from minitron.interop import convert_hf, hf, import_weights, progress, rows
from minitron.interop.hf_write import settings_of
from minitron.interop.import_weights import write_checkpoint
from minitron.model.gpt import GPT
from minitron.testing import assert_close_rel

ROOT = Path(__file__).resolve().parents[2]

# Both compute in float32; sums run in another order.
TOLERANCE = 1e-5
SCALED = {
    "rope_theta": 500.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
LLAMA = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=90,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
)
GPT2 = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=90, n_positions=64)
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**LLAMA),
    "llama2": lambda: transformers.LlamaConfig(**LLAMA | {"num_key_value_heads": 4, "rms_norm_eps": 1e-2}),
    "llama3.1": lambda: transformers.LlamaConfig(**LLAMA, **SCALED),
    "llama-tied": lambda: transformers.LlamaConfig(**LLAMA, **SCALED, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(
        **LLAMA | {"num_attention_heads": 6}, head_dim=8, sliding_window=None
    ),
    "qwen2": lambda: transformers.Qwen2Config(**LLAMA, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**LLAMA, head_dim=12),
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "gpt2-untied": lambda: transformers.GPT2Config(**GPT2, n_inner=80, tie_word_embeddings=False),
}


def model_of(name, dtype=torch.float32):
    """Random, vectors too, so that no weight or bias could be exchanged unnoticed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(MODELS[name](), attn_implementation="eager")
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape) * 0.1)
    return model.to(dtype).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The path of each model saved by transformers, made when first asked for, in several shards."""
    root, made = tmp_path_factory.mktemp("hf"), {}

    def get(name, dtype=torch.float32):
        if (name, dtype) not in made:
            made[name, dtype] = root / f"{name}-{dtype}"
            model_of(name, dtype).save_pretrained(made[name, dtype], max_shard_size="20KB")
        return made[name, dtype]

    return get


def convert(command, source, target, *options):
    convert_hf.main([command, str(source), str(target), *map(str, options)])


def error_of(call, *arguments):
    """The message of the ValueError that it raises: one line, without a full stop."""
    with pytest.raises(ValueError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message and not message.endswith(".")
    return message


def whole(reader, name, kind="param"):
    shape = reader.shape(name)
    return reader.read(name, kind, (0,) * len(shape), shape)


def minitron_of(checkpoint) -> GPT:
    """The model of a checkpoint in one piece, as model.yaml configures it, in float32."""
    cfg = cli.load([str(checkpoint / "model.yaml"), "precision.dtype=fp32", "train.seq_len=32"])
    rules.check(cfg, 1)
    mesh, reader = Mesh.offline(1), Reader(checkpoint)
    model = whole_model(cfg, mesh)
    params = {p.spec.name: p for p in model.parameters()}
    assert params.keys() == set(reader.names())
    with torch.no_grad():
        for name, p in params.items():
            assert p.shape == reader.shape(name), name
            p.copy_(whole(reader, name))
    return model


def batch_of(vocab, s=32, b=3) -> Batch:
    tokens = torch.randint(0, vocab, (s + 1, b), generator=torch.Generator().manual_seed(1))
    order = torch.arange(s)
    return Batch(tokens[:-1], tokens[1:], torch.ones(s, b), order[:, None], order, torch.arange(b), count=float(s * b))


def loaded(folder, dtype=torch.float32):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def assert_same_weights(actual, expected):
    assert actual.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(actual.state_dict()[name], tensor), name


# ---- there and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_and_weights_come_back_bit_by_bit(name, folders, tmp_path, monkeypatch):
    """In blocks of a few rows."""
    monkeypatch.setattr(hf, "BLOCK_ROWS", 7)
    for tool in convert_hf, import_weights:
        monkeypatch.setattr(tool, "BLOCK_VALUES", 200)
    source, (there, back) = folders(name), (tmp_path / "there", tmp_path / "back")
    assert len(list(source.glob("*.safetensors"))) > 2
    convert("import", source, there)
    twin, model = loaded(source), minitron_of(there)
    batch = batch_of(90)
    with torch.no_grad():
        expected = twin(batch.tokens.T).logits.transpose(0, 1)
        logits = model.logits(batch)
        assert logits.shape[-1] == 128  # padded
        assert_close_rel(logits[..., :90], expected, TOLERANCE, "logits")

        # Padding rows are the mean: their logit is the mean logit, and the loss does not see it.
        mean = expected.mean(-1, keepdim=True).expand(-1, -1, 38)
        assert_close_rel(logits[..., 90:], mean, TOLERANCE * 90**0.5, "padding")  # a mean is smaller than its terms
        loss = F.cross_entropy(expected.flatten(0, 1), batch.labels.flatten())
        assert float(model(batch) / batch.count) == pytest.approx(float(loss), rel=TOLERANCE)

    convert("export", there, back, "--max-shard-gb", 20e-6)
    again = loaded(back)
    assert_same_weights(again, twin)
    assert torch.equal(again(batch.tokens.T).logits, twin(batch.tokens.T).logits)
    largest = max(p.nbytes for p in twin.parameters())
    assert all(file.stat().st_size < max(20e3, largest) + 2000 for file in back.glob("*.safetensors"))
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in twin.parameters())
    assert again.config.architectures == [type(twin).__name__] and again.config.eos_token_id == twin.config.eos_token_id


def test_files_are_as_full_as_their_limit_allows():
    for items, groups in {
        (): [],
        (3, 4, 3, 5, 5, 1): [[3, 4, 3], [5, 5], [1]],
        (4, 7, 12, 3, 7, 1, 9): [[4], [7], [12], [3, 7], [1, 9]],
        (12, 12): [[12], [12]],
    }.items():
        assert list(import_weights.in_files(items, lambda item: item, 10)) == groups


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sixteen_bit_weights_stay_as_they_are_or_become_what_is_asked_for(name, folders, tmp_path):
    source = folders(name, torch.bfloat16)
    convert("import", source, tmp_path / "there", "--vocab-multiple", 1)
    reader = Reader(tmp_path / "there")
    assert {whole(reader, n).dtype for n in reader.names()} == {torch.bfloat16}
    assert reader.shape("embedding.words.weight") == (90, 32)
    convert("export", tmp_path / "there", tmp_path / "back")
    assert [file.name for file in (tmp_path / "back").glob("*.safetensors")] == ["model.safetensors"]
    twin = loaded(source, torch.bfloat16)
    assert_same_weights(loaded(tmp_path / "back", "auto"), twin)
    convert("import", source, tmp_path / "wide", "--dtype", "fp32")
    wide = Reader(tmp_path / "wide")
    assert (reader.config["precision"]["dtype"], wide.config["precision"]["dtype"]) == ("bf16", "fp32")
    assert (wide.iteration, wide.consumed_samples) == (0, 0)
    convert("export", tmp_path / "wide", tmp_path / "wide back")
    assert_same_weights(loaded(tmp_path / "wide back", "auto"), twin.float())


def test_export_of_a_training_checkpoint_rounds_the_masters(folders, tmp_path):
    """Masters in boxes that no tensor ends with, moments beside them, an FP8 history, and an older step."""
    source = hf.FolderReader(folders("llama3.1"), vocab_multiple=16)
    cfg = Config(model=source.model)
    for step in (10, 20):
        pieces = [TensorShard("blocks.0.mlp.up", "fp8_history", (4,), (0,), torch.ones(4))]
        for name in source.names():
            values = whole(source, name) * step
            for kind in ("exp_avg", "master"):
                for start in range(0, len(values), 7):
                    part = values[start : start + 7] * (1 if kind == "master" else 9)
                    pieces.append(TensorShard(name, kind, tuple(values.shape), (start, 0)[: values.dim()], part))
        write_checkpoint(tmp_path / "run", dataclasses.asdict(cfg), pieces, step)
    twin = model_of("llama3.1")
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(20)
    convert("export", tmp_path / "run", tmp_path / "exact", "--dtype", "fp32")
    assert_same_weights(loaded(tmp_path / "exact", "auto"), twin)
    convert("export", tmp_path / "run", tmp_path / "back")
    assert_same_weights(loaded(tmp_path / "back", "auto"), twin.bfloat16())
    older = tmp_path / "run" / "step_00000010"
    convert("export", older, tmp_path / "older", "--dtype", "fp32")
    expected = load_file(tmp_path / "exact" / "model.safetensors")["model.norm.weight"] / 2
    assert torch.equal(load_file(tmp_path / "older" / "model.safetensors")["model.norm.weight"], expected)


# ---- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2-untied"])
def test_any_box_is_that_part_of_the_whole_tensor(name, folders):
    """The whole as plain concatenation gives it: fused projections, transposed matrices, a padded vocabulary."""
    reader = hf.FolderReader(folders(name), vocab_multiple=16)
    state = model_of(name).state_dict()
    generator = torch.Generator().manual_seed(0)
    for tensor, parts in hf.tensor_map(reader.model).items():
        full = torch.cat([state[part.name].t() if part.across else state[part.name] for part in parts])
        if tensor in ("embedding.words.weight", "head.weight"):
            full = torch.cat([full, full.mean(0, keepdim=True).expand(6, -1)])
        assert reader.shape(tensor) == full.shape and reader.kinds(tensor) == ["param"]
        starts = [[int(torch.randint(n, (), generator=generator)) for n in full.shape] for _ in range(8)]
        boxes = [
            (s, [int(torch.randint(n - i, (), generator=generator)) + 1 for n, i in zip(full.shape, s)]) for s in starts
        ]
        boxes.append(([len(full) - 5, *[0] * (full.dim() - 1)], [5, *full.shape[1:]]))  # of a vocabulary padding alone
        for start, shape in boxes:
            expected = full[tuple(slice(s, s + n) for s, n in zip(start, shape))]
            # The padding alone is computed, in another order; the box itself says what it is.
            torch.testing.assert_close(reader.read(tensor, "param", start, shape), expected, rtol=1e-5, atol=1e-8)
        assert torch.equal(whole(reader, tensor)[:90], full[:90])


def settings_with(folder, **changes):
    """The config.json of a folder with these keys; without those that are set to `...`."""
    settings = json.loads((folder / "config.json").read_text()) | changes
    return {key: value for key, value in settings.items() if value is not ...}


def test_every_version_of_config_json_says_the_same(folders):
    llama, gpt = folders("llama3.1"), folders("gpt2")
    model = hf.model_config(settings_with(llama), "here")
    assert model.rope_theta == 500.0 and model.rope_scaling.factor == 4.0
    assert "rope_parameters" in settings_with(llama)  # what transformers 5 writes; the others:
    old = settings_with(llama, rope_parameters=..., head_dim=..., attention_bias=..., mlp_bias=..., **SCALED)
    assert hf.model_config(old, "here") == model
    renamed = {("type" if key == "rope_type" else key): value for key, value in SCALED["rope_scaling"].items()}
    assert hf.model_config(old | {"rope_scaling": renamed}, "here") == model
    assert hf.model_config(settings_of(model, "bf16"), "here") == model
    plain = hf.model_config(old | {"rope_scaling": None, "num_key_value_heads": None}, "here")
    assert plain == dataclasses.replace(model, rope_scaling=None, num_kv_heads=None)
    assert hf.model_config(settings_of(plain, "bf16"), "here") == dataclasses.replace(plain, num_kv_heads=4)
    hub = settings_with(gpt, n_inner=..., tie_word_embeddings=..., scale_attn_weights=..., n_ctx=64)
    assert hf.model_config(hub, "here") == hf.model_config(settings_with(gpt), "here")
    assert hf.model_config(hub, "here").tie_embeddings and hf.model_config(hub, "here").ffn_hidden_size == 128
    # What transformers itself takes for keys that are not there.
    sizes = {key: value for key, value in LLAMA.items() if key not in ("rms_norm_eps", "max_position_embeddings")}
    bare = hf.model_config({"model_type": "llama"} | sizes, "here")
    default = transformers.LlamaConfig(**sizes)
    assert (bare.norm_eps, bare.max_positions) == (default.rms_norm_eps, default.max_position_embeddings)
    assert bare.tie_embeddings == default.tie_word_embeddings
    assert bare.rope_theta == default.rope_parameters["rope_theta"]


SIZES = dict(num_layers=3, hidden_size=48, ffn_hidden_size=40, vocab_size=90, max_positions=64, norm_eps=1e-3)
RATES = dict(hidden_dropout=0.1, attention_dropout=0.2)
LLAMA_SETTINGS = {
    **{"num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 40, "vocab_size": 90, "rms_norm_eps": 1e-3},
    **{"max_position_embeddings": 64, "tie_word_embeddings": False, "rope_theta": 77.0, "rope_scaling": None},
    **{"attention_dropout": 0.2, "hidden_act": "silu", "bos_token_id": None, "eos_token_id": None},
}
QWEN_SETTINGS = {"use_sliding_window": False, "use_mrope": False}


@pytest.mark.parametrize(
    "model, expected",
    [
        (
            dict(num_heads=6, num_kv_heads=2, head_dim=16),
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "head_dim": 16, "num_key_value_heads": 2}
            | {"num_attention_heads": 6, "attention_bias": False, "mlp_bias": False},
        ),
        (
            dict(num_heads=5, num_kv_heads=None, head_dim=8),  # heads that transformers' Llama does not have
            {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "head_dim": 8, "num_key_value_heads": 5}
            | {"num_attention_heads": 5, "sliding_window": None},
        ),
        (
            dict(num_heads=6, num_kv_heads=3, qkv_bias=True),
            {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "head_dim": 8, "num_key_value_heads": 3}
            | {"num_attention_heads": 6, **QWEN_SETTINGS},
        ),
        (
            dict(num_heads=6, num_kv_heads=3, qk_norm=True),
            {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8, "num_key_value_heads": 3}
            | {"num_attention_heads": 6, "attention_bias": False, **QWEN_SETTINGS},
        ),
    ],
)
def test_settings_of_a_llama_are_written_key_by_key(model, expected):
    model = ModelConfig(**SIZES, **RATES, **model, rope_theta=77.0)
    scaled = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0}
    scaled |= {"original_max_position_embeddings": 32}
    for dtype, name in ("fp32", "float32"), ("fp16", "float16"), ("bf16", "bfloat16"):
        assert settings_of(model, dtype) == LLAMA_SETTINGS | expected | {"torch_dtype": name}
    longer = dataclasses.replace(model, rope_scaling=RopeScaling(2.0, 1.5, 3.0, 32), tie_embeddings=True)
    changes = {"torch_dtype": "float32", "rope_scaling": scaled, "tie_word_embeddings": True}
    assert settings_of(longer, "fp32") == LLAMA_SETTINGS | expected | changes


def test_settings_of_a_gpt_are_written_key_by_key():
    model = ModelConfig("gpt", num_heads=6, num_kv_heads=None, positions="learned", **SIZES, **RATES)
    assert settings_of(model, "bf16") == {
        **{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "torch_dtype": "bfloat16"},
        **{"n_layer": 3, "n_embd": 48, "n_inner": 40, "n_head": 6, "vocab_size": 90, "n_positions": 64},
        **{"layer_norm_epsilon": 1e-3, "tie_word_embeddings": False, "activation_function": "gelu_new"},
        **{"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.2, "bos_token_id": None, "eos_token_id": None},
        **{"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    }


def single(folder, target, change) -> Path:
    """A copy of a folder with all tensors in one file, after `change(tensors)`."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors.update(load_file(file))
    change(tensors)
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    shutil.copy(folder / "config.json", target)
    return target


def test_a_bare_model_s_files_may_hold_a_head(folders, tmp_path):
    def change(tensors):
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    bare, plain = (
        hf.FolderReader(single(folders("llama"), tmp_path / "bare", change)),
        hf.FolderReader(folders("llama")),
    )
    assert "head.weight" in bare.names()
    assert all(torch.equal(whole(bare, name), whole(plain, name)) for name in plain.names())


def test_tensors_that_older_files_hold_besides(folders, tmp_path):
    def bare(tensors):  # as the hub has GPT-2: saved from the model without head, masks included
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
        tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)

    def buffers(tensors):
        tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    for name, change in (("gpt2", bare), ("llama-tied", buffers)):
        expected, reader = (
            hf.FolderReader(folders(name)),
            hf.FolderReader(single(folders(name), tmp_path / name, change)),
        )
        assert all(torch.equal(whole(reader, n), whole(expected, n)) for n in expected.names())


# ---- refusals -------------------------------------------------------------------------------------------------------

YARN = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}}
LACKING = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0}}


OTHER_NETWORKS = [
    ("llama", "embedding_multiplier", 12.0),
    ("llama", "attention_multiplier", 0.0078125),
    ("llama", "residual_multiplier", 0.22),
    ("llama", "logits_scaling", 8.0),
    ("llama", "no_rope_layers", [1, 1, 1, 0]),
    ("llama", "no_rope_layer_interval", 4),
    ("llama", "rope_interleaved", True),
    ("llama", "layer_types", ["full_attention", "sliding_attention"]),
    ("llama", "sliding_window", 4096),
    ("llama", "num_local_experts", 8),
    ("llama", "final_logit_softcapping", 30.0),
    ("llama", "query_pre_attn_scalar", 256),
    ("llama", "use_qk_norm", True),
    ("llama", "quantization", {"bits": 4}),
    ("llama", "low_freq_factor", 1.0),
    ("llama", "is_encoder_decoder", True),
    ("llama", "pruned_heads", {"0": [1]}),
    ("gpt2", "rope_theta", 10000.0),
    ("gpt2", "n_query_groups", 1),
    ("gpt2", "multi_query", True),
    ("gpt2", "parallel_attn", True),
    ("gpt2", "is_encoder_decoder", True),
]


@pytest.mark.parametrize("name, key, value", OTHER_NETWORKS)
def test_a_key_of_another_network_is_refused_by_name(name, key, value, folders):
    with pytest.raises(ValueError, match=f"{key}="):
        hf.model_config(settings_with(folders(name), **{key: value}), "here")
    assert key not in hf.HARMLESS


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("key, value", [("attention_factor", 0.5), ("mrope_section", [2, 1, 1]), ("beta_fast", 32)])
def test_a_rotary_parameter_of_another_network_is_refused_by_name(place, key, value, folders):
    scaling = SCALED["rope_scaling"] | {"rope_theta": 500.0, key: value}
    with pytest.raises(ValueError, match=f"{key}="):
        hf.model_config(settings_with(folders("llama3.1"), **{"rope_parameters": ...} | {place: scaling}), "here")


@pytest.mark.parametrize("name", MODELS)
def test_keys_that_leave_the_network_as_it_is_are_accepted(name, folders):
    expected = hf.model_config(settings_with(folders(name)), "here")
    old = dict(pretraining_tp=2, max_sequence_length=2048, unsloth_version="2024.9", unsloth_fixed=True, n_ctx=64)
    old |= dict(n_special=0, predict_special_tokens=True, output_past=True, task_specific_params={"a": {"b": 1}})
    old |= dict(torch_dtype="float16", _name_or_path="x", bos_token_id=1, eos_token_id=[2, 3], temperature=0.6, top_k=9)
    old |= dict(new_thing=None, sliding_window=None, quantization_config=None, add_cross_attention=False)
    if expected.family == "llama":
        old |= dict(is_llama_config=True, rope_interleaved=False)
    assert hf.model_config(settings_with(folders(name), **old), "here") == expected
    whole = json.loads(MODELS[name]().to_json_string(use_diff=False))
    assert hf.model_config(whole, "here") == expected


@pytest.mark.parametrize(
    "name,changes,message",
    [
        (
            "llama",
            {"model_type": "gemma"},
            "model_type='gemma' is not supported; llama, mistral, qwen2, qwen3, gpt2 are",
        ),
        (
            "llama",
            {"model_type": ["llama"]},
            "model_type=['llama'] is not supported; llama, mistral, qwen2, qwen3, gpt",
        ),
        ("llama", {"attention_bias": True}, "attention_bias=True is not supported, minitron's llama has False"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True is not supported"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, minitron's llama has 'silu'"),
        ("llama", YARN, "rope_type='yarn' is not supported, minitron's llama has 'default' or 'llama3'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear' is not supported"),
        ("llama", {"rope_scaling": 2}, "the rotary parameters 2 are not a JSON object"),
        ("llama", LACKING, "high_freq_factor is missing"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ("llama", {"sliding_window": 4096}, "sliding_window=4096 is not supported, minitron's llama has None"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} is not supported"),
        ("llama", {"auto_map": {"AutoModel": "own.Model"}}, "auto_map={'AutoModel': 'own.Model'} is not supported"),
        ("llama", {"head_dim": 15}, "model.head_dim=15 is odd"),
        ("gpt2", {"head_dim": 16}, "head_dim=16 is not supported, minitron's gpt has None or 8"),
        ("llama", {"hidden_size": ...}, "hidden_size is missing"),
        ("llama", {"hidden_size": "wide"}, "model.hidden_size=wide is not an integer"),
        (
            "llama",
            {"num_attention_heads": 5, "head_dim": ...},
            "model.num_heads=5 does not divide model.hidden_size=32",
        ),
        ("gpt2", {"activation_function": "relu"}, "activation_function='relu' is not supported, minitron's gpt has"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True is not supported"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False is not supported"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True is not supported"),
        ("gpt2", {"n_embd": {}}, "model.hidden_size={} is not an integer"),
        ("gpt2", {"n_positions": ...}, "n_positions is missing"),
        (
            "gpt2",
            {"n_layer": "${oc.env:HOME}"},
            "model.num_layers=${oc.env:HOME} holds an interpolation ${...}, which is not expanded",
        ),
    ],
)
def test_what_the_model_cannot_be_is_refused_by_name(name, changes, message, folders):
    settings = settings_with(folders(name), **changes)
    assert error_of(hf.model_config, settings, "a/config.json").startswith(f"a/config.json: {message}")


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def reindex(change):
    return lambda d: edit(d / "model.safetensors.index.json", lambda index: change(index["weight_map"]))


def shard(d, number=0) -> Path:
    return sorted(d.glob("*.safetensors"))[number]


def only_pickle(d):
    for file in d.glob("*safetensors*"):
        file.unlink()
    (d / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")


def rewrite(change):
    def damage(d):
        tensors = load_file(shard(d))
        change(tensors)
        save_file(tensors, shard(d))

    return damage


def truncate(name=None):
    def damage(d):
        path = d / name if name else shard(d)
        path.write_bytes(path.read_bytes()[:-100])

    return damage


@pytest.mark.parametrize(
    "damage,message",
    [
        (lambda d: (d / "config.json").unlink(), r"config.json cannot be read \(No such file or directory\); name"),
        (truncate("config.json"), r"config.json cannot be read .* or copy it again"),
        (lambda d: (d / "config.json").write_text("[1]"), r"config.json cannot be read \(it is not a JSON object\)"),
        (truncate("model.safetensors.index.json"), r"index.json cannot be read .* or copy it again"),
        (lambda d: edit(d / "model.safetensors.index.json", dict.clear), r"index.json has no weight_map"),
        (reindex(lambda m: m.update(x="../x.safetensors")), r"no weight_map of tensors to files in its own folder"),
        (lambda d: shard(d).unlink(), r"model-00001-of-.* cannot be read"),
        (truncate(), r"model-00001-of-.* cannot be read"),
        (reindex(lambda m: m.pop("model.norm.weight")), r"holds model.norm.weight, unlike .*"),
        (
            reindex(lambda m: m.update({"model.norm.weight": min(m.values())})),
            r"model-00001-of-.* lacks model.norm.weight, unlike model.safetensors.index.json",
        ),
        (only_pickle, r"holds pytorch_model.bin but no model.safetensors: .bin is a pickle, and loading one can run"),
        (lambda d: [file.unlink() for file in d.glob("*safetensors*")], r"holds neither model.safetensors nor model.s"),
        (
            lambda d: edit(d / "config.json", lambda c: c.update(num_hidden_layers=3)),
            r"lacks the tensor model.layers.2.input_layernorm.weight of config.json's model",
        ),
        (
            lambda d: edit(d / "config.json", lambda c: c.update(num_hidden_layers=1)),
            r"model.layers.1.* has no place in config.json's model, a LlamaForCausalLM",
        ),
        (
            lambda d: edit(d / "config.json", lambda c: c.update(vocab_size=91)),
            r"embed_tokens.weight has shape \(90, 32\), config.json's model \(91, 32\)",
        ),
        (
            lambda d: edit(d / "config.json", lambda c: c.update(tie_word_embeddings=True)),
            r"lm_head.weight differs from the embedding, .* set tie_word_embeddings=false",
        ),
        (
            rewrite(lambda t: t.update({name: x.to(torch.float8_e4m3fn) for name, x in t.items()})),
            r"is F8_E4M3, not one of BF16, F16, F32; save the model unquantized",
        ),
    ],
)
def test_a_damaged_folder_is_refused_and_nothing_is_left(damage, message, folders, tmp_path):
    shutil.copytree(folders("llama"), tmp_path / "hf")
    damage(tmp_path / "hf")
    assert re.search(message, error_of(convert, "import", tmp_path / "hf", tmp_path / "there"))
    assert os.listdir(tmp_path) == ["hf"]


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
def test_a_model_of_another_task_is_named_as_such(family, task, tmp_path):
    """As transformers writes it: its configuration is that of a language model."""
    sizes = {"vocab_size": 90, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if family == "Llama":
        sizes |= dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    else:
        sizes |= dict(n_embd=32, n_layer=1, n_head=4, n_positions=32)
    config = getattr(transformers, f"{family}Config")(**sizes)
    getattr(transformers, f"{family}For{task}")(config).save_pretrained(tmp_path / "hf")
    message = rf"makes it a model that predicts labels, not the next token; convert a {family}"
    assert re.search(message, error_of(convert, "import", tmp_path / "hf", tmp_path / "there"))
    assert os.listdir(tmp_path) == ["hf"]


def checkpoint(folder, model, kind="param", names=None):
    shapes = {name: shape for name, shape in hf.global_shapes(model).items() if names is None or name in names}
    shapes |= {"lora.a": (1,)} if names else {}
    pieces = [TensorShard(name, kind, shape, (0,) * len(shape), torch.zeros(shape)) for name, shape in shapes.items()]
    write_checkpoint(folder, dataclasses.asdict(Config(model=model)), pieces, 5)


@pytest.mark.parametrize("rate", [10**400, 7, -1, None, "x", [0.5]], ids=lambda rate: str(rate)[:9])
def test_a_dropout_that_is_no_rate_is_none(folders, rate):
    settings = json.loads((folders("gpt2") / "config.json").read_text()) | {"attn_pdrop": rate, "resid_pdrop": 0.5}
    assert hf.dropout_of(settings) == {"hidden_dropout": 0.5}


def test_what_cannot_be_exported_is_refused_and_nothing_is_left(folders, tmp_path):
    model = hf.FolderReader(folders("llama")).model
    gpt = hf.FolderReader(folders("gpt2")).model

    def refused(checkpoint_model, *options, **more):
        checkpoint(tmp_path / "run", checkpoint_model, **more)
        try:
            return error_of(convert, "export", tmp_path / "run", tmp_path / "back", *options)
        finally:
            shutil.rmtree(tmp_path / "run")
            assert os.listdir(tmp_path) == []

    learned = dataclasses.replace(model, positions="learned")
    assert "model.positions=learned cannot be exported: transformers' llama has rope" in refused(learned)
    grouped = dataclasses.replace(gpt, num_kv_heads=2)
    assert "model.num_kv_heads=2 cannot be exported: transformers' gpt has 4" in refused(grouped)
    names = hf.global_shapes(model).keys()
    headless = refused(model, names=names - {"head.weight"})
    assert "head.weight was missing and is [128, 32]" in headless
    assert "lora.a was [1] and is missing" in refused(model, names=names)
    assert "blocks.0.attention.out.weight was missing" in refused(model, kind="exp_avg")
    assert "--max-shard-gb: 0 is not a positive number" in refused(model, "--max-shard-gb", 0)
    assert "--max-shard-gb: inf is not a positive number" in refused(model, "--max-shard-gb", "inf")
    assert "absent" in error_of(convert, "export", tmp_path / "absent", tmp_path / "back")

    checkpoint(tmp_path / "run", model)
    part = next(tmp_path.rglob("*.safetensors"))
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    assert "is damaged: its checksum is" in error_of(convert, "export", tmp_path / "run", tmp_path / "back")
    (tmp_path / "back").mkdir()
    assert "back exists already" in error_of(convert, "export", tmp_path / "run", tmp_path / "back")


def test_a_full_disk_leaves_nothing(folders, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    convert("import", folders("llama"), tmp_path / "there")
    monkeypatch.setattr(convert_hf, "header", full)
    message = error_of(convert, "export", tmp_path / "there", tmp_path / "back")
    assert message.endswith("back cannot be written ([Errno 28] No space left on device); nothing is left of it")
    assert os.listdir(tmp_path) == ["there"]


# ---- the command ----------------------------------------------------------------------------------------------------

MEMORY = """
import sys, threading
import torch
from minitron.interop import convert_hf as tool, import_weights
tool.BLOCK_VALUES, import_weights.BLOCK_VALUES, import_weights.FILE_BYTES = 1 << 20, 1 << 20, 4 << 20

def owned():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024

def watch():
    while not done.wait(0.002):
        peaks.append(owned())

torch.zeros(1 << 20).to(torch.bfloat16).float().sum()
for command in ["import", "hf", "there"], ["export", "there", "back", "--max-shard-gb", "0.04"]:
    before, peaks, done = owned(), [0], threading.Event()
    thread = threading.Thread(target=watch)
    thread.start()
    tool.main(command)
    done.set()
    thread.join()
    print("grew by", max(peaks) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of a process's own memory")
def test_memory_is_that_of_one_tensor(tmp_path):
    """138 MB of weights in tensors of up to 17 MB, converted there and back.

    Counted is the process's own memory: pages of mapped files the system takes back when it needs them. malloc is told
    to return freed tensors, which it does by itself for those above 32 MB; its heap would hide what is held.
    """
    sizes = dict(hidden_size=1024, ffn_hidden_size=4096, num_layers=4, vocab_size=1024, num_heads=8, num_kv_heads=8)
    model = dataclasses.replace(hf.model_config({"model_type": "llama"} | LLAMA, "here"), **sizes)
    tensors = (
        (part.name, torch.full(part.stored, 0.5, dtype=torch.bfloat16))
        for parts in hf.tensor_map(model).values()
        for part in parts
    )
    (tmp_path / "hf").mkdir()
    convert_hf.write_model(tmp_path / "hf", model, torch.bfloat16, tensors, 40_000_000)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(settings_of(model, "bf16")))
    (tmp_path / "measure.py").write_text(MEMORY)
    run = subprocess.run(
        [sys.executable, "measure.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
    )
    assert run.returncode == 0, run.stderr
    grown = [int(number) for number in re.findall(r"grew by (\d+)", run.stdout)]
    assert len(grown) == 2 and max(grown) < 40e6, grown
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 3 and sum(file.stat().st_size for file in files) > 130e6
    for file in files:
        assert file.read_bytes() == (tmp_path / "back" / file.name).read_bytes()


def test_the_command_says_what_comes_next_and_ends_in_one_line_otherwise(folders, tmp_path, capsys):
    convert("import", folders("gpt2"), tmp_path / "there")
    done = f"minitron.pretrain {tmp_path}/there/model.yaml checkpoint.load={tmp_path}/there data.source=..."
    assert done in capsys.readouterr().out
    again = subprocess.run(
        [sys.executable, ROOT / "tools" / "convert_hf.py", "import", folders("gpt2"), "there"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": ""},
    )
    assert again.returncode == 1
    assert re.fullmatch("error: .*there exists already; .*\n", again.stderr)


def test_the_size_of_a_file_is_in_gigabytes(tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(convert_hf, "export_folder", lambda *given: sizes.append(given[3]))
    convert("export", "a", tmp_path / "b")
    convert("export", "a", tmp_path / "b", "--max-shard-gb", 0.5)
    assert sizes == [5_000_000_000, 500_000_000]


class Bar:
    """The progress bar of a tool, which is full at its end."""

    made = ()

    def __init__(self, total, unit, doing):
        self.total, self.n = total, 0
        Bar.made = (*Bar.made, self)

    def update(self, more):
        self.n += more
        assert 0 <= self.n <= self.total

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_bars_are_full_at_the_end_and_appear_late(folders, tmp_path, monkeypatch):
    for module in import_weights, convert_hf, rows:
        monkeypatch.setattr(module, "progress_bar", Bar)
    monkeypatch.setattr(Bar, "made", ())
    convert("import", folders("llama"), tmp_path / "there")
    convert("export", tmp_path / "there", tmp_path / "back")
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n\n' * 3)
    assert len(list(rows.read_rows(str(tmp_path / "a.jsonl")))) == 3
    assert len(Bar.made) == 3 and all(bar.n == bar.total > 0 for bar in Bar.made)
    for is_terminal in False, True:
        monkeypatch.setattr(sys, "stderr", text := io.StringIO())
        text.isatty = lambda is_terminal=is_terminal: is_terminal
        with progress.progress_bar(9, "B", "reading") as bar:
            assert bar.disable != is_terminal
        assert not text.getvalue()  # it has taken no time
