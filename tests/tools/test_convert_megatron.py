"""Megatron-core's checkpoints: its own logits where it is there, every tensor by hand, and pickles that are not run."""

import argparse
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import zipfile
from collections import OrderedDict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers

from layouts import whole_model
from minitron.checkpoint.reader import Reader
from minitron.comm.mesh import Mesh
from minitron.config import cli
from minitron.data.batch import Batch
from minitron.interop import convert_hf, convert_megatron, torch_dist
from minitron.testing import assert_close_rel
from ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SIZES = dict(num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48)
LLAMA = SIZES | dict(
    group_query_attention=True,
    num_query_groups=2,
    vocab_size=90,
    max_position_embeddings=64,
    position_embedding_type="rope",
    rotary_base=500,
    normalization="RMSNorm",
    norm_epsilon=1e-5,
    params_dtype=torch.bfloat16,
)
GPT = SIZES | dict(position_embedding_type="learned_absolute", normalization="LayerNorm", norm_epsilon=1e-5)
GPT |= dict(group_query_attention=False, num_query_groups=1)  # as Megatron-LM saves it: of no effect


def convert(source, target, *keys):
    convert_megatron.main(["import", str(source), str(target), *map(str, keys)])


def error_of(*arguments):
    with pytest.raises(ValueError) as caught:
        convert(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def weights_of(folder):
    """Every tensor of a checkpoint, whole."""
    reader = Reader(folder)
    return {
        name: reader.read(name, "param", (0,) * len(reader.shape(name)), reader.shape(name)) for name in reader.names()
    }


# ---- what megatron-core wrote ---------------------------------------------------------------------------------------


@pytest.mark.skipif(not find_spec("megatron"), reason="megatron-core is not installed: pip install megatron-core")
@pytest.mark.parametrize("kind", [pytest.param("gpt", marks=pytest.mark.slow), "llama"])
def test_logits_equal_megatron_s(tmp_path, kind):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "write_megatron.py"), str(tmp_path), kind],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    convert(tmp_path / "ckpt", tmp_path / "ours")
    cfg = cli.load([str(tmp_path / "ours" / "model.yaml"), "precision.dtype=fp32", "train.seq_len=16"])
    assert (cfg.model.vocab_size, cfg.model.rope_theta if kind == "llama" else 500) == (120, 500)
    model, weights = whole_model(cfg, Mesh.offline(1)), weights_of(tmp_path / "ours")
    twin = torch.load(tmp_path / "twin.pt", weights_only=True)
    tokens, order = twin["tokens"].T, torch.arange(16)
    batch = Batch(tokens, tokens, torch.ones(16, 2), order[:, None], order, torch.arange(2), count=32.0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(weights[p.spec.name])
        logits = model.logits(batch)
    assert_close_rel(logits.transpose(0, 1)[..., :120], twin["logits"][..., :120], 1e-5, "logits")


# ---- every tensor, by hand ------------------------------------------------------------------------------------------


def megatron_of(model, gpt, stacked=True, padded=96):
    """A model of transformers under Megatron's names: the rows of q, k and v group by group, heads written out."""
    source, L = model.state_dict(), SIZES["num_layers"]
    groups, each, d = (4, 1, 8) if gpt else (2, 2, 8)

    def interleaved(q, k, v):
        rows = []
        for g in range(groups):
            rows += [q[(g * each + i) * d : (g * each + i + 1) * d] for i in range(each)]
            rows += [k[g * d : (g + 1) * d], v[g * d : (g + 1) * d]]
        return torch.cat(rows)

    layers = []
    for i in range(L):
        if gpt:
            at = f"transformer.h.{i}."
            weight, bias = source[at + "attn.c_attn.weight"].T, source[at + "attn.c_attn.bias"]
            layers.append(
                {
                    "self_attention.linear_qkv.weight": interleaved(*weight.split(32)),
                    "self_attention.linear_qkv.bias": interleaved(*bias.split(32)),
                    "input_layernorm.weight": source[at + "ln_1.weight"],
                    "input_layernorm.bias": source[at + "ln_1.bias"],
                    "self_attention.linear_proj.weight": source[at + "attn.c_proj.weight"].T,
                    "self_attention.linear_proj.bias": source[at + "attn.c_proj.bias"],
                    "pre_mlp_layernorm.weight": source[at + "ln_2.weight"],
                    "pre_mlp_layernorm.bias": source[at + "ln_2.bias"],
                    "mlp.linear_fc1.weight": source[at + "mlp.c_fc.weight"].T,
                    "mlp.linear_fc1.bias": source[at + "mlp.c_fc.bias"],
                    "mlp.linear_fc2.weight": source[at + "mlp.c_proj.weight"].T,
                    "mlp.linear_fc2.bias": source[at + "mlp.c_proj.bias"],
                }
            )
        else:
            at = f"model.layers.{i}."
            gate, up = source[at + "mlp.gate_proj.weight"], source[at + "mlp.up_proj.weight"]
            q, k, v = (source[f"{at}self_attn.{x}_proj.weight"] for x in "qkv")
            layers.append(
                {
                    "self_attention.linear_qkv.weight": interleaved(q, k, v),
                    "self_attention.linear_qkv.layer_norm_weight": source[at + "input_layernorm.weight"],
                    "self_attention.linear_proj.weight": source[at + "self_attn.o_proj.weight"],
                    "mlp.linear_fc1.layer_norm_weight": source[at + "post_attention_layernorm.weight"],
                    "mlp.linear_fc1.weight": torch.cat([gate, up]),
                    "mlp.linear_fc2.weight": source[at + "mlp.down_proj.weight"],
                }
            )
    words = source["transformer.wte.weight" if gpt else "model.embed_tokens.weight"]
    pad = torch.full((padded - len(words), 32), 7.0)  # Megatron's padding: never to be seen again
    found = {"embedding.word_embeddings.weight": torch.cat([words, pad])}
    if gpt:
        found["embedding.position_embeddings.weight"] = source["transformer.wpe.weight"]
        found["decoder.final_layernorm.bias"] = source["transformer.ln_f.bias"]
    else:
        found["output_layer.weight"] = torch.cat([source["lm_head.weight"], pad])
    found["decoder.final_layernorm.weight"] = source["transformer.ln_f.weight" if gpt else "model.norm.weight"]
    for name in layers[0]:
        if stacked:
            found[f"decoder.layers.{name}"] = torch.stack([layer[name] for layer in layers])
        else:
            found |= {f"decoder.layers.{i}.{name}": layer[name] for i, layer in enumerate(layers)}
    return {name: tensor.contiguous() for name, tensor in found.items()}


def write(folder, tensors, args=None):
    """As torch.distributed.checkpoint writes it, and Megatron's common.pt."""
    dcp.save(tensors, checkpoint_id=str(folder), no_dist=True)
    if args is not None:
        torch.save({"args": argparse.Namespace(**args), "iteration": 5}, folder / "common.pt")
    return folder


@pytest.fixture(scope="module", params=["llama", "gpt"])
def source(request, tmp_path_factory):
    """(kind, model, what `convert_hf.py import` makes of it)."""
    folder, gpt = tmp_path_factory.mktemp(request.param), request.param == "gpt"
    if gpt:
        cfg = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_inner=48, vocab_size=90, n_positions=64)
    else:
        cfg = transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=90,
            max_position_embeddings=64,
            rms_norm_eps=1e-5,
            rope_theta=500.0,
        )
    model = transformers.AutoModelForCausalLM.from_config(cfg)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.1)
    model.save_pretrained(folder / "hf")
    convert_hf.main(["import", str(folder / "hf"), str(folder / "expected")])
    return gpt, model, folder / "expected"


