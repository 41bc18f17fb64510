"""The two data tools, run as users run them, as scripts; what needs no process of its own is called directly."""

import gzip
import json
import lzma
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest
import zstandard

from minitron.config import cli
from minitron.data.indexed import IndexedDataset, IndexedWriter, read_sidecar
from minitron.interop.tokenizers import ByteTokenizer, load_tokenizer
from tools import check_data, preprocess_data, rows

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"}  # the tools find their own checkout
TEXTS = ["hello", "", "caf\u00e9 \U0001f600", "line\nbreak", " ", "x" * 3000] * 3


def tool(name, *arguments, **changes):
    return subprocess.run(
        [sys.executable, ROOT / "tools" / name, *map(str, arguments)],
        env=ENVIRONMENT | changes,
        capture_output=True,
        text=True,
        timeout=600,
    )


def preprocess(*inputs, prefix, workers=1, more=("--append-eod",)):
    return tool(
        "preprocess_data.py",
        "--input",
        *inputs,
        "--output-prefix",
        prefix,
        "--tokenizer",
        "bytes",
        "--workers",
        workers,
        *more,
    )


def lines_of(texts):
    return "".join(json.dumps({"text": text, "title": text[:3]}) + "\n" for text in texts).encode()


def documents_of(prefix):
    dataset = IndexedDataset(prefix)
    ends = dataset.document_indices.tolist()
    return [
        [i for sequence in range(begin, end) for i in dataset.get(sequence).tolist()]
        for begin, end in zip(ends, ends[1:])
    ]


def error_of(main, *arguments):
    """The one line that a tool's main() ends with."""
    with pytest.raises(ValueError) as error:
        main([str(argument) for argument in arguments])
    assert "\n" not in str(error.value)
    return str(error.value)


def one_line_error(run):
    """The message, after checking that it is one line and the exit status 1 (a progress bar may precede it)."""
    assert run.returncode == 1 and "Traceback" not in run.stderr, run.stderr
    errors = [line for line in run.stderr.replace("\r", "\n").splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and run.stderr.rstrip().endswith(errors[0]), run.stderr
    return errors[0]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_is_on_terminals_alone_and_shows_a_rate(terminal):
    code = (
        "import time\nfrom minitron.interop.progress import progress_bar\n"
        "with progress_bar(4, 'B', 'working') as bar:\n    time.sleep(1.1)\n    bar.update(2)"
    )
    ours, theirs = pty.openpty() if terminal else os.pipe()
    if terminal:
        termios.tcsetwinsize(theirs, (24, 100))
    environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], stderr=theirs, env=environment, check=True, timeout=600)
    os.write(theirs, b"end")
    written = ""
    while not written.endswith("end"):
        written += os.read(ours, 1 << 16).decode()
    assert ("working:  50%" in written and "B/s]" in written) if terminal else written == "end"


def test_every_compression_and_worker_count_give_the_same_dataset(tmp_path, monkeypatch):
    content = lines_of(TEXTS)
    half = len(lines_of(TEXTS[:9]))
    frames = zstandard.ZstdCompressor()
    files = {
        "plain.jsonl": content,
        "a.jsonl.gz": gzip.compress(content),
        "b.jsonl.xz": lzma.compress(content),
        "c.jsonl.zst": frames.compress(content[:half]) + frames.compress(content[half:]),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    one = preprocess(
        *[tmp_path / name for name in files],
        prefix=tmp_path / "one",
        more=["--append-eod", "--json-keys", "text", "title"],
    )
    assert one.returncode == 0, one.stderr
    assert one.stderr == "", "no bar in a log"
    three = preprocess(*[tmp_path / name for name in files], prefix=tmp_path / "three", workers=3)
    assert three.returncode == 0, three.stderr
    for kind in ("bin", "idx", "json"):
        assert (tmp_path / f"one_text_document.{kind}").read_bytes() == (
            tmp_path / f"three_text_document.{kind}"
        ).read_bytes()
    eod = ByteTokenizer.eod
    for key, cut in (("text", None), ("title", 3)):
        expected = [list(text[:cut].encode()) + [eod] if text else [] for text in TEXTS] * 4
        assert documents_of(tmp_path / f"one_{key}_document") == expected
        check_last_lines(one.stdout, tmp_path / f"one_{key}_document", expected)
    assert read_sidecar(tmp_path / "one_text_document") == {
        "tokenizer": "bytes",
        "fingerprint": load_tokenizer("bytes").fingerprint,
        "vocab_size": 257,
        "append_eod": True,
    }
    assert not list(tmp_path.glob("*.partial"))


def check_last_lines(stdout, prefix, expected):
    """What was written: documents, tokens, bytes. Then a command whose configuration reads it."""
    lines = stdout.splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith(f"{prefix}: ")]
    counts = [int(x.replace(",", "")) for x in re.findall(r"[\d,]*\d", lines[at].removeprefix(f"{prefix}: "))]
    assert counts == [len(expected), sum(map(len, expected)), (prefix.parent / f"{prefix.name}.bin").stat().st_size]
    python, flag, module, *keys = shlex.split(lines[at + 1])
    assert (python, flag, module) == ("python", "-m", "minitron.pretrain")
    cfg = cli.load(keys)
    assert cfg.data.source == "indexed" and cfg.data.paths == (str(prefix),) and cfg.data.tokenizer == "bytes"
    assert cfg.model.vocab_size == ByteTokenizer.vocab_size


