"""Rows of fine-tuning data: the files that hold them, and the keys that people give them.

    chats.jsonl                  an object a line
    alpaca.json                  one list of objects: its first byte is [
    chats.parquet, chats.arrow   a table, read some rows at a time; nulls are left out. Needs the extra `data`

    {"instruction": "Add.", "input": "1 2", "output": "3"}                            Alpaca
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", ...}]}       ShareGPT

The last two become messages, with the text of a key `system` as the first one, and all their other keys. Any other row
stays as it is: sft.py encodes messages, and prompt and completion.

A small table may hold a huge text, so one read takes at most TABLE_BYTES of memory. Left out: Alpaca's `history`.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

from minitron.config.command import limited_memory
from minitron.config.files import errors_as, lines_of, parse_json, read_bytes
from minitron.config.installed import pip_install

LIST_BYTES = 1 << 30  # of a JSON list, which is read as a whole
ROWS = 128  # of a table, read at a time
TABLE_BYTES = 4 << 30  # of memory, that one read may take
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant"}


def read_rows(path: str) -> Iterator[tuple[int, Any]]:
    """Yield each row's number, from 1, and its content: of JSONL the line as it is. Empty lines are left out.

    Raises OSError, and ValueError for a file that cannot be read as a whole.
    """
    if kind := table_kind(path):
        number = 0
        for part in read_table(path, kind, lambda schema: schema.names):
            for number, row in enumerate(part, number + 1):
                yield number, without_nulls(row)
    elif row_name(path) == "row":
        with errors_as(ValueError, lambda error: f"{path} is no list of JSON ({error}); correct it", ValueError):
            rows = parse_json(read_bytes(path, LIST_BYTES))
        yield from enumerate(rows, 1)
    else:
        with open(path, "rb") as file:
            yield from ((number, line) for number, line in enumerate(lines_of(file, path), 1) if line.strip())


def row_name(path: str) -> str:
    """Return what a file consists of: "line" or "row". Raises OSError."""
    with open(path, "rb") as file:
        return "row" if file.read(1) == b"[" or table_kind(path) else "line"


def parse_line(line: bytes) -> Any:
    """Parse a line of JSONL. Raises ValueError with what is wrong and the fix."""
    try:
        row = parse_json(line.rstrip())
    except ValueError as error:
        why: object = error  # nested too deeply, or not UTF-8
        if isinstance(error, json.JSONDecodeError):
            why = f"{error.msg} at character {error.pos + 1}"
        raise ValueError(f"is not JSON ({why}); correct it") from error
    return row


def to_messages(row: Any) -> Any:
    """Rewrite a row of Alpaca or ShareGPT as one of messages. Raises ValueError for a value that is no text."""
    if not isinstance(row, dict) or {"prompt", "completion", "messages"} & row.keys():
        return row
    turns: Any
    if "conversations" in row:
        turns = row["conversations"]
        if isinstance(turns, list):
            turns = [_message(turn) for turn in turns]
    elif {"instruction", "output"} <= row.keys():
        texts = [row["instruction"], row.get("input") or "", row["output"]]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("has an instruction, input or output that is no text; put it into quotes")
        asked = "\n\n".join(filter(None, texts[:2]))
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": texts[2]}]
    else:
        return row
    if row.get("system") and isinstance(turns, list):
        turns = [{"role": "system", "content": row["system"]}, *turns]
    others = row.keys() - {"conversations", "instruction", "input", "output", "system"}
    return {key: row[key] for key in others} | {"messages": turns}


def _message(turn: Any) -> Any:
    if not (isinstance(turn, dict) and isinstance(turn.get("from"), str)):
        return turn
    return {"role": ROLES.get(turn["from"], turn["from"]), "content": turn.get("value")}


def without_nulls(value: Any) -> Any:
    """Leave out the keys that are null: a column has every key of every row."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


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
        source = pyarrow.memory_map(path) if kind == "arrow" else path  # mapped before the limit, which counts maps
        with limited_memory(TABLE_BYTES):
            if kind == "parquet":
                table = parquet.ParquetFile(source)
                # Without threads: in them a failed allocation may end the process.
                parts = table.iter_batches(ROWS, columns=choose(table.schema_arrow), use_threads=False)
            else:
                table = ipc.open_stream(source)
                columns = choose(table.schema)
                parts = (
                    whole.select(columns).slice(row, ROWS) for whole in table for row in range(0, whole.num_rows, ROWS)
                )
        while (rows := _next_rows(parts)) is not None:
            yield rows
            done += len(rows)
    except MemoryError as error:
        why = f"{ROWS} rows after row {done} take more than {TABLE_BYTES >> 30} GiB of memory"
        raise ValueError(f"{path}: {why}; split the texts, or leave the file out") from error
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        why = f"cannot be read after row {done} ({' '.join(str(error).split())})"
        raise ValueError(f"{path}: {why}; the file is damaged: copy it again") from error


def _next_rows(parts: Iterator[Any]) -> list[dict[str, Any]] | None:
    """Return the rows of the next part, which may not be what the file says they are; None after the last."""
    with limited_memory(TABLE_BYTES):
        if (part := next(parts, None)) is None:
            return None
        part.validate(full=True)
        rows: list[dict[str, Any]] = part.to_pylist()
        return rows