@pytest.mark.parametrize("stacked", [True, False])
def test_every_tensor_is_that_of_the_same_model_from_hugging_face(source, tmp_path, stacked, capsys):
    gpt, model, expected = source
    tensors = megatron_of(model, gpt, stacked)
    others = "optimizer.state.exp_avg.decoder.x", "chained_0.optimizer.x", "rng_state", "rerun_state_machine_state"
    state = dict.fromkeys(others, torch.zeros(3)) | {"decoder.layers.y._extra_state": io.BytesIO(b"x")}
    args = (GPT | {"vocab_size": 90}) if gpt else LLAMA
    folder = write(tmp_path / "iter_0000005", tensors | state, args)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5\n")
    convert(tmp_path, tmp_path / "out")
    assert "left out: 4 tensors of the optimizer, 1 objects" in capsys.readouterr().out
    ours, wanted = weights_of(tmp_path / "out"), weights_of(expected)
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(ours[name], tensor), name
    yaml = [cli.load([str(path / "model.yaml")]).model for path in (tmp_path / "out", expected)]
    assert yaml[0] == yaml[1]
    assert folder.exists()


def test_without_arguments_keys_say_it_and_win(source, tmp_path):
    gpt, model, expected = source
    folder = write(tmp_path / "ckpt", megatron_of(model, gpt))
    assert "has no arguments of a run; give model.num_heads=N" in error_of(folder, tmp_path / "x")
    keys = ["model.num_heads=4", "model.vocab_size=90", "model.norm_eps=1e-5"]
    keys += (
        ["model.num_kv_heads=null"]
        if gpt
        else ["model.num_kv_heads=2", "model.rope_theta=500", "model.max_positions=64"]
    )
    assert error_of(folder, tmp_path / "x", *keys, "model.qk_norm=true").startswith("model.qk_norm=true: ")
    convert(folder, tmp_path / "out", *keys)
    assert all(torch.equal(a, weights_of(expected)[name]) for name, a in weights_of(tmp_path / "out").items())
    convert(folder, tmp_path / "yaml", expected / "model.yaml", "--dtype", "bf16")
    assert weights_of(tmp_path / "yaml")["head.norm.weight"].dtype == torch.bfloat16
    reader = Reader(tmp_path / "yaml")
    assert (reader.config["precision"]["dtype"], reader.iteration, reader.consumed_samples) == ("bf16", 0, 0)


