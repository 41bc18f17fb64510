"""Hugging Face folders (config.json and safetensors) of Llama, Mistral, Qwen and GPT-2, as minitron's global tensors.

Problem: both formats hold the same numbers under other names, split differently. The idea: one table, `tensor_map`,
lists for each tensor of minitron the Hugging Face tensors whose rows it stacks. Reading and writing both use it.

    minitron                           Llama, Mistral, Qwen                       GPT-2, under transformer.
    embedding.words.weight [v, h]      model.embed_tokens                         wte
    blocks.0.attention.qkv.weight      q_proj [n d, h] over k_, v_proj [g d, h]   h.0.attn.c_attn [h, 3h], transposed
    blocks.0.mlp.up.weight             gate_proj [f, h] over up_proj [f, h]       h.0.mlp.c_fc [h, f], transposed

Mistral (v0.3, without a window) is the network of Llama. Qwen 2.5 adds a bias of q, k and v; Qwen 3 instead norms q and
k. Each key of config.json must be used here or be known to be harmless. Any other key is an error that names it.

Rows of q and k keep their order: minitron's rotary positions too pair channel i of a head with channel i + d/2.

The vocabulary is padded. No loss uses the padding rows, and export drops them. They are the mean row: a run that raises
model.vocab_size turns some into tokens. All logits of GPT-2 are far below zero, so a row of zeros would take nearly the
whole softmax; the logit of the mean row is the mean logit.

`FolderReader` has the read interface of checkpoint/reader.py and reads only the box that is asked for, so a model is
converted, or loaded in any layout, in the memory of one tensor.

Left out: pickles (pytorch_model.bin), since loading one can run any code; quantized weights; the initial standard
deviation and dropout, which belong to a run and not to weights (`dropout` has them); tokenizers, which hf_tokenizer.py
copies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minitron.checkpoint.format import NAMES, STORED, CheckpointError
from minitron.checkpoint.weights import Weights
from minitron.config import cli, rules
from minitron.config.files import errors_as, read_json, size_of
from minitron.config.schema import ModelConfig

STORED_DTYPES = {code: dtype for dtype, code in STORED.items()}
BLOCK_ROWS = 1024  # rows of a vocabulary that are read at a time
HEADS = {"score.weight", "classifier.weight", "qa_outputs.weight"}  # heads of models that classify texts or tokens


class Format(NamedTuple):
    """One model_type of config.json, in hf_formats.yaml."""

    family: str  # minitron's
    architecture: str  # transformers' class
    prefix: str  # every tensor has it but the head; files of the bare model lack it
    keys: dict[str, str]  # field of ModelConfig -> its key
    absent: dict[str, object]  # keys that may be missing -> transformers' value then
    own: dict[str, object]  # fields of ModelConfig that no key sets
    fixed: dict[str, object]  # keys that change the network -> what minitron computes, and transformers' default
    allowed: dict[str, list]  # other such keys, which export does not write -> all values that minitron computes
    known: list[str]  # keys that are read elsewhere, or have no effect beside `fixed`
    buffers: str  # tensors that some versions save and none reads


HERE = Path(__file__).parent
FORMATS = {kind: Format(**fields) for kind, fields in yaml.safe_load((HERE / "hf_formats.yaml").read_text()).items()}
ROPE_SCALING = {name: name for name in ("factor", "low_freq_factor", "high_freq_factor")}
ROPE_SCALING["original_max_positions"] = "original_max_position_embeddings"
ROPE = {"rope_theta", "rope_type", "type", "partial_rotary_factor", *ROPE_SCALING.values()}
# Keys that leave the network as it is, of every version of transformers. Any other key is used, None, or an error.
HARMLESS = set((HERE / "config_keys.txt").read_text().split())


# ---- config.json ----------------------------------------------------------------------------------------------------


def model_config(settings: dict, origin: str, vocab_multiple: int = ModelConfig.vocab_multiple) -> ModelConfig:
    """Read the model out of a config.json. Raises ValueError, in a line that begins with `origin`.

    transformers 5 writes `rope_parameters`, transformers 4 `rope_theta` and `rope_scaling`.
    """
    kind = settings.get("model_type")
    if str(kind) not in FORMATS:
        raise CheckpointError(f"{origin}: model_type={kind!r} is not supported; {', '.join(FORMATS)} are")
    fmt = FORMATS[kind]
    settings = fmt.absent | settings
    model = {"family": fmt.family, "vocab_multiple": vocab_multiple} | fmt.own | _take(settings, fmt.keys, origin)
    fixed = {key: [value] for key, value in fmt.fixed.items()} | fmt.allowed
    known = HARMLESS | {*fmt.keys.values(), *fmt.known}
    if fmt.family == "llama":
        rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
        if not isinstance(rope, dict):
            raise CheckpointError(f"{origin}: the rotary parameters {rope!r} are not a JSON object; copy it again")
        strange = {key: value for key, value in rope.items() if key not in ROPE}
        rope = {"rope_theta": 10000.0, "rope_type": rope.get("type", "default")} | settings | rope
        settings = settings | {key: rope.get(key) for key in ("rope_type", "partial_rotary_factor")} | strange
        scaling = _take(rope, ROPE_SCALING, origin) if rope["rope_type"] == "llama3" else None
        model |= {"positions": "rope", "rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    else:
        model |= {"positions": "learned", "num_kv_heads": None}
        if model["ffn_hidden_size"] is None and isinstance(model["hidden_size"], int):
            model["ffn_hidden_size"] = 4 * model["hidden_size"]
    cfg = cli.from_tree({"model": model, "train": {"seq_len": 1}}, origin)  # any model takes this length
    with errors_as(CheckpointError, lambda error: f"{origin}: {error}", ValueError):
        rules.check(cfg, world=1)
    m = cfg.model
    if m.head_width * m.num_heads == m.hidden_size:
        m = replace(m, head_dim=None)  # one value for one network: some versions do not write it
    fixed |= {"head_dim": [None, m.head_width], "layer_types": [None, ["full_attention"] * m.num_layers]}
    fixed |= {key: [None] for key in settings if key not in fixed.keys() | known and not key.startswith("unsloth_")}
    for key, allowed in fixed.items():
        if settings.get(key, allowed[0]) not in allowed:
            has = f"minitron's {fmt.family} has {' or '.join(map(repr, allowed))}"
            raise CheckpointError(f"{origin}: {key}={settings[key]!r} is not supported, {has}; convert another model")
    return m


def dropout_of(settings: dict) -> dict[str, float]:
    """Read the rates of a config.json that are not 0, as transformers would train with them, by keys of `model`."""
    gpt = settings.get("model_type") == "gpt2"
    names = {"hidden_dropout": "resid_pdrop", "attention_dropout": "attn_pdrop" if gpt else "attention_dropout"}
    rates = {key: settings.get(name, 0.1 if gpt else 0.0) for key, name in names.items()}
    return {key: float(rate) for key, rate in rates.items() if isinstance(rate, int | float) and 0 < rate <= 1}


def _take(settings: dict, keys: dict[str, str], origin: str) -> dict:
    for key in keys.values():
        if key not in settings:
            raise CheckpointError(f"{origin}: {key} is missing; copy the file that belongs to these weights")
    return {field: settings[key] for field, key in keys.items()}


# ---- names and shapes -----------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A Hugging Face tensor that is some rows of one of minitron's. `across`: it is stored transposed."""

    name: str
    shape: tuple[int, ...]
    across: bool = False

    @property
    def stored(self) -> tuple[int, ...]:
        """Its shape in a file."""
        return self.shape[::-1] if self.across else self.shape


