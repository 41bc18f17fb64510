"""Whole models and whole runs equal what others wrote: transformers' models, torch's AdamW and its clipping.

Layouts that agree with each other share their mistakes. Here nothing is shared but the weights, which the conversion
carries over: transformers computes the forward pass, autograd the gradients, and the training loop is written out
below, from the formats of files and the documented rules. A run goes the way of a user's: a Hugging Face folder is
imported, `minitron.pretrain` trains it on indexed files, and its checkpoint is exported.
"""

import math
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

from kill_run import Ranks, new_store, records
from layouts import config, first_gradients
from minitron.checkpoint.load import ResumePoint, restore
from minitron.comm.mesh import Mesh
from minitron.config.schema import Config
from minitron.data.batch import Batch
from minitron.interop import convert_hf, hf
from minitron.interop import hf_write as hf_export
from minitron.testing import assert_close_rel
from minitron.train import build
from test_data_gpt import plain_samples

# The twin is in float64 but for what transformers casts (RMSNorm, rotary angles, softmax); float32's rounding step is
# 6e-8, and a gradient has passed two blocks and back.
TOLERANCE = 1e-5
SEQ_LEN, BATCH, MICRO, STEPS, SEED = 32, 8, 2, 20, 1234

LLAMA = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=96,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
)
# Four frequencies, which turn 2.5, 0.5, 0.1 and 0.02 times in 16 positions: one stays, one is blended, two stretched.
SCALED = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 0.25,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 16,
}
GPT = dict(
    n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
)
MODELS = {
    "llama": lambda: transformers.LlamaConfig(
        **LLAMA | {"num_hidden_layers": 3}, rope_theta=500.0, rope_scaling=SCALED
    ),
    "llama tied": lambda: transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**LLAMA, sliding_window=None),
    "qwen 2.5": lambda: transformers.Qwen2Config(**LLAMA, rope_theta=500.0),
    "qwen 3": lambda: transformers.Qwen3Config(**LLAMA, head_dim=12, tie_word_embeddings=True),
    "gpt": lambda: transformers.GPT2Config(**GPT),
    "llama padded": lambda: transformers.LlamaConfig(**LLAMA | {"vocab_size": 1003}),
    "gpt padded": lambda: transformers.GPT2Config(**GPT | {"vocab_size": 1003}),
}
VOCAB_MULTIPLE = {"llama padded": 128, "gpt padded": 128}  # of the others 1: nothing is padded


