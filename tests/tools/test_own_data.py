"""The first hour with data of one's own: the five commands of tools/README.md as they stand there, and mistakes."""

import json
import re
import sys

import pytest

import warm
from minitron.data.corpus import read_sources
from minitron.interop.tokenizers import load_tokenizer
from readmes import ROOT, blocks
from tools import train_tokenizer

pytest.importorskip("tokenizers")
SMALL = (
    "model.num_layers=2 model.hidden_size=32 model.ffn_hidden_size=64 model.num_heads=2 train.steps=3 train.seq_len=64"
    " train.micro_batch_size=2 train.global_batch_size=4 precision.dtype=fp32 optimizer.warmup_steps=1"
).split()


def texts(count=30):
    return [content.decode(errors="ignore") for _, content in read_sources()[:count]]


def write_lines(path, field="text", count=30):
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts(count)))
    return str(path)


def commands():
    """The page's five, each as a list of words."""
    (block,) = [block for block in blocks(ROOT / "tools" / "README.md") if "train_tokenizer.py" in block]
    lines = [line.split("  #")[0] for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    assert len(lines) == 5
    return [[word.strip('"') for word in re.findall(r'"[^"]*"|\S+', line)] for line in lines]


@pytest.mark.parametrize("form", ["jsonl", pytest.param("parquet", marks=pytest.mark.slow)])
def test_the_page_s_five_commands_give_a_model(tmp_path, form):
    """On two ranks of a smaller model and vocabulary; nothing else is changed."""
    transformers = pytest.importorskip("transformers")
    for folder in ("tools", "configs", "minitron"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    write_lines(tmp_path / "my.jsonl", "body")
    if form == "parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"body": texts()}), tmp_path / "my.parquet")
        (tmp_path / "my.jsonl").unlink()
    for words in commands():
        words = [word.replace("32000", "600").replace("my.jsonl", f"my.{form}") for word in words]
        if words[0] == "torchrun":
            words = ["-m", "torch.distributed.run", "--standalone", *words[1:], *SMALL]
            words[words.index("8")] = "2"
        else:
            words = words[1:] + (["--max-tokens", "5"] if "--prompt" in words else [])
        done = warm.run(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
        if "--prompt" in words:
            assert done.stdout.startswith("Once upon a time")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "my-gpt2"))
    model = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "my-gpt2"))
    assert len(tokenizer) == model.config.vocab_size == 600


@pytest.mark.parametrize("kind, spec", [("bpe", "hf:{}"), ("sentencepiece", "llama2:{}/tokenizer.model")])
def test_a_trained_tokenizer_is_what_it_says(tmp_path, capsys, kind, spec):
    source = write_lines(tmp_path / "in.jsonl")
    words = ["--input", source, "--vocab-size", "700", "--kind", kind, "--output", str(tmp_path / "t")]
    train_tokenizer.main(words)
    said = capsys.readouterr().out
    assert f"data.tokenizer={spec.format(tmp_path / 't')} model.vocab_size=700" in said
    tokenizer = load_tokenizer(spec.format(tmp_path / "t"))
    assert tokenizer.vocab_size == 700 and 0 <= tokenizer.eod < 700
    for text in [*texts(5), "今日は 😀  \n\n\t x"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text and tokenizer.eod not in tokenizer.encode(text)
    whole = " ".join(texts())
    assert len(whole) / len(tokenizer.encode(whole)) > 2, "it has learned whole words"
    train_tokenizer.main([*words[:-1], str(tmp_path / "same")])
    assert load_tokenizer(spec.format(tmp_path / "same")).fingerprint == tokenizer.fingerprint


def test_the_sample_is_the_beginning(tmp_path):
    paths = [write_lines(tmp_path / name, count=3) for name in ("a.jsonl", "b.jsonl")]
    assert "".join(train_tokenizer.sample(paths, "text", 1 << 30)) == "".join(texts(3)) * 2
    assert "".join(train_tokenizer.sample(paths, "text", 100)) == texts(1)[0][:100]
    (tmp_path / "wide.jsonl").write_text((json.dumps({"text": "\u4eca\u65e5"}) + "\n") * 9)
    wide = [str(tmp_path / "wide.jsonl")]  # 3 bytes a character
    assert train_tokenizer.sample(wide, "text", 12) == ["\u4eca\u65e5"] * 2
    assert train_tokenizer.sample(wide, "text", 10) == ["\u4eca\u65e5", "\u4eca"]


def test_a_text_that_has_no_more_pieces_says_so(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"text": "to be or not to be"}\n')
    train_tokenizer.main(
        ["--input", str(tmp_path / "in.jsonl"), "--vocab-size", "900", "--output", str(tmp_path / "t")]
    )
    assert re.search(
        r"note: the text has no more than (2\d\d) pieces.*model\.vocab_size=\1\n", capsys.readouterr().out, re.S
    )


@pytest.mark.parametrize(
    "more, message",
    [
        (["--vocab-size", "100"], "--vocab-size=100: a vocabulary has at least its bytes"),
        (["--sample-mb", "0"], "--sample-mb: 0 is not a positive number"),
        (["--output", "in.jsonl"], "in.jsonl exists already"),
        (["--text-field", "body"], "line 1 has no text under the key 'body'; correct the line or --text-field (it has"),
        (["--input", "no.jsonl"], "no.jsonl: no such input file; correct --input"),
        (["--input", "empty.jsonl"], "no text under the key 'text'; give files with documents"),
        (["--kind", "sentencepiece", "--vocab-size", "90000"], "--vocab-size=90000 cannot be had of"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(tmp_path, monkeypatch, more, message):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in.jsonl", count=3)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError) as error:
        train_tokenizer.main(["--input", "in.jsonl", "--output", "t", *more])
    assert message in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "empty.jsonl"}


def test_without_the_library_the_other_kind_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"-m pip install .*\[data\]'?, or use --kind sentencepiece"):
        train_tokenizer.main(["--input", write_lines(tmp_path / "in.jsonl", count=3), "--output", str(tmp_path / "t")])
    assert not (tmp_path / "t").exists()
