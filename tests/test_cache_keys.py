"""What a cache keeps depends on many things: each of them, varied alone, must make it anew, and nothing else may.

Each table maps an ingredient to a variation: other arguments of the function that makes the thing, or a function that
patches what it reads. `UNCHANGED` has what must not matter.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from minitron.config import files
from minitron.data import corpus, gpt, sft
from minitron.data.blend import BlendedDataset
from minitron.data.build import _open
from minitron.data.cache import Cache
from minitron.data.indexed import IndexedDataset, IndexedWriter
from minitron.data.mock import MockDataset
from minitron.interop.rows import READERS
from minitron.interop.tokenizers import ByteTokenizer, load_tokenizer
from minitron.planner.dryrun.kernels import cached_by_shape
from minitron.runtime import environment
from test_data_corpus import SOURCES, VOCAB, make_library

UNCHANGED = "unchanged: "  # of what must be found again, the beginning of its name


class Counted(Cache):
    """Counts what is built, but for hashes of files, which are of where these lie."""

    builds = 0

    def build_once(self, name, build):
        def counted(folder):
            self.builds += not name.startswith("hashes-")
            build(folder)

        return super().build_once(name, counted)


def assert_keyed(cache, make, table, monkeypatch):
    """Make it as usual, then with each variation, and as usual again."""
    make()
    assert cache.builds > 0
    for ingredient, change in {f"{UNCHANGED}all": {}, **table, f"{UNCHANGED}after all others": {}}.items():
        before = cache.builds
        with monkeypatch.context() as patch:
            arguments = change if isinstance(change, dict) else change(patch) or {}
            make(**arguments)
        assert (cache.builds == before) == ingredient.startswith(UNCHANGED), ingredient


# ---- folders of data.cache_dir --------------------------------------------------------------------------------------

NAME = "package/module_3.py"


def renamed():
    """The sources, one under another name that leaves their order as it is."""
    for i in range(1000):
        found = {f"package/other_{i}.py" if name == NAME else name: text for name, text in SOURCES.items()}
        if ordered(found) == ordered(SOURCES):
            return found


def ordered(sources):
    return [sources[name] for name in sorted(sources, key=lambda name: hashlib.sha256(name.encode()).digest())]


LIBRARIES = {
    "a letter of a file": {"sources": SOURCES | {NAME: SOURCES[NAME].replace("return", "retorn", 1)}},
    "the end of a file": {"sources": SOURCES | {NAME: SOURCES[NAME] + "\n"}},
    "the name of a file": {"sources": renamed()},
    "one file more": {"sources": SOURCES | {"more.py": "more = 1\n"}},
    "the version of Python": lambda patch: patch.setattr(platform, "python_version", lambda: "3.99.0"),
    f"{UNCHANGED}a file that is no source": {"sources": SOURCES | {"notes.txt": "no Python"}},
}
CORPUS = LIBRARIES | {
    "the vocabulary": {"vocab_size": VOCAB + 1},
    "how the tokenizer is trained": lambda patch: patch.setitem(corpus.TRAINER, "split_digits", False),
    "the pieces that it is trained on": lambda patch: patch.setattr(corpus, "TRAINING_PIECE", 500),
}


def libraries(folder):
    """Each call writes a library into another folder."""
    for i in range(100):
        yield folder / f"lib{i}"


def test_a_corpus_is_of_its_sources_and_of_how_it_is_made(tmp_path, monkeypatch):
    cache, roots = Counted(tmp_path / "cache"), libraries(tmp_path)

    def make(sources=SOURCES, vocab_size=VOCAB):
        corpus.build_corpus(cache, vocab_size, make_library(next(roots), sources))

    assert_keyed(cache, make, CORPUS, monkeypatch)


def test_docstrings_are_of_their_sources_and_of_how_they_are_found(tmp_path, monkeypatch):
    cache, roots = Counted(tmp_path / "cache"), libraries(tmp_path)
    (code := tmp_path / "corpus.py").write_bytes(Path(corpus.__file__).read_bytes() + b"\n")
    changed_code = {"the code": lambda patch: patch.setattr(corpus, "__file__", str(code))}

    def make(sources=SOURCES):
        corpus.build_docstrings(cache, make_library(next(roots), sources))

    assert_keyed(cache, make, LIBRARIES | changed_code, monkeypatch)


TOKENS = [[1, 2, 3, 4]] * 5


def write(prefix, documents=TOKENS, dtype=np.uint16):
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(np.array(document, dtype))
    return prefix


INDEX = {
    "the number of sequences": {"documents": [*TOKENS, [1, 2, 3, 4]]},
    "where a sequence ends": {"documents": [[1, 2, 3], [4, 1, 2, 3, 4], *TOKENS[2:]]},
    "the first tokens": {"documents": [[9, 2, 3, 4], *TOKENS[1:]]},
    "the last tokens": {"documents": [*TOKENS[:-1], [1, 2, 3, 9]]},
    "the format of a token": {"dtype": np.int32},
    "the first sequence": {"sequences": range(1, 5)},
    "the last sequence": {"sequences": range(4)},
    "samples": {"num_samples": 8},
    "their length": {"seq_len": 2},
    "the seed": {"seed": 2},
    f"{UNCHANGED}the vocabulary": {"vocab_size": 11},
}


def test_a_sample_index_is_of_its_sequences_samples_and_seed(tmp_path, monkeypatch):
    cache, prefixes = Counted(tmp_path / "cache"), libraries(tmp_path)  # each time elsewhere

    def make(documents=TOKENS, dtype=np.uint16, sequences=range(5), num_samples=7, seq_len=3, seed=1, vocab_size=10):
        file = IndexedDataset(write(next(prefixes), documents, dtype))
        gpt.GPTDataset(file, sequences, num_samples, seq_len, seed, cache, vocab_size)

    assert_keyed(cache, make, INDEX, monkeypatch)
    assert not list((tmp_path / "cache").glob("*.partial"))


BLEND = {
    "a weight": {"weights": (3, 2)},
    "a weight's tenth digit": {"weights": (1 + 1e-10, 2)},
    "the order of weights": {"weights": (2, 1)},
    "samples": {"num_samples": 9},
    f"{UNCHANGED}the sum of weights": {"weights": (2, 4)},
}


def test_the_order_of_a_blend_is_of_weights_and_samples(tmp_path, monkeypatch):
    file, cache = IndexedDataset(write(tmp_path / "data")), Counted(tmp_path / "cache")
    parts = [gpt.GPTDataset(file, range(5), 20, 3, seed, Cache(tmp_path / "other"), 10) for seed in (1, 2)]

    def make(weights=(1, 2), num_samples=8):
        BlendedDataset(parts, weights, num_samples, cache)

    assert_keyed(cache, make, BLEND, monkeypatch)


class Stat:
    """os, but for one figure of the files that end in `kind`."""

    def __init__(self, kind, figure):
        self.kind, self.figure = kind, figure

    def __getattr__(self, name):
        return getattr(os, name)

    def stat(self, path):
        found = {name: getattr(os.stat(path), name) for name in dir(os.stat(path)) if name.startswith("st_")}
        found[self.figure] += str(path).endswith(self.kind)
        return type("Found", (), found)


FILE = {
    f"{figure} of .{kind}": lambda patch, kind=kind, figure=figure: patch.setattr(files, "os", Stat(kind, figure))
    for kind in ("idx", "bin")
    for figure in ("st_size", "st_mtime_ns", "st_ctime_ns")
} | {"the vocabulary": {"vocab_size": 11}, "the path": {"name": "copy"}}


def test_that_a_file_was_read_whole_is_known_of_this_file_as_it_is(tmp_path, monkeypatch):
    write(tmp_path / "data")
    for kind in ("idx", "bin"):  # other names of the same files
        os.link(tmp_path / f"data.{kind}", tmp_path / f"copy.{kind}")
    cache = Counted(tmp_path / "cache")

    def make(name="data", vocab_size=10):
        _open(str(tmp_path / name), "corpus", None, vocab_size, cache)

    assert_keyed(cache, make, FILE, monkeypatch)


# ---- tokens of questions and answers --------------------------------------------------------------------------------

LINES = [json.dumps({"prompt": "a b", "completion": " b a"}), json.dumps({"prompt": "b", "completion": " a"})]
SFT = {
    "a letter of a file": {"files": [[LINES[0].replace("b a", "b b")], [LINES[1]]]},
    "the order of files": {"files": [[LINES[1]], [LINES[0]]]},
    "where one file ends": {"files": [[*LINES], []]},
    "a file more": {"files": [[LINES[0]], [LINES[1]], [LINES[1]]]},
    "the code": lambda patch: patch.setattr(sft, "FORMAT", sft.FORMAT + 1),
    "whether special tokens in a text are some": {"special": True},
}
SPECIAL = [
    {"id": 0, "content": "<u>", "special": True},
    {"id": 1, "content": "<s>", "special": True},
    {"id": 2, "content": "</s>", "special": True},
]
BASE = {
    "version": "1.0",
    "added_tokens": [
        token | {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False} for token in SPECIAL
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"<u>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}, "unk_token": "<u>"},
}
SETTINGS = {"eos_token": "</s>", "bos_token": "<s>"}


def begins_with(token):
    """A template that puts a token before a text."""
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {token: {"id": token, "ids": [BASE["model"]["vocab"][token]], "tokens": [token]}},
    }


FOLDERS = {
    "its ids": {"text": {"model": BASE["model"] | {"vocab": BASE["model"]["vocab"] | {"a": 4, "b": 3}}}},
    "how it normalises": {"text": {"normalizer": {"type": "Lowercase"}}},
    "how it cuts words": {"text": {"pre_tokenizer": {"type": "WhitespaceSplit"}}},
    "its added tokens": {"text": {"added_tokens": [*BASE["added_tokens"], BASE["added_tokens"][0] | {"id": 5}]}},
    "the end of a document": {"settings": {"eos_token": "<s>"}},
    "the begin of a prompt, by the settings": {"settings": {"add_bos_token": True}},
    "the begin of a prompt, by its template": {"text": {"post_processor": begins_with("<u>")}},
    "its chat template": {"settings": {"chat_template": "{{ messages }}"}},
    f"{UNCHANGED}where that was said": {"text": {"post_processor": begins_with("<s>")}},
    f"{UNCHANGED}how it decodes": {"text": {"decoder": {"type": "Fuse"}}},
    f"{UNCHANGED}where it lies": {},
}
FOLDERS["its added tokens"]["text"]["added_tokens"][-1]["content"] = "ab"


def test_tokens_of_answers_are_of_files_and_of_all_that_encodes_them(tmp_path, monkeypatch):
    cache, folders = Counted(tmp_path / "cache"), libraries(tmp_path)

    def make(files=([LINES[0]], [LINES[1]]), tokenizer=None, special=False):
        (folder := next(folders)).mkdir()
        paths = [folder / f"{i}.jsonl" for i in range(len(files))]
        for path, lines in zip(paths, files):
            path.write_text("".join(f"{line}\n" for line in lines))
        return sft.TokenizedFiles(paths, tokenizer or ByteTokenizer(), cache, READERS, special=special)

    assert_keyed(cache, make, SFT, monkeypatch)

    def make_hf(text=None, settings=None):
        folder = next(folders)
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps(BASE | (text or {})))
        (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS | (settings or {})))
        return make(tokenizer=load_tokenizer(f"hf:{folder}"))

    pytest.importorskip("tokenizers")
    assert_keyed(cache, make_hf, FOLDERS, monkeypatch)
    begun, plain = make_hf(settings={"add_bos_token": True}), make_hf()
    assert begun.get(0, 99)[0].tolist() == [1, *plain.get(0, 99)[0].tolist()]


# ---- what a resumed run knows its samples by -------------------------------------------------------------------------

MOCK = {
    "the vocabulary": {"vocab_size": 11},
    "the length of a sample": {"seq_len": 17},
    "the seed": {"seed": 1},
    "the longest document": {"longest": 5},
    "that there is none": {"longest": None},
    f"{UNCHANGED}the number of samples": {"num_samples": 5},
}
PACKED = {
    "the first document": {"part": range(1, 3)},
    "the last document": {"part": range(2)},
    "the length of a sample": {"seq_len": 6},
    "the seed": {"seed": 1},
    "that long documents are left out": {"too_long": "skip"},
    "what is in a document": {"last": LINES[0]},
    f"{UNCHANGED}where that was said": {"too_long": "truncate"},
}
MIXED = {
    "a weight": {"weights": (1, 3)},
    "a part": {"seeds": (1, 3)},
    "the order of parts": {"seeds": (2, 1)},
    f"{UNCHANGED}the number of samples": {"num_samples": 9},
    f"{UNCHANGED}the sum of weights": {"weights": (2, 4)},
}


def test_samples_are_known_by_all_that_they_follow_from(tmp_path):
    def mock(vocab_size=10, seq_len=16, num_samples=4, seed=0, longest=4):
        return MockDataset(vocab_size, seq_len, num_samples, seed, longest=longest)

    def packed(part=range(3), seq_len=5, seed=0, too_long="truncate", last=LINES[1]):
        (path := tmp_path / "data.jsonl").write_text("\n".join([*LINES, last]))
        files = sft.TokenizedFiles([path], ByteTokenizer(), Cache(tmp_path / "cache"), READERS)
        return sft.SFTDataset(files, part, seq_len, seed, too_long)

    def mixed(weights=(1, 2), seeds=(1, 2), num_samples=8):
        parts = [packed(seed=seed).of_length(20) for seed in seeds]
        return BlendedDataset(parts, weights, num_samples, Cache(tmp_path / "cache"))

    for make, table in (mock, MOCK), (packed, PACKED), (mixed, MIXED):
        usual = make().fingerprint
        for ingredient, change in table.items():
            assert (make(**change).fingerprint == usual) == ingredient.startswith(UNCHANGED), (make, ingredient)


# ---- compiled kernels, and what a dry run keeps ---------------------------------------------------------------------


def test_compiled_kernels_are_of_the_user_and_the_node(tmp_path, monkeypatch):
    """What a job sets itself stays; Triton's and Inductor's own keys do the rest."""

    def caches(**environ):
        environment.set_defaults(environ)
        return {name: environ[name] for name in environment.CACHES}

    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "here"))
    usual = caches()
    assert caches() == usual and len({*usual.values()}) == len(usual)
    for name in usual:
        assert caches(**{name: "mine"}) == usual | {name: "mine"}
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda uid=os.getuid(): uid + 1)
        assert not {*caches().values()} & {*usual.values()}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "there"))
    assert not {*caches().values()} & {*usual.values()}


def empty(*shape, dtype=torch.float32, stride=None, device="meta"):
    return torch.empty_strided(shape, stride or (shape[-1], 1), dtype=dtype, device=device)


SHAPES = {
    "a shape": {"x": empty(3, 4)},
    "a stride": {"x": empty(4, 4, stride=(1, 4))},
    "a dtype": {"x": empty(4, 4, dtype=torch.bfloat16)},
    "a device": {"x": empty(4, 4, device="cpu")},
    "a tensor or none": {"y": None},
    "a number": {"scale": 3},
    "the type of a number": {"scale": 2.0},
    "a number or a bool": {"scale": True},
    "a list's length": {"sizes": (4, 4, 1)},
    f"{UNCHANGED}other tensors": {"x": empty(4, 4), "y": empty(4, 4)},
}


def test_what_a_kernel_allocates_is_of_all_its_arguments(monkeypatch):
    cache = type("Cache", (), {"builds": 0})()

    def kernel(x, y, sizes, *, scale):
        cache.builds += 1
        return torch.empty_like(x)

    seen = cached_by_shape(kernel)

    def make(x=empty(4, 4), y=empty(4, 4), sizes=(4, 4), scale=2):
        seen(x, y, sizes, scale=scale)

    # A result on the CPU is computed each time, so that variation counts as made anew.
    assert_keyed(cache, make, SHAPES, monkeypatch)


def test_a_kernel_that_returns_an_argument_returns_it_also_after_a_call_with_one_tensor_twice():
    first, second = (cached_by_shape(lambda x, y, i=i: (x, y)[i].add_(1)) for i in (0, 1))
    x, y = empty(4, 4), empty(4, 4)
    assert first(x, x) is x and first(x, y) is x and first(y, x) is y
    assert second(x, x) is x and second(x, y) is y