class Model(NamedTuple):
    """A folder as transformers saved it, and the checkpoint that the import made of it."""

    folder: Path
    imported: Path

    def twin(self) -> torch.nn.Module:
        """transformers' model with the first weights, in float64."""
        model = transformers.AutoModelForCausalLM.from_pretrained(self.folder, attn_implementation="eager")
        return model.double().train()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """get(name): that model, made when first asked for."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def get(name: str) -> Model:
        if name not in made:
            made[name] = Model(root / name, root / f"{name} imported")
            with torch.random.fork_rng():
                torch.manual_seed(0)
                model = transformers.AutoModelForCausalLM.from_config(MODELS[name]())
                with torch.no_grad():
                    for p in model.parameters():  # vectors too, so that no two of them could be exchanged unnoticed
                        p.add_(torch.randn(p.shape) * 0.1)
            model.save_pretrained(made[name].folder)
            multiple = str(VOCAB_MULTIPLE.get(name, 1))
            convert_hf.main(["import", *map(str, made[name]), "--vocab-multiple", multiple])
        return made[name]

    return get


# ---- gradients ------------------------------------------------------------------------------------------------------


def microbatches(vocab: int, number: int, b: int) -> list[Batch]:
    """Random tokens, of which a random half counts: microbatches differ in how many."""
    generator, order, batches = torch.Generator().manual_seed(1), torch.arange(SEQ_LEN), []
    for i in range(number):
        tokens = torch.randint(0, vocab, (SEQ_LEN + 1, b), generator=generator)
        mask = torch.randint(0, 2, (SEQ_LEN, b), generator=generator).float()
        batches.append(
            Batch(
                tokens[:-1], tokens[1:], mask, order[:, None], order, i * b + torch.arange(b), count=float(mask.sum())
            )
        )
    return batches


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_every_gradient_equal_transformers(models, name):
    """Gradients as the optimizer gets them: of two microbatches, accumulated in main_grad. Padding is none of it."""
    twin, reader = models(name).twin(), hf.FolderReader(models(name).folder, VOCAB_MULTIPLE.get(name, 1))
    settings = {"train": {"seq_len": SEQ_LEN, "micro_batch_size": 3}, "precision": {"dtype": "fp32"}}
    cfg = config({"model": reader.config["model"] | {"rope_scaling": reader.model.rope_scaling}}, settings)
    trainer = build(cfg, Mesh.offline(1))
    restore(ResumePoint(reader), trainer.state)
    vocab = cfg.model.vocab_size
    assert (cfg.model.padded_vocab_size > vocab) == (name in VOCAB_MULTIPLE)
    batches = microbatches(vocab, 2, 3)
    expected = [twin(batch.tokens.T).logits.transpose(0, 1) for batch in batches]
    with torch.no_grad():
        for batch, logits in zip(batches, expected, strict=True):
            assert_close_rel(trainer.chunks[0].logits(batch)[..., :vocab], logits, TOLERANCE, "logits")

    count = sum(batch.count for batch in batches)
    loss = (
        sum(
            (
                F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none") * batch.mask.flatten()
            ).sum()
            for batch, logits in zip(batches, expected)
        )
        / count
    )
    loss.backward()
    gradients = first_gradients(trainer)
    figures = trainer.step(batches, lr=0.0).read()
    assert figures["loss"] == pytest.approx(loss.item(), rel=TOLERANCE)

    def read(name, start, shape):
        return gradients[name][0][tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]

    ours = dict(hf_export.export(cfg.model, read))
    theirs = {weight: p.grad for weight, p in twin.named_parameters()}
    assert ours.keys() == theirs.keys() and len(gradients) == sum(1 for _ in trainer.chunks[0].parameters())
    for weight, grad in theirs.items():
        assert_close_rel(ours[weight] / count, grad, TOLERANCE, f"gradient of {weight}")
    norm = torch.stack([grad.norm() for grad in theirs.values()]).norm()
    assert figures["grad_norm"] == pytest.approx(norm.item(), rel=TOLERANCE)


# ---- runs -----------------------------------------------------------------------------------------------------------


# eps: above the noise in gradients that nearly vanish, as a key bias's does: AdamW would blow it up to whole steps.
OPTIMIZER = dict(lr=4e-3, min_lr=1e-3, warmup_steps=5, constant_steps=4, weight_decay=0.2, eps=1e-5, clip_grad=1.8)
BETAS = 0.8, 0.95
LAYOUTS = {"one process": (1, {}), "tp 2 x pp 2": (4, {"tp": 2, "pp": 2}), "cp 2 x dp 2": (4, {"cp": 2})}


def write_indexed(prefix: Path, documents: list[np.ndarray]) -> None:
    """Megatron's .bin and .idx from the description of the format, without minitron's writer."""
    lengths = np.array([len(document) for document in documents], "<i4")
    np.concatenate(documents).astype("<u2").tofile(f"{prefix}.bin")
    pointers = np.concatenate([[0], 2 * np.cumsum(lengths[:-1])]).astype("<i8")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), len(lengths) + 1)
    numbers = (lengths, pointers, np.arange(len(lengths) + 1, dtype="<i8"))
    Path(f"{prefix}.idx").write_bytes(header + b"".join(array.tobytes() for array in numbers))


def read_indexed(prefix: Path) -> list[list[int]]:
    """The documents of both files, without minitron's reader."""
    index, tokens = Path(f"{prefix}.idx").read_bytes(), np.fromfile(f"{prefix}.bin", "<u2").tolist()
    *_, number, _ = struct.unpack_from("<9sQBQQ", index)
    ends = np.cumsum(np.frombuffer(index, "<i4", number, struct.calcsize("<9sQBQQ"))).tolist()
    return [tokens[begin:end] for begin, end in zip([0, *ends], ends)]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """text(vocab): the prefix of 70 documents of common and rare words, read almost twice in a run."""
    root = tmp_path_factory.mktemp("text")

    def get(vocab: int) -> Path:
        prefix, rng = root / f"{vocab}_text_document", np.random.RandomState(7)
        if not Path(f"{prefix}.idx").exists():
            write_indexed(prefix, [np.minimum(rng.zipf(1.3, rng.randint(1, 91)), vocab) - 1 for _ in range(70)])
        return prefix

    return get