def test_many_batches_keep_their_order(tmp_path):
    texts = [f"{i} " + "y" * 40_000 for i in range(120)]  # 4.8 MB: five batches for two workers
    (tmp_path / "in.jsonl").write_bytes(lines_of(texts) + b"\n  \n")
    run = preprocess(tmp_path / "in.jsonl", prefix=tmp_path / "out", workers=2, more=[])
    assert run.returncode == 0, run.stderr
    assert documents_of(tmp_path / "out_text_document") == [list(text.encode()) for text in texts]


GOOD = b'{"text": "fine"}\n'


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("in.jsonl", GOOD * 2 + b'{"text": \n', r"in.jsonl: line 3 is not JSON"),
        ("in.jsonl", GOOD + b"\xff\xfe\n", r"in.jsonl: line 2 is not JSON"),
        (
            "in.jsonl",
            GOOD + b'{"body": "x"}\n',
            "in.jsonl: line 2 has no text under the key 'text'; correct the line or --text-field",
        ),
        ("in.jsonl", b'{"text": 3}\n', "in.jsonl: line 1 has no text under the key 'text'"),
        ("in.jsonl", b"[1]\n", "in.jsonl: line 1 has no text under the key 'text'"),
        ("in.jsonl", b'{"text": "\\ud800"}\n', "in.jsonl: line 1: 'text' is no Unicode text"),
        ("in.jsonl.gz", gzip.compress(GOOD * 9, mtime=0)[:-12], "in.jsonl.gz: cannot be read after line"),
        ("in.jsonl.xz", lzma.compress(GOOD * 9)[:-30], "in.jsonl.xz: cannot be read after line"),
        (
            "in.jsonl.zst",
            zstandard.compress(GOOD * 9)[:-5],
            "in.jsonl.zst: cannot be read after line 0 (it ends inside a frame)",
        ),
        ("in.jsonl.zst", GOOD, "in.jsonl.zst: cannot be read after line 0"),
        ("in.jsonl.gz", GOOD, "in.jsonl.gz: cannot be read after line 0"),
    ],
)
def test_every_bad_input_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    job = preprocess_data.Job("bytes", ("text",), False)
    with pytest.raises(ValueError) as error:
        for batch in preprocess_data.read_batches([str(tmp_path / name)]):
            preprocess_data.encode_batch(job, batch)
    assert message in str(error.value)