def test_a_tied_head_rows_without_padding_and_wider_norms(tmp_path, capsys):
    """Weights get the format that holds all of them; the padding of minitron is the mean row."""

    def change(tensors):
        tensors.pop("output_layer.weight")
        for name in tensors.keys() - {"decoder.final_layernorm.weight"}:
            tensors[name] = tensors[name].bfloat16()

    folder = llama(tmp_path, change, LLAMA | {"vocab_size": 96, "bias_gelu_fusion": False})
    convert(folder, tmp_path / "out")
    assert "GELU" not in capsys.readouterr().out
    ours, model = weights_of(tmp_path / "out"), cli.load([str(tmp_path / "out" / "model.yaml")]).model
    assert model.tie_embeddings and model.vocab_size == 96 and {w.dtype for w in ours.values()} == {torch.float32}
    words = torch_dist.Reader(folder).read("embedding.word_embeddings.weight")
    mean = words.double().mean(0).bfloat16().float().expand(32, -1)
    assert torch.equal(ours["embedding.words.weight"], torch.cat([words.float(), mean]))


def llama(tmp_path, change=None, args=LLAMA):
    cfg = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=90,
    )
    tensors = megatron_of(transformers.LlamaForCausalLM(cfg), False)
    if change is not None:
        change(tensors)
    return write(tmp_path / "ckpt", tensors, args)


@pytest.mark.parametrize(
    "change, args, keys, message",
    [
        (
            lambda t: t.update({"decoder.layers.mlp.router.weight": torch.zeros(2, 4)}),
            {},
            [],
            "holds decoder.layers.mlp.rou",
        ),
        (
            lambda t: t.pop("decoder.layers.mlp.linear_fc1.weight"),
            {},
            [],
            "has no decoder.layers.mlp.linear_fc1.weight",
        ),
        (lambda t: t.pop("embedding.word_embeddings.weight"), {}, [], "it is not a dense GPT of Megatron's (it has"),
        (None, {"rotary_interleaved": True}, [], "its argument rotary_interleaved=True is not supported by minitron"),
        (None, {"num_experts": 8}, [], "its argument num_experts=8 is not supported by"),
        (None, {"num_query_groups": 4}, [], "linear_qkv.weight has shape [64, 32], and [96, 32] in the model that"),
        (None, {"num_attention_heads": 3}, [], "model.num_heads=3 does not divide model.hidden_size=32"),
        (None, {}, ["model.num_head=4"], "model.num_head"),
        (
            lambda t: t.update({"decoder.final_layernorm.weight": torch.ones(32, dtype=torch.float64)}),
            {},
            [],
            "holds weights in torch.float64, not in ",
        ),
        (None, {}, ["model.num_layers=3"], "has no decoder.layers.self_attention.linear_qkv.layer_norm_weight"),
    ],
)
def test_what_cannot_be_converted_is_named(tmp_path, change, args, keys, message):
    folder = llama(tmp_path, change, LLAMA | args)
    assert message in error_of(folder, tmp_path / "out", *keys)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("out.*"))


def test_other_folders_and_formats_are_named(tmp_path):
    assert "there is no such folder" in error_of(tmp_path / "no", tmp_path / "out")
    (tmp_path / "old" / "mp_rank_00").mkdir(parents=True)
    assert "a pickle a rank, and loading one can run any code; save it with --ckpt-format torch_dist" in error_of(
        tmp_path / "old", tmp_path / "out"
    )
    (tmp_path / "zarr" / "decoder.x").mkdir(parents=True)
    (tmp_path / "zarr" / "decoder.x" / ".zarray").touch()
    assert "is in the format zarr; save it with" in error_of(tmp_path / "zarr", tmp_path / "out")
    folder = llama(tmp_path)
    assert f"name one of its folders: {folder.name}" in error_of(tmp_path, tmp_path / "out")
    assert "exists already" in error_of(folder, folder)


