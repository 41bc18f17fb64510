"""Text to token ids and back: the interface of a tokenizer, and that of the corpus.

Tokenizers of published models are in interop/tokenizers.py. A command opens one and passes it to data code.
`encode` treats its input as plain text: "<|endoftext|>" in a document is thirteen characters, never the special token,
unless `special` is set. It adds no token: code that separates documents appends `eod`. `fingerprint` names a tokenizer
by its content, so a dataset can record which one made it, wherever the files are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import sentencepiece

from minitron.data.cache import fingerprint_of

REASONING = "reasoning_content", "thinking", "reasoning"  # three names of a thought; templates read the first two


class UnusableTemplate(ValueError):
    """A chat template that no chat can be written with."""


class Chat(Protocol):
    """A tokenizer's chat template: minitron/interop/chat.py. fingerprint: 16 hex digits.

    encode: a chat to context and answer in turn; special: text that spells a special token is encoded as that token.
    """

    fingerprint: str

    def encode(self, chat: Mapping[str, Any], special: bool = False) -> list[list[int]]: ...

    def close(self) -> None: ...


class Tokenizer(Protocol):
    """What data code needs of a tokenizer.

    eod: the id that ends a document. bos: the id that begins one, None if it was trained without. special: the ids of
    its special tokens. chat: its template, None if it has none. fingerprint: 16 hex digits.
    """

    vocab_size: int
    eod: int
    bos: int | None
    special: Mapping[str, int]
    chat: Chat | None
    fingerprint: str

    def encode(self, text: str, special: bool = False) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def refuse(what: str, **_: object) -> Any:
    """Refuse to read a file of another project. For callers whose data need none."""
    raise ValueError(f"{what} cannot be opened here; use a data.source that needs no files of other projects")


class Readers(NamedTuple):
    """How commands read files of other projects: by minitron/interop, which this code does not import.

    tokenizer(spec, cache=...): opens data.tokenizer; the cache keeps the result of a trial.
    rows(path): yields (number, row) of a file for sft. A row that cannot be used is a ValueError that describes why.
    """

    tokenizer: Callable[..., Tokenizer] = refuse
    rows: Callable[[str], Iterator[tuple[int, Any]]] = refuse


class SentencePieceTokenizer:
    """A SentencePiece model, given as its file's bytes. The end of document is </s>.

    space_first: whether encoding puts a space before every text.
    """

    chat: Chat | None = None

    def __init__(self, model: bytes, name: str):
        try:
            self._model = sentencepiece.SentencePieceProcessor()
            self._model.load_from_serialized_proto(model)
        except (RuntimeError, TypeError) as error:
            why = " ".join(str(error).split())
            raise ValueError(f"{name}: no SentencePiece model ({why}); give the tokenizer.model of Llama 2") from error
        self.vocab_size = self._model.vocab_size()
        self.eod, self.space_first = self._model.eos_id(), self._model.encode("a", out_type=str)[0][0] == "\u2581"
        self.bos = self._model.bos_id() if self._model.bos_id() >= 0 else None
        if self.eod < 0:
            why = "the model has no end-of-sentence piece, so documents cannot be separated"
            raise ValueError(f"{name}: {why}; train it with one")
        self.special: Mapping[str, int] = {self._model.id_to_piece(i): i for i in (self.bos, self.eod) if i is not None}
        self.fingerprint = fingerprint_of(model)

    def encode(self, text: str, special: bool = False) -> list[int]:
        pieces = re.split(f"({'|'.join(map(re.escape, self.special))})", text) if special else [text]
        known = self.special if special else {}
        return [i for piece in pieces for i in ([known[piece]] if piece in known else self._encode(piece))]

    def _encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode(list(ids))
