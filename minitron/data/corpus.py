"""A corpus of real text that every machine has: the sources of the Python standard library.

A first run must need no download. The .py files of the running Python (about 12 MB) are text written by people, with
structure at every scale, and a small model learns them fast. Once per cache directory, `build_corpus` does:

    read every .py     -> shuffle the files -> train a SentencePiece BPE -> encode -> corpus.bin/.idx, meta.json
    skip undecodable      by hash of name      of `vocab_size` pieces       + </s>

The files are ordered by the hash of their names: the validation split is a random choice of files, not the last ones of
the alphabet, and a new file leaves the others in their order. The tokenizer loses nothing: decode(encode(text)) ==
text, white space and line ends included (identity normalization, no dummy prefix, unknown characters as their bytes).

`meta.json` holds the Python version, the fingerprint of the sources, counts, and the unigram entropy -sum p ln p in
nats per token: the loss of a model that predicts each token by its frequency alone. A lower loss shows that a model has
learned from context.

A first fine-tuning needs no download either: some thousand functions of these sources have a docstring that begins with
a sentence. A small pretrained model soon learns to write that sentence. `build_docstrings` keeps the pairs as JSONL,
read from there like any other file (sft.py):

    {"prompt": "Explain random.Random.shuffle(self, x):", "completion": " Shuffle list x in place, and return None."}

Left out: site-packages, and test directories, which many distributions do not install: machines should agree. Of
docstrings: private functions, and first lines that end in the middle of a sentence.
"""

import ast
import hashlib
import io
import json
import os
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sentencepiece

from minitron.config.files import write_json
from minitron.data.cache import Cache, fingerprint_of, reading
from minitron.data.indexed import IndexedDataset, IndexedWriter, best_dtype
from minitron.data.tokenizers import SentencePieceTokenizer

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
TRAINING_PIECE = 1000  # characters of a training sentence; SentencePiece drops sentences beyond 4192 bytes
SPACE_MARK = "\u2581"  # SentencePiece's own sign for a space
OTHER_DATA = "use another Python, or data.source=indexed with your own data"
# Text is not altered before it is cut; every text can be encoded; numbers of the special pieces.
UNCHANGED = dict(normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False)
PIECES = dict(byte_fallback=True, allow_whitespace_only_pieces=True, split_digits=True)
IDS = dict(unk_id=0, eos_id=1, bos_id=-1, pad_id=-1)
TRAINER: dict[str, Any] = dict(model_type="bpe", num_threads=1) | UNCHANGED | PIECES | IDS


class Corpus(NamedTuple):
    """prefix: that of the .bin/.idx pair. meta: the contents of meta.json."""

    prefix: str
    tokenizer: "CorpusTokenizer"
    meta: dict[str, Any]


class CorpusTokenizer(SentencePieceTokenizer):
    """The corpus's model, lossless for every text.

    SentencePiece writes a space as U+2581 and so would read that character back as a space; here it is encoded as its
    three bytes.
    """

    def _encode(self, text: str) -> list[int]:
        mark = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        first, *others = [self._model.encode(piece) for piece in text.split(SPACE_MARK)]
        return first + [i for ids in others for i in mark + ids]


def build_corpus(cache: Cache, vocab_size: int, root: str | os.PathLike[str] | None = None) -> Corpus:
    """Build the corpus in the cache, or find it there; safe to call from any number of processes at once.

    root: the folder of sources, by default this Python's standard library.
    Raises ValueError when there is no source, or too little text for `vocab_size` pieces.
    """
    sources = read_sources(root)
    fingerprint = fingerprint_of(repr(sorted(TRAINER.items())).encode(), *contents(sources))
    name = f"corpus-{platform.python_version()}-{fingerprint}-v{vocab_size}-p{TRAINING_PIECE}"
    folder = cache.build_once(name, lambda partial: _build(partial, sources, vocab_size, fingerprint))
    with reading(folder):
        tokenizer = CorpusTokenizer((folder / "tokenizer.model").read_bytes(), f"{folder}/tokenizer.model")
        return Corpus(str(folder / "corpus"), tokenizer, json.loads((folder / "meta.json").read_text()))


