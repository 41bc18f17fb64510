"""Tokenizers of published models: every one is a file that the user names.

    spec                file                                                            vocabulary, end of document
    bytes               none: UTF-8 bytes                                               257, the last id
    gpt2:DIR            DIR/encoder.json and DIR/vocab.bpe, as OpenAI published them    50257, <|endoftext|>
                        (or, the same files under transformers' names, vocab.json and merges.txt)
    llama3:FILE         tokenizer.model: lines of "base64 rank" (tiktoken's format)     128256, <|end_of_text|>
    llama2:FILE         tokenizer.model: a SentencePiece model                          32000, </s>
    hf:DIR              DIR/tokenizer.json, and tokenizer_config.json beside it         all ids, its eos_token

Byte-pair encoding in three lines: a regular expression splits the text into words; a word starts as its bytes; the
neighbouring pair whose concatenation has the lowest rank is joined, until no pair has one. So a token's rank is both
its id and its priority, and one table holds both:

    ranks  b"a" 0  b"b" 1  b"ab" 2  b"abab" 3        "abab" -> a b a b -> ab ab -> abab = [3]

The first four kinds read the published files with tiktoken and sentencepiece. `hf:` runs any tokenizer.json by Hugging
Face's own library, the extra `data`. Its ids are those of transformers, except that text that spells a special token
stays text. A damaged or hostile tokenizer.json can abort that library, or let it take all memory: another process tries
it first.

Left out: downloads, a beginning-of-text token in pretraining data; chats (chat.py, chat_template.py).
"""

import base64
import hashlib
import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import tiktoken

from minitron.config.files import errors_as, parse_json, read_bytes
from minitron.config.installed import pip_install
from minitron.data.cache import Cache, fingerprint_of
from minitron.data.tokenizers import SentencePieceTokenizer, Tokenizer
from minitron.interop.chat import Chats
from minitron.interop.chat_template import ChatTemplate, find_templates
from minitron.interop.limits import limit_memory

GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The special tokens of Llama 3.1, which follow the ordinary ones; each - is reserved, and all that come after.
SPECIAL = "begin_of_text end_of_text - - finetune_right_pad_id - start_header_id end_header_id eom_id eot_id python_tag"
NUM_SPECIAL = 256
TOKENIZER_BYTES = 256 << 20
# tiktoken's regex engine overflows its stack in a white-space run of some 500,000; Llama 3's own code cuts here.
MAX_SPACES = 25_000
TRIAL_SECONDS, TRIAL_BYTES = 60, 2 << 30  # CPU time, so that no trial fails on a busy machine; memory
TRIAL_TEXT = f"It isn't 1,234 o'clock,\n\n  she\tsays: Ol\u00e9, \u4eca\u65e5 \U0001f600! \0 <s> {'a' * 40}!"
TRIAL = """import json, sys
sys.path[:], *given = json.loads(sys.argv[1])
from minitron.interop.tokenizers import _load_and_use
_load_and_use(*given)"""