# ---- arguments ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    """An open checkpoint of each family, without arguments."""
    made = {}
    for gpt in (False, True):
        if gpt:
            cfg = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_inner=48, vocab_size=90, n_positions=64)
        else:
            sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
            cfg = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=90)
        tensors = megatron_of(transformers.AutoModelForCausalLM.from_config(cfg), gpt)
        made[gpt] = torch_dist.Reader(write(tmp_path_factory.mktemp("arguments") / "ckpt", tensors))
    return made


def model_with(reader, monkeypatch, args, accepted=()):
    """The model that is read from the tensors of a checkpoint and these arguments."""
    monkeypatch.setattr(reader, "common", lambda: args)
    return convert_megatron.model_of(reader, set(reader.names()), [], set(accepted))[0]


def test_rope_is_scaled_by_megatron_s_factor_unless_another_is_given(readers, monkeypatch):
    scaled = lambda **args: model_with(readers[False], monkeypatch, LLAMA | args).rope_scaling
    assert scaled() is None and scaled(use_rope_scaling=False, rope_scaling_factor=4.0) is None
    assert scaled(use_rope_scaling=True).factor == scaled(use_rope_scaling=True, rope_scaling_factor=None).factor == 8.0
    assert scaled(use_rope_scaling=True, rope_scaling_factor=4.0).factor == 4.0


def test_tensors_give_sizes_and_arguments_the_rest(readers, monkeypatch):
    """A vocabulary without padding has all rows. No groups of queries: as many k and v as q."""
    model = lambda gpt, **args: model_with(readers[gpt], monkeypatch, (GPT if gpt else LLAMA) | args)
    assert [model(False, vocab_size=size).vocab_size for size in (None, 96, 1)] == [96, 96, 1]
    assert model(True, max_position_embeddings=128).max_positions == 64
    assert model(False, max_position_embeddings=128).max_positions == 128
    assert model(True, num_attention_heads=8).kv_heads == 8
    assert model(False, num_attention_heads=8, group_query_attention=False).kv_heads == 8


@pytest.mark.parametrize("fused", [True, False, None, "absent"])
def test_an_exact_gelu_is_noted(readers, monkeypatch, fused):
    """Only a GPT has them: a gated MLP has none."""
    for gpt in False, True:
        args = (GPT if gpt else LLAMA) | ({} if fused == "absent" else {"bias_gelu_fusion": fused})
        monkeypatch.setattr(readers[gpt], "common", lambda args=args: args)
        found = convert_megatron.model_of(readers[gpt], set(readers[gpt].names()), [], set())
        assert found[1] == (gpt and fused is False)


@pytest.mark.parametrize("heads", [0, -4, "4", 4.5, 3])
def test_heads_that_no_model_has_are_refused(readers, monkeypatch, heads):
    with pytest.raises(ValueError, match="head"):
        model_with(readers[False], monkeypatch, LLAMA | {"num_attention_heads": heads})


OTHER_NETWORKS = dict(
    window_size=(127, 0),
    window_attn_skip_freq=4,
    no_rope_freq=4,
    softmax_type="off-by-one",
    softmax_scale=0.5,
    quick_geglu=True,
    squared_relu=True,
    openai_gelu=True,
    qk_l2_norm=True,
    qk_layernorm=True,
    activation_func_clamp_value=7.0,
    glu_linear_offset=1.0,
    attention_output_gate=True,
    layernorm_zero_centered_gamma=True,
    apply_layernorm_1p=True,
    apply_residual_connection_post_layernorm=True,
    add_qkv_bias=True,
    multi_latent_attention=True,
    mtp_num_layers=1,
    num_experts=8,
    num_moe_experts=8,
    mrope_section=[16, 24, 24],
    spec=["megatron.core.models.gpt", "own"],
    hybrid_layer_pattern="M*M*",
    hybrid_override_pattern="M*-",
    hybrid_attention_ratio=0.1,
    is_hybrid_model=True,
    heterogeneous_layers_config_path="layers.json",
    heterogeneous_layers_config_encoded_json="{}",
    linear_attention_freq=4,
    experimental_attention_variant="gated_delta_net",
    rotary_interleaved=True,
    rotary_percent=0.5,
    rotary_seq_len_interpolation_factor=4,
    rope_type="yarn",
    use_mup=True,
    mup_embedding_mult=12.0,
    enable_mhc_connections=True,
    normalization="LayerNorm",
    swiglu=False,
    gated_linear_unit=False,
    position_embedding_type="none",
    layernorm_epsilon=1e-6,
    kv_channels=16,
    num_layers=3,
    hidden_size=64,
    ffn_hidden_size=64,
)


