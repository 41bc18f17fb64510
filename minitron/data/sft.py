"""Fine-tuning data: rows of questions and answers, packed so that only answers count, without attention across them.

A row of a file is a document, in one of two forms. The second takes the tokenizer's own chat template, with roles,
`tools` and `chat_template_kwargs` as in transformers; or Llama 3's, if the tokenizer has no template. Files and
templates are read by minitron/interop/rows.py and chat.py, which commands pass to this code:

    {"prompt": "Capital of France?", "completion": " Paris"}
        context   bos Capital of France?                                    bos: Llama's; other tokenizers have none
        answer    _Paris eod                                                nothing is added between: mind the space
    {"messages": [{"role": "user", "content": "Capital of France?"}, {"role": "assistant", "content": "Paris"}]}
        context   <|begin_of_text|><|start_header_id|>user<|end_header_id|>\\n\\nCapital of France?<|eot_id|>
                  <|start_header_id|>assistant<|end_header_id|>\\n\\n
        answer    Paris<|eot_id|>                                           then the next context, and so on

Documents are tokenized once, into a .bin/.idx pair of `data.cache_dir` that is named by the hash of files and
tokenizer. Its sequences are context and answer in turn, so the index shows which tokens count. packing.py chooses the
documents of a sample. It is a gpt.Sample as in pretraining, so every layout treats it alike: `starts` keeps documents
apart, with positions from 0, and the mask is 1 for answers only. The rest of a sample is padding with loss weight 0.

A document that is too long is cut at its end, and reported (data.too_long=truncate). A prompt that is too long by
itself is an error, as is any other defect of a row. The error names the files and the rows, the first SHOWN of them.
With data.bad_lines=skip the log has this line, and the run continues without these rows. Bad rows are kept beside the
tokens, so one process finds them, and all others read them there.

A special token in the text of a row counts as text, and is reported; `data.special_tokens_in_text` changes that.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from minitron.config.files import errors_as, parse_json, read_json, size_of, write_json
from minitron.config.text import short
from minitron.data.cache import Cache, digest_of, fingerprint_of, load_arrays, reading, save_arrays, state_of
from minitron.data.gpt import Sample
from minitron.data.indexed import IndexedDataset, IndexedWriter, best_dtype
from minitron.data.packing import Packing
from minitron.data.tokenizers import REASONING, Readers, Tokenizer, UnusableTemplate

FORMAT = 1  # raise it if rows give other tokens than before, so that cached ones are not used
HEADER = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
ROLES = "system", "developer", "user", "assistant", "tool"  # the roles in a chat template
SHOWN = 10  # rows that an error names; the others are counted
WHY = 150  # characters of a description of a defect
BAD = "bad.json"
Defect = tuple[int, int, str]  # number of the file, number of the row, what is wrong with it


class TokenizedFiles:
    """The tokenized rows of `paths`, in their order; `len()` counts them.

    fingerprint: 16 hex digits, the same wherever the files are. lengths, prompts: int64 and int32 [documents], in
    tokens.
    special: text that spells a special token is encoded as that token. with_special: the number of rows with such text.
    skipped: describes the rows that were left out, "" if none were.
    Raises ValueError, naming files and rows, for rows without a question and an answer, unless skip_bad is set.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        tokenizer: Tokenizer,
        cache: Cache,
        readers: Readers,
        special: bool = False,
        skip_bad: bool = False,
    ):
        self.paths, self.eod, self.special = [os.path.expanduser(path) for path in paths], tokenizer.eod, special
        self.prefix = ", ".join(self.paths)
        # A tokenizer's fingerprint covers only the mapping from text to ids. bos is hashed too: prompts begin with it.
        hashed = [f"{FORMAT} {tokenizer.fingerprint} {tokenizer.bos}".encode()]
        line = lambda e: f"data.paths: {e.filename or self.prefix} cannot be read ({e.strerror}); name JSONL or Parquet"
        with errors_as(ValueError, line, OSError):
            for path in self.paths if cache.first_on_node else ():
                size_of(path)
                open(path, "rb").close()  # else NFS may return an older state for a minute
            state = state_of(*self.paths)
        digests = errors_as(ValueError, line, OSError)(lambda: " ".join(map(digest_of, self.paths)))
        hashed += map(bytes.fromhex, cache.recall(f"hashes-{state}", digests).split())
        template = None if tokenizer.chat is None else tokenizer.chat.fingerprint
        key = fingerprint_of(*hashed, f"chats by {template}, {special=}".encode())
        build = lambda partial: _tokenize(partial, self.paths, tokenizer, readers, special)
        folder = cache.build_once(f"sft-rows-2-{key}", build)  # another number once other rows are bad
        with reading(folder):
            self._file = IndexedDataset(folder / "documents")
            bad, first = read_json(folder / BAD)
        found = self._listed(first, bad)
        if bad and not (skip_bad and len(self._file)):
            fix = "correct the files: no row is left" if skip_bad else "data.bad_lines=skip leaves such rows out"
            raise ValueError(f"{found}; {fix}")
        if not len(self._file):
            raise ValueError(f"data.paths: there is no row in {self.prefix}; give prompt and completion, or messages")
        self._rows, (templated, self.with_special) = load_arrays(folder, "rows", "counts")
        # The template and `special` enter the fingerprint only if a row uses the template or `special` is set.
        self.fingerprint = key if templated or special else fingerprint_of(*hashed)
        self._parts = self._file.document_indices
        self.lengths = np.add.reduceat(self._file.lengths, self._parts[:-1], dtype=np.int64)
        self.prompts = self._file.lengths[self._parts[:-1]]
        self.skipped = f"; {bad:,} bad rows left out: {found}" if bad else ""

    def __len__(self) -> int:
        return len(self.lengths)

    def refuse_long(self, part: range, whole: bool, seq_len: int) -> None:
        """Raise ValueError for prompts without room for an answer; whole: for all documents that do not fit."""
        long = self.lengths > seq_len + 1 if whole else self.prompts > seq_len
        if len(bad := part.start + np.flatnonzero(long[part.start : part.stop])):
            why = "has a prompt of {} tokens, with its answer {}"
            first = [(*self._rows[i], why.format(self.prompts[i], self.lengths[i])) for i in bad[:SHOWN]]
            limit = f"train.seq_len={seq_len} takes {seq_len + 1} and leaves a prompt room for an answer"
            fix = "raise it, shorten the texts, or set data.too_long=skip"
            raise ValueError(f"{self._listed(first, len(bad))}; {limit}: {fix}")

    def get(self, i: int, limit: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the first `limit` tokens of a document, int64, and whether each is of an answer, bool."""
        parts = [self._file.get(part) for part in range(self._parts[i], self._parts[i + 1])]
        answers = np.repeat(np.arange(len(parts)) % 2 == 1, [len(part) for part in parts])
        answers[0] = False  # no token comes before it that could predict it
        return np.concatenate(parts, dtype=np.int64)[:limit], answers[:limit]

    def _listed(self, first: Iterable[Defect], count: int) -> str:
        """Name the first of `count` defective rows. Those that follow each other with one defect share its words."""
        words, named = list[str](), 0
        for (file, why), same in groupby(first, key=lambda defect: (defect[0], defect[2])):
            rows = [str(row) for _, row, _ in same]
            words.append(f"{self.paths[file]}: row {', '.join(rows)} {why}")
            named += len(rows)
        return "; ".join(words + [f"and {count - named:,} more"] * (count > named))


class SFTDataset:
    """Packed samples of some documents of a file: an endless order of epochs. `of_length` sets how many are read.

    too_long: what happens to documents of more than seq_len + 1 tokens (data.too_long); `cut` counts them.
    note: a line for the log: the documents and samples of an epoch, and how full samples are.
    """

    def __init__(self, documents: TokenizedFiles, part: range, seq_len: int, seed: int, too_long: str = "truncate"):
        whole, capacity = documents.lengths[part.start : part.stop], seq_len + 1
        self.documents, self.num_samples, self.seq_len = documents, 0, seq_len
        self.part: range | np.ndarray = part
        self.fingerprint = f"{documents.fingerprint} {part.start}-{part.stop} seq_len {seq_len} seed {seed}"
        long = whole > capacity
        self.cut, cut = int(long.sum()), "cut at the end"
        if too_long != "skip":
            documents.refuse_long(part, too_long == "error", seq_len)
        elif self.cut == len(whole):
            why = f"train.seq_len={seq_len} is too short for every document of {documents.prefix}"
            raise ValueError(f"{why}; raise it, or set data.too_long=truncate")
        elif self.cut:
            self.part, whole, cut = part.start + np.flatnonzero(~long), whole[~long], "longer ones left out"
            self.fingerprint += " without longer ones"
        lengths = np.minimum(whole, capacity)
        self.packing = Packing(lengths, capacity, seed)
        self.fill = int(lengths.sum()) / (self.packing.num_sequences * capacity)
        cut = f" ({self.cut:,} {cut})" if self.cut else ""
        samples = f"{self.packing.num_sequences:,} samples of train.seq_len={seq_len}, {self.fill:.2%} full"
        self.note = f"sft: an epoch is {len(self.part):,} documents{cut} in {samples}{documents.skipped}"
        if documents.with_special and not documents.special:
            found = f"{documents.with_special:,} of {documents.prefix} have special tokens in their text"
            self.note += f"; {found}, which are read as text: data.special_tokens_in_text=true reads them as tokens"

    def of_length(self, num_samples: int) -> "SFTDataset":
        """Return a dataset of these samples that ends after num_samples."""
        other = copy(self)
        other.num_samples = num_samples
        return other

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> Sample:
        s = self.seq_len
        drawn = [self.documents.get(self.part[j], s + 1) for j in self.packing.documents(i)]
        tokens, answers = (np.concatenate(arrays) for arrays in zip(*drawn))
        ends = np.cumsum([len(document) for document, _ in drawn], dtype=np.int32)
        hole = s + 1 - len(tokens)
        tokens = np.pad(tokens, (0, hole), constant_values=self.documents.eod)
        mask = np.pad(answers, (0, hole))[1:].astype(np.float32)
        return Sample(tokens, ends[ends <= s], mask, padding=max(0, hole - 1))


# ---- from a row to tokens -------------------------------------------------------------------------------------------


def encode_prompt(prompt: str, tokenizer: Tokenizer, special: bool = False) -> list[int]:
    """Encode what a completion follows, in training as in generation."""
    return ([] if tokenizer.bos is None else [tokenizer.bos]) + tokenizer.encode(prompt, special)


def encode_chat(messages: Sequence[dict[str, Any]], tokenizer: Tokenizer, special: bool = False) -> list[list[int]]:
    """Encode messages by Llama 3's template to context and answer in turn, one answer for each of the assistant.

    Raises ValueError for a tokenizer without Llama 3's special tokens.
    """
    if not tokenizer.special.keys() >= set(HEADER):
        fix = "set data.tokenizer=hf:DIR, with a chat_template.jinja in it; or write prompt and completion"
        raise ValueError(f"chat messages need a chat template, or the special tokens of Llama 3; {fix}")
    begin, end, eot = (tokenizer.special[name] for name in HEADER)
    parts: list[list[int]] = []
    bos = tokenizer.special.get("<|begin_of_text|>") if tokenizer.bos is None else tokenizer.bos
    context = [] if bos is None else [bos]
    for message in messages:
        context += [begin, *tokenizer.encode(message["role"]), end, *tokenizer.encode("\n\n")]
        content = [*tokenizer.encode(message["content"].strip(), special), eot]
        if message["role"] == "assistant":
            parts += [context, content]
            context = []
        else:
            context += content
    return parts


def encode_row(row: Any, tokenizer: Tokenizer, special: bool, counts: Counter[str]) -> list[list[int]]:
    """Encode a row of Readers.rows to context and answer in turn. Raises ValueError with what is wrong, and the fix.

    counts: adds 1 to `templated` if the row uses the tokenizer's template, to `special` if a text has a special token.
    """
    if isinstance(row, ValueError):
        raise row
    keys = {"prompt", "completion", "messages"} & (row.keys() if isinstance(row, dict) else set())
    if keys not in ({"messages"}, {"prompt", "completion"}):
        found = ", ".join(sorted(keys)) or "none"
        fix = "give prompt and completion, or messages (or the keys of Alpaca or ShareGPT)"
        raise ValueError(f"has {found} of the keys prompt, completion and messages; {fix}")
    with errors_as(ValueError, lambda error: "is nested too deeply; leave it out", RecursionError):
        texts = "\0".join(_texts([row.get(key) for key in (*keys, "tools")]))
    counts["special"] += any(text in texts for text in tokenizer.special)
    if "messages" in keys:
        return _encode_messages(row, tokenizer, special, counts)
    if no_texts := [key for key in sorted(keys) if not isinstance(row[key], str)]:
        raise ValueError(f"has a {no_texts[0]} that is not text; put it into quotes")
    if not row["completion"].strip():
        raise ValueError("has an empty completion; fill it in, or drop the row")
    answer = [*tokenizer.encode(row["completion"], special), tokenizer.eod]
    return [encode_prompt(row["prompt"], tokenizer, special), answer]


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, also the keys of its objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _texts(item)


def _encode_messages(row: dict[str, Any], tokenizer: Tokenizer, special: bool, counts: Counter[str]) -> list[list[int]]:
    """Encode a chat by the tokenizer's template, or by Llama 3's."""
    chat = {key: row[key] for key in ("messages", "tools", "chat_template_kwargs") if row.get(key)}
    if isinstance(tools := chat.pop("tools", None), str):  # tables store it as text
        with errors_as(ValueError, lambda error: f"has tools that are not JSON ({error}); correct them", ValueError):
            tools = parse_json(tools)
    if tools is not None and not isinstance(tools, list):
        raise ValueError("has tools that are not a list; write the list of their JSON schemas")
    if tools:
        chat["tools"] = tools
    if tokenizer.chat is None:
        messages = [m for m in row["messages"] if isinstance(m, dict)] if isinstance(row["messages"], list) else []
        parts = [key for key in ("tool_calls", *REASONING) if any(m.get(key) for m in messages)]
        if parts := ["tools"] * bool(tools) + parts:
            fix = "set data.tokenizer=hf:DIR with one, or drop the row"
            raise ValueError(f"has {' and '.join(parts)}, which only a chat template writes; {fix}")
    _check_messages(row["messages"], tokenizer.chat is not None)
    if tokenizer.chat is None:
        return encode_chat(row["messages"], tokenizer, special)
    counts["templated"] += 1
    return tokenizer.chat.encode(chat, special)


def _check_messages(messages: object, by_template: bool) -> None:
    """Check for an optional system message, then user and assistant in turn, the assistant last and with text.

    by_template: a template checks the order of its roles, and the assistant may have tool_calls in place of a text.
    """

    def is_message(m: object) -> bool:
        if not isinstance(m, dict) or not isinstance(m.get("role"), str):
            return False
        content = m.get("content")
        return isinstance(content, str) or by_template and content is None and bool(m.get("tool_calls"))

    if not (isinstance(messages, list) and messages and all(map(is_message, messages))):
        raise ValueError("has messages that are not a list of objects with the texts role and content; write them so")
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    if by_template and (unknown := set(roles) - set(ROLES)):
        raise ValueError(f"has the role {min(unknown)}; use {', '.join(ROLES)}")
    if not by_template and (not turns or turns != ["user", "assistant"] * (len(turns) // 2)):
        raise ValueError(f"has the roles {', '.join(roles)}; begin with system or not, then user and assistant in turn")
    answers = (m for m in messages if m["role"] == "assistant" and not (by_template and m.get("tool_calls")))
    if not all(m["content"].strip() for m in answers):
        raise ValueError("has an empty answer of the assistant; fill it in, or drop the row")


def _tokenize(folder: Path, paths: list[str], tokenizer: Tokenizer, readers: Readers, special: bool) -> None:
    """Write documents.bin/.idx and rows.npy, int64 [documents, 2]: the numbers of the file and of the row.

    Also write counts.npy, int64 [2]: the rows that used a template, and the rows with a special token in a text; and
    BAD: how many rows are left out, and the first of them.
    """
    rows, counts, first, bad = [], Counter[str](), list[Defect](), 0
    with IndexedWriter(folder / "documents", best_dtype(tokenizer.vocab_size)) as writer:
        for file, path in enumerate(paths):
            for number, row in readers.rows(path):
                try:
                    parts = encode_row(row, tokenizer, special, counts)
                except UnusableTemplate as error:  # perhaps not the row's fault: the cache must not keep it
                    raise UnusableTemplate(f"{path}: row {number}: {error}") from error
                except ValueError as error:
                    bad += 1
                    first += [(file, number, short(error, WHY))][: SHOWN - len(first)]
                else:
                    writer.add_document([np.array(part, np.int64) for part in parts])
                    rows.append((file, number))
    if tokenizer.chat is not None:
        tokenizer.chat.close()
    save_arrays(folder, rows=np.array(rows), counts=np.array([counts["templated"], counts["special"]]))
    write_json(folder / BAD, [bad, first])
