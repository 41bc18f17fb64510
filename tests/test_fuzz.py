"""Bad command lines and hostile files, drawn by a seeded generator: one line each, status 1, in seconds and 1 GiB.

Every case is bad by construction; one that is not would train a step and end with status 0, which fails its test. Some
of each kind run always, all of them with -m slow.
"""

import functools
import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_origin

import numpy as np
import pytest
from safetensors.torch import save_file
from torch import zeros

import warm
from minitron.checkpoint import format as files
from minitron.config import schema

ROOT = Path(__file__).parents[1]
CPU_SECONDS, PEAK_BYTES = 15.0, 1 << 30  # a busy machine needs three times as much
LINES, FILES, SOME_LINES, SOME_FILES = 500, 300, 80, 40
MODEL = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.vocab_size=300",
    "model.max_positions=32",
]
SMALL = [
    *MODEL,
    "train.steps=1",
    "train.seq_len=16",
    "train.micro_batch_size=2",
    "train.global_batch_size=2",
    "precision.dtype=fp32",
    "data.source=mock",
]
DIGITS = "9" * 20

Command = tuple[str, list[str]]


def run_all(commands: list[Command], folder: Path) -> None:
    """Each command fails as it has to; all that do not are told at once."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "fuzz_run.py")],
        input=json.dumps(commands),
        text=True,
        stdout=subprocess.PIPE,
        cwd=folder,
        env=env,
        check=True,
    )
    results = list(map(json.loads, done.stdout.splitlines()))
    assert len(results) == len(commands)
    wrong = [
        f"{module} {str(arguments[-4:])[:300]}\n    {result[0]}, {result[2]:.1f} s, {result[3] >> 20} MiB: "
        f"{result[1][-700:]!r}"
        for (module, arguments), result in zip(commands, results)
        if not fails_well(*result)
    ]
    assert not wrong, f"{len(wrong)} of {len(commands)}:\n" + "\n".join(wrong)


def fails_well(status: int | None, errors: str, seconds: float, peak_bytes: int) -> bool:
    one_line = errors.startswith("error: ") and errors.count("\n") == 1 and 20 < len(errors) < 2500
    return status == 1 and one_line and seconds < CPU_SECONDS and peak_bytes < PEAK_BYTES


# ---- command lines ---------------------------------------------------------------------------------------------------

NUMBERS = [
    "",
    "abc",
    "1:30",
    "12:30:45",
    "[1]",
    "{}",
    "{a: 1}",
    "true",
    "'3'",
    '"3"',
    "2026-11-22",
    "0x10",
    "1e",
    "١٢",
    "1,5",
    "--1",
    "1 2",
    "~",
    "inf",
    "-Infinity",
    "nan",
    ".nan",
    "-.inf",
    "1e400",
    "${x}",
    "!!int 3",
    "&a 1",
    "*a",
    "[",
    "1\n2",
    DIGITS * 200,
    f"-{DIGITS}",
    "9" * 100_000 + "x",
]
BAD = {
    int: [*NUMBERS, "010", "1e3", "2.5", "1.0", DIGITS, "1_", "10" + "0" * 16, "-7"],
    float: [*NUMBERS, "1e300", "-1e300", "0x1p3", "fast", "1.2.3"],
    bool: ["", "3", "0", "'true'", "maybe", "[true]", "{}", "tRUE", "1.0", "y", DIGITS],
    str: [
        "",
        "''",
        "[a]",
        "{a: b}",
        "'",
        '"x',
        "a\nb",
        "a\x00b",
        "\ud800",
        "true",
        "No",
        "???",
        "${oc.env:HOME}",
        "${",
        "~nobody-here/x",
        "[" * 2000,
        "{a: " * 500,
    ],
    Literal: ["", "nonsense", "{}", "[none]", "3", "AUTO", "true", "'", DIGITS * 20],
    tuple: [
        "",
        "a",
        "3",
        "{}",
        "[",
        "[[1]]",
        "[{a: 1}]",
        "[true]",
        "['']",
        "[a",
        "'[1]'",
        "[" * 3000,
        "&a [*a]",
        "[1, 2, 3, ${x}]",
    ],
}
BAD[schema.Shares] = BAD[str]


def bad_values() -> list[str]:
    """Every key with every value that its type does not take. null drops what a file has set."""
    found = []
    for key, kinds, _ in schema.keys():
        kind = kinds[0]
        if get_origin(kind) is not None or kind in BAD:
            values = BAD[get_origin(kind) or kind]
            if bool in kinds[1:]:  # of text or a boolean
                values = [value for value in values if value not in ("true", "No")]
            found += [f"{key}={value}" for value in values]
    return found


SIZES = [
    "hidden_size=10000000001",
    "hidden_size=1000000007",
    "num_layers=2000000",
    "num_layers=10001",
    "ffn_hidden_size=99999999977",
    "vocab_size=99999999977",
    "vocab_multiple=99999999977",
    "num_heads=1000000007",
    "num_kv_heads=999999999989",
    "max_positions=8",
    "hidden_size=1048576",
    "num_layers=10000000000000000",
]
RULES = [
    ["lora.alpha=1e300", "finetune.kind=lora"],
    ["lora.rank=9"],
    ["precision.loss_scale=0.5", "precision.dtype=fp16"],
    ["precision.loss_scale=4096"],
    ["precision.loss_scale_window=7"],
    ["precision.loss_scale_hysteresis=3"],
    ["profile.kind=torch", "log.dir=logs", "profile.start_step=1", "profile.end_step=1", "profile.ranks=[0,0]"],
    ["parallel.tp=2"],
    ["parallel.pp=999999"],
    ["parallel.vp=1000000000"],
    ["parallel.cp=3"],
    ["parallel.layers_per_stage=[9,9]"],
    ["parallel.layers_per_stage=[100000000000000000]"],
    ["train.seq_len=100000000"],
    ["train.micro_batch_size=999999999"],
    ["train.global_batch_size=999999999999"],
    ["train.hang_seconds=999999999999"],
    ["data.source=corpus", "train.steps=999999999999"],
    ["data.source=corpus", "train.eval_every=1", "train.eval_steps=999999999999"],
    ["optimizer.betas=[0.9,1]"],
    ["optimizer.min_lr=2"],
    ["checkpoint.dir=/proc/nowhere/x"],
    ["checkpoint.load=/no/such"],
    ["checkpoint.load=/dev/null"],
    ["checkpoint.load=~nobody-here/x"],
    ["finetune.base=x"],
    ["log.dir=/proc/nowhere/x"],
    ["log.dir=/dev/null"],
    ["log.tensorboard=true"],
    ["data.source=indexed", "data.paths=[/no/such]"],
    ["data.source=indexed", "data.paths=[/dev/zero]"],
    ["data.source=indexed", "data.paths=[1,a,2]"],
    ["data.source=indexed", "data.paths=[a,b,c,d]"],
    ["data.source=sft", "data.paths=[/dev/zero]", "data.separate_documents=true", "data.tokenizer=bytes"],
    ["data.source=indexed", "data.paths=[a]", "data.tokenizer=llama3:/dev/zero"],
    ["data.source=indexed", "data.paths=[a]", "data.tokenizer=gpt2:/dev"],
    ["data.document_length=7", "data.source=corpus"],
    ["--dry-run", "--world", "0"],
    ["--dry-run", "--world", "-5"],
    ["--dry-run", "--world", DIGITS * 2],
    ["--dry-run", "--world", "many"],
    ["--dry-run", "--ranks", "1"],
    ["--dry-run", "--ranks", DIGITS * 300],
    ["--dry-run", "--ranks", ""],
    ["--world", "2"],
    ["--dry-run", "parallel.tp=2", "--world", "3"],
]


def garbage(draw: random.Random) -> list[str]:
    """An argument that is neither a file nor an override of a key."""
    text = "".join(draw.choice("abzAZ019._-=[]{}'\"#: ~$é中\t/\\*&!%@") for _ in range(draw.randint(1, 30)))
    key = draw.choice([key.name for key in schema.keys()])
    return [
        draw.choice(
            [
                text,
                f"-{text}",
                f"{text}.yaml",
                f"no{text}=1",
                f"{key}x=1",
                f"{key}.{key}=1",
                f"{key[:-1]}=1",
                f"{key}..=1",
                key,
                f"{key}:1",
                f"x{key}={text}",
                "a" * 100_000,
                "a" * 100_000 + "=1",
                "model." * 5000 + "x=1",
                f"{key}{'.x' * 3000}=1",
                "model" * 9 + ".yaml",
                "=" * 50,
                "/.yaml",
                f"{key.split('.')[0]}={text.replace('{', '')}",
            ]
        )
    ]


def bad_lines() -> list[Command]:
    """All of them, in an order of which any beginning has some of each kind."""
    draw = random.Random(20261122)
    values = bad_values()
    kinds = [
        [[value] for value in draw.sample(values, LINES - 200 - len(SIZES) - len(RULES))],
        [garbage(draw) for _ in range(200)],
        [[f"model.{size}"] for size in SIZES],
        RULES,
    ]
    lines = [line for kind in kinds for line in kind]
    draw.shuffle(lines)
    return [("minitron.pretrain", [*SMALL, *line]) for line in lines]


def test_bad_command_lines(tmp_path):
    run_all(bad_lines()[:SOME_LINES], tmp_path)


@pytest.mark.slow
def test_all_bad_command_lines(tmp_path):
    lines = bad_lines()
    assert len(lines) == LINES
    run_all(lines, tmp_path)


# ---- files -----------------------------------------------------------------------------------------------------------

DEEP = "[" * 2000 + "]" * 2000


def special(path: Path, what: str) -> Path:
    """Something at `path` that is no file to read from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to({"zero": "/dev/zero", "null": "/dev/null", "terminal": "/dev/tty", "loop": path}[what])
    return path


