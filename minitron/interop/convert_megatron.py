"""A checkpoint of Megatron-core or Megatron-LM (torch_dist) to one of minitron: dense GPT and Llama.

    python tools/convert_megatron.py import checkpoints/megatron checkpoints/mine
    python -m minitron.pretrain checkpoints/mine/model.yaml checkpoint.load=checkpoints/mine data.source=...
    python tools/convert_megatron.py import nemo/weights checkpoints/mine model.num_heads=32 model.num_kv_heads=8

The source is a folder iter_0001000, or the folder above it: then its newest checkpoint is read. The tensors determine
the sizes. Heads, rotary base and epsilon are in the arguments that Megatron-LM saves. A checkpoint of Megatron-core
alone has no arguments: give keys of `model` or a YAML file after the two folders. They win over arguments, too.

    decoder.layers.self_attention.linear_qkv.weight [L, (n + 2g) d, h]   rows group by group: q ... q k v
    -> blocks.i.attention.qkv.weight [(n + 2g) d, h]                     rows: all q, all k, all v

Only weights are imported, and the command prints what it leaves out. No pickle is run (torch_dist.py).

Left out: the optimizer's state, Megatron's older format of a pickle a rank, mixtures of experts, other tensors than
those of the two families: each is refused by its name.
"""

import argparse
import re
from functools import lru_cache, reduce
from pathlib import Path

import torch
import yaml
from torch import Tensor

from minitron.checkpoint.format import NAMES
from minitron.config import cli, rules
from minitron.config.command import Parser
from minitron.config.files import errors_as
from minitron.config.schema import ModelConfig
from minitron.config.text import printable, short
from minitron.interop import hf
from minitron.interop.import_weights import Source, add_arguments, import_weights
from minitron.interop.torch_dist import Reader
from minitron.kernels.gemm import DTYPES

LAYERS = "decoder.layers."
NOT_WEIGHTS = ("optimizer", "chained_", "rng_state", "rerun_state_machine")
# minitron's name within a block -> Megatron's, with Transformer Engine's fused norms or with separate norms.
MODULES = {
    "norm1": ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    "attention.qkv": ("self_attention.linear_qkv.",),
    "attention.out": ("self_attention.linear_proj.",),
    "norm2": ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    "mlp.up": ("mlp.linear_fc1.",),
    "mlp.down": ("mlp.linear_fc2.",),
}
BLOCK = {f"{ours}.{kind}": [name + kind for name in MODULES[ours]] for ours in MODULES for kind in ("weight", "bias")}
REST = {
    "embedding.words.weight": "embedding.word_embeddings.weight",
    "embedding.positions": "embedding.position_embeddings.weight",
    "head.norm.weight": "decoder.final_layernorm.weight",
    "head.norm.bias": "decoder.final_layernorm.bias",
    "head.weight": "output_layer.weight",
}
# Arguments that change the network -> the values that minitron computes. `fitting` adds those that depend on tensors.
TABLE = yaml.safe_load(Path(__file__).with_name("megatron_fixed.yaml").read_text())
FIXED = dict.fromkeys(TABLE["absent"], [None, False, "", []]) | TABLE["fixed"]
# Arguments of Megatron-LM and fields of Megatron-core, 0.4 to 0.19, that leave the network as it is.
HARMLESS = Path(__file__).with_name("megatron_arguments.txt")


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    importer = commands.add_parser("import", help="MEGATRON_FOLDER CHECKPOINT_DIR [KEYS]: Megatron to minitron")
    add_arguments(importer, "MEGATRON_FOLDER", "with .metadata, or the one above it")
    words = "keys of `model`, as on the command line of minitron.pretrain"
    importer.add_argument("keys", nargs="*", metavar="KEY=VALUE|FILE", help=words)
    words = "unknown arguments of the checkpoint that do not change the network"
    importer.add_argument("--accept", default="", metavar="NAME,NAME", help=words)
    options = parser.parse_args(argv)
    source = open_megatron(Path(options.source).expanduser(), options.keys, set(options.accept.split(",")))
    import_weights(source, options.target, options.dtype)


