"""What a user names as a file: only a regular one is read, and only JSON that is JSON."""

import os

import pytest

from minitron.config import files
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