@pytest.mark.parametrize("name", OTHER_NETWORKS)
def test_an_argument_of_another_network_is_refused_and_cannot_be_accepted(readers, monkeypatch, name):
    args = LLAMA | {name: OTHER_NETWORKS[name]}
    with pytest.raises(ValueError, match=f"{name}=") as caught:
        model_with(readers[False], monkeypatch, args, accepted=[name])
    assert "--accept" not in str(caught.value)


@pytest.mark.parametrize(
    "name, value",
    [
        ("normalization", "RMSNorm"),
        ("swiglu", True),
        ("gated_linear_unit", True),
        ("position_embedding_type", "rope"),
        ("use_rotary_position_embeddings", True),
    ],
)
def test_gpt_s_arguments_must_fit_its_tensors(readers, monkeypatch, name, value):
    with pytest.raises(ValueError, match=f"{name}="):
        model_with(readers[True], monkeypatch, GPT | {name: value})


def test_arguments_that_are_off_or_known_to_be_harmless_pass(readers, monkeypatch):
    args = LLAMA | dict.fromkeys(
        OTHER_NETWORKS.keys() - LLAMA.keys() - {"swiglu", "gated_linear_unit", "rotary_percent"}
    )
    args |= dict(swiglu=True, gated_linear_unit=True, rotary_percent=1.0, layernorm_epsilon=1e-5, kv_channels=8)
    args |= dict(softmax_type="vanilla", qk_layernorm=False, mtp_num_layers=0, hybrid_attention_ratio=0.0)
    args |= dict(moe_router_topk=2, retro_bert_vocab_file="v", train_iters=5, lr=1e-3, tensor_model_parallel_size=4)
    args |= dict(use_flash_attn=True, fp8="hybrid", hidden_dropout=0.1, wandb_project="p", rampup_batch_size=[1, 2, 3])
    assert model_with(readers[False], monkeypatch, args) == model_with(readers[False], monkeypatch, LLAMA)
    gpt = dict(normalization="LayerNorm", swiglu=False, use_rotary_position_embeddings=False)
    assert model_with(readers[True], monkeypatch, GPT | gpt) == model_with(readers[True], monkeypatch, GPT)
    old = {key: value for key, value in GPT.items() if key != "norm_epsilon"} | {"layernorm_epsilon": 1e-3}
    assert model_with(readers[True], monkeypatch, old).norm_eps == 1e-3


@pytest.mark.parametrize("value", [True, 1, 0, 0.0, "gate", [1], {"a": 1}, (0,)])
def test_an_unknown_argument_that_is_on_is_refused_unless_accepted(readers, monkeypatch, value):
    args = LLAMA | {"new_gate": value}
    with pytest.raises(ValueError, match="new_gate=.*--accept new_gate"):
        model_with(readers[False], monkeypatch, args, accepted=["other"])
    plain = model_with(readers[False], monkeypatch, LLAMA)
    assert model_with(readers[False], monkeypatch, args, accepted=["new_gate"]) == plain


@pytest.mark.parametrize("value", [None, False, "", [], (), {}])
def test_an_unknown_argument_that_is_off_passes(readers, monkeypatch, value):
    model_with(readers[False], monkeypatch, LLAMA | {"new_gate": value})


def test_the_command_takes_names_to_accept(tmp_path):
    folder = llama(tmp_path, args=LLAMA | {"new_gate": 3, "new\nline": 4, "new_scale": 2})
    message = error_of(folder, tmp_path / "out")
    assert "new_gate=3" in message and "new_scale=2" in message
    convert(folder, tmp_path / "out", "--accept", "new_gate,new_scale,new\nline")


def test_known_arguments_are_sorted_names_and_none_changes_the_network():
    names = convert_megatron.HARMLESS.read_text().split()
    assert names == sorted(set(names)) and all(name.isidentifier() for name in names)
    assert not OTHER_NETWORKS.keys() & set(names) and not convert_megatron.FIXED.keys() & set(names)


# ---- pickles --------------------------------------------------------------------------------------------------------


class Harm:
    """Pickled: a call of os.system."""

    def __reduce__(self):
        return os.system, (f"touch {HARM}",)


HARM = ""


