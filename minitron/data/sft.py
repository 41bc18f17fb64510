"""Fine-tuning data: rows of questions and answers, packed so that only answers count, without attention across them.

A line of a file is a document, in one of two forms. The second takes the tokenizer's own chat template (chat.py), with
roles, `tools` and `chat_template_kwargs` as transformers has them; or Llama 3's, if the tokenizer has no template:

    {"prompt": "Capital of France?", "completion": " Paris"}
        context   bos Capital of France?                                    bos: Llama's; other tokenizers have none
        answer    _Paris eod                                                nothing is added in between: mind the space
    {"messages": [{"role": "user", "content": "Capital of France?"}, {"role": "assistant", "content": "Paris"}]}
        context   <|begin_of_text|><|start_header_id|>user<|end_header_id|>\\n\\nCapital of France?<|eot_id|>
                  <|start_header_id|>assistant<|end_header_id|>\\n\\n
        answer    Paris<|eot_id|>                                           then the next context, and so on

Documents are tokenized once, into a .bin/.idx pair of `data.cache_dir` that is named by the hash of files and
tokenizer.  Its sequences are context and answer in turn, so the index already says which tokens count.  packing.py
chooses the documents of a sample.  It is a gpt.Sample as in pretraining, so every layout treats it alike: `starts`
keeps documents apart, with positions from 0, and the mask is 1 for answers only. The rest of a sample is padding with
loss weight 0.

A document that is too long is cut at its end, and reported (data.too_long=truncate). A prompt that is too long by
itself is an error, as is any other defect of a line. The error names the files and the lines, the first SHOWN of them.
With data.bad_lines=skip the log has this line, and the run goes on without these rows.

A special token in the text of a line counts as text, and is reported; `data.special_tokens_in_text` changes that.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from minitron.config.files import errors_as, parse_json, read_json, size_of, write_json
from minitron.config.text import short
from minitron.data.cache import Cache, fingerprint_of, load_arrays, reading, save_arrays
from minitron.data.chat import ROLES, encode_templated, mark_special
from minitron.data.gpt import Sample
from minitron.data.indexed import IndexedDataset, IndexedWriter, best_dtype
from minitron.data.packing import Packing
from minitron.data.rows import parse_line, read_rows, row_name, to_messages
from minitron.data.tokenizers import Tokenizer, UnusableTemplate

FORMAT = 1  # to be raised when this file makes other tokens of a line, so that cached ones are not taken for them
HEADER = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
SHOWN = 10  # lines that an error names; the others are counted
WHY = 150  # characters of what is wrong with each
SKIPPED = "skipped.json"
Defect = tuple[int, int, str]  # number of the file, number of the line, what is wrong with it


class TokenizedFiles:
    """The tokenized lines of `paths`, in their order; `len()` counts them.

    fingerprint: 16 hex digits, the same wherever the files lie.  lengths: int64 [documents], in tokens.
    special: a special token in a text is one. with_special: the number of lines with one in a text.
    skipped: which lines were left out, "" if none were.
    Raises ValueError, naming files and lines, for lines without a question and an answer, unless skip_bad is set.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        tokenizer: Tokenizer,
        cache: Cache,
        special: bool = False,
        skip_bad: bool = False,
    ):
        self.paths, self.eod, self.special = [os.path.expanduser(path) for path in paths], tokenizer.eod, special
        self.prefix = ", ".join(self.paths)
        # Beside the fingerprint, which names what makes ids of a text: prompts begin with this token.
        hashed = [f"{FORMAT} {tokenizer.fingerprint} {tokenizer.bos}".encode()]
        for path in self.paths:
            line = lambda error: f"data.paths: {path} cannot be read ({error.strerror}); name JSONL or Parquet files"
            with errors_as(ValueError, line, OSError):
                size_of(path)
                with open(path, "rb") as file:
                    hashed.append(hashlib.file_digest(file, "sha256").digest())
        template = None if tokenizer.chat is None else tokenizer.chat.fingerprint
        key = fingerprint_of(*hashed, f"chats by {template}, {special=}".encode())
        build = lambda partial: _tokenize(partial, self.paths, tokenizer, special, skip_bad)
        folder = cache.build_once(f"sft-{key}" + "-skip" * skip_bad, build)
        with reading(folder):
            self._file = IndexedDataset(folder / "documents")
            count, first = read_json(folder / SKIPPED) if skip_bad else (0, [])
        self._lines, (templated, self.with_special) = load_arrays(folder, "lines", "counts")
        # What had no effect is left out, so that older checkpoints know their data.
        self.fingerprint = key if templated or special else fingerprint_of(*hashed)
        self._parts = self._file.document_indices
        self.lengths = np.add.reduceat(self._file.lengths, self._parts[:-1], dtype=np.int64)
        self.skipped = f"; {count:,} bad lines left out: {_listed(self.paths, first, count)}" if count else ""

    def __len__(self) -> int:
        return len(self.lengths)

    def refuse_long(self, part: range, whole: bool, seq_len: int) -> None:
        """Raise ValueError for prompts without room for an answer; whole: for all documents that do not fit."""
        prompts = self._file.lengths[self._parts[part.start : part.stop]]
        lengths = self.lengths[part.start : part.stop]
        if len(bad := np.flatnonzero(lengths > seq_len + 1 if whole else prompts > seq_len)):
            why = [f"has a prompt of {prompts[i]} tokens, with its answer {lengths[i]}" for i in bad[:SHOWN]]
            lines = self._lines[part.start + bad[:SHOWN]].tolist()
            found = _listed(self.paths, [(*line, text) for line, text in zip(lines, why)], len(bad))
            limit = f"train.seq_len={seq_len} takes {seq_len + 1} and leaves a prompt room for an answer"
            raise ValueError(f"{found}; {limit}: raise it, shorten the texts, or set data.too_long=skip")

    def get(self, i: int, limit: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the first `limit` tokens of a document, int64, and whether each is of an answer, bool."""
        parts = [self._file.get(part) for part in range(self._parts[i], self._parts[i + 1])]
        answers = np.repeat(np.arange(len(parts)) % 2 == 1, [len(part) for part in parts])
        answers[0] = False  # no token comes before it from which it could be predicted
        return np.concatenate(parts, dtype=np.int64)[:limit], answers[:limit]


class SFTDataset:
    """Packed samples of some documents of a file: an endless order of epochs, of which the run reads num_samples.

    too_long: what becomes of documents of more than seq_len + 1 tokens (data.too_long); `cut` counts them.
    note: a line that says how much there is, and how well it is packed.
    """

    def __init__(
        self,
        documents: TokenizedFiles,
        part: range,
        num_samples: int,
        seq_len: int,
        seed: int,
        too_long: str = "truncate",
    ):
        whole, capacity = documents.lengths[part.start : part.stop], seq_len + 1
        self.documents, self.num_samples, self.seq_len = documents, num_samples, seq_len
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
        """Return these samples as a dataset of another number of them."""
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


# ---- from a line to tokens ------------------------------------------------------------------------------------------


def encode_prompt(prompt: str, tokenizer: Tokenizer, special: bool = False) -> list[int]:
    """Encode what a completion follows, in training as in generation."""
    return ([] if tokenizer.bos is None else [tokenizer.bos]) + tokenizer.encode(prompt, special)


def encode_chat(messages: Sequence[dict[str, Any]], tokenizer: Tokenizer, special: bool = False) -> list[list[int]]:
    """Encode messages by Llama 3's template to context and answer in turn, one answer for each of the assistant.

    Raises ValueError for a tokenizer without Llama 3's special tokens.
    """
    if not tokenizer.special.keys() >= set(HEADER):
        fix = "set data.tokenizer=llama3:FILE, or hf:DIR with a chat_template; or write prompt and completion"
        raise ValueError(f"chat messages need the special tokens of Llama 3; {fix}")
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


def encode_question(messages: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> list[int]:
    """Encode messages that an answer is to follow, with the beginning of the answer."""
    if tokenizer.chat is None:
        return encode_chat([*messages, {"role": "assistant", "content": ""}], tokenizer)[0]
    chat = {"messages": mark_special(messages, tokenizer), "add_generation_prompt": True}
    return encode_templated(chat, tokenizer)[0]


def encode_line(line: object, tokenizer: Tokenizer, special: bool, counts: Counter[str]) -> list[list[int]]:
    """Encode a row, or as bytes a line: context and answer in turn.  Raises ValueError: what is wrong, and the fix.

    counts: adds a line to `templated` if it takes the tokenizer's template, to `special` if a text has a special token.
    """
    row = to_messages(parse_line(line) if isinstance(line, bytes) else line)
    if not isinstance(line, bytes) or b"\\ud" in line.lower():  # tokenizers raise, or replace it silently
        why = "has an escape of half a character, \\ud800 to \\udfff; write the character as UTF-8, or as two escapes"
        with errors_as(ValueError, lambda _: why, UnicodeError):
            json.dumps(row, ensure_ascii=False, default=str).encode()
    keys = {"prompt", "completion", "messages"} & (row.keys() if isinstance(row, dict) else set())
    if keys == {"messages"}:
        return _encode_messages(row, tokenizer, special, counts)
    if keys != {"prompt", "completion"}:
        found = ", ".join(sorted(keys)) or "none"
        fix = "give prompt and completion, or messages (or the keys of Alpaca or ShareGPT)"
        raise ValueError(f"has {found} of the keys prompt, completion and messages; {fix}")
    for key in sorted(keys):
        if not isinstance(row[key], str):
            raise ValueError(f"has a {key} that is no text; put it into quotes")
    if not row["completion"].strip():
        raise ValueError("has an empty completion; fill it in, or drop the line")
    texts = [row["prompt"], row["completion"]]
    counts["special"] += mark_special(texts, tokenizer) != texts
    answer = [*tokenizer.encode(row["completion"], special), tokenizer.eod]
    return [encode_prompt(row["prompt"], tokenizer, special), answer]


def _encode_messages(row: dict[str, Any], tokenizer: Tokenizer, special: bool, counts: Counter[str]) -> list[list[int]]:
    """Encode a chat by the tokenizer's template, or by Llama 3's."""
    _check_messages(row["messages"], tokenizer.chat is not None)
    chat = {key: row[key] for key in ("messages", "tools", "chat_template_kwargs") if row.get(key)}
    if isinstance(tools := chat.get("tools", []), str):  # as tables have it
        with errors_as(ValueError, lambda error: f"has tools that are no JSON ({error}); correct them", ValueError):
            chat["tools"] = tools = parse_json(tools)
    if not isinstance(tools, list):
        raise ValueError("has tools that are no list; write the list of their JSON schemas")
    marked = mark_special(chat, tokenizer)
    counts["special"] += marked != chat
    if tokenizer.chat is None:
        return encode_chat(row["messages"], tokenizer, special)
    counts["templated"] += 1
    return encode_templated(chat if special else marked, tokenizer)


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
        raise ValueError("has messages that are no list of objects with the texts role and content; write them so")
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    if by_template and (unknown := set(roles) - set(ROLES)):
        raise ValueError(f"has the role {min(unknown)}; use {', '.join(ROLES)}")
    if not by_template and (not turns or turns != ["user", "assistant"] * (len(turns) // 2)):
        raise ValueError(f"has the roles {', '.join(roles)}; begin with system or not, then user and assistant in turn")
    if not all(m["content"].strip() for m in messages if m["role"] == "assistant" and not m.get("tool_calls")):
        raise ValueError("has an empty answer of the assistant; fill it in, or drop the line")


def _tokenize(folder: Path, paths: list[str], tokenizer: Tokenizer, special: bool, skip_bad: bool) -> None:
    """Write documents.bin/.idx, lines.npy, int64 [documents, 2]: number of the file, number of the line, and
    counts.npy, int64 [2]: of lines that took a template, and of lines with a special token in a text.

    skip_bad: write also SKIPPED, [how many rows are left out, the first of them]. Without it they are an error.
    """
    lines, counts, defects, count = [], Counter[str](), list[Defect](), 0
    sizes = [size_of(path) for path in paths]
    with (
        IndexedWriter(folder / "documents", best_dtype(tokenizer.vocab_size)) as writer,
        # On a terminal alone, and only if it takes longer than a second.
        tqdm(total=sum(sizes), unit="B", unit_scale=True, desc="tokenizing", disable=None, delay=1) as bar,
    ):
        for number, path in enumerate(paths):
            for line, row in read_rows(path):
                try:
                    parts = encode_line(row, tokenizer, special, counts)
                except UnusableTemplate:  # no row's fault
                    raise
                except ValueError as error:
                    count += 1
                    defects += [(number, line, short(error, WHY))][: SHOWN - len(defects)]
                else:
                    writer.add_document([np.array(part, np.int64) for part in parts])
                    lines.append((number, line))
                bar.update(len(row) if isinstance(row, bytes) else 0)
            bar.update(sum(sizes[: number + 1]) - bar.n)
        if tokenizer.chat is not None:
            tokenizer.chat.close()
        if count and not (skip_bad and lines):
            raise ValueError(f"{_listed(paths, defects, count)}; data.bad_lines=skip leaves such lines out")
    if not lines:
        raise ValueError(f"data.paths: there is no line in {', '.join(paths)}; give prompt and completion, or messages")
    save_arrays(folder, lines=np.array(lines), counts=np.array([counts["templated"], counts["special"]]))
    if skip_bad:
        write_json(folder / SKIPPED, [count, defects])


def _listed(paths: list[str], defects: Iterable[Defect], count: int) -> str:
    """Name the first of `count` defective lines."""
    words, before = list[str](), None
    for number, line, why in defects:
        where = "" if number == before else f"{paths[number]}: "
        words.append(f"{where}{row_name(paths[number])} {line} {why}")
        before = number
    return "; ".join(words) + (f"; and {count - len(words):,} more" if count > len(words) else "")
