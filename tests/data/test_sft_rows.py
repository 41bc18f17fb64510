"""Fine-tuning data as people have it: other keys and files equal plain ones, bad and long rows, blends, epochs."""

import hashlib
import itertools
import json
import math
import os
import re
import resource
from collections import Counter
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from minitron import pretrain
from minitron.config import cli, rules
from minitron.data import build, sft
from minitron.data.cache import Cache
from minitron.data.sft import SHOWN, TokenizedFiles, encode_row
from minitron.data.tokenizers import REASONING
from minitron.interop.rows import READERS, read_rows, to_messages
from minitron.interop.tokenizers import ByteTokenizer, load_tokenizer
from test_pretrain import records
from test_sft import S, datasets, rows, write
from test_tokenizers import llama3_file  # noqa: F401  (a fixture)
from tools import check_job


def message(role, content):
    return {"role": role, "content": content}


ASKED = [
    [message("user", "the\n\nend"), message("assistant", "it")],
    [message("user", "the"), message("assistant", "end"), message("user", "it"), message("assistant", "the")],
    [message("system", "it"), message("user", "end"), message("assistant", "the")],
    [message("user", "the"), message("assistant", "end")],
]
TURNS = [{"from": who, "value": text} for who, text in zip(["human", "gpt"] * 2, ["the", "end", "it", "the"])]
OTHERS = [
    {"instruction": "the", "input": "end", "output": "it"},
    {"conversations": TURNS},
    {"instruction": "end", "input": "", "output": "the", "system": "it"},
    {"instruction": "the", "input": None, "output": "end"},
]


def tokens(path, tokenizer, folder):
    documents = TokenizedFiles([str(path)], tokenizer, Cache(folder / "cache"), READERS)
    return [tuple(array.tolist() for array in documents.get(i, 999)) for i in range(len(documents))]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow"])
def test_other_keys_and_files_are_messages(tmp_path, llama3_file, kind):  # noqa: F811
    """Alpaca and ShareGPT, in lines, in a list and in tables, whose rows have a null for each key of other rows."""
    tokenizer = load_tokenizer(f"llama3:{llama3_file}")
    expected = tokens(write(tmp_path, [{"messages": m} for m in ASKED]), tokenizer, tmp_path)
    for name, content in ("others", OTHERS), ("same", [{"messages": m} for m in ASKED]):
        path = tmp_path / f"{name}.{kind}"
        if kind == "jsonl":
            write(tmp_path, content, path.name)
        elif kind == "json":
            path.write_text(json.dumps(content, indent=1))
        else:
            pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install pyarrow")
            from pyarrow import ipc, parquet

            table = pyarrow.Table.from_pylist(content, pyarrow.schema(schema_of(pyarrow)))
            if kind == "parquet":
                parquet.write_table(table, path)
            else:
                with ipc.new_stream(str(path), table.schema) as writer:
                    writer.write_table(table)
        assert tokens(path, tokenizer, tmp_path) == expected
        if kind in ("parquet", "arrow"):
            for (_, row), given in zip(read_rows(str(path)), content, strict=True):
                assert row == row | {key: value for key, value in given.items() if value is not None}


def schema_of(pyarrow):
    text, turns = pyarrow.string(), lambda *names: pyarrow.list_(pyarrow.struct([(n, pyarrow.string()) for n in names]))
    columns = dict.fromkeys(("instruction", "input", "output", "system"), text)
    return columns | {"conversations": turns("from", "value"), "messages": turns("role", "content", "name")}


def in_parts(content):
    return [{"type": "text", "text": content[:2]}, {"type": "text", "text": content[2:]}]


PARTS = [m | {"content": in_parts(m["content"])} for m in ASKED[1]]
ALIKE = [
    {"messages": PARTS},
    {"messages": ASKED[1], "prompt": "the", "prompt_id": "7"},
    {"conversations": PARTS, "prompt": None},
    {"prompt": ASKED[0][:1], "completion": [ASKED[0][1] | {"content": in_parts("it")}]},
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_parts_and_prompts_of_messages_are_messages(tmp_path, llama3_file, kind):  # noqa: F811
    """OpenAI's parts, UltraChat's question beside the messages, TRL's prompt and completion of messages."""
    for number, row in enumerate(ALIKE):
        path = tmp_path / f"{number}.{kind}"
        if kind == "jsonl":
            write(tmp_path, [{key: value for key, value in row.items() if value is not None}], path.name)
        else:
            pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pyarrow.Table.from_pylist([row]), path)
        ((_, found),) = read_rows(str(path))
        assert found["messages"] == ASKED["completion" not in row]
        assert not {"prompt", "completion"} & found.keys()
        encode_row(found, load_tokenizer(f"llama3:{llama3_file}"), False, Counter())