def tensor_map(m: ModelConfig) -> dict[str, list[Part]]:
    """Map global tensor names to their parts, first rows first, without the padding of the vocabulary."""
    h, f, vocab = m.hidden_size, m.ffn_hidden_size, (m.vocab_size, m.hidden_size)
    q, kv = m.num_heads * m.head_width, m.kv_heads * m.head_width
    if m.family == "llama":
        words, norm, layer = "model.embed_tokens", "model.norm", "model.layers"
        block = {
            "norm1": [Part("input_layernorm", (h,))],
            "attention.qkv": [Part(f"self_attn.{x}_proj", (rows, h)) for x, rows in zip("qkv", (q, kv, kv))],
            **{f"attention.{x}_norm": [Part(f"self_attn.{x}_norm", (m.head_width,))] for x in "qk" * m.qk_norm},
            "attention.out": [Part("self_attn.o_proj", (h, q))],
            "norm2": [Part("post_attention_layernorm", (h,))],
            "mlp.up": [Part(f"mlp.{x}_proj", (f, h)) for x in ("gate", "up")],
            "mlp.down": [Part("mlp.down_proj", (h, f))],
        }
    else:
        words, norm, layer = "transformer.wte", "transformer.ln_f", "transformer.h"
        block = {
            "norm1": [Part("ln_1", (h,))],
            "attention.qkv": [Part("attn.c_attn", (3 * h, h), True)],
            "attention.out": [Part("attn.c_proj", (h, h), True)],
            "norm2": [Part("ln_2", (h,))],
            "mlp.up": [Part("mlp.c_fc", (f, h), True)],
            "mlp.down": [Part("mlp.c_proj", (h, f), True)],
        }
    parts = {"embedding.words": [Part(words, vocab)], "head.norm": [Part(norm, (h,))]}
    for i in range(m.num_layers):
        for ours, stack in block.items():
            parts[f"blocks.{i}.{ours}"] = [part._replace(name=f"{layer}.{i}.{part.name}") for part in stack]
    if not m.tie_embeddings:
        parts["head"] = [Part("lm_head", vocab)]
    weights, biases = {}, {}
    for ours, stack in parts.items():
        weights[f"{ours}.weight"] = [part._replace(name=f"{part.name}.weight") for part in stack]
        of_qkv = m.qkv_bias and ours.endswith("attention.qkv")
        if of_qkv or m.family == "gpt" and ours not in ("embedding.words", "head"):
            biases[f"{ours}.bias"] = [Part(f"{part.name}.bias", part.shape[:1]) for part in stack]
    if m.family == "gpt":
        biases["embedding.positions"] = [Part("transformer.wpe.weight", (m.max_positions, h))]
    return weights | biases


