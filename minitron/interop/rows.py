"""Rows of fine-tuning data: the formats of files, and the keys of known data sets.

    chats.jsonl                  an object a line
    alpaca.json                  one list of objects: its first byte is [
    chats.parquet, chats.arrow   a table, read some rows at a time; nulls are left out. Needs the extra `data`

    {"instruction": "Add.", "input": "1 2", "output": "3"}                            Alpaca
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", ...}]}       ShareGPT
    {"prompt": [{"role": "user", ...}], "completion": [{"role": "assistant", ...}]}   TRL
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, ...]}  OpenAI: parts, which are joined
    {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}, ...]}            UltraChat: a question twice

Every file is read as lines of JSON, each a row. The rows above are converted to messages, and the text of a key
`system` becomes the first one. Any other row stays as it is: data/sft.py encodes messages, and prompt and completion.

Left out: Alpaca's `history`; a limit of memory, so a damaged table can end the process.
"""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from minitron.config.files import errors_as, lines_of, parse_json, read_bytes, size_of
from minitron.config.installed import pip_install
from minitron.data.tokenizers import Readers
from minitron.interop.progress import progress_bar
from minitron.interop.tokenizers import load_tokenizer

LIST_BYTES = 1 << 30  # a JSON list is read as a whole
ROWS = 128  # rows of a table that are read at a time
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant"}


def read_rows(path: str) -> Iterator[tuple[int, Any]]:
    """Yield the number of each row, from 1, and the row, or in its place a ValueError that describes the defect.

    An empty line counts, but is not a row. Raises OSError, and ValueError for a file that cannot be read as a whole.
    """
    with progress_bar(size_of(path), "B", f"reading {path}") as bar:
        for number, line in enumerate(_lines(path), 1):
            bar.update(min(len(line), bar.total - bar.n))  # a table is smaller than its rows
            if line.strip():
                yield number, _parsed(line)


READERS = Readers(load_tokenizer, read_rows)


def _lines(path: str) -> Iterator[bytes]:
    """Yield each row of a file as a line of JSON."""
    if kind := table_kind(path):
        for rows in read_table(path, kind, lambda schema: schema.names):
            yield from (json.dumps(without_nulls(row), default=str).encode() for row in rows)  # dates as text
        return
    with open(path, "rb") as file:
        if file.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] != b"[":  # behind a byte order mark or an empty line
            yield from lines_of(file, path)
            return
    with errors_as(ValueError, lambda error: f"{path} is not a JSON list ({error}); correct it", ValueError, OSError):
        rows = parse_json(read_bytes(path, LIST_BYTES).removeprefix(b"\xef\xbb\xbf"))
    yield from (json.dumps(row).encode() for row in rows)