def load_tokenizer(spec: str, key: str = "data.tokenizer", cache: Cache | None = None) -> Tokenizer:
    """Load the tokenizer that a spec of the table above names; `~` in it is the home directory.

    key: the name of the spec in errors. cache: where the success of a trial is kept; without one there is a trial each
    time. If this process is not the cache's first on its node, the first has made the trial.
    Raises ValueError for an unknown kind or a bad file.
    """
    kind, _, path = spec.partition(":")
    if spec == "bytes":
        return ByteTokenizer()
    loaders = {"gpt2": load_gpt2, "llama3": load_llama3, "llama2": load_llama2, "hf": partial(load_hf, cache=cache)}
    if kind not in loaders or not path:
        fix = "name one of them (the tokenizer of data.source=corpus is made with the corpus)"
        if os.path.isfile(os.path.join(os.path.expanduser(spec), "tokenizer.json")):
            fix = f"for its tokenizer.json write hf:{spec}"
        raise ValueError(f"{key}={spec!r} is not one of bytes, gpt2:DIR, llama3:FILE, llama2:FILE, hf:DIR; {fix}")
    return loaders[kind](Path(os.path.expanduser(path)))


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255 and an end of document, 256, which decodes to nothing."""

    vocab_size, eod, bos = 257, 256, None
    special, chat = {}, None
    fingerprint = fingerprint_of(b"bytes")

    def encode(self, text: str, special: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i != self.eod).decode(errors="replace")


class TiktokenTokenizer:
    """Byte-pair encoding by tiktoken. ranks: bytes -> id. special: text -> id. eod: a key of special."""

    chat = None

    def __init__(self, ranks: dict[bytes, int], special: dict[str, int], split: str, eod: str):
        self._encoding = tiktoken.Encoding("minitron", pat_str=split, mergeable_ranks=ranks, special_tokens=special)
        self.ranks, self.split, self.vocab_size = ranks, split, len(ranks) + len(special)
        self.special, self.eod, self.bos = special, special[eod], special.get("<|begin_of_text|>")
        table = repr((split, sorted(ranks.items(), key=lambda item: item[1]), sorted(special.items())))
        self.fingerprint = hashlib.sha256(table.encode()).hexdigest()[:16]

    def encode(self, text: str, special: bool = False) -> list[int]:
        encode = partial(self._encoding.encode, allowed_special="all") if special else self._encoding.encode_ordinary
        with _library("tiktoken", "cannot encode a text", "remove such text"):
            return [i for piece in cut_long_spaces(text) for i in encode(piece)]

    def decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids)


class HfTokenizer:
    """A tokenizer.json, given as its text, run by Hugging Face's library; end: the token that ends documents, as text.

    Text that spells a special token is encoded as text; other added tokens are encoded as tokens. bos: the token that
    the file's own template puts before a text, or `begin` if the folder's settings ask for one.
    chats: the templates and tokens of ChatTemplate.
    """

    def __init__(self, text: bytes, end: str, begin: str | None, name: str, chats: tuple[dict, dict] = ({}, {})):
        try:
            from tokenizers import Tokenizer as Library
        except ImportError as error:
            fix = pip_install("data")
            raise ValueError(f"{name} needs the package tokenizers, which is not installed; {fix}") from error
        self._name, fix = name, "copy the file again, or upgrade the package tokenizers"
        with _library(name, "no tokenizer.json that can be read", fix):
            self._library = Library.from_str(text.decode())
            content = parse_json(text)
            self._library.no_truncation()
            self._library.no_padding()
            added = self._library.get_added_tokens_decoder()
            self.vocab_size = max(self._library.get_vocab().values()) + 1
            self.special = {token.content: i for i, token in added.items() if token.special}
            self.eod, first = self._library.token_to_id(end), self._library.encode("").ids[:1]
        if self.vocab_size > 1 << 31:
            raise ValueError(f"{name}: its ids reach {self.vocab_size - 1}, more than int32 holds; {fix}")
        if self.eod is None:
            raise ValueError(f"{name}: the end of a document, {end!r}, is not one of its tokens; correct eos_token")
        self.bos = self._library.token_to_id(begin) if begin is not None else None
        if self.bos is None and first and first[0] in added and first[0] != self.eod:
            self.bos = first[0]
        self.chat = Chats(ChatTemplate(*chats, self._encoded, os.path.dirname(name)), self) if chats[0] else None
        table = {key: content.get(key) for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
        self.fingerprint = hashlib.sha256(json.dumps([table, self.eod], sort_keys=True).encode()).hexdigest()[:16]

    def encode(self, text: str, special: bool = False) -> list[int]:
        return self._encoded(text, special).ids

    def _encoded(self, text: str, special: bool = True):
        if self._library.encode_special_tokens == special:  # only then, since threads may be encoding
            self._library.encode_special_tokens = not special
        with _library(self._name, "cannot encode a text", "remove such text, or correct the file"):
            return self._library.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        with _library(self._name, "cannot decode ids", "correct the file"):
            return self._library.decode(ids, skip_special_tokens=False)


def load_gpt2(folder: Path) -> TiktokenTokenizer:
    """Load DIR/encoder.json, {token: id}, and DIR/vocab.bpe, a comment line and then a merge "left right" a line.

    Without encoder.json: vocab.json and merges.txt, the same files under transformers' names. Merges are in the order
    of their priority. Both files write a byte as a printable character. The ids must follow the merges, as in the
    published files, because tiktoken joins the pair of the lowest id first.
    """
    own, other = ("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")
    names = other if os.path.exists(folder / other[0]) and not os.path.exists(folder / own[0]) else own
    encoder_path, merges_path = (folder / name for name in names)
    text = _read(encoder_path)
    try:
        encoder = parse_json(text)
        end = encoder.pop("<|endoftext|>")
        byte_of = {character: byte for byte, character in enumerate(_printable_bytes())}
        ranks = {bytes(byte_of[c] for c in token): i for token, i in encoder.items()}
        if not all(type(i) is int for i in (end, *ranks.values())):
            raise TypeError("an id is not an integer")
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{encoder_path}: no GPT-2 vocabulary ({error!r}); give the published {names[0]}") from error
    merges = [line.split(" ") for line in _read(merges_path).decode(errors="replace").splitlines()[1:] if line]
    joined = {"".join(pair): 256 + rank for rank, pair in enumerate(merges)}
    if any(len(pair) != 2 for pair in merges) or joined != {token: i for token, i in encoder.items() if len(token) > 1}:
        fix = "give the two files of one vocabulary as published; one of your own as hf:DIR, with its tokenizer.json"
        raise ValueError(f"{merges_path}: its merges are not those of {encoder_path}; {fix}")
    _check_ranks(ranks | {b"<|endoftext|>": end}, encoder_path)
    return TiktokenTokenizer(ranks, {"<|endoftext|>": end}, GPT2_SPLIT, "<|endoftext|>")


def load_llama3(path: Path) -> TiktokenTokenizer:
    """Load tokenizer.model of Llama 3 or later: lines "base64(token) rank"; 256 special tokens follow the last rank."""
    ranks = {}
    fix = "give the tokenizer.model of Llama 3 (that of Llama 2 is llama2:FILE)"
    lines = _read(path).splitlines()
    with errors_as(ValueError, lambda e: f"{path}: line {number} is not 'base64 rank' ({e}); {fix}", ValueError):
        for number, line in enumerate(lines, start=1):
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    _check_ranks(ranks, path)
    reserved, names = itertools.count(), SPECIAL.split()
    names += ["-"] * (NUM_SPECIAL - len(names))
    names = [f"reserved_special_token_{next(reserved)}" if name == "-" else name for name in names]
    special = {f"<|{name}|>": len(ranks) + i for i, name in enumerate(names)}
    return TiktokenTokenizer(ranks, special, LLAMA3_SPLIT, "<|end_of_text|>")


def load_llama2(path: Path) -> SentencePieceTokenizer:
    """Load tokenizer.model of Llama 2."""
    return SentencePieceTokenizer(_read(path), str(path))


def load_hf(folder: Path, cache: Cache | None) -> HfTokenizer:
    """Load DIR/tokenizer.json, after a trial. The files beside it name the token that ends a document."""
    path = folder / "tokenizer.json"
    if not os.path.isfile(path):
        others = {"tokenizer.model": "llama3:FILE or llama2:FILE", "vocab.json": "gpt2:DIR", "encoder.json": "gpt2:DIR"}
        known = [f"; for its {name} write {spec}" for name, spec in others.items() if os.path.isfile(folder / name)]
        known += [f"; name its folder, hf:{folder.parent}"] if folder.name == "tokenizer.json" else []
        if known:
            raise ValueError(f"{folder} is not a folder with a tokenizer.json{known[0]}")
    settings = hf_settings(folder)
    end, begin = (_content(settings.get(f"{name}_token")) for name in ("eos", "bos"))
    if os.path.isfile(path) and end is None:
        why = "neither tokenizer_config.json nor special_tokens_map.json beside it names an eos_token"
        raise ValueError(f'{path}: {why}, which ends documents; write {{"eos_token": "..."}} into the first')
    given = _read(path), end, begin if settings.get("add_bos_token") else None, str(path)
    if cache is None:
        _try(*given)
    elif cache.first_on_node:
        content = hashlib.sha256(given[0])
        content.update(repr(given[1:3]).encode())
        cache.recall(f"tokenizer-{content.hexdigest()}", lambda: _try(*given))
    tokens = {
        key: content for key, value in settings.items() if key.endswith("_token") and (content := _content(value))
    }
    return HfTokenizer(*given, (find_templates(folder, settings), tokens))


def _try(text: bytes, end: str, begin: str | None, name: str) -> str:
    """Let another process load and use a tokenizer.json, with limits of time and memory. Raises ValueError."""
    given = json.dumps([[str(path) for path in sys.path], end, begin, name])
    done = subprocess.run([sys.executable, "-I", "-c", TRIAL, given], input=text, capture_output=True)
    said = done.stderr.decode(errors="replace").strip()
    if status := done.returncode:
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        limits = f"within {TRIAL_SECONDS} s and {TRIAL_BYTES >> 20} MiB"
        died = f"{name}: the library, which has to read it {limits}, ended with {how} ({' '.join(said.split())[:200]})"
        raise ValueError(said.rpartition("\n")[2] if status == 1 else f"{died}; copy the file again")
    return "passed"


def _load_and_use(end: str, begin: str | None, name: str) -> None:
    """Run in the process that `_try` starts: end with one line if the tokenizer.json on stdin cannot be used."""
    os.environ["RAYON_NUM_THREADS"] = "1"  # the stacks of many threads would count as memory
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_memory(TRIAL_BYTES)
    resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_SECONDS, TRIAL_SECONDS + 1))
    try:
        tokenizer = HfTokenizer(sys.stdin.buffer.read(), end, begin, name)
        tokenizer.decode([*tokenizer.encode(TRIAL_TEXT), tokenizer.eod])
    except ValueError as error:
        sys.exit(" ".join(str(error).split()))


@contextmanager
def _library(name: str, what: str, fix: str) -> Iterator[None]:
    """Turn every error of a library into a ValueError. A panic of Rust code is one, too, but is not an Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{name}: {what} ({' '.join(str(error).split())[:300]}); {fix}") from error


