"""The corpus: lossless, recorded, and built once however many ask for it."""

import io
import json
import math
import os
import platform
import random
import subprocess
import sys
import time
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minitron.config.schema import DataConfig
from minitron.data import corpus
from minitron.data.build import build_datasets
from minitron.data.cache import Cache
from minitron.data.corpus import build_corpus, build_docstrings, explained
from minitron.data.indexed import IndexedDataset

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 400
WORDS = ["".join(random.Random(i).choices("abcdefgh_", k=1 + i % 9)) for i in range(300)]
SOURCES = {
    f"package/module_{i}.py": "".join(
        f"def {WORDS[k]}({WORDS[-k]}):\n    return {WORDS[-k]} + {k}  # \u00e9\n\n" for k in range(20 * i, 20 * i + 20)
    )
    for i in range(12)
}


def make_library(root, sources=SOURCES):
    for name, text in sources.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return root


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    library = make_library(
        folder / "lib",
        SOURCES
        | {
            "latin.py": "# caf\u00e9\n".encode("latin-1"),
            "package/__init__.py": "",
            "notes.txt": "not Python",
            **{
                f"{folder}/x.py": "left = 'out'\n" for folder in ("test", "package/tests", "a/idle_test", "__pycache__")
            },
            **{f"{folder}/a/x.py": "left = 'out'\n" for folder in ("site-packages", "package/dist-packages")},
        },
    )
    return build_corpus(Cache(folder / "cache"), VOCAB, library)


def test_documents_are_the_files_in_a_fixed_shuffled_order(small):
    dataset = IndexedDataset(small.prefix)
    texts = []
    for i in range(len(dataset)):
        *ids, last = dataset.get(i).tolist()
        assert last == small.tokenizer.eod
        texts.append(small.tokenizer.decode(ids))
    assert texts == [SOURCES[name] for name in sorted(SOURCES, key=lambda name: sha256(name.encode()).digest())]
    assert texts != list(SOURCES.values())


def test_the_tokenizer_is_trained_on_every_character(tmp_path, monkeypatch):
    """Each source has some 950 characters, and is cut into pieces of 300."""
    monkeypatch.setattr(corpus, "TRAINING_PIECE", 300)
    built, model = build_corpus(Cache(tmp_path / "cache"), VOCAB, make_library(tmp_path / "lib")), io.BytesIO()
    texts = [SOURCES[name] for name in sorted(SOURCES, key=lambda name: sha256(name.encode()).digest())]
    pieces = [text[i : i + 300] for text in texts for i in range(0, len(text), 300)]
    assert "".join(pieces) == "".join(texts) and len(pieces) > 3 * len(texts)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(pieces), model_writer=model, vocab_size=VOCAB, minloglevel=2, **corpus.TRAINER
    )
    assert (Path(built.prefix).parent / "tokenizer.model").read_bytes() == model.getvalue()


def test_meta_says_what_the_corpus_is(small):
    dataset = IndexedDataset(small.prefix)
    counts = Counter(i for sequence in range(len(dataset)) for i in dataset.get(sequence).tolist())
    total = sum(counts.values())
    entropy = -sum(count / total * math.log(count / total) for count in counts.values())
    assert small.meta["python"] == platform.python_version() and small.meta["skipped"] == ["latin.py"]
    assert small.meta["files"] == len(SOURCES) and small.meta["bytes"] == len("".join(SOURCES.values()).encode())
    assert small.meta["tokens"] == total and small.meta["vocab_size"] == VOCAB
    assert small.meta["unigram_entropy"] == pytest.approx(entropy, rel=1e-12)  # both sum in float64
    folder = Path(small.prefix).parent.name
    assert folder.startswith(f"corpus-{platform.python_version()}-{small.meta['fingerprint']}-v{VOCAB}-")
    assert json.loads((Path(small.prefix).parent / "meta.json").read_text()) == small.meta


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(
        st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \t\r\n\u2581\x00def")), max_size=40
    )
)
@example(text="  leading, trailing  \r\n\r\n\t\n")
@example(text="\u2581 \u2581\u2581")
@example(text="<unk></s><0x41>")
def test_the_tokenizer_loses_nothing(small, text):
    ids = small.tokenizer.encode(text)
    assert small.tokenizer.decode(ids) == text
    assert all(0 <= i < VOCAB and i != small.tokenizer.eod for i in ids)


def test_a_changed_source_is_another_corpus(small, tmp_path):
    changed = make_library(tmp_path / "lib", SOURCES | {"package/module_3.py": "other = 1\n" * 50})
    assert build_corpus(Cache(tmp_path), VOCAB, changed).meta["fingerprint"] != small.meta["fingerprint"]


