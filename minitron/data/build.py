"""Build the training and the validation set from the keys of `data`. All other code builds data through this file.

    source    made of                                                        tokenizer
    corpus    the Python standard library (corpus.py)                        its own
    indexed   .bin/.idx files, one or a weighted blend (indexed.py)          data.tokenizer, checked with PREFIX.json
    sft       rows of prompts and answers, packed; one set of files or a     data.tokenizer, or the corpus's
              weighted blend (sft.py, packing.py)
    mock      random ids (mock.py)                                           none

Every rank calls `build_datasets` with the same arguments, and one of them builds the indices (cache.py). A split cuts
the sequences, in file order, at its cumulative shares: 790 sequences at "7,3,1" give 0 to 503 for training, 503 to 718
for validation and the rest for tests.

Defects of the data are found here, before a model exists: a missing or foreign file, a split that leaves nothing, a
zero weight, a tokenizer that did not make the data, an id beyond the vocabulary. One rank reads an index and a .bin of
at most 1 GiB in full, once per vocabulary, and again when a file was written or replaced; the cache keeps the result.
Of a larger .bin the first million tokens are read at the start, the others when they are drawn. tools/check_data.py
reads it in full before a run.

Left out: separate files for validation, except for sft; the test split is only set aside.
"""

import itertools
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from minitron.config.schema import DataConfig
from minitron.config.sizes import MOCK_DOCUMENT
from minitron.config.text import NUMBER
from minitron.data.blend import BlendedDataset, normalize, part_samples
from minitron.data.cache import Cache
from minitron.data.corpus import build_corpus, build_docstrings
from minitron.data.gpt import GPTDataset, scan_ids
from minitron.data.indexed import IndexedDataset, check_index, read_sidecar
from minitron.data.mock import MockDataset
from minitron.data.sft import SFTDataset, TokenizedFiles
from minitron.data.tokenizers import Readers, Tokenizer

SCAN_BYTES = 1 << 30  # the largest .bin that is read in full before training
PEEK_TOKENS = 1 << 20  # read from a larger one
MAX_SAMPLES = 1 << 32  # 20 bytes of memory each
TRAIN, VALID = 0, 1  # positions in a split

Dataset = GPTDataset | BlendedDataset | SFTDataset | MockDataset


class Datasets(NamedTuple):
    """What `build_datasets` returns.

    train, valid: `len()` and `[i] -> gpt.Sample`; valid is None when no validation samples are asked for.
    tokenizer: None for mock data, and for indexed data when data.tokenizer is left at "corpus".
    info: a record, for JSON, of what was built; `train` and `valid` identify the order of samples, `tokenizer` is the
    tokenizer's fingerprint, and the corpus adds `unigram_entropy`, in nats per token.
    note: a line for the log that describes how well documents were packed; empty if none were.
    """

    train: Dataset
    valid: Dataset | None
    tokenizer: Tokenizer | None
    info: dict[str, Any]
    note: str = ""


def build_datasets(
    data: DataConfig,
    *,
    vocab_size: int,
    seq_len: int,
    seed: int,
    train_samples: int | Callable[[int], int],
    valid_samples: int,
    first_on_node: bool = True,
    readers: Readers = Readers(),
) -> Datasets:
    """Build or find the datasets; safe to call on every rank at once.

    train_samples, valid_samples: how many samples the run may draw. The datasets hold at least these, in an order that
    depends on the numbers. For sft train_samples may compute its number from the samples of an epoch. vocab_size: ids
    must be below it.
    first_on_node: False for a rank that calls after the first rank of its node has returned. That one has built what
    was missing and checked the cache's checksums.
    readers: open data.tokenizer, unless that is "corpus", and read the files of sft.
    Raises ValueError for everything that the module docstring lists.
    """
    open_source = {"mock": _mock, "sft": _sft}.get(data.source, _token_files)
    cache = Cache(os.path.expanduser(data.cache_dir), first_on_node)
    tokenizer, info, dataset, epoch = open_source(data, readers, cache, vocab_size, seq_len, seed)
    count = train_samples if isinstance(train_samples, int) else train_samples(epoch)
    if count < 1:
        raise ValueError(f"{count} training samples were asked for; set train.steps to 1 or more")
    if (most := max(count, valid_samples)) > MAX_SAMPLES:
        why = f"{most} samples are more than the {MAX_SAMPLES} of which an order can be laid out"
        raise ValueError(f"{why}; lower train.steps, train.eval_steps or train.global_batch_size")
    train, valid = dataset(TRAIN, count), dataset(VALID, valid_samples) if valid_samples else None
    if data.source in ("corpus", "indexed"):  # the order of others does not depend on how many samples there are
        info |= {"train_samples": count, "valid_samples": valid_samples}
    info |= {"tokenizer": tokenizer and tokenizer.fingerprint}
    info |= {"train": train.fingerprint, "valid": valid and valid.fingerprint}
    parts = train.parts if isinstance(train, BlendedDataset) else [train]
    note = " | ".join(part.note for part in parts if isinstance(part, SFTDataset))
    return Datasets(train, valid, tokenizer, info, note)