def _parsed(line: bytes) -> Any:
    """Return the row that a line holds, or a ValueError with the defect and the fix."""
    try:
        row = parse_json(line.rstrip())
        if b"\\ud" in line.lower():  # tokenizers raise, or replace it silently
            json.dumps(row, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        return ValueError(f"is not JSON ({error.msg} at character {error.pos + 1}); correct it")
    except UnicodeEncodeError:
        return ValueError("has an escape of half a character, \\ud800 to \\udfff; write UTF-8, or two escapes")
    except ValueError as error:  # nested too deeply, or not UTF-8
        return ValueError(f"is not JSON ({error}); correct it")
    try:
        return to_messages(row)
    except ValueError as error:
        return error
    except TypeError:
        return ValueError("has an instruction, input, output or conversations that are not text or list; correct them")


def to_messages(row: Any) -> Any:
    """Convert a row of another format to messages.

    Raises TypeError if a value is not text or a list, and ValueError for a row that cannot be used.
    """
    turns = _turns(row) if isinstance(row, dict) else None
    if not isinstance(turns, list):
        return row
    if system := row.get("system"):
        if turns and isinstance(turns[0], dict) and turns[0].get("role") == "system":
            raise ValueError("has the key system and a system message; drop one")
        turns = [{"role": "system", "content": system}, *turns]
    others = {key: row[key] for key in row.keys() - {"prompt", "completion"}}
    return others | {"messages": [_joined(turn) for turn in turns]}


def _turns(row: dict[str, Any]) -> Any:
    """Return the messages of a row; None if it has none."""
    given, found = {"prompt", "completion", "messages"} & row.keys(), row.get("messages")
    if given == {"messages"}:
        return found
    if given == {"prompt", "messages"} and isinstance(found, list):
        return found if {"role": "user", "content": row["prompt"]} in found else None
    if given == {"prompt", "completion"} and all(isinstance(row[key], list) for key in given):
        if any(isinstance(turn, dict) and turn.get("role") == "assistant" for turn in row["prompt"]):
            raise ValueError("has an answer in its prompt, and every answer is trained; write them as messages")
        return row["prompt"] + row["completion"]
    if not given and "conversations" in row:
        return [_message(turn) for turn in row["conversations"]]
    if not given and {"instruction", "output"} <= row.keys():
        asked = "\n\n".join(text for text in (row["instruction"], row.get("input") or "") if text != "")
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"] + ""}]
    return None


def _message(turn: Any) -> Any:
    if not (isinstance(turn, dict) and "from" in turn):
        return turn
    others = {key: turn[key] for key in turn.keys() - {"from", "value"}}
    return others | {"role": ROLES.get(turn["from"], turn["from"]), "content": turn.get("value")}


def _joined(turn: Any) -> Any:
    """Join the texts of a message's parts. Raises ValueError for an image, and for OpenAI's weight 0."""
    if isinstance(turn, dict) and turn.get("role") == "assistant" and turn.get("weight") == 0:
        raise ValueError("has an answer of weight 0, and every answer is trained; cut the chat before it")
    if not (isinstance(turn, dict) and isinstance(turn.get("content"), list)):
        return turn
    parts = [part if isinstance(part, dict) else {} for part in turn["content"]]
    for part in parts:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"has a part of type {part.get('type')} in its content, and only text is read; leave it out"
            )
    return turn | {"content": "".join(part["text"] for part in parts)}


def without_nulls(value: Any) -> Any:
    """Leave out the keys that are null: a column has every key of every row. Bytes and NaN, not in JSON, are null."""
    if isinstance(value, dict):
        inner = {key: without_nulls(item) for key, item in value.items()}
        return {key: item for key, item in inner.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    is_json = not isinstance(value, (bytes, float)) or isinstance(value, float) and math.isfinite(value)
    return value if is_json else None


# ---- tables ---------------------------------------------------------------------------------------------------------


def table_kind(path: str) -> str | None:
    """Return "parquet", "arrow", or None for another file. Raises OSError."""
    if path.endswith((".parquet", ".arrow")):
        return path.rsplit(".", 1)[1]
    with open(path, "rb") as file:
        return "parquet" if file.read(4) == b"PAR1" else None


def read_table(path: str, kind: str, choose: Callable[[Any], list[str]]) -> Iterator[list[dict[str, Any]]]:
    """Yield some rows at a time, of the columns that `choose` names for a schema. Raises ValueError."""
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError as error:
        why = "needs the package pyarrow, which is not installed"
        raise ValueError(f"{path} {why}; {pip_install('data')}") from error
    done = 0
    try:
        if kind == "parquet":
            table = parquet.ParquetFile(path)
            # Without threads: in them a failed allocation may end the process.
            parts = table.iter_batches(ROWS, columns=choose(table.schema_arrow), use_threads=False)
        else:
            table = ipc.open_stream(pyarrow.memory_map(path))
            names = choose(table.schema)
            parts = (whole.select(names).slice(row, ROWS) for whole in table for row in range(0, whole.num_rows, ROWS))
        for part in parts:
            part.validate(full=True)  # the file may be damaged
            yield part.to_pylist()
            done += part.num_rows
    except MemoryError as error:
        why = f"{ROWS} rows after row {done} need more memory than the limit of this process"
        raise ValueError(f"{path}: {why}; split the texts, or leave the file out") from error
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        why = f"cannot be read after row {done} ({' '.join(str(error).split())})"
        raise ValueError(f"{path}: {why}; the file is damaged: copy it again") from error