def global_shapes(m: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Map global tensor names to their shapes, the vocabulary padded."""
    shapes = {}
    for name, parts in tensor_map(m).items():
        rows = sum(part.shape[0] for part in parts)
        padded = name in ("embedding.words.weight", "head.weight")
        shapes[name] = (m.padded_vocab_size if padded else rows, *parts[0].shape[1:])
    return shapes


# ---- reading --------------------------------------------------------------------------------------------------------


class FolderReader(Weights):
    """A Hugging Face folder with the read interface of `reader.Reader`; every tensor has the one kind "param".

    Attributes: model, and those of `Weights`: path, index (config.json), config, which holds the model as in a
    checkpoint, and note, on a dropout of the source. The files have no checksums.
    Opening it reads config.json and the headers of all files, and checks that the tensors are those of the model.
    Raises CheckpointError in one line that names the file or the tensor.
    """

    def __init__(self, folder: str | Path, vocab_multiple: int = ModelConfig.vocab_multiple):
        self.path = Path(folder)
        self.index = self.path / "config.json"
        settings = _json(self.index)
        self.model = model_config(settings, str(self.index), vocab_multiple)
        if dropout := " ".join(f"model.{key}={rate:g}" for key, rate in dropout_of(settings).items()):
            why = f"{self.index} has dropout, which belongs to a run and is not copied"
            self.note = f"{why}; to train with it: {dropout}"
        self._map, self._shapes, self._means = tensor_map(self.model), global_shapes(self.model), {}
        fmt = FORMATS[settings["model_type"]]
        self._places = _find_tensors(self.path)
        if not any(name.startswith(fmt.prefix) for name in self._places):
            self._places = {
                name if name.startswith("lm_head.") else fmt.prefix + name: place
                for name, place in self._places.items()
            }
        self._check(fmt)
        self.config = {"model": asdict(self.model), "precision": {"dtype": self.precision}, "data": {}}

    def names(self) -> list[str]:
        """List the global names of all tensors."""
        return list(self._map)

    def kinds(self, name: str) -> list[str]:
        return ["param"] if name in self._map else []

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor, the vocabulary padded."""
        return self._shapes[name]

    def dtype(self, name: str, kind: str) -> torch.dtype:
        """Return the dtype that holds the values of all parts exactly."""
        return reduce(torch.promote_types, (STORED_DTYPES[self._places[part.name].dtype] for part in self._map[name]))

    @property
    def precision(self) -> str:
        """The name of the dtype (in format.NAMES) that holds all tensors exactly."""
        return NAMES[reduce(torch.promote_types, (self.dtype(name, "param") for name in self.names()))]

    def read(self, name: str, kind: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Read the box [start, start + shape) of a global tensor, in the format of the file."""
        assert kind == "param" and len(start) == len(shape) == len(self.shape(name))
        begin, end = start[0], start[0] + shape[0]
        columns = [slice(s, s + n) for s, n in zip(start[1:], shape[1:])]
        box, row = torch.empty(shape, dtype=self.dtype(name, kind)), 0
        for part in self._map[name]:
            first, last = max(begin, row), min(end, row + part.shape[0])
            if first < last:
                box[first - begin : last - begin] = self._slice(part, slice(first - row, last - row), *columns)
            row += part.shape[0]
        if end > row:
            box[max(row - begin, 0) :] = self._mean(name)[columns[0]]
        return box

    def _slice(self, part: Part, *index: slice) -> Tensor:
        """Read a box of one part. Opens the file each time: while mapped, its pages count as memory of the process."""
        place = self._places[part.name]
        with safe_open(place.path, "pt") as file:
            tensor = file.get_slice(place.name)[index[::-1] if part.across else index]
        return tensor.t() if part.across else tensor

    def _mean(self, name: str) -> Tensor:
        """Compute the mean row of a vocabulary: [h]."""
        if name not in self._means:
            (part,) = self._map[name]
            sums = (self._slice(part, rows).sum(0, dtype=torch.float64) for rows in self._blocks())
            self._means[name] = (sum(sums) / self.model.vocab_size).to(self.dtype(name, "param"))
        return self._means[name]

    def _blocks(self) -> Iterator[slice]:
        """Yield the rows of the vocabulary, some at a time."""
        for row in range(0, self.model.vocab_size, BLOCK_ROWS):
            yield slice(row, min(row + BLOCK_ROWS, self.model.vocab_size))

    def _check(self, fmt: Format) -> None:
        """Raise CheckpointError unless the tensors are the model's, no fewer, no more, and of its shapes."""
        parts = {part.name: part for stack in self._map.values() for part in stack}
        bare = {name.removeprefix(fmt.prefix): name for name in self._places}
        for name in HEADS & bare.keys():
            why = f"{name} makes it a model that predicts labels, not the next token"
            raise CheckpointError(f"{self._places[bare[name]].path}: {why}; convert a {fmt.architecture}")
        for name, part in parts.items():
            place = self._places.get(name)
            if place is None:
                raise CheckpointError(f"{self.path} lacks the tensor {name} of config.json's model; copy it again")
            if place.shape != part.stored:
                why = f"{name} has shape {place.shape}, config.json's model {part.stored}"
                raise CheckpointError(f"{place.path}: {why}; copy the files of one model")
            if place.dtype not in STORED_DTYPES:
                why = f"{name} is {place.dtype}, not one of {', '.join(STORED_DTYPES)}"
                raise CheckpointError(f"{place.path}: {why}; save the model unquantized")
        for name in self._places.keys() - parts.keys():
            if name == "lm_head.weight" and self.model.tie_embeddings:
                self._check_tied(self._map["embedding.words.weight"][0])
            elif not re.search(fmt.buffers, name):
                why = f"{name} has no place in config.json's model, a {fmt.architecture}"
                raise CheckpointError(f"{self._places[name].path}: {why}; copy the files of one model")

    def _check_tied(self, words: Part) -> None:
        """Raise CheckpointError if a saved, tied head differs from the embedding: transformers 5 would not tie it."""
        head = words._replace(name="lm_head.weight")
        if not all(torch.equal(self._slice(words, rows), self._slice(head, rows)) for rows in self._blocks()):
            why = f"{head.name} differs from the embedding, to which config.json ties it"
            raise CheckpointError(f"{self._places[head.name].path}: {why}; set tie_word_embeddings=false there")


class Place(NamedTuple):
    """Where a tensor is stored, and how."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # safetensors' name


def _find_tensors(folder: Path) -> dict[str, Place]:
    """Find every tensor of a folder by its name in the files: there is one file, or an index lists them."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists():
        return _headers(whole)
    if not index.exists():
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        if pickles:
            why = ".bin is a pickle, and loading one can run any code"
            fix = "have transformers' save_pretrained write safetensors"
            raise CheckpointError(f"{folder} holds {pickles[0]} but no {whole.name}: {why}; {fix}")
        raise CheckpointError(f"{folder} holds neither {whole.name} nor {index.name}; copy the weights there")
    files = _json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(f, str) and f == Path(f).name for f in files.values()):
        raise CheckpointError(f"{index} has no weight_map of tensors to files in its own folder; copy it again")
    places = {}
    for file in sorted(set(files.values())):
        inside, listed = _headers(folder / file), {name for name, other in files.items() if other == file}
        for name in sorted(inside.keys() ^ listed):
            why = f"{'holds' if name in inside else 'lacks'} {name}, unlike {index.name}"
            raise CheckpointError(f"{folder / file} {why}; copy the files of one model")
        places |= inside
    return places


def _headers(path: Path) -> dict[str, Place]:
    with errors_as(CheckpointError, lambda e: f"{path} cannot be read ({e}); copy it again", OSError, SafetensorError):
        size_of(path)
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return {name: Place(path, name, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}


def _json(path: Path) -> dict:
    why = lambda e: (
        f"{path} cannot be read ({getattr(e, 'strerror', None) or e}); name the folder of a model, or copy it again"
    )
    with errors_as(CheckpointError, why, OSError, ValueError):
        if not isinstance(content := read_json(path), dict):
            raise ValueError("it is not a JSON object")
        return content
