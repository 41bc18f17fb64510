"""What a user names as a file: only a regular one is read, and only JSON that is JSON."""

import io
import os
import resource
import unicodedata

import pytest

from minitron.config import files
from minitron.config.text import printable, short
from minitron.interop.limits import limited_memory


@pytest.mark.parametrize(
    "what, message",
    [
        ("pipe", "not a regular file"),
        ("device", "not a regular file"),
        ("folder", "Is a directory"),
        ("nothing", "No such file"),
    ],
)
def test_only_regular_files_are_read(tmp_path, what, message):
    path = tmp_path / "x"
    {
        "pipe": os.mkfifo,
        "folder": os.mkdir,
        "device": lambda path: path.symlink_to("/dev/zero"),
        "nothing": lambda path: None,
    }[what](path)
    with pytest.raises(OSError, match=message) as caught:  # without waiting for whoever writes into the pipe
        files.read_bytes(path, 10)
    assert caught.value.filename == str(path)


def test_a_file_may_be_too_large(tmp_path):
    (tmp_path / "x").write_bytes(bytes(11))
    assert files.read_bytes(tmp_path / "x", 11) == bytes(11)
    with limited_memory(1 << 30):  # the limit on the file is no memory that is taken
        assert files.read_bytes(tmp_path / "x", 1 << 33) == bytes(11)
    with pytest.raises(OSError, match="its 11 bytes are more than 10"):
        files.read_bytes(tmp_path / "x", 10)


@pytest.mark.parametrize("soft", [resource.RLIM_INFINITY, 1 << 60, 1 << 20])
def test_a_limit_of_memory_is_what_is_taken_and_more_but_never_above_the_one_before(monkeypatch, soft):
    limits, more = [], 1 << 40
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, 1 << 61))
    monkeypatch.setattr(resource, "setrlimit", lambda *limit: limits.append(limit))
    taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    with limited_memory(more):
        ((which, (inside, hard)),) = limits
    assert (which, hard) == (resource.RLIMIT_AS, 1 << 61)
    assert inside == pytest.approx(soft if soft == 1 << 20 else taken + more, rel=0.01)
    assert limits[1:] == [(resource.RLIMIT_AS, (soft, 1 << 61))]


@pytest.mark.parametrize(
    "text, message",
    [
        ("[" * 2000 + "]" * 2000, "nested too deeply"),
        ("NaN", "NaN is not a number in JSON"),
        ("[-Infinity]", "not a number"),
        ("1e400", "1e400 is too large a number"),
        ("9" * 5000, "digits"),
        ("{", "Expecting"),
        (b"\xff", "decode"),
    ],
)
def test_what_is_no_json(text, message):
    with pytest.raises(ValueError, match=message):
        files.parse_json(text)


def test_json(tmp_path):
    (tmp_path / "x").write_text('{"a": [1, 2.5, null, "b"]}')
    assert files.read_json(tmp_path / "x") == {"a": [1, 2.5, None, "b"]}


def test_a_line_may_be_as_long_as_a_record(monkeypatch):
    """The limit includes the newline, which the last line may lack."""
    monkeypatch.setattr(files, "RECORD_BYTES", 5)
    assert list(files.lines_of(io.BytesIO(b"abcd\n\nabcde"), "x")) == [b"abcd\n", b"\n", b"abcde"]
    for text in b"a\nabcde\n", b"a\nabcdef":
        with pytest.raises(ValueError, match="x: line 2 has more than"):
            list(files.lines_of(io.BytesIO(text), "x"))


def test_what_moves_a_cursor_or_turns_the_direction_of_writing_is_escaped():
    def moves(character):
        turns = unicodedata.bidirectional(character) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
        return turns or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in "\u061c\u200e\u200f"

    for character in map(chr, range(0x3000)):
        assert (printable(character) != character) == moves(character), hex(ord(character))
    assert printable("a\ud800\x1b") == "a\\ud800\\x1b"
    assert (short(" a\n b"), short("ab", 2), short("abc", 2)) == ("a b", "ab", "ab...")