SPECIAL = ("pipe", "folder", "zero", "null", "terminal", "loop")


def recipes() -> Iterator[tuple[str, bytes | str]]:
    """YAML that is no configuration: (what, its content, or one of SPECIAL)."""
    laughs = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'lol'}]\n" for i in range(9))
    texts = [
        f"train: {DEEP}\n",
        "train: " + "{a: " * 2000 + "1" + "}" * 2000,
        laughs,
        "train: &a [*a]\n",
        "train: {steps: 2026-11-22}\n",
        "train: {steps: 2026-11-22 10:00:00}\n",
        "optimizer: {lr: 1e400}\n",
        f"train: {{steps: {DIGITS}}}\n",
        f"optimizer: {{eps: {DIGITS * 20}}}\n",
        "train: {steps: 1}\n---\ntrain: {}\n",
        "train: {steps: 1, steps: 2}\n",
        "train:\n  steps: 1\ntrain:\n  steps: 2\n",
        "train: !!python/none\n",
        "train: !!python/object/apply:os.system [ls]\n",
        "? [a]\n: b\n",
        "- 1\n",
        "3\n",
        "a\n",
        "train: [\n",
        "train: 'x\n",
        "train: {steps: 0o10}\n",
        "train: {steps: 1:30}\n",
        "\ttrain: {}\n",
        "train:\n\tsteps: 1\n",
        "<<: {train: {}}\n",
        "train: {steps: }\n",
        "train:\n",
        'checkpoint: {dir: "a\\0b"}\n',
        "log: {dir: ''}\n",
        "train: {steps: |\n 3}\n",
        "data: {paths: [" + "x, " * 400_000 + "x]}\n",
        "#" * (2 << 20),
        "%YAML 9.9\n---\na: b\n",
        "train: {max_skipped: 10000000000001}\n",
        "parallel: {pp: 2000000}\n",
        "null: {a: 1}\n",
        "@\n",
        "`\n",
    ]
    yield from (("text", text.encode()) for text in texts)
    yield from ((what, what) for what in SPECIAL if what != "null")  # /dev/null is all defaults
    for number in range(1000):  # a recipe with one byte that YAML does not have
        draw = random.Random(number)
        content = draw.choice(sorted((ROOT / "configs").glob("*.yaml"))).read_bytes()
        place = draw.randrange(len(content))
        bad = draw.choice([b"\x00", b"\xff\xfe", b"\x1b", b"\xed\xa0\x80"])
        yield "bytes", content[:place] + bad + content[place:]


