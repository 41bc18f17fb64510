"""Tokenizers against a plain byte-pair loop, transformers' GPT-2 and SentencePiece, on files that the tests make."""

import base64
import errno
import functools
import io
import json
import shutil
from collections import Counter

import pytest
import regex
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from minitron.interop import tokenizers
from minitron.interop.tokenizers import GPT2_SPLIT, LLAMA3_SPLIT, load_tokenizer

TEXT = (
    "The quick brown fox isn't lazy; the dog's name is Ol\u00e9!\n\n    def f(x):\n        return x + 12345\r\n"
    "\u4eca\u65e5\u306f \u4e16\u754c \U0001f600\U0001f600 the the THE They'll we've\t\ttabs  "
) * 3
SAMPLES = [
    "",
    " ",
    "  ",
    "hello world",
    TEXT,
    "\n\n\n x",
    "a  b   c",
    "it's IT'S I'LL",
    "1234567",
    "\u00e9\u0301\u0000\u2028",
    "\U0001f469\u200d\U0001f4bb ok",
    "<|endoftext|>",
    "x<|end_of_text|>y",
    "trailing   ",
    "\r\n\t mixed \r",
    "\u00a0nbsp\u3000wide",
]
any_text = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \t\r\n'stheTHE019")), max_size=60
)


def train_bpe(merges: int) -> list[bytes]:
    """A small byte-pair vocabulary in order of rank: GPT-2's 256 bytes, then the most frequent pairs of TEXT."""
    words = Counter(tuple(bytes([b]) for b in word.encode()) for word in regex.findall(GPT2_SPLIT, TEXT))
    tokens = [bytes([b]) for b in sorted(range(256), key=lambda b: (not chr(b).isprintable() or b == 32, b))]
    for _ in range(merges):
        pairs = Counter()
        for word, count in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += count
        if not pairs:
            break
        pair = max(pairs, key=lambda pair: (pairs[pair], pair))
        tokens.append(pair)
        words = Counter({join(word, pair): count for word, count in words.items()})
    return tokens


def join(word, pair):
    out, i = [], 0
    while i < len(word):
        paired = tuple(word[i : i + 2]) == pair
        out.append(word[i] + word[i + 1] if paired else word[i])
        i += 1 + paired
    return tuple(out)


@functools.cache
def vocabulary() -> tuple[list[bytes], list[tuple[bytes, bytes]]]:
    trained = train_bpe(90)
    merges = trained[256:]
    return trained[:256] + [left + right for left, right in merges], merges


def plain_encode(text: str, split: str) -> list[int]:
    """Join the neighbouring pair of the lowest rank until none is left, word by word."""
    rank = {token: i for i, token in enumerate(vocabulary()[0])}
    ids = []
    for word in regex.findall(split, text):
        parts = [bytes([b]) for b in word.encode()]
        while True:
            ranks = [rank.get(left + right, len(rank)) for left, right in zip(parts, parts[1:])]
            if not ranks or min(ranks) == len(rank):
                break
            i = ranks.index(min(ranks))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [rank[part] for part in parts]
    return ids


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    tokens, merges = vocabulary()
    shown = {b: chr(b) for b in range(256) if chr(b).isprintable() and b != 32}
    shown |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in shown)}

    def show(token):
        return "".join(shown[b] for b in token)

    encoder = {show(token): i for i, token in enumerate(tokens)} | {"<|endoftext|>": len(tokens)}
    (folder / "encoder.json").write_text(json.dumps(encoder))
    (folder / "vocab.bpe").write_text(
        "#version: 0.2\n" + "".join(f"{show(left)} {show(right)}\n" for left, right in merges), "utf-8"
    )
    return folder


@pytest.fixture(scope="module")
def llama3_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama3") / "tokenizer.model"
    path.write_text("".join(f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(vocabulary()[0])))
    return path


@pytest.fixture(scope="module")
def llama2_file(tmp_path_factory):
    return sentencepiece_file(tmp_path_factory.mktemp("llama2"))