@pytest.mark.parametrize(
    "row, message",
    [
        ({"instruction": 3, "output": "x"}, "an instruction, input, output or conversations that are not text or list"),
        ({"instruction": "x", "output": ""}, "an empty answer"),
        ({"conversations": [{"from": "gpt", "value": "x"}]}, "the roles assistant"),
        ({"conversations": "x"}, "messages that are not a list"),
        ({"conversations": [{"from": "human"}]}, "messages that are not a list"),
        ({"prompt": "x", "messages": ASKED[0]}, "messages, prompt of the keys"),
        ({"prompt": ASKED[0], "completion": ASKED[0]}, "an answer in its prompt"),
        ({"messages": [message("user", [{"type": "image_url", "image_url": {}}])]}, "a part of type image_url"),
        ({"messages": [message("user", ["x"])]}, "a part of type None"),
        ({"messages": [*ASKED[1], message("assistant", "x") | {"weight": 0}]}, "an answer of weight 0"),
        ({"conversations": [*TURNS, {"from": "gpt", "value": "x", "weight": 0}]}, "an answer of weight 0"),
        ({"messages": ASKED[2], "system": "x"}, "the key system and a system message"),
    ],
)
def test_bad_rows_of_others(tmp_path, row, message):
    with pytest.raises(ValueError, match=f"row 2 has {message}"):
        path = tmp_path / "a.json"
        path.write_text(json.dumps([{"prompt": "a", "completion": "b"}, row]))
        datasets(tmp_path, [path])


def noted(bos, *special):
    """Make a tokenizer that returns (text, special) in place of ids."""
    ids = {text: number for number, text in enumerate(special)}
    encode = lambda text, special=False: [(text, special)]
    return SimpleNamespace(bos=bos, eod=99, special=ids, chat=None, encode=encode)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("bos, begin", [(None, 3), (7, 7)])
def test_only_what_a_row_says_may_hold_special_tokens(special, bos, begin):
    tokenizer, counts = noted(bos, *sft.HEADER, "<|begin_of_text|>"), Counter()
    row = {"prompt": "p", "completion": "c"}
    first = [] if bos is None else [bos]
    assert encode_row(row, tokenizer, special, counts) == [[*first, ("p", special)], [("c", special), 99]]
    messages = [message("system", " s\n"), message("user", "u"), message("assistant", "a "), *ASKED[3]]
    said = lambda role: [0, (role, False), 1, ("\n\n", False)]
    assert encode_row({"messages": messages}, tokenizer, special, counts) == [
        [begin, *said("system"), ("s", special), 2, *said("user"), ("u", special), 2, *said("assistant")],
        [("a", special), 2],
        [*said("user"), ("the", special), 2, *said("assistant")],
        [("end", special), 2],
    ]
    tokenizer = noted(bos, *sft.HEADER)
    assert encode_row({"messages": messages}, tokenizer, special, counts)[0][: len(first) + 1] == [*first, 0]


@pytest.mark.parametrize(
    "row, count",
    [
        ({"prompt": "a", "completion": "b"}, 0),
        ({"prompt": "<s> </s> <s>", "completion": "b"}, 1),
        ({"prompt": "a", "completion": "b</s>"}, 1),
        ({"prompt": "s><", "completion": "s><"}, 0),
        ({"prompt": "a", "completion": "b", "id": "<s>"}, 0),
        ({"prompt": "a", "completion": "b", "tools": [{"<s>": 1}]}, 1),
        ({"prompt": "a", "completion": "b", "tools": [{"name": {"x": ["y", "</s>"]}}]}, 1),
    ],
)
def test_a_row_counts_once_if_any_of_its_texts_has_a_special_token(row, count):
    counts: Counter[str] = Counter()
    encode_row(row, noted(None, "<s>", "</s>"), False, counts)
    assert counts["special"] == count and counts["templated"] == 0


def called(content, **more):
    return message("assistant", content) | {"tool_calls": [{"name": "f"}]} | more