def recipe_cases(folder: Path) -> Iterator[Command]:
    for number, (what, content) in enumerate(recipes()):
        path = folder / f"recipe-{number}.yaml"
        if what in SPECIAL:
            special(path, what)
        else:
            path.write_bytes(content)
        yield "minitron.pretrain", [*SMALL, str(path)]


WRONG = [
    "null",
    '"x"',
    "-1",
    "1.5",
    "true",
    "[]",
    "{}",
    "NaN",
    "Infinity",
    "1e400",
    DIGITS,
    DIGITS * 300,
    "1" + "0" * 17,
    DEEP,
]


def walk(tree: Any, path: tuple = ()) -> Iterator[tuple]:
    """The place of everything in a tree of JSON."""
    if path:
        yield path
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from walk(value, (*path, key))


def with_value(tree: Any, path: tuple, text: str) -> str:
    """JSON of the tree, with `text` at a place."""
    tree = json.loads(json.dumps(tree))
    *above, last = path
    functools.reduce(lambda node, key: node[key], above, tree)[last] = "@@"
    return json.dumps(tree).replace('"@@"', text)


def checkpoint(folder: Path) -> tuple[Path, dict]:
    """A small checkpoint that a run resumes, and its index."""
    done = warm.run("-m", "minitron.pretrain", *SMALL, f"checkpoint.dir={folder}", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    [step] = folder.glob("step_*")
    index = json.loads((step / "index.json").read_text())
    del index["checksum"]
    return step, index


def indexed(text: str) -> bytes:
    """An index with the checksum of its text, which is right."""
    body = text[1:].encode()
    return b'{"checksum": "%s",\n' % files.checksum(body).encode() + body


# Places of an index at which every other value, or some that are said, must be refused.
PLACES: list[tuple[Callable[[tuple], bool], tuple[str, ...]]] = [
    (lambda p: p in (("iteration",), ("consumed_samples",)), ()),
    (lambda p: p[0] in ("config", "layout", "state", "files", "tensors") and len(p) == 1, ("{}",)),
    (lambda p: p[:2] == ("config", "model") and len(p) == 3 and p[2] in ("num_layers", "hidden_size", "num_heads"), ()),
    (lambda p: p[:1] == ("config",) and len(p) == 2, ("{}",)),
    (lambda p: p[:1] == ("layout",) and len(p) == 2, ("1" + "0" * 13,)),
    (lambda p: p == ("state", "optimizer_steps"), ("1.5", "true")),
    (lambda p: p[:1] == ("files",) and len(p) >= 2, ()),
    (lambda p: p[:1] == ("tensors",) and len(p) >= 2 and p[-1] != "kinds", ()),
]


def index_texts(index: dict) -> list[str]:
    """The index with one thing wrong in it."""
    draw = random.Random(7)
    found = []
    for chosen, harmless in PLACES:
        places = [path for path in walk(index) if path and chosen(path)]
        found.append([with_value(index, path, value) for path in places for value in WRONG if value not in harmless])
    name = next(iter(index["tensors"]))
    twice = json.loads(json.dumps(index))
    kinds = twice["tensors"][name]["kinds"]
    kinds["master"]["boxes"][0]["key"] = kinds["exp_avg"]["boxes"][0]["key"]
    many = json.loads(json.dumps(index))
    box = many["tensors"][name]["kinds"]["master"]["boxes"][0]
    many["tensors"][name]["kinds"]["master"]["boxes"] = [box | {"key": f"k{i}"} for i in range(100_000)]
    first = [json.dumps(tree) for tree in (twice, many, index | {"iteration": 7}, index | {"version": 2})]
    for kind in found:
        draw.shuffle(kind)
    return first + [text for kind in zip(*(kind * 20 for kind in found)) for text in kind][:200]


def index_cases(folder: Path, made: tuple[Path, dict]) -> Iterator[Command]:
    step, index = made
    for number, text in enumerate(index_texts(index)):
        copy = folder / f"run-{number}" / step.name
        copy.mkdir(parents=True)
        for path in step.glob("*.safetensors"):
            os.link(path, copy / path.name)
        (copy / "index.json").write_bytes(indexed(text))
        where = f"checkpoint.dir={copy.parent}" if number % 3 else f"checkpoint.load={copy}"
        if number % 3 == 0 and '"consumed_samples": 2' not in text or text.startswith("["):
            where = f"checkpoint.dir={copy.parent}"
        yield "minitron.pretrain", [*SMALL, "train.steps=2", where]
    for what in SPECIAL:
        for name in ("index.json", "latest", next(step.glob("*.safetensors")).name):
            copy = folder / f"run-{what}-{name}" / step.name
            copy.mkdir(parents=True)
            for path in step.iterdir():
                if path.name != name:
                    os.link(path, copy / path.name)
            special(copy / name if name != "latest" else copy.parent / name, what)
            yield "minitron.pretrain", [*SMALL, "train.steps=2", f"checkpoint.dir={copy.parent}"]


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def header(entries: dict | str, data: int = 0, length: int | None = None) -> bytes:
    text = (entries if isinstance(entries, str) else json.dumps(entries)).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


def hugging_face_cases(folder: Path) -> Iterator[Command]:
    """Folders whose config.json or weights are not those of a model."""
    configs = [
        with_value(LLAMA, (key,), value)
        for key in (
            "num_hidden_layers",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "vocab_size",
            "max_position_embeddings",
            "rms_norm_eps",
            "rope_theta",
            "model_type",
        )
        for value in WRONG
        if not (
            key in ("rms_norm_eps", "rope_theta")
            and value in ("1.5", "1" + "0" * 17, DIGITS)
            or key == "max_position_embeddings"
            and value == "null"
        )
    ]
    configs = [
        json.dumps(LLAMA | {"hidden_size": 10000000001}),
        json.dumps(LLAMA | {"num_hidden_layers": 2000000}),
        DEEP,
        "{",
        "[]",
        "3",
        '{"a": ' * 2000,
        json.dumps(LLAMA | {"rope_scaling": [1]}),
        *configs,
    ]
    many = {f"t{i}": {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i in range(200_000)}
    one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    weights: list[bytes | str] = [
        header(many, 800_000),
        header("{", 0),
        header(DEEP),
        header("{}", 0, 1 << 63),
        header("{}", 0, 1 << 40),
        b"",
        b"\x00",
        header({"a": one}),
        header({"a": one, "b": one}, 8),
        header({"a": one | {"shape": [1 << 62, 1 << 62]}}, 4),
        header({"a": one | {"dtype": "F7"}}, 4),
        header({"a": one | {"data_offsets": [4, 0]}}, 4),
        header({"a": 3}, 4),
        header({"__metadata__": 3}),
        *SPECIAL,
    ]
    draw = random.Random(3)
    draw.shuffle(configs[8:])
    cases = [pair for pairs in zip([(None, w) for w in weights], [(c, None) for c in configs]) for pair in pairs]
    cases += [(c, None) for c in configs[len(weights) :]] + [(what, None) for what in SPECIAL]
    for number, (config, weight) in enumerate(cases):
        model = folder / f"model-{number}"
        for name, content, sound in (("config.json", config, json.dumps(LLAMA)), ("model.safetensors", weight, None)):
            if content in SPECIAL:
                special(model / name, content)
                continue
            model.mkdir(exist_ok=True)
            if content is None and sound is None:
                save_file({"a": zeros(1)}, model / name)
            else:
                content = sound if content is None else content
                (model / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        yield "minitron.pretrain", [*SMALL, f"checkpoint.load={model}"]


def data_cases(folder: Path) -> Iterator[Command]:
    """Token files, their sidecars, JSONL and tokenizers."""

    def indexed_case(prefix: Path) -> Command:
        return "minitron.pretrain", [
            *SMALL,
            "data.source=indexed",
            f"data.paths=['{prefix}']",
            "data.tokenizer=bytes",
            f"data.cache_dir={folder}/cache",
        ]

    def sft_case(path: Path, tokenizer: str = "bytes") -> Command:
        return "minitron.pretrain", [
            *SMALL,
            "data.source=sft",
            "data.separate_documents=true",
            f"data.paths=['{path}']",
            f"data.tokenizer={tokenizer}",
            f"data.cache_dir={folder}/cache",
        ]

    sound = (
        struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 1, 2)
        + np.array([64], "<i4").tobytes()
        + np.array([0, 0, 1], "<i8").tobytes()
    )
    counts = [
        struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, *pair)
        for pair in ((1 << 63, 2), (1, 1 << 63), (1 << 61, 1 << 61), (0, 0), ((1 << 64) - 1, (1 << 64) - 1))
    ]
    indices: list[bytes | str] = [b"", sound[:20], sound[:-1], b"x" + sound[1:], sound + b"xx", *counts, *SPECIAL]
    for place in range(9, len(sound)):  # any other byte is another version, type, count, length or place
        indices.append(sound[:place] + bytes([sound[place] ^ 0x81]) + sound[place + 1 :])
    for number, content in enumerate(indices):
        prefix = folder / f"tokens-{number}"
        Path(f"{prefix}.bin").write_bytes(bytes(128))
        if content in SPECIAL:
            special(Path(f"{prefix}.idx"), content)
        else:
            Path(f"{prefix}.idx").write_bytes(content)
        yield indexed_case(prefix)
    for what in SPECIAL:
        prefix = folder / f"tokens-bin-{what}"
        Path(f"{prefix}.idx").write_bytes(sound)
        special(Path(f"{prefix}.bin"), what)
        yield indexed_case(prefix)
    for number, text in enumerate(["{", DEEP, "3", "{}", "NaN", '{"tokenizer": 1, "fingerprint": 1, "vocab_size": 1}']):
        prefix = folder / f"tokens-json-{number}"
        Path(f"{prefix}.idx").write_bytes(sound)
        Path(f"{prefix}.bin").write_bytes(bytes(128))
        Path(f"{prefix}.json").write_text(text)
        yield indexed_case(prefix)
    rows = [
        "",
        "{",
        DEEP,
        "3",
        "[]",
        "{}",
        "NaN",
        '{"prompt": 1, "completion": "a"}',
        '{"prompt": "a"}',
        "\x00",
        '{"prompt": "a", "completion": " "}',
        '{"messages": []}',
        '{"messages": 3}',
        '{"prompt": "a", "completion": ',
        '{"messages": [{"role": "user", "content": "a"}]}',
        f'{{"prompt": {DIGITS * 300}, "completion": "a"}}',
    ]
    for number, row in enumerate(rows):
        path = folder / f"rows-{number}.jsonl"
        path.write_text(row + "\n")
        yield sft_case(path)
    for what in SPECIAL:
        yield sft_case(special(folder / f"rows-{what}.jsonl", what))
        for kind in ("llama3", "llama2"):
            yield sft_case(folder / "rows-0.jsonl", f"{kind}:{special(folder / f'{kind}-{what}', what)}")
        yield sft_case(
            folder / "rows-0.jsonl", f"gpt2:{special(folder / f'gpt2-{what}' / 'encoder.json', what).parent}"
        )
    for number, text in enumerate(["", "a b c\n", "YQ== x\n", f"YQ== {DIGITS}\n", "\x00\n", "!! 0\n"]):
        for kind in ("llama3", "llama2"):
            path = folder / f"{kind}-{number}"
            path.write_text(text)
            yield sft_case(folder / "rows-0.jsonl", f"{kind}:{path}")
    for number, text in enumerate(
        ["", DEEP, "[]", '{"a": 1}', '{"<|endoftext|>": 1e400}', '{"<|endoftext|>": [], "a": "b"}']
    ):
        (folder / f"gpt2-{number}").mkdir()
        (folder / f"gpt2-{number}" / "encoder.json").write_text(text)
        yield sft_case(folder / "rows-0.jsonl", f"gpt2:{folder}/gpt2-{number}")


def hostile_files(folder: Path, count: int) -> list[Command]:
    """`count` cases, some of each kind."""
    made = checkpoint(folder / "sound")
    kinds = [recipe_cases(folder), index_cases(folder, made), hugging_face_cases(folder), data_cases(folder)]
    cases = [case for _, cases in zip(range(count // len(kinds) + 1), zip(*kinds)) for case in cases]
    return cases[:count]


def test_hostile_files(tmp_path):
    run_all(hostile_files(tmp_path, SOME_FILES), tmp_path)


@pytest.mark.slow
def test_all_hostile_files(tmp_path):
    cases = hostile_files(tmp_path, FILES)
    assert len(cases) == FILES
    run_all(cases, tmp_path)
