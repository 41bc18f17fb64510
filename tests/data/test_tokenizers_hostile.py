"""A tokenizer.json that is damaged or made to do harm loads, or is one line; it is never a traceback or a signal."""

import copy
import json
import random
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minitron.data.cache import Cache
from minitron.interop import tokenizers
from minitron.interop.tokenizers import TRIAL_BYTES, load_tokenizer

pytest.importorskip("tokenizers")
ROOT = Path(__file__).resolve().parents[2]
END = "<|end|>"
REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}


def ordinary():
    """The content of a byte-level BPE with two merges and an added token."""
    letters = {character: i for i, character in enumerate(tokenizers._printable_bytes())}
    vocabulary = letters | {"ab": 256, "abc": 257}
    added = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 258, "content": END, "special": True, **added}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [["a", "b"], ["ab", "c"]]},
    }


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def unigram(**changes):
    """A Unigram model of a few pieces."""
    pieces = [["<unk>", 0.0], ["a", -1.0], ["b", -2.0], [END, -3.0]]
    return {"type": "Unigram", "unk_id": 0, "vocab": pieces, **changes}


def template(**changes):
    special = {END: {"id": END, "ids": [258], "tokens": [END]}}
    single = [{"SpecialToken": {"id": END, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special, **changes}


# What is put in the place of which part of the file.
CHANGES = {
    **{f"model is {value!r}": (["model"], value) for value in (None, [], 7, "BPE", {}, {"type": "Magic"})},
    **{f"vocab is {value!r}": (["model", "vocab"], value) for value in (None, [], {}, {"a": None}, {"a": -1})},
    **{
        f"id {str(i)[:12]}": (["model", "vocab", "ab"], i)
        for i in (2**31, 2**32 - 1, 2**32, 2**63, 10**400, 0.5, 1e300)
    },
    "two tokens of one id": (["model", "vocab", "ab"], 0),
    "a gap of ids": (["model", "vocab", "ab"], 1_000_000),
    "a merge of missing tokens": (["model", "merges"], [["nosuch", "other"]]),
    "a merge into a missing token": (["model", "merges"], [["a", "c"]]),
    "a merge of one part": (["model", "merges"], ["ab"]),
    "a merge of three": (["model", "merges"], [["a", "b", "c"]]),
    "merges are null": (["model", "merges"], None),
    "merges of numbers": (["model", "merges"], [[1, 2]]),
    "a dropout of 7": (["model", "dropout"], 7),
    "a dropout that is everything": (["model", "dropout"], 1.0),
    "an unknown unk_token": (["model", "unk_token"], "nosuch"),
    "a prefix that cuts characters": (["model", "continuing_subword_prefix"], "\u20ac\u20ac"),
    "a suffix without tokens": (["model", "end_of_word_suffix"], "</w>"),
    "added tokens are null": (["added_tokens"], None),
    "an added token of id 2**32 - 1": (["added_tokens", 0, "id"], 2**32 - 1),
    "an added token of id -1": (["added_tokens", 0, "id"], -1),
    "an added token without text": (["added_tokens", 0, "content"], ""),
    "an added token whose text is null": (["added_tokens", 0, "content"], None),
    "the pre_tokenizer is text": (["pre_tokenizer"], "ByteLevel"),
    "a regex that does not close": (["pre_tokenizer"], split("(")),
    "a regex that explodes": (["pre_tokenizer"], split("(a|a|aa)+$")),
    "a regex that explodes in steps": (["pre_tokenizer"], split("((a*)*)*$")),
    "a regex of many repeats": (["pre_tokenizer"], split("(((((a{1000}){1000}){1000}){1000}){1000})")),
    "a regex that is deep": (["pre_tokenizer"], split("(" * 20_000 + ")" * 20_000)),
    "a regex that matches nothing": (["pre_tokenizer"], split("")),
    "a regex that refers to itself": (["pre_tokenizer"], split("(?<x>a\\g<x>)")),
    "a normalizer that multiplies by a billion": (["normalizer"], {"type": "Sequence", "normalizers": [REPLACE] * 3}),
    "a normalizer of no pattern": (["normalizer"], {**REPLACE, "pattern": {"String": ""}}),
    "a charsmap that is none": (["normalizer"], {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "a charsmap of too long a trie": (["normalizer"], {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAA="}),
    "a charsmap that is null": (["normalizer"], {"type": "Precompiled", "precompiled_charsmap": None}),
    "a decoder that multiplies by a billion": (["decoder"], {"type": "Sequence", "decoders": [REPLACE] * 3}),
    "a decoder that strips 2**63": (["decoder"], {"type": "Strip", "content": "a", "start": 2**63, "stop": 2**63}),
    "a template of missing tokens": (["post_processor"], template(special_tokens={})),
    "a template that is empty": (["post_processor"], template(single=[])),
    "a template of a foreign id": (
        ["post_processor"],
        template(special_tokens={END: {"id": END, "ids": [2**32 - 1], "tokens": [END]}}),
    ),
    "a truncation to less than its stride": (
        ["truncation"],
        {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 2**62},
    ),
    "a truncation to -1": (["truncation", "max_length"], -1),
    "a padding to 2**60": (
        ["padding"],
        {"strategy": {"Fixed": 2**60}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "a"},
    ),
    "a unigram model": (["model"], unigram()),
    "a unigram model of no unk": (["model"], unigram(unk_id=None)),
    "a unigram model of a far unk": (["model"], unigram(unk_id=2**40)),
    "a unigram model without pieces": (["model"], unigram(vocab=[])),
    "a unigram model with an empty piece": (["model"], unigram(vocab=[["", 0.0], [END, -1.0]])),
    "a unigram model of infinite scores": (["model"], unigram(vocab=[["a", -1e308], ["aa", -1e308], [END, -1e308]])),
    "a word-piece model without unk": (["model"], {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "none"}),
    "a word-level model without unk": (["model"], {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}),
}


def put(content, path, value):
    for key in path[:-1]:
        content[key] = content[key] if not isinstance(content, dict) or content.get(key) else {}
        content = content[key]
    content[path[-1]] = value


def hostile():
    """(name, text of a tokenizer.json), each time the same."""
    for name, (path, value) in CHANGES.items():
        content = copy.deepcopy(ordinary())
        put(content, path, value)
        yield name, json.dumps(content).encode()
    text, dice = json.dumps(ordinary()).encode(), random.Random(0)
    yield "empty", b""
    yield "deep brackets", b"[" * 200_000
    yield "deep objects", b'{"model":' * 100_000
    yield "no UTF-8", b"\xff\xfe" + text
    yield "half a surrogate", text.replace(b'"abc"', b'"\\ud800"')
    yield "NaN", text.replace(b'"dropout"', b"NaN").replace(b"257", b"NaN")
    yield "a key twice", text.replace(b'"version"', b'"model": 1, "version"', 1)
    for cut in (1, len(text) // 2, len(text) - 1):
        yield f"cut at {cut}", text[:cut]
    for i in range(4):
        damaged = bytearray(text)
        for _ in range(3):
            damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
        yield f"bits flipped {i}", bytes(damaged)


KEPT = "a unigram model", "a gap of ids", "a normalizer that multiplies by a billion"


def write(folder, text, end=END):
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(text)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    return f"hf:{folder}"


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_every_hostile_file_loads_or_is_one_line(tmp_path, monkeypatch, every):
    """With lower limits than a user's, for the sake of time; an ordinary file needs a tenth of them."""
    files = list(hostile())
    files = [file for i, file in enumerate(files) if i % every == 0 or file[0] in KEPT]
    limits = "import minitron.interop.tokenizers as t\nt.TRIAL_SECONDS, t.TRIAL_BYTES = 5, 1 << 29"
    monkeypatch.setattr(tokenizers, "TRIAL", tokenizers.TRIAL.replace("\nfrom", f"\n{limits}\nfrom"))

    def load(numbered):
        number, (name, text) = numbered
        try:
            tokenizer = load_tokenizer(write(tmp_path / f"{number}", text))
            tokenizer.decode(tokenizer.encode("A text of the user's."))
        except ValueError as error:
            assert "\n" not in str(error) and str(tmp_path / f"{number}") in str(error), (name, str(error))
            return name, str(error)
        return name, None

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(load, enumerate(files)))
    lines = {name: line for name, line in answers if line is not None}
    loads = [name for name, line in answers if line is None]
    assert len(loads) + len(lines) >= 60 // every and "a unigram model" in loads and "a gap of ids" in loads
    assert any("SIG" in line for line in lines.values())  # what would have ended the run
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10 <= TRIAL_BYTES


def test_a_success_is_remembered_by_the_content(tmp_path, monkeypatch):
    spec, cache, trials = write(tmp_path / "t", json.dumps(ordinary()).encode()), Cache(tmp_path / "cache"), []
    real = tokenizers._try
    monkeypatch.setattr(tokenizers, "_try", lambda *given: trials.append(1) or real(*given))
    for _ in range(2):
        load_tokenizer(spec, cache=cache)
    assert len(trials) == 1
    load_tokenizer(spec, cache=Cache(tmp_path / "other", first_on_node=False))  # another process of the node has tried
    assert len(trials) == 1
    load_tokenizer(spec)
    assert len(trials) == 2
    write(tmp_path / "t", json.dumps(ordinary() | {"normalizer": {"type": "NFC"}}).encode())
    load_tokenizer(spec, cache=cache)
    write(tmp_path / "t", json.dumps(ordinary() | {"normalizer": {"type": "NFC"}}).encode(), end="abc")
    load_tokenizer(spec, cache=cache)
    assert len(trials) == 4
    write(tmp_path / "t", b"{")
    for _ in range(2):  # a failure is not
        with pytest.raises(ValueError, match="no tokenizer.json that can be read"):
            load_tokenizer(spec, cache=cache)
    assert len(trials) == 6


def test_a_trial_loads_no_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizers, "TRIAL", tokenizers.TRIAL + "\nsys.exit('torch' if 'torch' in sys.modules else 0)")
    load_tokenizer(write(tmp_path / "t", json.dumps(ordinary()).encode()))


def test_what_libraries_reserve_is_no_part_of_a_trials_memory(tmp_path, monkeypatch):
    """numpy's OpenBLAS reserves memory for each core: on 64 of them no tokenizer loaded."""
    reserve = f"import mmap\nreserved = mmap.mmap(-1, {TRIAL_BYTES})\n"
    monkeypatch.setattr(tokenizers, "TRIAL", reserve + tokenizers.TRIAL)
    assert load_tokenizer(write(tmp_path / "t", json.dumps(ordinary()).encode())).eod == 258


@pytest.mark.parametrize(
    "harm, how",
    [("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"), ("import os; os._exit(3)", "status 3")],
)
def test_the_line_says_how_the_trial_ended(tmp_path, monkeypatch, harm, how):
    monkeypatch.setattr(tokenizers, "TRIAL", harm)
    with pytest.raises(ValueError, match=f"t/tokenizer.json: .*60 s and 2048 MiB.*{how}"):
        load_tokenizer(write(tmp_path / "t", json.dumps(ordinary()).encode()))


def test_time_is_bounded_also_if_the_parent_has_died(tmp_path, monkeypatch):
    """By a limit of the process itself, in seconds of CPU: a busy machine fails no trial."""
    harm = "import minitron.interop.tokenizers as t\nt.TRIAL_SECONDS, t.HfTokenizer = 1, lambda *_: list(iter(int, 1))"
    slow = tokenizers.TRIAL.replace("\nfrom", f"\n{harm}\nfrom")
    monkeypatch.setattr(tokenizers, "TRIAL", slow)
    with pytest.raises(ValueError, match="ended with SIGXCPU"):
        load_tokenizer(write(tmp_path / "t", json.dumps(ordinary()).encode()))


class Panic(BaseException):
    pass


Panic.__name__ = "PanicException"  # as pyo3's, which no module exports


@pytest.mark.parametrize("error, kind", [(Panic("unwrap on None\nagain"), ValueError), (KeyboardInterrupt(), None)])
def test_a_panic_at_a_strange_text_is_one_line(tmp_path, error, kind):
    class Library:
        encode_special_tokens = False

        def encode(self, *_, **__):
            raise error

        decode = encode

    tokenizer = load_tokenizer(write(tmp_path / "t", json.dumps(ordinary()).encode()))
    tokenizer._library = Library()
    for use in (lambda: tokenizer.encode("x"), lambda: tokenizer.decode([1])):
        with pytest.raises(kind or type(error)) as raised:
            use()
        assert kind is None or "t/tokenizer.json" in str(raised.value) and "\n" not in str(raised.value)


def test_preprocessing_names_the_tokenizer(tmp_path):
    """The advice to use fewer workers is for memory alone: the tokenizer is tried before they start."""
    spec = write(tmp_path / "t", dict(hostile())["a normalizer that multiplies by a billion"])
    (tmp_path / "x.jsonl").write_text('{"text": "aaaa"}\n')
    command = [sys.executable, "tools/preprocess_data.py", "--input", str(tmp_path / "x.jsonl"), "--tokenizer", spec]
    command += ["--output-prefix", str(tmp_path / "out"), "--workers", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "t/tokenizer.json" in done.stderr and "--workers" not in done.stderr