@pytest.mark.parametrize(
    "messages, plain, by_template",
    [
        (ASKED[1], True, True),
        (ASKED[2], True, True),
        ([message("user", "a"), message("system", "b"), message("assistant", "c")], False, True),
        ([message("developer", "a"), *ASKED[3]], False, True),
        ([message("user", "a"), called(None), message("tool", "1"), message("assistant", "b")], False, True),
        ([message("user", "a"), called("")], False, True),
        ([message("user", "a"), called(None, tool_calls=[])], False, False),
        ([message("user", "a"), called(3)], False, False),
        ([message("narrator", "a"), *ASKED[3]], False, False),
        ([*ASKED[3], message("narrator", "a")], False, False),
        ([message("user", "a"), message("assistant", " ")], False, False),
        ([message("user", "a"), message(None, "b")], False, False),
        ([*ASKED[3], "text"], False, False),
        ([], False, False),
    ],
)
def test_messages_with_and_without_a_template(messages, plain, by_template):
    for template, accepted in (False, plain), (True, by_template):
        with nullcontext() if accepted else pytest.raises(ValueError, match="has "):
            sft._check_messages(messages, template)


@pytest.mark.parametrize(
    "more, last, part",
    [
        ({"tools": [{"name": "f"}]}, {}, "tools"),
        ({"tools": '[{"name": "f"}]'}, {"tool_calls": [{"name": "f"}]}, "tools and tool_calls"),
        ({}, {"content": None, "tool_calls": [{"name": "f"}]}, "tool_calls"),
        *(({}, {key: "so it is"}, key) for key in REASONING),
    ],
)
def test_without_a_template_no_part_of_a_chat_is_left_out(more, last, part):
    tokenizer, counts = noted(None, *sft.HEADER), Counter()
    row = {"messages": [*ASKED[2][:-1], ASKED[2][-1] | last]} | more
    with pytest.raises(ValueError, match=f"^has {part},.* template.*data.tokenizer=hf:DIR"):
        encode_row(row, tokenizer, False, counts)
    emptied = {"messages": [*ASKED[2][:-1], dict.fromkeys(last) | ASKED[2][-1]], "tools": "[]"}
    assert encode_row(emptied, tokenizer, False, counts) == encode_row({"messages": ASKED[2]}, tokenizer, False, counts)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "instruction": "b", "output": "c"},
        {"completion": "a", "instruction": "b", "output": "c"},
        {"prompt": "a", "conversations": TURNS},
        {"prompt": "a", "completion": ASKED[0]},
        {"prompt": "a", "completion": "b"},
        {"prompt": "of another chat", "messages": ASKED[0]},
        {"prompt": "the", "messages": "a"},
        {"instruction": "a"},
        {"output": "a", "input": "b"},
        {},
        ["a"],
    ],
)
def test_a_row_of_no_format_or_of_two_stays_as_it_is(row):
    assert to_messages(row) is row


def test_messages_come_before_turns_and_turns_before_instructions():
    others = {"instruction": "a", "output": "b", "conversations": TURNS}
    assert to_messages(others | {"messages": ASKED[0]}) == others | {"messages": ASKED[0]}
    assert to_messages(others)["messages"] == ASKED[1]


@pytest.mark.parametrize(
    "row, messages",
    [
        ({"prompt": "end", "messages": ASKED[2]}, ASKED[2]),  # a question behind the system's message
        ({"instruction": "", "input": "the", "output": "it"}, [message("user", "the"), message("assistant", "it")]),
        (
            {"conversations": [{"from": "tool", "value": "a"}, {"from": "bing", "value": "b", "name": "c"}]},
            [message("tool", "a"), message("assistant", "b") | {"name": "c"}],
        ),
        ({"messages": [message("user", "a") | {"weight": 0}]}, [message("user", "a") | {"weight": 0}]),
        (
            {"messages": [message("assistant", "a") | {"weight": 1}], "id": 7},
            [message("assistant", "a") | {"weight": 1}],
        ),
        ({"prompt": ASKED[0][:1], "completion": ASKED[0][1:]}, ASKED[0]),
        (
            {"prompt": "end", "messages": [message("user", "end")], "system": "x"},
            [message("system", "x"), message("user", "end")],
        ),
    ],
)
def test_the_messages_of_a_row_and_nothing_else_of_it(row, messages):
    kept = {key: row[key] for key in row.keys() & {"id", "system", "instruction", "input", "output", "conversations"}}
    assert to_messages(row) == kept | {"messages": messages}


@pytest.mark.parametrize("row", [{"instruction": None, "input": "a", "output": "b"}, {"instruction": "a", "output": 3}])
def test_what_is_no_text_is_no_instruction_and_no_answer(row):
    with pytest.raises(TypeError):
        to_messages(row)