def read_sources(root: str | os.PathLike[str] | None = None) -> list[tuple[str, bytes]]:
    """Read every non-empty .py file below root: (relative name, content), ordered by the hash of the name.

    root: by default this Python's standard library. Raises ValueError when there is none.
    """
    root = Path(sysconfig.get_paths()["stdlib"] if root is None else root)
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        names += [(Path(folder) / name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    names.sort(key=lambda name: hashlib.sha256(name.encode(errors="surrogateescape")).digest())
    sources = [(name, content) for name in names if (content := (root / name).read_bytes())]
    if not sources:
        why = f"no .py sources in {root} (this Python was installed without them)"
        raise ValueError(f"data.source=corpus: {why}; {OTHER_DATA}")
    return sources


def contents(sources: list[tuple[str, bytes]]) -> Iterator[bytes]:
    """Yield the name and the text of every source, for a fingerprint."""
    for name, content in sources:
        yield f"{name}\n{len(content)}\n".encode() + content


def _build(folder: Path, sources: list[tuple[str, bytes]], vocab_size: int, fingerprint: str) -> None:
    """Write corpus.bin/.idx/.json, tokenizer.model and meta.json into `folder`."""
    texts, skipped = [], []
    for name, content in sources:
        try:
            texts.append(content.decode())
        except UnicodeDecodeError:
            skipped.append(name)
    if not texts:
        raise ValueError(f"data.source=corpus: none of {len(skipped)} sources is UTF-8 text; {OTHER_DATA}")
    model = _train(texts, vocab_size)
    (folder / "tokenizer.model").write_bytes(model)
    tokenizer = CorpusTokenizer(model, "the corpus tokenizer")
    sidecar = {"tokenizer": "corpus", "fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size}
    with IndexedWriter(folder / "corpus", best_dtype(vocab_size), sidecar) as writer:
        for text in texts:
            writer.add_document(np.array(tokenizer.encode(text) + [tokenizer.eod]))
    tokens = IndexedDataset(folder / "corpus")
    meta = {"python": platform.python_version(), "fingerprint": fingerprint, "files": len(texts)}
    meta |= {"bytes": sum(len(text.encode()) for text in texts), "tokens": tokens.num_tokens, "vocab_size": vocab_size}
    meta |= {"skipped": skipped, "unigram_entropy": unigram_entropy(tokens)}
    write_json(folder / "meta.json", meta)


def _train(texts: list[str], vocab_size: int) -> bytes:
    """Train the BPE on all texts, cut into pieces; returns the model file's bytes."""
    model = io.BytesIO()
    pieces = (text[begin : begin + TRAINING_PIECE] for text in texts for begin in range(0, len(text), TRAINING_PIECE))
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=pieces, model_writer=model, vocab_size=vocab_size, minloglevel=2, **TRAINER
        )
    except RuntimeError as error:
        characters, why = sum(map(len, texts)), " ".join(str(error).split())
        lacks = f"{characters} characters of source do not give model.vocab_size={vocab_size} pieces ({why})"
        raise ValueError(f"data.source=corpus: {lacks}; model.vocab_size=4096 suits the whole library") from error
    return model.getvalue()


def unigram_entropy(dataset: IndexedDataset) -> float:
    """Compute -sum p ln p over the token frequencies of a dataset, in nats per token."""
    counts = np.bincount(dataset.tokens(0, dataset.num_tokens))
    frequency = counts[counts > 0] / counts.sum()
    return float(-(frequency * np.log(frequency)).sum())


# ---- instructions ---------------------------------------------------------------------------------------------------


def build_docstrings(cache: Cache, root: str | os.PathLike[str] | None = None) -> Path:
    """Return the JSONL file of pairs, built once; safe to call from any number of processes at once.

    root: the folder of sources, by default this Python's standard library. Raises ValueError when there is no source.
    """
    sources = read_sources(root)
    made_by = Path(__file__).read_bytes()  # another form of the pairs is another file
    fingerprint = fingerprint_of(made_by, *contents(sources))
    name = f"docstrings-{platform.python_version()}-{fingerprint}"
    return cache.build_once(name, lambda folder: _write_pairs(folder, sources)) / "docstrings.jsonl"


def _write_pairs(folder: Path, sources: list[tuple[str, bytes]]) -> None:
    pairs: dict[str, str] = {}  # the first of equal signatures
    for name, content in sources:
        for signature, sentence in explained(name, content):
            pairs.setdefault(f"Explain {signature}:", f" {sentence}")
    rows = [json.dumps({"prompt": prompt, "completion": completion}) for prompt, completion in pairs.items()]
    (folder / "docstrings.jsonl").write_text("".join(f"{row}\n" for row in rows))


def explained(name: str, content: bytes) -> Iterator[tuple[str, str]]:
    """Yield (signature, first sentence of the docstring) of a module's public functions and methods, top to bottom."""
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    try:
        with warnings.catch_warnings(action="ignore"):  # newer Pythons deprecate some escapes
            tree = ast.parse(content)
    except (SyntaxError, ValueError):  # a template, or a file for another Python
        return

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, str]]:
        for node in body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name[0] != "_":
                if isinstance(node, ast.ClassDef):
                    yield from walk(node.body, f"{prefix}{node.name}.")
                elif (first := (ast.get_docstring(node) or "").split("\n")[0].strip()).endswith("."):
                    yield f"{prefix}{node.name}({ast.unparse(node.args)})", first

    yield from walk(tree.body, f"{module}.")