@pytest.mark.parametrize("place", ["metadata", "common", "chunk", "known module"])
def test_a_pickle_that_would_run_code_is_refused_and_not_run(tmp_path, place, monkeypatch):
    """The marker of its code must not appear, whichever file it lies in."""
    monkeypatch.setattr(sys.modules[__name__], "HARM", str(tmp_path / "harm"))
    folder = llama(tmp_path)
    if place == "metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(Harm()))
        assert ".metadata is refused: it calls for posix.system, which no checkpoint needs" in error_of(
            folder, tmp_path / "o"
        )
    elif place == "known module":
        data = b"cmegatron.core.transformer.moe.router\nTopKRouter\n(tR."
        (folder / ".metadata").write_bytes(data)
        assert "it calls for megatron.core.transformer.moe.router.TopKRouter" in error_of(folder, tmp_path / "o")
    elif place == "common":
        torch.save({"args": Harm()}, folder / "common.pt")
        message = error_of(folder, tmp_path / "o")
        assert "common.pt is refused: it calls for posix.system" in message and "give model.num_heads=N" in message
        convert(folder, tmp_path / "o", "model.num_heads=4", "model.num_kv_heads=2")  # keys do without it
    else:
        buffer = io.BytesIO()
        torch.save(Harm(), buffer)
        for path in folder.glob("*.distcp"):
            path.write_bytes(buffer.getvalue() * 99)
        assert "cannot be read" in error_of(folder, tmp_path / "o")
    assert not (tmp_path / "harm").exists()


def test_a_plain_load_would_have_run_it(tmp_path, monkeypatch):
    """So the tests above see something."""
    monkeypatch.setattr(sys.modules[__name__], "HARM", str(tmp_path / "harm"))
    pickle.loads(pickle.dumps(Harm()))
    assert (tmp_path / "harm").exists()


def test_enumerations_of_arguments_are_records_without_code(tmp_path):
    data = b"(dX\x01\x00\x00\x00acmegatron.core.transformer.enums\nAttnBackend\n(I1\ntRs."
    made = torch_dist.unpickle(data, "here")["a"]
    assert isinstance(made, torch_dist.Record) and made.args == (1,)


def test_values_of_arguments_that_are_no_numbers_are_read(tmp_path):
    """Paths, signals and ordered mappings become records, and the model is the same."""
    others = {"exit_signal": signal.SIGTERM, "save": Path("a/b"), "x": OrderedDict(b=1), "y": SimpleNamespace(c=2)}
    reader = torch_dist.Reader(llama(tmp_path, args=LLAMA | others))
    args = reader.common()
    assert {name: args[name] for name in LLAMA} == LLAMA and args.keys() == LLAMA.keys() | others.keys()
    assert args["exit_signal"].args == (signal.SIGTERM,) and "/".join(args["save"].args) == "a/b"
    assert (args["x"].b, args["y"].c) == (1, 2)