def test_a_key_system_is_the_first_message_of_every_kind_of_row(tmp_path):
    for row in {"messages": ASKED[0]}, {"conversations": TURNS}:
        ((_, found),) = read_rows(write(tmp_path, [row | {"system": "it"}]))
        assert found["messages"][0] == message("system", "it") and found["messages"][1]["role"] == "user"


@pytest.mark.parametrize("before", [b"\xef\xbb\xbf", b"\n\n  "])
def test_a_list_may_begin_behind_a_mark_or_an_empty_line(tmp_path, before):
    path = tmp_path / "a.json"
    path.write_bytes(before + json.dumps(rows(5), indent=1).encode())
    assert [row for _, row in read_rows(str(path))] == rows(5)


def test_columns_that_json_has_no_value_for_are_null(tmp_path):
    """A row that needs such a column is bad; others do not see it."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    data, path = rows(3), tmp_path / "a.parquet"
    score, picture = pyarrow.array([math.nan, 1.0, math.inf]), pyarrow.array([b"\xff"] * 3)
    day = pyarrow.array([None, None, date(2024, 7, 26)])
    columns = {key: [row[key] for row in data] for key in data[0]}
    parquet.write_table(pyarrow.table(columns | {"score": score, "picture": picture, "day": day}), path)
    expected = [data[0], data[1] | {"score": 1.0}, data[2] | {"day": "2024-07-26"}]
    assert [row for _, row in read_rows(str(path))] == expected
    parquet.write_table(pyarrow.table(columns | {"completion": picture}), path)
    with pytest.raises(ValueError, match="row 1.* has prompt of the keys"):
        datasets(tmp_path, [path])


def test_a_row_that_is_nested_too_deeply_is_bad(tmp_path):
    deep = "[" * 985 + "]" * 985
    path = write(tmp_path, [*rows(20), '{"prompt": "a", "completion": "b", "tools": ' + deep + "}"])
    with pytest.raises(ValueError, match="row 21 is n"):
        datasets(tmp_path, [path])


def test_all_bad_lines_are_found_at_once_or_left_out(tmp_path):
    """The first SHOWN are named, the others counted; without them the data are those of a file that never had them."""
    good, bad = rows(20), ["nonsense", {"prompt": "a"}, {"prompt": 3, "completion": "x"}] * 5
    mixed = [line for pair in itertools.zip_longest(good, bad) for line in pair if line is not None]
    path, plain = write(tmp_path, mixed), write(tmp_path, good, "plain.jsonl")
    numbers = [i for i, line in enumerate(mixed, 1) if line in bad]
    for _ in range(2):
        with pytest.raises(ValueError, match="data.bad_lines=skip") as caught:
            datasets(tmp_path, [path])
        assert [int(n) for n in re.findall(r"row (\d+) ", str(caught.value))] == numbers[:SHOWN]
        assert f"{len(bad) - SHOWN} more" in str(caught.value) and str(caught.value).startswith(path)
        skipped, expected = datasets(tmp_path, [path], bad_lines="skip"), datasets(tmp_path, [plain])
        for i in range(expected.train.packing.num_sequences):
            assert skipped.train[i].tokens.tolist() == expected.train[i].tokens.tolist()
        assert f"{len(bad)} bad rows" in skipped.note and f"row {numbers[0]} " in skipped.note
    alike = write(tmp_path, [*good, {"prompt": "a"}, {"prompt": "b"}], "alike.jsonl")
    with pytest.raises(ValueError, match=r"row 21, 22 has prompt of the keys [^;]*; [^;]*; data\.bad_lines=skip"):
        datasets(tmp_path, [alike])
        assert expected.note == datasets(tmp_path, [plain], bad_lines="skip").note


def counted(monkeypatch, module, name):
    """Count the calls of a function of a module."""
    calls, real = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **more: calls.append(args) or real(*args, **more))
    return calls


def test_bad_rows_are_found_by_one_process_for_all_that_read_them(tmp_path, monkeypatch):
    """Every node of a job reads them in the cache, as does a run that then leaves them out."""
    made, path = counted(monkeypatch, sft, "_tokenize"), write(tmp_path, [*rows(20), {"prompt": "a"}])
    for _ in range(3):
        with pytest.raises(ValueError, match="row 21 has prompt of the keys"):
            datasets(tmp_path, [path])
    assert "row 21" in datasets(tmp_path, [path], bad_lines="skip").note
    assert len(made) == 1


def test_files_are_hashed_by_one_process_until_one_is_written(tmp_path, monkeypatch):
    """Another process of the cache, on this node or another, takes the hash from there."""
    hashed, digest = [], hashlib.file_digest

    def counted_digest(file, algorithm):
        hashed.append(file.name)
        return digest(file, algorithm)

    def opened(first_on_node):
        return TokenizedFiles(paths, ByteTokenizer(), Cache(tmp_path / "cache", first_on_node), READERS).fingerprint

    monkeypatch.setattr(hashlib, "file_digest", counted_digest)
    paths = [write(tmp_path, rows(20)), write(tmp_path, rows(3), "b.jsonl")]
    before = {opened(first_on_node) for first_on_node in (True, False, True, False)}
    assert [path for path in hashed if path in paths] == paths
    times = os.stat(paths[1])
    Path(paths[1]).write_text(Path(paths[1]).read_text().replace("?", "!"))
    os.utime(paths[1], ns=(times.st_atime_ns, times.st_mtime_ns))
    after = {opened(first_on_node) for first_on_node in (True, False)}
    assert len(before) == len(after) == 1 and before != after
    assert [path for path in hashed if path in paths] == 2 * paths


def test_a_file_without_a_good_row_is_an_error_also_if_bad_rows_are_left_out(tmp_path):
    with pytest.raises(ValueError, match="row 2 is not JSON"):
        datasets(tmp_path, [write(tmp_path, ["", "nonsense"])], bad_lines="skip")


def test_files_are_read_once_for_training_and_validation(tmp_path, monkeypatch):
    files = [write(tmp_path, rows(30)), write(tmp_path, rows(20), "b.jsonl")]
    opened = counted(monkeypatch, build, "TokenizedFiles")
    blend = ["0.5", files[0], "0.5", files[1]]
    data = datasets(tmp_path, blend, valid=4, split="8,2")
    assert [call[0] for call in opened] == [[path] for path in files]
    assert [len(part.part) for part in data.valid.parts] == [6, 4]
    datasets(tmp_path, files[:1], valid=4, valid_paths=(files[1],))
    assert [call[0] for call in opened[2:]] == [[path] for path in files]


def test_a_table_is_read_without_a_limit_of_this_process(tmp_path, monkeypatch):
    """The memory of a trainer is not the reader's to limit."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install pyarrow")
    from pyarrow import ipc, parquet

    table = pyarrow.Table.from_pylist(rows(300))
    parquet.write_table(table, tmp_path / "a.parquet")
    with ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    limits = counted(monkeypatch, resource, "setrlimit")
    for name in "a.parquet", "a.arrow":
        assert list(read_rows(str(tmp_path / name))) == list(enumerate(rows(300), 1)) and not limits