@pytest.mark.parametrize("change", ["content", "name", "vocabulary", "training"])
def test_a_cached_corpus_is_that_of_its_sources_and_of_the_way_it_was_made(tmp_path, monkeypatch, change):
    """A changed letter leaves all names and lengths as they were."""
    library, source = make_library(tmp_path / "lib", SOURCES | {"one.py": EXPLAINED}), tmp_path / "lib" / "one.py"
    old_corpus, old_pairs = made(tmp_path / "cache", VOCAB, library)
    vocab_size = VOCAB - 10 if change == "vocabulary" else VOCAB
    if change == "content":
        source.write_text(EXPLAINED.replace("sum", "max"))
    elif change == "name":
        source.rename(library / "two.py")  # its hash has the same place among the others': the corpus stays as it is
    elif change == "training":
        monkeypatch.setitem(corpus.TRAINER, "split_digits", False)
    new_corpus, new_pairs = made(tmp_path / "cache", vocab_size, library)
    assert (new_corpus, new_pairs) == made(tmp_path / "another", vocab_size, library)
    changed = new_corpus != old_corpus, new_pairs != old_pairs
    assert changed == (change != "name", change in ("content", "name"))


EXPLAINED = (
    "def total(numbers):\n" + '    """Return the sum of the numbers."""\n    return numbers\n\n' + "total = sum\n" * 9
)


def test_sources_that_a_newer_python_warns_of_are_read_all_the_same(recwarn):
    source = EXPLAINED.replace("return numbers", "return r'' + '\\d'")
    assert list(explained("one.py", source.encode())) == [("one.total(numbers)", "Return the sum of the numbers.")]
    assert not recwarn.list


def made(folder, vocab_size, library):
    """The model of the corpus, its tokens in their order, and the pairs; from this cache or made for it."""
    built = build_corpus(Cache(folder), vocab_size, library)
    tokens = [IndexedDataset(built.prefix).get(i).tolist() for i in range(built.meta["files"])]
    model = (Path(built.prefix).parent / "tokenizer.model").read_bytes()
    return (model, tokens), build_docstrings(Cache(folder), library).read_text()


@pytest.mark.parametrize(
    "sources, message",
    [
        ({"notes.txt": "no Python"}, r"no \.py sources in .*lib.*data\.source=indexed"),
        ({"empty.py": ""}, r"no \.py sources in"),
        ({"latin.py": b"\xe9"}, "none of 1 sources is UTF-8 text"),
        ({"tiny.py": "x = 1\n"}, r"6 characters of source do not give model\.vocab_size=400 pieces"),
    ],
)
def test_an_empty_corpus_is_an_error_and_leaves_nothing(tmp_path, sources, message):
    library = make_library(tmp_path / "lib", sources)
    with pytest.raises(ValueError, match=message):
        build_corpus(Cache(tmp_path / "cache"), VOCAB, library)
    assert not [path for path in (tmp_path / "cache").glob("corpus*") if path.is_dir()]


@pytest.mark.parametrize("name", ["meta.json", "tokenizer.model", "corpus.bin", "corpus.idx"])
def test_a_damaged_cache_names_the_folder_to_delete(tmp_path, name):
    library = make_library(tmp_path / "lib")
    folder = Path(build_corpus(Cache(tmp_path), VOCAB, library).prefix).parent
    content = (folder / name).read_bytes()
    for damaged in (content[: len(content) // 2], None):
        (folder / name).write_bytes(damaged) if damaged else (folder / name).unlink()
        with pytest.raises(ValueError, match=rf"^{folder}: this folder of data.cache_dir is damaged .*; delete it"):
            build_corpus(Cache(tmp_path), VOCAB, library)


RACE = """
import sys
from minitron.data import corpus
from minitron.data.cache import Cache
folder = sys.argv[1]
build = corpus._build
def logged_build(*arguments):
    with open(f"{folder}/builds", "a") as log:
        log.write("built\\n")
    build(*arguments)
corpus._build = logged_build
print("ready", flush=True)
sys.stdin.readline()
print(corpus.build_corpus(Cache(f"{folder}/cache"), 400, f"{folder}/lib").meta)
"""


def test_processes_at_once_build_once_and_agree(tmp_path):
    make_library(tmp_path / "lib")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(tmp_path)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(4)
    ]
    assert [rank.stdout.readline() for rank in ranks] == ["ready\n"] * 4
    for rank in ranks:
        rank.stdin.write("\n")
        rank.stdin.flush()
    outputs = {rank.communicate(timeout=600)[0] for rank in ranks}
    assert len(outputs) == 1 and outputs != {""} and all(rank.returncode == 0 for rank in ranks)
    assert (tmp_path / "builds").read_text() == "built\n"


def test_the_standard_library_is_a_corpus_within_40_seconds(tmp_path):
    begin = time.process_time()
    built = build_datasets(
        DataConfig(cache_dir=str(tmp_path)), vocab_size=4096, seq_len=256, seed=1, train_samples=1000, valid_samples=10
    )
    assert time.process_time() - begin < 40  # of one core, also on a busy machine
    assert 4 < built.info["unigram_entropy"] < math.log(4096) and built.info["python"] == platform.python_version()
    assert built.info["tokenizer"] == built.tokenizer.fingerprint and built.info["fingerprint"]
    assert (built.info["train_samples"], built.info["valid_samples"]) == (1000, 10)
    text = built.tokenizer.decode([i for n in range(50) for i in built.train[n].tokens.tolist()])
    assert "def " in text and "\n    " in text
