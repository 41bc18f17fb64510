"""Fine-tuning data: JSONL of questions and answers, packed so that only answers count, without attention across them.

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

A document that is too long is cut at its end, and reported. A prompt that is too long by itself is an error, as is any
other defect of a line. The error names the file and the line.

A special token in the text of a line counts as text, and is reported; `data.special_tokens_in_text` changes that.

Left out: weights of files.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minitron.config.files import errors_as, lines_of, parse_json, size_of
from minitron.data.cache import Cache, fingerprint_of, load_arrays, reading, save_arrays
from minitron.data.chat import ROLES, encode_templated, mark_special
from minitron.data.gpt import Sample
from minitron.data.indexed import IndexedDataset, IndexedWriter, best_dtype
from minitron.data.packing import Packing
from minitron.data.tokenizers import Tokenizer

FORMAT = 1  # to be raised when this file makes other tokens of a line, so that cached ones are not taken for them
HEADER = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"


class TokenizedFiles:
    """The tokenized lines of `paths`, in their order; `len()` counts them.

    fingerprint: 16 hex digits, the same wherever the files lie.  lengths: int64 [documents], in tokens.
    special: a special token in a text is one. with_special: the number of lines with one in a text.
    Raises ValueError, naming file and line, for a line without a question and an answer.
    """

    def __init__(
        self, paths: Sequence[str | os.PathLike[str]], tokenizer: Tokenizer, cache: Cache, special: bool = False
    ):
        self.paths, self.eod, self.special = [os.path.expanduser(path) for path in paths], tokenizer.eod, special
        self.prefix = ", ".join(self.paths)
        # Beside the fingerprint, which names what makes ids of a text: prompts begin with this token.
        hashed = [f"{FORMAT} {tokenizer.fingerprint} {tokenizer.bos}".encode()]
        for path in self.paths:
            line = lambda error: f"data.paths: {path} cannot be read ({error.strerror}); name JSONL files"
            with errors_as(ValueError, line, OSError):
                size_of(path)
                with open(path, "rb") as file:
                    hashed.append(hashlib.file_digest(file, "sha256").digest())
        template = None if tokenizer.chat is None else tokenizer.chat.fingerprint
        key = fingerprint_of(*hashed, f"chats by {template}, {special=}".encode())
        folder = cache.build_once(f"sft-{key}", lambda partial: _tokenize(partial, self.paths, tokenizer, special))
        with reading(folder):
            self._file = IndexedDataset(folder / "documents")
        self._lines, (templated, self.with_special) = load_arrays(folder, "lines", "counts")
        # What had no effect is left out, so that older checkpoints know their data.
        self.fingerprint = key if templated or special else fingerprint_of(*hashed)
        self._parts = self._file.document_indices
        self.lengths = np.add.reduceat(self._file.lengths, self._parts[:-1], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def check(self, documents: range, seq_len: int) -> None:
        """Raise ValueError for a prompt that leaves no room for its answer."""
        prompts = self._file.lengths[self._parts[documents.start : documents.stop]]
        if (prompts > seq_len).any():
            i = int((prompts > seq_len).argmax())
            number, line = self._lines[documents[i]].tolist()
            why = f"a prompt of {prompts[i]} tokens, which leaves no room for an answer in train.seq_len={seq_len}"
            raise ValueError(f"{self.paths[number]}: line {line} has {why}; shorten it, or raise train.seq_len")

    def get(self, i: int, limit: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the first `limit` tokens of a document, int64, and whether each is of an answer, bool."""
        parts = [self._file.get(part) for part in range(self._parts[i], self._parts[i + 1])]
        answers = np.repeat(np.arange(len(parts)) % 2 == 1, [len(part) for part in parts])
        answers[0] = False  # no token comes before it from which it could be predicted
        return np.concatenate(parts, dtype=np.int64)[:limit], answers[:limit]


class SFTDataset:
    """Packed samples of some documents of a file: an endless order of epochs, of which the run reads num_samples.

    note: a line that says how much there is, and how well it is packed.
    """

    def __init__(self, documents: TokenizedFiles, part: range, num_samples: int, seq_len: int, seed: int):
        documents.check(part, seq_len)
        self.documents, self.part, self.num_samples, self.seq_len = documents, part, num_samples, seq_len
        whole, capacity = documents.lengths[part.start : part.stop], seq_len + 1
        lengths = np.minimum(whole, capacity)
        self.packing = Packing(lengths, capacity, seed)
        self.fill = int(lengths.sum()) / (self.packing.num_sequences * capacity)
        self.cut = int((whole > capacity).sum())
        cut = f" ({self.cut:,} cut at the end)" if self.cut else ""
        samples = f"{self.packing.num_sequences:,} samples of train.seq_len={seq_len}, {self.fill:.2%} full"
        self.note = f"sft: an epoch is {len(part):,} documents{cut} in {samples}"
        if documents.with_special and not documents.special:
            found = f"{documents.with_special:,} of {documents.prefix} have special tokens in their text"
            self.note += f"; {found}, which are read as text: data.special_tokens_in_text=true reads them as tokens"
        self.fingerprint = f"{documents.fingerprint} {part.start}-{part.stop} seq_len {seq_len} seed {seed}"

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


def encode_line(line: bytes, tokenizer: Tokenizer, special: bool, counts: Counter[str]) -> list[list[int]]:
    """Encode the document of a line: context and answer in turn.  Raises ValueError with what is wrong and the fix.

    counts: adds a line to `templated` if it takes the tokenizer's template, to `special` if a text has a special token.
    """
    try:
        row = parse_json(line.rstrip())
    except ValueError as error:
        why: object = error  # nested too deeply, or not UTF-8
        if isinstance(error, json.JSONDecodeError):
            why = f"{error.msg} at character {error.pos + 1}"
        raise ValueError(f"is not JSON ({why}); correct it") from error
    if b"\\ud" in line.lower():  # tokenizers raise, or replace it silently
        why = "has an escape of half a character, \\ud800 to \\udfff; write the character as UTF-8, or as two escapes"
        with errors_as(ValueError, lambda _: why, UnicodeError):
            json.dumps(row, ensure_ascii=False).encode()
    keys = {"prompt", "completion", "messages"} & (row.keys() if isinstance(row, dict) else set())
    if keys == {"messages"}:
        return _encode_messages(row, tokenizer, special, counts)
    if keys != {"prompt", "completion"}:
        found = ", ".join(sorted(keys)) or "none"
        fix = "give prompt and completion, or messages"
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


def _tokenize(folder: Path, paths: list[str], tokenizer: Tokenizer, special: bool) -> None:
    """Write documents.bin/.idx, lines.npy, int64 [documents, 2]: number of the file, number of the line, and
    counts.npy, int64 [2]: of lines that took a template, and of lines with a special token in a text.
    """
    lines, counts = [], Counter[str]()
    with IndexedWriter(folder / "documents", best_dtype(tokenizer.vocab_size)) as writer:
        for number, path in enumerate(paths):
            with open(path, "rb") as file:
                for line, text in enumerate(lines_of(file, path), 1):
                    if not text.strip():
                        continue
                    with errors_as(ValueError, lambda error: f"{path}: line {line} {error}", ValueError):
                        parts = encode_line(text, tokenizer, special, counts)
                    writer.add_document([np.array(part, np.int64) for part in parts])
                    lines.append((number, line))
    if tokenizer.chat is not None:
        tokenizer.chat.close()
    if not lines:
        raise ValueError(f"data.paths: there is no line in {', '.join(paths)}; give prompt and completion, or messages")
    save_arrays(folder, lines=np.array(lines), counts=np.array([counts["templated"], counts["special"]]))