# A source returns the tokenizer, the beginning of `info`, (part of the split, samples) -> dataset, and for sft the
# training samples of an epoch, else 0.
Source = tuple[Tokenizer | None, dict[str, Any], Callable[[int, int], Dataset], int]


def _mock(data: DataConfig, readers: Readers, cache: Cache, vocab_size: int, seq_len: int, seed: int) -> Source:
    """Make random data, with another seed for validation.

    Without data.document_length a document has a quarter of a sample on average, so that separate_documents has work.
    """
    longest = data.document_length
    mean = max(1, MOCK_DOCUMENT * seq_len) if longest is None else None

    def dataset(which: int, samples: int) -> MockDataset:
        return MockDataset(vocab_size, seq_len, samples, seed + which, mean, longest)

    return None, {"source": "mock"}, dataset, 0


def _token_files(data: DataConfig, readers: Readers, cache: Cache, vocab_size: int, seq_len: int, seed: int) -> Source:
    """Open the corpus, one file or a blend of several, and check all files."""
    tokenizer: Tokenizer | None
    weights: list[float] | None = None
    info: dict[str, Any] = {"source": data.source, "split": data.split, "seq_len": seq_len, "seed": seed}
    if data.source == "corpus":
        if data.tokenizer != "corpus":
            why = f"data.tokenizer={data.tokenizer} cannot read data.source=corpus, which has its own"
            fix = "set data.tokenizer=corpus, or preprocess your own text and set data.source=indexed"
            raise ValueError(f"{why}; {fix}")
        corpus = build_corpus(cache, vocab_size)
        prefixes, tokenizer = [corpus.prefix], corpus.tokenizer
        info |= {key: corpus.meta[key] for key in ("python", "fingerprint", "unigram_entropy")}
    else:
        prefixes, weights = parse_paths(data.paths)
        tokenizer = None if data.tokenizer == "corpus" else readers.tokenizer(data.tokenizer, cache=cache)
    files = [_open(prefix, data.tokenizer, tokenizer, vocab_size, cache) for prefix in prefixes]
    info |= {"weights": weights, "data": [file.fingerprint for file in files]}
    info |= {"tokens": [file.num_tokens for file in files]}

    def dataset(which: int, samples: int) -> GPTDataset | BlendedDataset:
        wanted = [samples] if weights is None else [part_samples(samples, share) for share in normalize(weights)]
        parts = [
            GPTDataset(file, split_part(file, data.split, which), count, seq_len, seed, cache, vocab_size)
            for file, count in zip(files, wanted, strict=True)
        ]
        return parts[0] if weights is None else BlendedDataset(parts, weights, samples, cache)

    return tokenizer, info, dataset, 0


def _sft(data: DataConfig, readers: Readers, cache: Cache, vocab_size: int, seq_len: int, seed: int) -> Source:
    """Tokenize and pack files of questions and answers."""
    if data.tokenizer == "corpus":
        tokenizer: Tokenizer = build_corpus(cache, vocab_size).tokenizer
    else:
        tokenizer = readers.tokenizer(data.tokenizer, cache=cache)
    check_vocabulary(tokenizer.vocab_size, f"data.tokenizer={data.tokenizer}", vocab_size)
    choices, too_long = (data.special_tokens_in_text, data.bad_lines == "skip"), data.too_long
    split, valid_paths = data.split, data.valid_paths

    def read(paths: Sequence[str]) -> tuple[list[TokenizedFiles], list[float] | None]:
        files, weights = parse_paths(paths, grouped=True)
        files = [str(build_docstrings(cache)) if path == "docstrings" else path for path in files]
        groups = [files] if weights is None else [[path] for path in files]
        return [TokenizedFiles(group, tokenizer, cache, readers, *choices) for group in groups], weights

    def pack(files: list[TokenizedFiles], which: int) -> list[SFTDataset]:
        parts = [range(len(file)) if valid_paths else split_part(file, split, which) for file in files]
        return [SFTDataset(file, part, seq_len, seed, too_long) for file, part in zip(files, parts)]

    files, weights = read(data.paths)
    train = pack(files, TRAIN)

    def dataset(which: int, samples: int) -> SFTDataset | BlendedDataset:
        made, shares = train, weights
        if which == VALID:
            others, shares = read(valid_paths) if valid_paths else (files, weights)
            made = pack(others, VALID)
        if shares is None:
            return made[0].of_length(samples)
        sized = [part.of_length(part_samples(samples, w)) for part, w in zip(made, normalize(shares))]
        return BlendedDataset(sized, shares, samples, cache)

    return tokenizer, {"source": "sft"}, dataset, sum(part.packing.num_sequences for part in train)


