"""Logits and losses equal Hugging Face transformers' Llama and GPT-2 on the same weights."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from layouts import GPT3, LLAMA, config
from minitron import attention
from minitron.config import RopeScaling
from minitron.mesh import Mesh
from minitron.model.gpt import GPT, Batch
from minitron.model.init import initialise
from minitron.testing import assert_close_rel

# Both compute in float32; sums run in another order through eight layers.
TOLERANCE = 1e-5


def whole_model(cfg, std=0.1) -> GPT:
    """The model in one piece, every vector given values too, so that no weight or bias could be exchanged unnoticed."""
    mesh = Mesh.offline(1)
    backend = attention.choose("auto", mesh.device, torch.float32, cfg.model.head_dim)
    model = GPT(cfg, mesh, backend, range(cfg.model.num_layers), first=True, last=True)
    initialise([model], cfg.train.seed)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn(p.shape, generator=generator) * std)
    return model


def batch_of(cfg, b=3) -> Batch:
    s = cfg.train.seq_len
    tokens = torch.randint(0, cfg.model.vocab_size, (s + 1, b), generator=torch.Generator().manual_seed(1))
    order = torch.arange(s)
    return Batch(tokens[:-1], tokens[1:], torch.ones(s, b), order[:, None], order, torch.arange(b), count=float(s * b))


def llama_twin(cfg, model: GPT):
    m, s = cfg.model, cfg.model.rope_scaling
    rope = {"rope_type": "default", "rope_theta": m.rope_theta}
    if s is not None:
        rope.update(
            rope_type="llama3",
            factor=s.factor,
            low_freq_factor=s.low_freq_factor,
            high_freq_factor=s.high_freq_factor,
            original_max_position_embeddings=s.original_max_positions,
        )
    twin = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=m.hidden_size,
            intermediate_size=m.ffn_hidden_size,
            num_hidden_layers=m.num_layers,
            num_attention_heads=m.num_heads,
            num_key_value_heads=m.kv_heads,
            vocab_size=m.padded_vocab_size,
            rms_norm_eps=m.norm_eps,
            max_position_embeddings=m.max_positions,
            rope_parameters=rope,
            tie_word_embeddings=m.tie_embeddings,
            attn_implementation="eager",
        )
    )
    state, kv = {}, m.kv_heads * m.head_dim
    for i, block in model.blocks.items():
        q, k, v = block.attention.qkv.weight.split([m.hidden_size, kv, kv])
        gate, up = block.mlp.up.weight.chunk(2)
        parts = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": block.attention.out.weight,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": block.mlp.down.weight,
            "input_layernorm": block.norm1.weight,
            "post_attention_layernorm": block.norm2.weight,
        }
        state.update({f"model.layers.{i}.{name}.weight": w for name, w in parts.items()})
    state.update(
        {
            "model.embed_tokens.weight": model.embedding.words.weight,
            "model.norm.weight": model.head.norm.weight,
            "lm_head.weight": model.head.weight,
        }
    )
    twin.load_state_dict({name: w.detach() for name, w in state.items()})
    return twin


def gpt2_twin(cfg, model: GPT):
    m = cfg.model
    twin = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=m.padded_vocab_size,
            n_positions=m.max_positions,
            n_embd=m.hidden_size,
            n_layer=m.num_layers,
            n_head=m.num_heads,
            n_inner=m.ffn_hidden_size,
            layer_norm_epsilon=m.norm_eps,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="eager",
        )
    )
    state = {
        "transformer.wte.weight": model.embedding.words.weight,
        "transformer.wpe.weight": model.embedding.positions,
        "transformer.ln_f.weight": model.head.norm.weight,
        "transformer.ln_f.bias": model.head.norm.bias,
        "lm_head.weight": model.head.weight,
    }
    for i, block in model.blocks.items():
        linears = {
            "attn.c_attn": block.attention.qkv,
            "attn.c_proj": block.attention.out,
            "mlp.c_fc": block.mlp.up,
            "mlp.c_proj": block.mlp.down,
        }
        for name, layer in linears.items():  # GPT-2 keeps its matrices transposed
            state.update(
                {f"transformer.h.{i}.{name}.weight": layer.weight.t(), f"transformer.h.{i}.{name}.bias": layer.bias}
            )
        for name, norm in {"ln_1": block.norm1, "ln_2": block.norm2}.items():
            state.update({f"transformer.h.{i}.{name}.weight": norm.weight, f"transformer.h.{i}.{name}.bias": norm.bias})
    twin.load_state_dict({name: w.detach() for name, w in state.items()})
    return twin


SCALED = {"model": {"rope_scaling": RopeScaling(factor=8.0, original_max_positions=16)}}


@pytest.mark.parametrize(
    "base,change,make_twin",
    [
        (LLAMA, {}, llama_twin),
        (LLAMA, SCALED, llama_twin),
        (LLAMA, {"model": {"tie_embeddings": True}}, llama_twin),
        (LLAMA, {"model": {"num_kv_heads": None}}, llama_twin),
        (GPT3, {}, gpt2_twin),
    ],
    ids=["llama3", "llama3.1", "llama-tied", "llama2", "gpt"],
)
def test_logits_and_loss_equal_transformers(base, change, make_twin):
    cfg = config(base, change)
    model, batch = whole_model(cfg), batch_of(cfg)
    twin = make_twin(cfg, model).eval()
    with torch.no_grad():
        expected = twin(batch.tokens.T).logits.transpose(0, 1)
        assert_close_rel(model.logits(batch), expected, TOLERANCE, "logits")
        loss = F.cross_entropy(expected.flatten(0, 1), batch.labels.flatten(), reduction="sum")
        assert float(model(batch)) == pytest.approx(float(loss), rel=TOLERANCE)


def test_rope_scaling_matters_here():
    """The scaled case above would prove nothing if its frequencies were those of the plain one."""
    cfg = config(LLAMA, SCALED)
    plain = config(LLAMA)
    model, other = whole_model(cfg), whole_model(plain)
    assert not torch.allclose(model.frequencies, other.frequencies)


@pytest.mark.parametrize("base", [LLAMA, GPT3], ids=["llama", "gpt"])
def test_documents_apart_equal_documents_alone(base):
    """A packed sample gives each document the logits it has alone, and no gradient crosses a boundary: exactly 0."""
    cfg = config(base, {"data": {"separate_documents": True}})
    model, batch = whole_model(cfg), batch_of(cfg, b=1)
    s, bounds = cfg.train.seq_len, np.array([0, 5, 18, cfg.train.seq_len])
    positions = torch.arange(s) - torch.from_numpy(np.repeat(bounds[:-1], np.diff(bounds)))
    batch.documents, batch.positions = [bounds], positions[:, None]
    logits = model.logits(batch)
    for start, end in zip(bounds[:-1], bounds[1:]):
        order = torch.arange(end - start)
        alone = Batch(
            batch.tokens[start:end],
            batch.labels[start:end],
            batch.mask[start:end],
            order[:, None],
            order,
            batch.samples,
            count=float(end - start),
        )
        assert_close_rel(logits[start:end], model.logits(alone), TOLERANCE, f"document at {start}")
    embedded = []
    hook = model.embedding.words.register_forward_hook(lambda *args: embedded.append(args[2]))
    logits = model.logits(batch)
    hook.remove()
    (grad,) = torch.autograd.grad(logits[5:18].square().sum(), embedded)
    assert grad[5:18].abs().sum() > 0
    assert float(grad[:5].abs().max()) == float(grad[18:].abs().max()) == 0.0


def test_initial_weights_do_not_depend_on_the_number_of_stages():
    """A parameter's values come from its global name: the last of two stages begins like the whole model ends."""
    cfg = config(LLAMA)
    whole = whole_model(cfg, std=0.0)
    mesh = Mesh.offline(2, 1, pp=2)
    last = GPT(
        cfg,
        mesh,
        attention.choose("auto", mesh.device, torch.float32, cfg.model.head_dim),
        range(4, 8),
        first=False,
        last=True,
    )
    initialise([last], cfg.train.seed)
    params = dict(whole.named_parameters())
    for name, param in last.named_parameters():
        assert torch.equal(param, params[name]), name