def open_megatron(folder: Path, keys: list[str], accepted: set[str]) -> Source:
    """Open a checkpoint of Megatron's, or the newest in a folder. Raises ValueError.

    keys: keys of `model`, as on a command line. accepted: unknown arguments that do not change the network.
    """
    reader = Reader(find(folder))
    weights = {name for name in reader.names() if not name.startswith(NOT_WEIGHTS)}
    model, erf = model_of(reader, weights, keys, accepted)
    shapes = hf.global_shapes(model)
    places = {name: place_of(name, weights, reader) for name in shapes}
    for name in sorted(weights - {place for place, _ in places.values()}):
        why = f"holds {name} {list(reader.shape(name))}, which minitron's {model.family} does not have"
        raise ValueError(f"{reader.path} {why}; only dense GPT and Llama models can be converted")
    found = reduce(torch.promote_types, (reader.dtype(place) for place, _ in places.values()))
    if found not in NAMES:
        raise ValueError(f"{reader.path} holds weights in {found}, not in {', '.join(DTYPES)}; convert them first")
    notes = ["bias_gelu_fusion was off, so its GELU was the exact one; minitron's is the tanh form, 1e-4 away"] * erf
    if (left := len(reader.names()) - len(weights)) or reader.others:
        notes.append(f"left out: {left} tensors of the optimizer, {len(reader.others)} objects")

    @lru_cache(1)  # the order of rows differs, so a block needs the whole tensor
    def whole(name: str) -> Tensor:
        place, row = places[name]
        return arranged(reader.read(place, row), name, shapes[name], model, f"{reader.path}: {place}")

    def read(name: str, kind: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        return whole(name)[tuple(slice(first, first + size) for first, size in zip(start, shape))]

    return Source(model, NAMES[found], "; ".join(notes), read)


def find(source: Path) -> Path:
    """Return the folder with .metadata: the source, or the newest iteration in it."""
    latest = source / "latest_checkpointed_iteration.txt"
    if latest.is_file():
        text = latest.read_text(errors="replace").strip()
        if not re.fullmatch("[0-9]{1,9}|release", text):
            raise ValueError(f"{latest} has {short(text)!r}, not an iteration; name one of the folders beside it")
        source /= text if text == "release" else f"iter_{int(text):07d}"
    if not source.is_dir():
        raise ValueError(f"{source}: there is no such folder; name a checkpoint of Megatron's")
    if not (source / ".metadata").is_file():
        if any(source.glob("mp_rank_*")):
            why = "is in Megatron's older format, a pickle a rank, and loading one can run any code"
            raise ValueError(f"{source} {why}; save it with --ckpt-format torch_dist")
        if any(source.glob("*/.zarray")):
            raise ValueError(f"{source} is in the format zarr; save it with --ckpt-format torch_dist")
        inside = sorted(path.parent.name for path in source.glob("*/.metadata"))
        fix = f"name one of its folders: {', '.join(inside[:5])}" if inside else "name a folder iter_... of Megatron's"
        raise ValueError(f"{source} has no .metadata of a torch_dist checkpoint; {fix}")
    return source


def model_of(reader: Reader, weights: set[str], keys: list[str], accepted: set[str]) -> tuple[ModelConfig, bool]:
    """Read the model from tensors, arguments and keys; the later one wins. Raises ValueError.

    Also return whether its GELU was computed by erf, as Megatron does without its fused kernel.
    """
    try:
        args, why = reader.common(), ""
    except ValueError as error:
        args, why = {}, f" ({error})"
    words, fc2 = REST["embedding.words.weight"], BLOCK["mlp.down.weight"][0]
    stacked, single = f"{LAYERS}{fc2}", f"{LAYERS}0.{fc2}"
    if words not in weights or not {stacked, single} & weights:
        missing = words if words not in weights else stacked
        some = ", ".join(sorted(reader.names())[:3])
        raise ValueError(f"{reader.path} has no {missing}, so it is not a dense GPT of Megatron's (it has {some} ...)")
    layers = reader.shape(stacked)[0] if stacked in weights else sum(name.endswith(fc2) for name in weights)
    rows, hidden = reader.shape(words)
    gpt = REST["head.norm.bias"] in weights
    vocab = args.get("vocab_size")
    if vocab is not None and not (type(vocab) is int and 0 < vocab <= rows):
        why = f"its argument vocab_size={short(repr(vocab))} does not fit the {rows} rows of {words}"
        raise ValueError(f"{reader.path}: {why}; copy the files of one checkpoint")
    model = {
        "family": "gpt" if gpt else "llama",
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": reader.shape(stacked if stacked in weights else single)[-1],
        "vocab_size": rows if vocab is None else vocab,
        "tie_embeddings": REST["head.weight"] not in weights,
        "positions": "learned" if REST["embedding.positions"] in weights else "rope",
    }
    if model["positions"] == "learned":
        model["max_positions"] = reader.shape(REST["embedding.positions"])[0]
    args = {"norm_epsilon": args.get("layernorm_epsilon")} | args  # its older name
    check_arguments(reader, args, FIXED | fitting(model, args), accepted)
    if args.get("num_attention_heads") is not None:
        given = {"num_heads": "num_attention_heads", "norm_eps": "norm_epsilon", "rope_theta": "rotary_base"}
        given |= {"num_kv_heads": "num_query_groups"} if args.get("group_query_attention") else {}
        given |= {} if "max_positions" in model else {"max_positions": "max_position_embeddings"}
        given |= {"rope_scaling": "rope_scaling_factor"} if args.get("use_rope_scaling") else {}
        numbers = {key: args[name] for key, name in given.items() if args.get(name) is not None}
        for key, value in numbers.items():
            if not isinstance(value, int | float):
                why = f"its argument {given[key]}={short(repr(value))} is not a number"
                raise ValueError(f"{reader.path}: {why}; copy the files of one checkpoint")
        model |= {"num_kv_heads": None} | numbers
        if args.get("use_rope_scaling"):
            model["rope_scaling"] = {"factor": numbers.get("rope_scaling", 8.0)}
    elif not any("num_heads" in key or "=" not in key for key in keys):
        fix = "give model.num_heads=N, and if they differ from the defaults model.num_kv_heads, model.rope_theta"
        raise ValueError(f"{reader.path} has no arguments of a run{why}; {fix}, model.norm_eps, model.max_positions")
    elif why:
        print(f"note: the keys alone describe the model, since the run's arguments cannot be read{printable(why)}")
    cfg = cli.load([*keys, "train.seq_len=1"], ({"model": model}, str(reader.path)))
    rules.check(cfg, world=1)
    if cfg.model.qk_norm:
        raise ValueError("model.qk_norm=true: Megatron's norms of q and k are not converted; import from Hugging Face")
    return cfg.model, gpt and args.get("bias_gelu_fusion", True) is False


def fitting(model: dict, args: dict) -> dict[str, list]:
    """Map the arguments that must fit the tensors to the values that do."""
    heads = args.get("num_attention_heads")
    width = model["hidden_size"] // heads if isinstance(heads, int) and heads > 0 else None
    sizes = {name: model[name] for name in ("num_layers", "hidden_size", "ffn_hidden_size")}
    sizes |= {"layernorm_epsilon": args["norm_epsilon"], "kv_channels": width}
    return TABLE[model["family"]] | TABLE[model["positions"]] | {name: [None, size] for name, size in sizes.items()}


def check_arguments(reader: Reader, args: dict, fixed: dict[str, list], accepted: set[str]) -> None:
    """Raise ValueError for an argument of another network, and for an unknown one that is on and not accepted."""
    known = fixed.keys() | set(HARMLESS.read_text().split())
    unknown = []
    for name, value in args.items():
        with errors_as(ValueError, lambda _: f"{reader.path}: its arguments are nested too deeply", RecursionError):
            shown = " ".join(f"{name}={value!r}".split())[:200]
        if name in fixed and value not in fixed[name]:
            has = f"this kind of model has {' or '.join(map(repr, fixed[name]))}"
            raise ValueError(f"{reader.path}: its argument {shown} is not supported by minitron: {has}")
        off = value is None or value is False or value in ("", [], (), {})
        if name not in known and not off and name not in accepted:
            unknown.append((" ".join(f"{name}".split()), shown))
    if unknown:
        names, shown = (", ".join(part) for part in zip(*unknown[:9]))
        fix = f"if the network is the same with and without it, add --accept {names.replace(' ', '')}"
        raise ValueError(f"{reader.path}: its argument {shown} is unknown here; {fix}")


def place_of(name: str, weights: set[str], reader: Reader) -> tuple[str, int | None]:
    """Find Megatron's tensor for one of minitron's, and its row where layers are stacked. Raises ValueError."""
    if name in REST:
        candidates = [(REST[name], None)]
    else:
        _, layer, rest = name.split(".", 2)
        candidates = [(f"{LAYERS}{theirs}", int(layer)) for theirs in BLOCK[rest]]
        candidates += [(f"{LAYERS}{layer}.{theirs}", None) for theirs in BLOCK[rest]]
    for place, row in candidates:
        if place in weights and (row is None or row < reader.shape(place)[0]):
            return place, row
    raise ValueError(f"{reader.path} has no {candidates[0][0]}, which the model has; give the model's own keys")


def arranged(tensor: Tensor, name: str, shape: tuple[int, ...], m: ModelConfig, origin: str) -> Tensor:
    """Bring the rows of a tensor into minitron's order, and pad the vocabulary. Raises ValueError."""
    if ".attention.qkv." in name and tensor.shape == shape:
        groups = tensor.unflatten(0, (m.kv_heads, -1, m.head_width))
        each = m.num_heads // m.kv_heads
        tensor = torch.cat([part.flatten(0, 2) for part in groups.split((each, 1, 1), 1)])
    if name in ("embedding.words.weight", "head.weight") and len(tensor) >= m.vocab_size:
        real = tensor[: m.vocab_size]
        mean = real.double().mean(0, keepdim=True).to(real.dtype)
        tensor = torch.cat([real, mean.expand(m.padded_vocab_size - m.vocab_size, -1)])
    if tuple(tensor.shape) != shape:
        why = f"has shape {list(tensor.shape)}, and {list(shape)} in the model that the keys describe"
        raise ValueError(f"{origin} {why}; correct model.num_heads, model.num_kv_heads or model.vocab_size")
    return tensor