def rate(step: int) -> float:
    """The documented learning rate of step 1, 2, ...: a line from 0, half a cosine, then the lowest."""
    warmup, decay = OPTIMIZER["warmup_steps"], STEPS - OPTIMIZER["constant_steps"]
    if step <= warmup:
        return OPTIMIZER["lr"] * step / warmup
    turned = math.pi * min(1.0, (step - warmup) / (decay - warmup))
    return OPTIMIZER["min_lr"] + (OPTIMIZER["lr"] - OPTIMIZER["min_lr"]) * (1 + math.cos(turned)) / 2


def twin_run(twin: torch.nn.Module, prefix: Path) -> list[dict]:
    """Train transformers' model in place, as a page of torch: the figures of every step."""
    documents = read_indexed(prefix)
    training = range(round(0.969 * len(documents)))  # of the default split, 969,30,1
    order = [tokens for tokens, _ in plain_samples(documents, training, STEPS * BATCH, SEQ_LEN, SEED)]
    plain = {name for name, _ in twin.named_parameters() if re.search(r"bias$|norm|\bln_", name)}
    groups = [
        {
            "params": [p for name, p in twin.named_parameters() if (name in plain) == apart],
            "weight_decay": 0.0 if apart else OPTIMIZER["weight_decay"],
        }
        for apart in (False, True)
    ]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=OPTIMIZER["eps"])
    figures = []
    for step in range(1, STEPS + 1):
        tokens = torch.tensor(order[(step - 1) * BATCH : step * BATCH])
        logits = twin(tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), OPTIMIZER["clip_grad"])
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        figures.append({"loss": loss.item(), "grad_norm": norm.item(), "learning_rate": rate(step)})
    return figures


def our_run(model: Model, prefix: Path, world: int, parallel: dict, folder: Path) -> dict:
    """minitron.pretrain on that many ranks; its records are in folder. Returns the exported weights."""
    keys = {f"optimizer.{key}": value for key, value in OPTIMIZER.items()} | {
        "optimizer.betas": list(BETAS),
        "precision.dtype": "fp32",
        "train.steps": STEPS,
        "train.seq_len": SEQ_LEN,
        "train.micro_batch_size": MICRO,
        "train.global_batch_size": BATCH,
        "train.seed": SEED,
        "data.source": "indexed",
        "data.paths": f"['{prefix}']",
        "data.cache_dir": folder / "cache",
        "log.dir": folder,
        "checkpoint.load": f"'{model.imported}'",
        "checkpoint.dir": folder / "saves",
        "checkpoint.every": 0,
    }
    keys |= {f"parallel.{axis}": size for axis, size in parallel.items()}
    argv = [str(model.imported / "model.yaml"), *(f"{key}={value}" for key, value in keys.items())]
    folder.mkdir()
    with Ranks(new_store(), world, argv, folder / "output") as ranks:
        assert not any(ranks.wait()), (folder / "output").read_text()
    convert_hf.main(["export", str(folder / "saves"), str(folder / "exported")])
    return load_file(folder / "exported" / "model.safetensors")


@pytest.fixture(scope="module")
def twin_runs(models, text):
    """get(name): the figures of that model's twin_run, and its weights after it."""
    done = {}

    def get(name: str) -> tuple[list[dict], dict]:
        if name not in done:
            twin = models(name).twin()
            figures = twin_run(twin, text(twin.config.vocab_size))
            done[name] = figures, {name: p.detach() for name, p in twin.named_parameters()}
        return done[name]

    return get


RUNS = [(name, layout) for name in MODELS if name not in VOCAB_MULTIPLE for layout in LAYOUTS]
TUNED = ["qwen 3", "qwen 2.5", "mistral", "llama tied"]


@pytest.mark.sampled(4, "qwen 3-tp 2 x pp 2")
@pytest.mark.parametrize("name,layout", [*RUNS, ("llama padded", "tp 2 x pp 2")])
def test_a_run_equals_a_page_of_torch(models, text, twin_runs, tmp_path, name, layout):
    figures, weights = twin_runs(name)
    clipped = [step["grad_norm"] > OPTIMIZER["clip_grad"] for step in figures]
    assert 3 <= sum(clipped) <= STEPS - 3, "both kinds of steps are to be compared"
    ours = our_run(models(name), text(MODELS[name]().vocab_size), *LAYOUTS[layout], tmp_path / "run")
    for mine, expected in zip(records(tmp_path / "run", "step"), figures, strict=True):
        for key, value in expected.items():
            assert mine[key] == pytest.approx(value, rel=TOLERANCE), f"{key} of step {mine['step']}"
    assert ours.keys() == weights.keys()
    for weight, value in weights.items():
        assert_close_rel(ours[weight], value, TOLERANCE, f"final {weight}")