def parse_paths(paths: Sequence[str], grouped: bool = False) -> tuple[list[str], list[float] | None]:
    """Split data.paths, one prefix or weight and prefix in turn, into prefixes and weights (None for one bare prefix).

    `~` at the start of a prefix is the home directory. grouped: several without weights are one set of files, of sft.
    """
    paths = [os.path.expanduser(str(path)) for path in paths]
    if len(paths) == 1 or grouped and not any(re.fullmatch(NUMBER, path) for path in paths):
        return paths, None
    rule = "give one prefix, or weight and prefix in turn, as in [0.7, web_text_document, 0.3, code_text_document]"
    if not paths or len(paths) % 2:
        raise ValueError(f"data.paths={paths} has {len(paths)} entries; {rule}")
    if words := [weight for weight in paths[::2] if not re.fullmatch(NUMBER, weight)]:
        raise ValueError(f"data.paths={paths}: {words[0]} is not a weight; {rule}")
    weights = [float(weight) for weight in paths[::2]]
    normalize(weights)
    return paths[1::2], weights


def split_ranges(split: str, num_sequences: int) -> list[range]:
    """Return the sequences of the training, validation and test parts of a split such as "969,30,1"."""
    try:
        parts = [float(part) for part in split.split(",")]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or not all(0 <= part < float("inf") for part in parts) or sum(parts) == 0:
        raise ValueError(f"data.split={split!r} is not up to three shares of at least 0, as in 969,30,1; correct it")
    shares = np.array(parts + [0.0] * (3 - len(parts)))
    totals = itertools.accumulate((shares / np.sum(shares)).tolist())  # as Megatron adds: round() sees the last bit
    ends = [0, *(round(total * float(num_sequences)) for total in totals)]
    return [range(begin, end) for begin, end in itertools.pairwise(ends)]


def split_part(file: IndexedDataset | TokenizedFiles, split: str, which: int) -> range:
    """Return the sequences of TRAIN or VALID. Raises ValueError if there are none."""
    parts = split_ranges(split, len(file))
    if not len(parts[which]):
        counts = [len(part) for part in parts]
        counts[max(range(3), key=lambda part: (counts[part], part))] -= 1  # the largest part gives one
        counts[which] += 1
        why = f"data.split={split} leaves none of the {len(file)} sequences of {file.prefix}"
        fix = f"set for example data.split={','.join(map(str, counts))}"
        fix = fix if counts[TRAIN] else "give more documents, or set train.eval_every=0"
        raise ValueError(f"{why} to {'train' if which == TRAIN else 'validate'} on; {fix}")
    return parts[which]


def _open(prefix: str, spec: str, tokenizer: Tokenizer | None, vocab_size: int, cache: Cache) -> IndexedDataset:
    """Open a dataset; check its index, its ids and, by PREFIX.json, that this tokenizer made it."""
    file = IndexedDataset(prefix)
    check_maker(prefix, spec, tokenizer, vocab_size)
    read = partial(check_tokens, file, vocab_size)
    return IndexedDataset(prefix, cache.recall(f"tokens-{file.state}-v{vocab_size}", read))


def check_tokens(file: IndexedDataset, vocab_size: int) -> str:
    """Read an index, and the .bin or its beginning, as before training. Returns the fingerprint. Raises ValueError."""
    check_index(file)
    scan_ids(file, vocab_size, count=PEEK_TOKENS if file.num_bin_bytes > SCAN_BYTES else None)
    return file.fingerprint


def check_maker(prefix: str, spec: str, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """Raise ValueError if PREFIX.json names another tokenizer, or if ids of the dataset exceed the vocabulary."""
    sidecar = read_sidecar(prefix)
    if sidecar is not None:
        made_by, fingerprint = sidecar["tokenizer"], sidecar["fingerprint"]
        if made_by != "corpus" if tokenizer is None else fingerprint != tokenizer.fingerprint:
            named = f"{prefix}.json names {made_by} with fingerprint {fingerprint}"
            raise ValueError(f"data.tokenizer={spec} did not make {prefix}: {named}; set data.tokenizer to that")
    needed = max(tokenizer.vocab_size if tokenizer else 0, sidecar["vocab_size"] if sidecar else 0)
    check_vocabulary(needed, f"the tokenizer of {prefix}", vocab_size)


def check_vocabulary(needed: int, whose: str, vocab_size: int) -> None:
    if needed > vocab_size:
        why = f"model.vocab_size={vocab_size} is smaller than the {needed} ids of {whose}"
        fix = "or name another tokenizer, since weights that exist have their size"
        raise ValueError(f"{why}; set model.vocab_size={needed}, {fix}")