def hf_settings(folder: Path) -> dict:
    """Read the settings in a folder's special_tokens_map.json and tokenizer_config.json; the latter wins."""
    settings: dict = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if os.path.isfile(folder / name):
            fix = "copy the file again"
            with errors_as(
                ValueError, lambda e: f"{folder / name} is not a JSON object ({e}); {fix}", ValueError, TypeError
            ):
                settings |= {k: v for k, v in dict(parse_json(_read(folder / name))).items() if v is not None}
    return settings


def _content(token: object) -> str | None:
    """Return the text of a token, which tokenizer_config.json has as a string or as an object."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def cut_long_spaces(text: str) -> list[str]:
    """Cut the text into pieces, only inside runs of more than MAX_SPACES white-space characters."""
    cuts = [0]
    for run in re.finditer(rf"(?<!\s)\s{{{MAX_SPACES}}}\s*", text):
        cuts.extend(range(run.start() + MAX_SPACES, run.end(), MAX_SPACES))
    return [text[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def _printable_bytes() -> list[str]:
    """List the character that GPT-2's files write for each byte: itself if printable, else the next from U+0100 on."""
    spare = iter(range(256, 512))
    return [chr(b) if chr(b).isprintable() and b != 32 else chr(next(spare)) for b in range(256)]


def _check_ranks(ranks: dict[bytes, int], path: Path) -> None:
    """Check that ids are 0 .. n - 1, each once, and that every byte is a token, so that any text can be encoded."""
    if sorted(ranks.values()) != list(range(len(ranks))) or not all(bytes([b]) in ranks for b in range(256)):
        why = "ids must count from 0 without gaps and cover all 256 bytes"
        raise ValueError(f"{path}: {why}; the file is damaged: copy it again")


def _read(path: Path) -> bytes:
    if os.path.isdir(path):
        raise ValueError(f"{path} is a folder, not a tokenizer file; name its file, such as {path}/tokenizer.model")
    if not os.path.isfile(path):
        raise ValueError(f"{path}: no such tokenizer file; nothing is downloaded, so copy it there or correct the path")
    fix = "correct its permissions or the path"
    with errors_as(ValueError, lambda error: f"{path}: cannot be read ({error}); {fix}", OSError):
        return read_bytes(path, TOKENIZER_BYTES)