def adapters_of(twin: torch.nn.Module, cfg: Config, read: Callable[[str], torch.Tensor]) -> torch.nn.Module:
    """PEFT's adapters on transformers' model, with the factors that read(name) returns."""
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    names = dict(qkv="q_proj k_proj v_proj", o="o_proj", gate="gate_proj", up="up_proj", down="down_proj")
    modules = [module for target in cfg.lora.targets for module in names[target].split()]
    tuned = peft.get_peft_model(
        twin, peft.LoraConfig(r=cfg.lora.rank, lora_alpha=cfg.lora.alpha, target_modules=modules)
    )
    with torch.no_grad():
        for name, p in tuned.named_parameters():
            if p.requires_grad:
                p.copy_(factor(name, cfg, read))
    return tuned.double()


def factor(name: str, cfg: Config, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """What PEFT's parameter is among minitron's factors: q, k and v share an A and have their rows of one B."""
    layer, module, side = re.search(r"layers\.(\d+)\.\w+\.(\w+)_proj\.lora_([AB])", name).groups()
    q, kv = cfg.model.num_heads * cfg.model.head_width, cfg.model.kv_heads * cfg.model.head_width
    places = {"q": ("qkv", slice(0, q)), "k": ("qkv", slice(q, q + kv)), "v": ("qkv", slice(q + kv, None))}
    target, rows = places.get(module, (module, slice(None)))
    weight = {"qkv": "attention.qkv", "o": "attention.out", "down": "mlp.down"}.get(target, "mlp.up")
    if side == "B":
        return read(f"blocks.{layer}.{weight}.adapter.b.{target}")[rows]
    stacked = read(f"blocks.{layer}.{weight}.adapter.a")
    first = cfg.lora.rank if target == "up" and "gate" in cfg.lora.targets else 0
    return stacked[first : first + cfg.lora.rank]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", TUNED)
def test_lora_equals_peft(models, name):
    """Twenty steps of AdamW beside frozen weights. The adapter of qkv has one A, which for PEFT are three equal ones.

    So the sum of PEFT's three gradients of A is ours, and its three matrices are tied here.
    """
    reader = hf.FolderReader(models(name).folder, 1)
    settings = {
        "train": {"seq_len": SEQ_LEN, "micro_batch_size": 3, "global_batch_size": 6},
        "precision": {"dtype": "fp32"},
        "optimizer": {"betas": BETAS, "eps": 1e-5, "clip_grad": 0.0},
        "finetune": {"kind": "lora", "base": str(models(name).folder)},
        "lora": {"rank": 4, "alpha": 8.0, "targets": ("qkv", "o", "gate", "up", "down")},
    }
    cfg = config({"model": reader.config["model"] | {"rope_scaling": reader.model.rope_scaling}}, settings)
    trainer = build(cfg, Mesh.offline(1))
    restore(ResumePoint(base_weights=reader), trainer.state)
    params = {p.spec.name: p for p in trainer.chunks[0].parameters()}
    tuned = adapters_of(models(name).twin(), cfg, lambda name: params[name].detach())
    groups: dict[str, list] = {}
    for weight, p in tuned.named_parameters():
        if p.requires_grad:
            groups.setdefault(re.sub(r"[qkv]_proj\.lora_A", "qkv.lora_A", weight), []).append(p)
    trained = [p for same in groups.values() for p in same]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=BETAS, eps=1e-5, weight_decay=cfg.optimizer.weight_decay)
    batches = microbatches(cfg.model.vocab_size, 2, 3)
    count = sum(batch.count for batch in batches)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = 0.0
        for batch in batches:
            logits = tuned(input_ids=batch.tokens.T).logits.transpose(0, 1).flatten(0, 1)
            losses = F.cross_entropy(logits, batch.labels.flatten(), reduction="none")
            loss += (losses * batch.mask.flatten()).sum() / count
        loss.backward()
        for same in groups.values():  # the three A of q, k and v are one
            total = sum(p.grad for p in same)
            for p in same:
                p.grad = total.clone() if len(same) > 1 else p.grad
        optimizer.step()
        figures = trainer.step(batches, lr=1e-2).read()
        assert figures["loss"] == pytest.approx(loss.item(), rel=TOLERANCE), f"loss of step {step}"
    trainer.gradients.wait_parameters()
    for weight, p in tuned.named_parameters():
        if p.requires_grad:
            ours = factor(weight, cfg, lambda name: params[name].detach())
            assert_close_rel(ours, p, 10 * TOLERANCE, weight)