def test_damaged_files_are_named(tmp_path):
    folder = llama(tmp_path)
    whole = (folder / ".metadata").read_bytes()
    (shard,) = folder.glob("*.distcp")
    for data, message in (
        (whole[: len(whole) // 2], ".metadata is refused"),
        (pickle.dumps([1]), "is not an index of a torch_dist checkpoint"),
        (whole.replace(shard.name.encode(), b"../" + shard.name.encode()[3:]), "which is not beside it"),
    ):
        (folder / ".metadata").write_bytes(data)
        assert message in error_of(folder, tmp_path / "o"), message
    (folder / ".metadata").write_bytes(whole)
    chunks = shard.read_bytes()
    shard.write_bytes(chunks[:4000])  # then .metadata could make any folder take any memory
    assert "copy all its files" in error_of(folder, tmp_path / "o")
    shard.write_bytes(chunks[:4000] + bytes(len(chunks) - 4000))
    assert "cannot be read" in error_of(folder, tmp_path / "o")
    (folder / "common.pt").write_bytes(b"no zip")
    assert "common.pt cannot be read" in error_of(folder, tmp_path / "o")
    torch.save({"args": [4]}, folder / "common.pt")
    assert "a list for the run's arguments" in error_of(folder, tmp_path / "o")
    with zipfile.ZipFile(folder / "common.pt", "w") as file:
        file.writestr("x/data.pkl", pickle.dumps(json.loads("{}")))
    assert "has no arguments of a run" in error_of(folder, tmp_path / "o")


@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp"])
@pytest.mark.parametrize("what", ["pipe", "dangling"])
def test_what_is_no_file_is_not_waited_for(tmp_path, name, what):
    folder = llama(tmp_path)
    (folder / name).unlink()
    if what == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/nowhere")
    error_of(folder, tmp_path / "o")


@pytest.mark.parametrize("text, name", [("5\n", "iter_0000005"), ("12345678", "iter_12345678"), ("release", "release")])
def test_the_newest_checkpoint_of_a_folder_is_found(tmp_path, text, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / ".metadata").touch()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    assert convert_megatron.find(tmp_path) == convert_megatron.find(tmp_path / name) == tmp_path / name


@pytest.mark.parametrize("text", ["../other", "/etc", "", "9" * 5000, "\xb2", "a\0b"])
def test_the_newest_iteration_is_a_folder_beside_the_file_that_names_it(tmp_path, text):
    folder = llama(tmp_path)
    (folder / "latest_checkpointed_iteration.txt").write_text(text, encoding="latin-1")
    assert "latest_checkpointed_iteration.txt" in error_of(folder, tmp_path / "o")


@pytest.mark.parametrize(
    "args",
    [
        {"vocab_size": "90"},
        {"vocab_size": 1000},
        {"rotary_base": {"a": 1}},
        {"rotary_base": torch.float32},
        {"norm_epsilon": [torch.float32]},
        {"use_rope_scaling": True, "rope_scaling_factor": [8]},
    ],
)
def test_an_argument_that_is_no_number_of_the_model_is_refused(tmp_path, args):
    *_, name = args
    assert f"its argument {name}=" in error_of(llama(tmp_path, args=LLAMA | args), tmp_path / "o")


def test_arguments_that_cannot_be_read_are_noted_also_where_keys_describe_the_model(tmp_path, capsys):
    folder = llama(tmp_path)
    (folder / "common.pt").write_bytes(b"no zip")
    convert(folder, tmp_path / "o", "model.num_heads=4", "model.num_kv_heads=2")
    assert "note: " in capsys.readouterr().out


# ---- chunks ---------------------------------------------------------------------------------------------------------


class Stored:
    """Makes an object of the index as torch.distributed.checkpoint pickles it."""

    def __new__(cls, name, **fields):
        module, _, name = f"torch.distributed.checkpoint.{name}".rpartition(".")
        made = object.__new__(getattr(sys.modules[module], name))
        made.__dict__.update(fields)
        return made


def index_with(folder, chunks, shape=(4, 6), name="x", **place):
    """Write a .metadata whose one tensor has these chunks: (offsets, sizes) each."""
    properties = dcp.metadata.TensorProperties(dtype=torch.float32)
    stored = [Stored("metadata.ChunkStorageMetadata", offsets=offsets, sizes=sizes) for offsets, sizes in chunks]
    entry = Stored("metadata.TensorStorageMetadata", properties=properties, size=shape, chunks=stored)
    info = Stored("filesystem._StorageInfo", **{"relative_path": "__0_0.distcp", "offset": 0, "length": 9} | place)
    places = {Stored("metadata.MetadataIndex", fqn=name, offset=offsets, index=None): info for offsets, _ in chunks}
    index = dcp.metadata.Metadata(state_dict_metadata={name: entry}, storage_data=places)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return folder


@pytest.mark.parametrize(
    "chunks",
    [
        [((0, 0), (4, 6))],
        [((0, 0), (2, 6)), ((2, 0), (2, 6))],
        [((0, 0), (4, 1)), ((0, 1), (1, 5)), ((1, 1), (3, 5))],
        [((1, 1), (2, 2)), ((0, 0), (1, 3)), ((0, 3), (3, 3)), ((3, 1), (1, 5)), ((1, 0), (3, 1))],  # a pinwheel
    ],
)
def test_chunks_that_hold_each_element_once_are_accepted(tmp_path, chunks):
    assert torch_dist.Reader(index_with(tmp_path, chunks)).shape("x") == (4, 6)


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([((0, 0), (2, 6)), ((1, 0), (2, 6))], id="overlap and a hole of the same size"),
        pytest.param([((0, 0), (2, 6)), ((2, 0), (1, 6)), ((2, 1), (1, 6))], id="overlap, a hole, and beyond"),
        pytest.param([((0, 0), (2, 6))], id="a hole"),
        pytest.param([((0, 0), (4, 6)), ((1, 1), (1, 1))], id="overlap"),
        pytest.param([((0, 0), (4, 6)), ((0, 0), (4, 6))], id="twice"),
        pytest.param([((0, 0), (4, 7))], id="beyond a column"),
        pytest.param([((2, 0), (4, 6))], id="moved beyond the end"),
        pytest.param([((0, 0), (3, 6)), ((4, 0), (1, 6))], id="a row beyond the end"),
        pytest.param([((0, 0), (5, 6)), ((5, 0), (-1, 6))], id="a negative size that takes the rest back"),
        pytest.param([((-1, 0), (5, 6))], id="a negative offset"),
        pytest.param([((0,), (24,))], id="fewer dimensions"),
        pytest.param([((0, 0, 0), (4, 6, 1))], id="more dimensions"),
        pytest.param([((0, 0.5), (4, 6))], id="half a column"),
        pytest.param([((0, 0), (4, 1 << 70))], id="a size of 71 bits"),
        pytest.param([], id="none"),
    ],
)
def test_chunks_that_leave_a_hole_overlap_or_reach_beyond_are_refused(tmp_path, chunks):
    message = error_of(index_with(tmp_path, chunks), tmp_path / "out")
    assert "'x'" in message and ".metadata" in message