def test_a_check_of_much_data_leaves_bad_rows_out_as_the_run_does(tmp_path, monkeypatch):
    monkeypatch.setattr(check_job, "READ_BYTES", 0)
    path = write(tmp_path, [*rows(20), {"prompt": "a"}])
    words = ["data.source=sft", f"data.paths=[{path}]", "data.tokenizer=bytes"]
    with pytest.raises(ValueError, match="row 21 has prompt of the keys"):
        check_job._sft(cli.load(words), ByteTokenizer())
    found = check_job._sft(cli.load([*words, "data.bad_lines=skip"]), ByteTokenizer())
    assert "1 bad rows" in found and "row 21" in found


def test_long_documents_are_cut_left_out_or_refused(tmp_path):
    lines = [*rows(60, longest=2 * S), {"prompt": "?", "completion": "!" * (S - 1)}]  # the last one fills a sample
    long = [len(row["prompt"] + row["completion"]) + 1 > S + 1 for row in lines]
    kept = [row for row, out in zip(lines, long) if not out]
    assert 10 < len(kept) < 50
    path, short = write(tmp_path, lines), write(tmp_path, kept, "short.jsonl")
    left, expected = datasets(tmp_path, [path], split="1", too_long="skip"), datasets(tmp_path, [short], split="1")
    for i in range(3 * expected.train.packing.num_sequences):
        assert [a.tolist() for a in left.train[i][:3]] == [a.tolist() for a in expected.train[i][:3]]
    assert (
        f"{sum(long)} longer" in left.note and left.info["train"] != datasets(tmp_path, [path], split="1").info["train"]
    )
    begin = datasets(tmp_path, [path], valid=9, split="1,1").valid.part.start
    late = write(tmp_path, [row for row, out in zip(lines[begin:], long[begin:]) if not out], "late.jsonl")
    left = datasets(tmp_path, [path], valid=9, split="1,1", too_long="skip").valid
    expected = datasets(tmp_path, [short], valid=9, valid_paths=(late,)).valid
    assert 0 < sum(long[begin:]) == left.cut and len(left) == len(expected) == 9
    assert [left[i].tokens.tolist() for i in range(9)] == [expected[i].tokens.tolist() for i in range(9)]
    with pytest.raises(ValueError, match="data.too_long=skip") as caught:
        datasets(tmp_path, [path], split="1", too_long="error")
    numbers = [i for i, out in enumerate(long, 1) if out]
    assert [int(n) for n in re.findall(r"row (\d+) ", str(caught.value))] == numbers[:SHOWN]
    assert f"{len(numbers) - SHOWN} more" in str(caught.value)
    assert datasets(tmp_path, [short], too_long="error").info == datasets(tmp_path, [short]).info
    with pytest.raises(ValueError, match="train.seq_len=2 is too short for every document"):
        datasets(tmp_path, [path], seq_len=2, too_long="skip")