def sentencepiece_file(folder, **options):
    """Train a small model with these options, and write it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=model,
        vocab_size=350,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
        **options,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return folder / "tokenizer.model"


def check_against_plain(tokenizer, text, split):
    ids = tokenizer.encode(text)
    assert ids == plain_encode(text, split) and tokenizer.decode(ids) == text


def test_samples_equal_the_plain_loop(gpt2_folder, llama3_file):
    for text in SAMPLES:
        check_against_plain(load_tokenizer(f"gpt2:{gpt2_folder}"), text, GPT2_SPLIT)
        check_against_plain(load_tokenizer(f"llama3:{llama3_file}"), text, LLAMA3_SPLIT)


@settings(max_examples=150, deadline=None)
@given(text=any_text)
def test_gpt2_equals_the_plain_loop(gpt2_folder, text):
    check_against_plain(load_tokenizer(f"gpt2:{gpt2_folder}"), text, GPT2_SPLIT)


def test_gpt2_equals_transformers(gpt2_folder):
    transformers = pytest.importorskip("transformers")
    encoder = json.loads((gpt2_folder / "encoder.json").read_text())
    merges = [tuple(line.split(" ")) for line in (gpt2_folder / "vocab.bpe").read_text("utf-8").splitlines()[1:]]
    theirs = transformers.GPT2Tokenizer(vocab=encoder, merges=merges)
    ours = load_tokenizer(f"gpt2:{gpt2_folder}")
    for text in SAMPLES:
        if "<|endoftext|>" not in text:  # theirs takes it for the special token, ours for text
            assert ours.encode(text) == theirs(text)["input_ids"], repr(text)
    assert ours.eod == theirs.eos_token_id and ours.vocab_size == len(theirs)
    assert ours.eod not in ours.encode("<|endoftext|>") and ours.decode([ours.eod]) == "<|endoftext|>"


def test_gpt2_s_files_may_have_transformers_names(gpt2_folder, tmp_path):
    (tmp_path / "vocab.json").write_bytes((gpt2_folder / "encoder.json").read_bytes())
    with pytest.raises(ValueError, match=r"merges\.txt: no such tokenizer file"):
        load_tokenizer(f"gpt2:{tmp_path}")
    (tmp_path / "merges.txt").write_bytes((gpt2_folder / "vocab.bpe").read_bytes())
    renamed, published = load_tokenizer(f"gpt2:{tmp_path}"), load_tokenizer(f"gpt2:{gpt2_folder}")
    assert renamed.fingerprint == published.fingerprint and renamed.encode(TEXT) == published.encode(TEXT)
    (tmp_path / "vocab.json").write_text("[]")
    with pytest.raises(ValueError, match=r"give the published vocab\.json"):
        load_tokenizer(f"gpt2:{tmp_path}")


def test_published_names_come_first_and_a_merge_may_look_like_a_comment(gpt2_folder, tmp_path):
    for name, other in ("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt"):
        (tmp_path / name).write_bytes((gpt2_folder / name).read_bytes())
        (tmp_path / other).write_text("damaged")
    plain = load_tokenizer(f"gpt2:{tmp_path}")
    encoder = json.loads((gpt2_folder / "encoder.json").read_text())
    last = encoder["<|endoftext|>"]
    (tmp_path / "encoder.json").write_text(json.dumps(encoder | {"##": last, "<|endoftext|>": last + 1}))
    with open(tmp_path / "vocab.bpe", "a") as file:
        file.write("# #\n")
    assert load_tokenizer(f"gpt2:{tmp_path}").encode("the##") == [*plain.encode("the"), last]


@settings(max_examples=150, deadline=None)
@given(text=any_text)
def test_llama3_equals_the_plain_loop(llama3_file, text):
    check_against_plain(load_tokenizer(f"llama3:{llama3_file}"), text, LLAMA3_SPLIT)


def test_llama3_has_256_special_tokens(llama3_file):
    tokenizer, n = load_tokenizer(f"llama3:{llama3_file}"), len(vocabulary()[0])
    assert tokenizer.vocab_size == n + 256 and tokenizer.eod == n + 1
    names = [tokenizer.decode([n + i]) for i in range(256)]
    around = [*tokenizer.encode("the"), n + 9, *tokenizer.encode(" dog")]
    assert tokenizer.encode("the<|eot_id|> dog", special=True) == around and n + 9 not in tokenizer.encode("<|eot_id|>")
    assert len(set(names)) == 256 and names[:2] == ["<|begin_of_text|>", "<|end_of_text|>"]
    assert (names[9], names[11], names[255]) == (
        "<|eot_id|>",
        "<|reserved_special_token_3|>",
        "<|reserved_special_token_247|>",
    )


def test_llama2_equals_sentencepiece(llama2_file):
    ours, theirs = (
        load_tokenizer(f"llama2:{llama2_file}"),
        sentencepiece.SentencePieceProcessor(model_file=str(llama2_file)),
    )
    for text in SAMPLES:
        assert ours.encode(text) == theirs.encode(text) and ours.decode(ours.encode(text)) == theirs.decode(
            theirs.encode(text)
        )
    assert ours.eod == theirs.eos_id() and ours.vocab_size == theirs.vocab_size() == 350


@pytest.mark.parametrize("bos, eos, unk", [(1, 2, 0), (0, 1, 2), (1, 0, 2), (-1, 0, 1)])
def test_special_pieces_of_sentencepiece_have_any_ids(tmp_path, bos, eos, unk):
    """As of T5 and Gemma. Only in a text that may hold them do their names become ids."""
    ours = load_tokenizer(f"llama2:{sentencepiece_file(tmp_path, bos_id=bos, eos_id=eos, unk_id=unk)}")
    assert (ours.bos, ours.eod) == (None if bos < 0 else bos, eos)
    assert ours.special == {"</s>": eos} | ({} if bos < 0 else {"<s>": bos})
    ids = ours.encode("<s>the</s>", special=True)
    assert ids[-1] == eos and (ids[0] == bos) == (bos >= 0) and eos not in ours.encode("<s>the</s>")
    assert eos not in ours.encode("</s>")
    ours = load_tokenizer(f"llama2:{sentencepiece_file(tmp_path, eos_piece='<.|>')}")  # whose characters are no pattern
    assert ours.encode("the<.|>end<a>", special=True).count(ours.eod) == 1


@given(text=any_text)
def test_bytes(text):
    tokenizer = load_tokenizer("bytes")
    assert (
        tokenizer.encode(text) == list(text.encode())
        and tokenizer.decode(tokenizer.encode(text) + [tokenizer.eod]) == text
    )
    assert tokenizer.vocab_size == 257 and tokenizer.eod == 256


def test_a_million_spaces_do_not_overflow_the_regex_engine(gpt2_folder, llama3_file):
    """tiktoken panics on them unless the run is cut; shorter runs are not touched."""
    for spec in (f"gpt2:{gpt2_folder}", f"llama3:{llama3_file}"):
        tokenizer = load_tokenizer(spec)
        text = "a" + " " * 1_000_000 + "b" + "\n \t" * 300_000
        assert tokenizer.decode(tokenizer.encode(text)) == text
    limit = tokenizers.MAX_SPACES
    assert tokenizers.cut_long_spaces("a" + " " * limit + "b") == ["a" + " " * limit + "b"]
    assert tokenizers.cut_long_spaces("a" + " " * (limit + 1) + "b") == ["a" + " " * limit, " b"]
    assert [len(piece) for piece in tokenizers.cut_long_spaces(" " * (2 * limit + 5) + "b")] == [limit, limit, 6]
    assert tokenizers.cut_long_spaces("") == [""]


def test_fingerprints_are_of_all_that_makes_ids(gpt2_folder, llama3_file, llama2_file, tmp_path, monkeypatch):
    """And of nothing else: two ids that are swapped, a token less, another cut into words, another special token."""
    lines = llama3_file.read_bytes().splitlines(keepends=True)
    names = [line.split()[0] for line in lines[-2:]]
    swapped = [b"%s %d\n" % (name, len(lines) - 1 - i) for i, name in enumerate(names)]
    (tmp_path / "swapped").write_bytes(b"".join([*lines[:-2], *reversed(swapped)]))
    (tmp_path / "moved").write_bytes(llama3_file.read_bytes())
    shutil.copytree(gpt2_folder, fewer := tmp_path / "fewer")
    encoder, merges = json.loads((fewer / "encoder.json").read_text()), (fewer / "vocab.bpe").read_text("utf-8")
    kept = {token: i for token, i in encoder.items() if i < len(encoder) - 2}
    (fewer / "encoder.json").write_text(json.dumps(kept | {"<|endoftext|>": len(kept)}))
    (fewer / "vocab.bpe").write_text("".join(merges.splitlines(keepends=True)[:-1]), "utf-8")

    def found(spec, **patches):
        with monkeypatch.context() as patch:
            for name, value in patches.items():
                patch.setattr(tokenizers, name, value)
            return load_tokenizer(spec).fingerprint

    gpt2, llama3 = f"gpt2:{gpt2_folder}", f"llama3:{llama3_file}"
    prints = [
        *map(
            found, ["bytes", gpt2, f"gpt2:{fewer}", llama3, f"llama3:{tmp_path / 'swapped'}", f"llama2:{llama2_file}"]
        ),
        found(gpt2, GPT2_SPLIT=tokenizers.LLAMA3_SPLIT),
        found(llama3, LLAMA3_SPLIT=tokenizers.GPT2_SPLIT),
        found(llama3, SPECIAL=tokenizers.SPECIAL.replace("eom_id", "eon_id")),
    ]
    assert len({*prints}) == len(prints) and all(len(name) == 16 for name in prints)
    assert found(f"llama3:{tmp_path / 'moved'}") == prints[3]


@pytest.mark.parametrize("spec", ["gpt5:x", "gpt2", "gpt2:", "bytes:x", "", "corpus"])
def test_an_unknown_spec_is_an_error(spec):
    with pytest.raises(ValueError, match=r"data\.tokenizer=.* is not one of bytes, gpt2:DIR"):
        load_tokenizer(spec)


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "llama2"])
def test_a_missing_file_is_an_error(kind, tmp_path):
    with pytest.raises(ValueError, match="no such tokenizer file; nothing is downloaded"):
        load_tokenizer(f"{kind}:{'x' * 300}")  # of which not even stat says anything: the name is too long
    with pytest.raises(ValueError, match="no such tokenizer file; nothing is downloaded"):
        load_tokenizer(f"{kind}:{tmp_path / 'absent'}")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda encoder, merges: ("[1, 2]", merges), r"encoder\.json: no GPT-2 vocabulary"),
        (lambda encoder, merges: ("{", merges), r"encoder\.json: no GPT-2 vocabulary"),
        (lambda encoder, merges: (encoder.replace('"!": 0', '"!": null'), merges), r"encoder\.json: no GPT-2"),
        (lambda encoder, merges: (encoder.replace('"!": 0', '"!": 0.0'), merges), r"encoder\.json: no GPT-2"),
        (lambda encoder, merges: (encoder.replace('"!": 0', '"!": [0]'), merges), r"encoder\.json: no GPT-2"),
        (
            lambda encoder, merges: (regex.sub(r'("<\|endoftext\|>"): \d+', r"\1: null", encoder), merges),
            r"encoder\.json: no GPT-2 vocabulary",
        ),
        (
            lambda encoder, merges: (encoder.replace("<|endoftext|>", "ab"), merges),
            r"encoder\.json: no GPT-2 vocabulary",
        ),
        (lambda encoder, merges: (encoder, merges[:-10]), r"vocab\.bpe: its merges .*; one of your own as hf:DIR"),
        (lambda encoder, merges: (encoder, merges + "lonely\n"), r"vocab\.bpe: its merges are not those of"),
        (
            lambda encoder, merges: (encoder.replace('"!": 0', '"!": 7'), merges),
            r"encoder\.json: ids must count from 0",
        ),
    ],
)
def test_malformed_gpt2_files_are_an_error(gpt2_folder, tmp_path, change, message):
    texts = change((gpt2_folder / "encoder.json").read_text(), (gpt2_folder / "vocab.bpe").read_text("utf-8"))
    for name, text in zip(("encoder.json", "vocab.bpe"), texts):
        (tmp_path / name).write_text(text, "utf-8")
    with pytest.raises(ValueError, match=message):
        load_tokenizer(f"gpt2:{tmp_path}")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda lines: [b"\x0a\x0e\x0a\x05<unk>"], "line 1 is not 'base64 rank'.*llama2:FILE"),
        (lambda lines: lines[:5] + [b"YWI= x"], "line 6 is not 'base64 rank'"),
        (lambda lines: lines[:5] + [b"Y*I= 5"], "line 6 is not 'base64 rank'"),
        (lambda lines: lines[1:], "ids must count from 0"),
        (lambda lines: [], "ids must count from 0"),
        (lambda lines: [*lines[:-1], lines[-1].split()[0] + b" %d" % len(lines)], "ids must count from 0"),  # a gap
        (lambda lines: [*lines[:-1], lines[-1].split()[0] + b" 300"], "ids must count from 0"),  # one twice
        (  # all ids, and no token for one of the bytes
            lambda lines: [line.split()[0] + b" %d" % i for i, line in enumerate(lines[1:])],
            "ids must count from 0",
        ),
    ],
)
def test_malformed_llama3_files_are_an_error(llama3_file, tmp_path, change, message):
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(change(llama3_file.read_bytes().splitlines())))
    with pytest.raises(ValueError, match=message):
        load_tokenizer(f"llama3:{tmp_path / 'tokenizer.model'}")


@pytest.mark.parametrize("content", [b"", b"garbage" * 20, b"YWI= 0\n"])
def test_malformed_llama2_files_are_an_error(tmp_path, content):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ValueError, match="no SentencePiece model"):
        load_tokenizer(f"llama2:{tmp_path / 'tokenizer.model'}")


def test_a_tilde_is_the_home_directory(llama2_file, monkeypatch):
    monkeypatch.setenv("HOME", str(llama2_file.parent))
    prints = {load_tokenizer(f"llama2:{folder}/{llama2_file.name}").fingerprint for folder in ("~", llama2_file.parent)}
    assert len(prints) == 1


def test_a_file_that_cannot_be_read_is_an_error(gpt2_folder, monkeypatch):
    def refuse(path, most):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tokenizers, "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"encoder\.json: cannot be read .*Permission denied.; correct"):
        load_tokenizer(f"gpt2:{gpt2_folder}")


def test_a_sentencepiece_model_without_an_end_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="has no end-of-sentence piece"):
        load_tokenizer(f"llama2:{sentencepiece_file(tmp_path, eos_id=-1)}")