@pytest.mark.parametrize(
    "change",
    [
        {"name": 5},
        {"name": ("a", 1)},
        {"name": None},
        {"shape": (1,) * 60},
        {"shape": ()},
        {"shape": 24},
        {"shape": "x"},
    ],
)
def test_names_that_are_no_text_and_shapes_that_are_none_are_refused(tmp_path, change):
    shape = change.get("shape", (4, 6))
    chunks = [((0,) * len(shape), shape)] if isinstance(shape, tuple) else [((0,), (1,))]
    assert ".metadata" in error_of(index_with(tmp_path, chunks, **change), tmp_path / "out")


@pytest.mark.parametrize("place", [{"offset": "5"}, {"offset": 1 << 70}, {"length": {}}, {"relative_path": None}])
def test_a_chunk_s_place_that_is_none_is_refused(tmp_path, place):
    folder = index_with(tmp_path, [((0, 0), (4, 6))], **place)
    (folder / "__0_0.distcp").write_bytes(b"some bytes")
    with pytest.raises(ValueError, match="again"):
        torch_dist.Reader(folder).read("x")


def test_any_row_is_joined_from_the_chunks_that_hold_it(tmp_path):
    """A pinwheel, whose chunks lie behind each other in one file."""
    whole, content, infos = torch.arange(24.0).view(4, 6), b"", {}
    chunks = [((1, 1), (2, 2)), ((0, 0), (1, 3)), ((0, 3), (3, 3)), ((3, 1), (1, 5)), ((1, 0), (3, 1))]
    for (row, column), (rows, columns) in chunks:
        torch.save(whole[row : row + rows, column : column + columns].clone(), buffer := io.BytesIO())
        infos[row, column] = SimpleNamespace(
            relative_path="__0_0.distcp", offset=len(content), length=len(buffer.getvalue())
        )
        content += buffer.getvalue()
    (tmp_path / "__0_0.distcp").write_bytes(content)
    reader = torch_dist.Reader(index_with(tmp_path, chunks))
    reader._places = {("x", place): info for place, info in infos.items()}
    assert torch.equal(reader.read("x"), whole)
    for row in range(4):
        assert torch.equal(reader.read("x", row), whole[row])


def test_tensors_may_have_as_many_bytes_as_all_files(tmp_path):
    path = index_with(tmp_path, [((0, 0), (1000, 6))], shape=(1000, 6)) / "__0_0.distcp"
    left = 1000 * 6 * 4 - (tmp_path / ".metadata").stat().st_size
    path.write_bytes(bytes(left))
    torch_dist.Reader(tmp_path)
    path.write_bytes(bytes(left - 1))
    with pytest.raises(ValueError, match="has 23999 bytes, and its .metadata tensors of 24000"):
        torch_dist.Reader(tmp_path)


def test_what_is_compressed_is_refused(tmp_path):
    """Else seven bytes could become gigabytes."""
    reader = torch_dist.Reader(index_with(tmp_path, [((0, 0), (4, 6))], transform_descriptors=["zstd"]))
    with pytest.raises(ValueError, match="is compressed; save it without stream extensions"):
        reader.read("x")
    with zipfile.ZipFile(tmp_path / "common.pt", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x/data.pkl", pickle.dumps({"args": None, "x": "a" * 9999}))
    with pytest.raises(ValueError, match="data.pkl is compressed"):
        reader.common()


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(torch.zeros(4, 6).to_sparse(), id="sparse"),
        pytest.param(torch.empty(4, 6, device="meta"), id="without data"),
        pytest.param(torch.zeros(4, 6, dtype=torch.int8), id="of another number format"),
        pytest.param(torch.zeros(6, 4), id="of another shape"),
        pytest.param({"x": torch.zeros(4, 6)}, id="no tensor"),
    ],
)
def test_a_chunk_that_is_no_tensor_of_the_index_is_refused(tmp_path, made):
    torch.save(made, tmp_path / "__0_0.distcp")
    size = (tmp_path / "__0_0.distcp").stat().st_size
    reader = torch_dist.Reader(index_with(tmp_path, [((0, 0), (4, 6))], length=size))
    with pytest.raises(ValueError, match="__0_0.distcp: x "):
        reader.read("x")