def test_files_are_blended_by_weight(tmp_path):
    """By the greedy rule, written out; the samples of a file are those that it has alone, however many there are."""
    files = [write(tmp_path, rows(n), f"{n}.jsonl") for n in (20, 30, 40)]
    shares = [0.5, 0.3, 0.2]
    alone = [datasets(tmp_path, [path], split="1").train for path in files]
    blend = datasets(tmp_path, [str(x) for pair in zip(shares, files) for x in pair], split="1")
    counts = [0] * 3
    for k in range(10):
        which = int(np.argmax([share * max(k, 1) - count for share, count in zip(shares, counts)]))
        assert blend.train[k].tokens.tolist() == alone[which][counts[which]].tokens.tolist()
        counts[which] += 1
    assert all(train.note in blend.note for train in alone)
    with pytest.raises(ValueError, match="weight"):
        datasets(tmp_path, [files[0], "0.5", files[1]])


def test_epochs_are_the_steps_of_all_samples_also_of_a_blend_that_is_resumed(tmp_path):
    """As a run of so many steps; documents are kept apart without a key for it."""
    files = [write(tmp_path, rows(20)), write(tmp_path, rows(9), "b.jsonl")]
    sequences = sum(datasets(tmp_path, [path], split="1").train.packing.num_sequences for path in files)
    steps = math.ceil(1.5 * sequences / 4)
    assert sequences % 4 and 1 < math.ceil(sequences / 4) < steps

    def losses(name, *keys):
        """Of the steps of this start."""
        before = len(records(tmp_path / name, "step")) if (tmp_path / name).exists() else 0
        places = [f"{key}={tmp_path / name}" for key in ("log.dir", "checkpoint.dir")]
        paths = f"data.paths=[0.5,{files[0]},0.5,{files[1]}]"
        pretrain.main([*SMALL, *keys, *places, paths, f"data.cache_dir={tmp_path / 'cache'}"])
        return [record["loss"] for record in records(tmp_path / name, "step")][before:]

    whole = losses("whole", f"train.steps={steps}", "data.separate_documents=true")
    first = losses("parts", "train.epochs=1")
    assert len(first) == math.ceil(sequences / 4)
    assert first + losses("parts", "train.epochs=1.5") == whole
    written = cli.load([str(tmp_path / "parts" / "config.yaml")])
    assert (written.train.steps, written.train.epochs) == (steps, None)
    rules.check(written, 1)


def test_the_rules_of_steps_are_checked_once_epochs_are_counted(tmp_path, capsys):
    keys = ["train.epochs=1", "optimizer.lr_schedule=cosine", "optimizer.constant_steps=99"]
    places = [f"data.cache_dir={tmp_path / 'cache'}", f"data.paths=[{write(tmp_path, rows(20))}]"]
    with pytest.raises(SystemExit) as ended:
        pretrain.main([*SMALL, *keys, *places])
    assert ended.value.code == 1 and "optimizer.constant_steps=99 must be below train.steps=" in capsys.readouterr().err


SMALL = [
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.ffn_hidden_size=32",
    "model.vocab_size=300",
    "data.source=sft",
    "data.tokenizer=bytes",
    "data.split=1",
    f"train.seq_len={S}",
    "train.global_batch_size=4",
    "precision.dtype=fp32",
    "optimizer.lr_schedule=constant",
    "optimizer.warmup_steps=0",
]