def test_an_error_in_a_worker_is_one_line_and_leaves_nothing(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(GOOD * 2 + b"{")
    assert "in.jsonl: line 3 is not JSON" in one_line_error(preprocess(tmp_path / "in.jsonl", prefix=tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"--input": "absent"}, "absent: no such input file; correct --input"),
        ({"--workers": "0"}, "--workers: 0 is not a whole number"),
        ({"--workers": "9999999"}, "--workers 9999999: that many processes"),
        ({"--tokenizer": "gpt9:x"}, "--tokenizer='gpt9:x' is not one of"),
        ({"--output-prefix": "old"}, "old_text_document.idx exists already; delete it or choose another"),
        ({"--output-prefix": "in.jsonl/out"}, "in.jsonl/out_text_document: cannot be written"),
        ({"--output-prefix": "/proc/nope/x"}, "/proc/nope/x_text_document: cannot be written"),
        ({"--json-keys": "text"}, "--json-keys text text: 'text' is there twice; name each key once"),
        (
            {"--workers": "many"},
            "argument --workers: many is not a whole number of 1 or more; --help lists what there is",
        ),
    ],
)
def test_bad_arguments_are_one_line(tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_bytes(GOOD)
    (tmp_path / "old_text_document.idx").write_bytes(b"days of work")
    options = {"--input": "in.jsonl", "--output-prefix": "out", "--tokenizer": "bytes", "--workers": "1"} | changes
    words = [word for option in options.items() for word in option]
    twice = ["text"] if "--json-keys" in changes else []
    assert message in error_of(preprocess_data.main, *words, *twice)
    assert len(list(tmp_path.iterdir())) == 2


def test_check_tries_the_beginning_of_each_input_and_writes_nothing(tmp_path, monkeypatch):
    good, bad, prefix = tmp_path / "good.jsonl", tmp_path / "bad.jsonl", tmp_path / "d"
    good.write_bytes(lines_of(["text"] * 3) + b"no JSON, behind the first batch\n")
    monkeypatch.setattr(rows, "BATCH_BYTES", 1)
    preprocess_data.main(["--input", str(good), "--output-prefix", str(prefix), "--tokenizer", "bytes", "--check"])
    bad.write_text('{"other": 1}\n')
    with pytest.raises(ValueError, match="bad.jsonl: line 1 has no text under the key 'text'"):
        preprocess_data.main(
            ["--input", str(good), str(bad), "--output-prefix", str(prefix), "--tokenizer", "bytes", "--check"]
        )
    assert {path.name for path in tmp_path.iterdir()} == {"good.jsonl", "bad.jsonl"}


@pytest.mark.parametrize(
    "content, keys, empty",
    [
        (b"", ["text"], "text"),
        (b"\n \n", ["text"], "text"),
        (b'{"text": ""}\n' * 3, ["text"], "text"),
        (b'{"text": "full", "title": ""}\n', ["text", "title"], "title"),
    ],
)
def test_an_input_without_text_is_an_error_and_writes_nothing(tmp_path, content, keys, empty):
    """It gave a dataset of no tokens and exit status 0."""
    (tmp_path / "in.jsonl").write_bytes(content)
    more = ["--append-eod", "--json-keys", *keys]
    run = preprocess(tmp_path / "in.jsonl", prefix=tmp_path / "out", more=more)
    assert f"in.jsonl: not a token under the key '{empty}'; give files with documents" in one_line_error(run)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_an_input_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(ValueError, match=r": cannot be read \(.*\); correct --input or its permissions"):
        next(preprocess_data.read_batches([str(tmp_path)]))


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(lines_of(["z" * 100_000] * 10))
    words = [
        sys.executable,
        ROOT / "tools" / "preprocess_data.py",
        "--input",
        tmp_path / "in.jsonl",
        "--output-prefix",
        tmp_path / "out",
        "--tokenizer",
        "bytes",
        "--workers",
        "1",
    ]
    limited = ["bash", "-c", 'ulimit -f 200; exec "$@"', "limited", *map(str, words)]  # files of at most 200 KiB
    run = subprocess.run(limited, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert "out_text_document: cannot be written ([Errno 27] File too large)" in one_line_error(run)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def children_of(pid):
    """Processes whose parent is `pid`, from /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def wait_until(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def long_run(tmp_path):
    """A run that is under way, in a process group of its own, and its two workers."""
    (tmp_path / "in.jsonl").write_bytes(lines_of(["z" * 100_000] * 100))
    arguments = [
        "--input",
        *[tmp_path / "in.jsonl"] * 80,
        "--output-prefix",
        tmp_path / "out",
        "--tokenizer",
        "bytes",
        "--workers",
        "2",
    ]
    process = subprocess.Popen(
        [sys.executable, ROOT / "tools" / "preprocess_data.py", *map(str, arguments)],
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until(lambda: any(path.stat().st_size for path in tmp_path.glob("out_text_document.bin.*.partial")))
    workers = [pid for pid in children_of(process.pid) if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(workers) == 2
    return process, workers


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_ctrl_c_is_one_line_and_leaves_nothing(tmp_path):
    """A terminal sends it to every process of the group."""
    process, workers = long_run(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    stderr = process.communicate(timeout=600)[1].replace("\r", "\n")
    assert process.returncode == 130 and stderr.endswith("error: interrupted\n") and "Traceback" not in stderr, stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("victim", ["parent", "worker"])
def test_a_killed_run_leaves_no_dataset_and_no_process(tmp_path, victim):
    """The input is large enough to be still under way when the victim is killed."""
    process, workers = long_run(tmp_path)
    os.kill(process.pid if victim == "parent" else workers[0], signal.SIGKILL)
    stderr = process.communicate(timeout=600)[1]
    assert process.returncode == (-signal.SIGKILL if victim == "parent" else 1)
    if victim == "worker":
        assert "error: an encoding process was killed" in stderr
    assert not (tmp_path / "out_text_document.bin").exists() and not (tmp_path / "out_text_document.idx").exists()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


def test_a_worker_killed_in_the_middle_of_its_answer_is_noticed():
    """In a pipe that the others hold open too, the rest of it was waited for for ever."""
    batch = preprocess_data.Batch("file", 1, [lines_of(["z" * 5_000_000]).rstrip()], 0)
    with preprocess_data.Workers(2, preprocess_data.Job("bytes", ("text",), False)) as pool:
        pipe = pool.idle.get()
        pipe.send(batch)
        assert pipe.poll(60)  # it has begun to write, and cannot end before somebody reads
        os.kill(pool.processes[0].pid, signal.SIGKILL)
        with pytest.raises((EOFError, OSError)):
            pipe.recv()
        pool.idle.put(pipe)
        answers = [pool.submit(batch).exception(60) for _ in range(2)]
    assert sorted(str(answer) for answer in answers)[0] == "None"
    assert any("an encoding process was killed; it may have run out of memory" in str(a) for a in answers)


def write(prefix, documents, dtype=np.uint16, sidecar=None):
    with IndexedWriter(prefix, dtype, sidecar) as writer:
        for document in documents:
            writer.add_document(np.array(document, dtype))
    return prefix


def test_check_data_describes_a_dataset(tmp_path, capsys):
    write(tmp_path / "d", [list(b"hello world"), list(b"bye"), []])
    check_data.main([str(tmp_path / "d"), "--vocab-size", "300", "--samples", "2", "--tokenizer", "bytes"])
    shown = capsys.readouterr().out
    fingerprint = IndexedDataset(tmp_path / "d").fingerprint
    for part in (
        "documents 3   sequences 3   tokens 14",
        f"dtype uint16   largest id {max(b'hello world bye')}",
        fingerprint,
        "0% 0",
        "50% 3",
        "100% 11",
        "tokenizer unknown",
        "sequence 0: 'hello world'",
    ):
        assert part in shown, shown
    write(tmp_path / "made", [[1]], sidecar={"tokenizer": "bytes", "fingerprint": "f", "vocab_size": 257})
    run = tool("check_data.py", tmp_path / "d", tmp_path / "made")
    assert run.returncode == 0 and "tokens 14" in run.stdout and "tokenizer bytes of 257 ids" in run.stdout


def poke(path, offset, content):
    data = bytearray(path.read_bytes())
    data[offset : offset + len(content)] = content
    path.write_bytes(data)


LENGTHS = 34  # bytes of the header; then 3 lengths of 4, 3 pointers of 8, 4 document indices of 8
POINTERS = LENGTHS + 3 * 4
INDICES = POINTERS + 3 * 8


@pytest.mark.parametrize(
    "damage, arguments, message",
    [
        (lambda d: (d / "d.idx").unlink(), [], "d.idx: no such file"),
        (
            lambda d: poke(d / "d.idx", LENGTHS, b"\xff\xff\xff\xff"),
            [],
            "sequence 0 has -1 tokens from byte 0 on, where byte 0 is next; the index is damaged",
        ),
        (lambda d: poke(d / "d.idx", POINTERS + 8, b"\x02"), [], "from byte 2 on, where byte 6 is next"),
        (lambda d: poke(d / "d.idx", INDICES + 8, b"\x09"), [], "document indices do not rise from 0 to 3"),
        (
            lambda d: (d / "d.bin").write_bytes((d / "d.bin").read_bytes() + b"\0\0"),
            [],
            "d.idx needs 18; the file is truncated or belongs to another index",
        ),
        (lambda d: None, ["--vocab-size", "9"], "d.bin: position 8 holds token id 9, but --vocab-size=9 allows 0 to 8"),
        (
            lambda d: (d / "d.json").write_text('{"tokenizer": "x", "fingerprint": "f", "vocab_size": 5}'),
            [],
            "d.json's vocab_size=5 allows 0 to 4; set it to",
        ),
        (lambda d: write(d / "d", []), [], "d.bin: no tokens in 0 documents"),
        (lambda d: write(d / "d", [[], []]), [], "d.bin: no tokens in 2 documents"),
        (lambda d: None, ["--samples", "-1"], "--samples: -1 is not a whole number"),
        (lambda d: None, ["--vocab-size", "0"], "--vocab-size: 0 is not a whole number"),
        (lambda d: None, ["--tokenizer", "x"], "--tokenizer='x' is not one of"),
        (lambda d: None, ["--vocab"], "argument --vocab-size: expected one argument"),
        (
            lambda d: (d / "d.json").write_text('{"tokenizer": "x", "fingerprint": "f", "vocab_size": 50}'),
            ["--tokenizer", "bytes"],
            "d.json says tokenizer x with fingerprint f, but --tokenizer has",
        ),
    ],
)
def test_check_data_finds_every_defect(tmp_path, damage, arguments, message):
    write(tmp_path / "d", [[1, 2, 3], [4, 5], [6, 7, 8, 9]])
    damage(tmp_path)
    assert message in error_of(check_data.main, tmp_path / "d", *arguments)


def test_check_data_exits_with_one_line(tmp_path):
    assert "absent.idx: no such file" in one_line_error(tool("check_data.py", tmp_path / "absent"))


@pytest.mark.parametrize("name", ["preprocess_data", "check_data", "plot_run", "draw_pipeline"])
def test_a_bad_argument_of_any_tool_is_one_line_and_exit_1(name):
    line = one_line_error(tool(f"{name}.py", "--no-such-option"))
    assert "the following arguments are required: " in line and line.endswith("; --help lists what there is")
