"""Tokenizers against transformers' on real text: each kind, and whatever a folder with tokenizer.json may hold."""

import base64
import io
import json
import sys
from pathlib import Path

import pytest
import sentencepiece

from minitron.config.schema import DataConfig
from minitron.data.build import build_datasets
from minitron.data.cache import Cache
from minitron.data.corpus import read_sources
from minitron.data.sft import encode_chat
from minitron.interop import tokenizers
from minitron.interop.rows import READERS
from minitron.interop.tokenizers import LLAMA3_SPLIT, SPECIAL, _content, _printable_bytes, load_tokenizer

transformers = pytest.importorskip("transformers")
library = pytest.importorskip("tokenizers")
ROOT = Path(__file__).resolve().parents[2]
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Sources of the standard library, this project's pages, and what neither has."""
    sources = [content.decode(errors="ignore") for _, content in read_sources()[:12]]
    pages = [path.read_text() for path in sorted(ROOT.glob("*/README.md"))]
    return [*sources, *pages, "", "  \n\n x", "今日は 世界 😀 Olé! isn't\r\n\tx 12345"]


@pytest.fixture(scope="module")
def gpt2(texts, tmp_path_factory):
    """vocab.json and merges.txt of a byte-level BPE, as `tokenizers` trains and writes them."""
    folder, bpe = tmp_path_factory.mktemp("gpt2"), library.ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=1500, special_tokens=[], show_progress=False)
    bpe.save_model(str(folder))
    vocabulary = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(vocabulary | {END: len(vocabulary)}))
    return folder


@pytest.fixture(scope="module")
def hf(gpt2, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    transformers.GPT2Tokenizer.from_pretrained(str(gpt2)).save_pretrained(folder)
    return folder


def check(tokenizer, theirs, texts):
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == theirs(text), text[:80]
        assert tokenizer.decode(ids) == text


def test_gpt2(gpt2, texts):
    theirs = transformers.GPT2Tokenizer.from_pretrained(str(gpt2))
    check(load_tokenizer(f"gpt2:{gpt2}"), lambda text: theirs(text).input_ids, texts)


def test_llama3(gpt2, texts, tmp_path):
    convert = pytest.importorskip("transformers.convert_slow_tokenizer")
    byte_of = {character: byte for byte, character in enumerate(_printable_bytes())}
    ranks = json.loads((gpt2 / "vocab.json").read_text())
    rows = [(bytes(byte_of[c] for c in token), i) for token, i in ranks.items() if token != END]
    path = tmp_path / "tokenizer.model"
    path.write_text("".join(f"{base64.b64encode(token).decode()} {i}\n" for token, i in rows))
    ours = load_tokenizer(f"llama3:{path}")
    converter = convert.TikTokenConverter(str(path), pattern=LLAMA3_SPLIT, extra_special_tokens=list(ours.special))
    theirs = converter.converted()
    check(ours, lambda text: theirs.encode(text, add_special_tokens=False).ids, texts)
    # the same as a tokenizer.json: special tokens and their ids, the begin of a text, chats
    theirs.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|end_of_text|>"}, "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    folder = load_tokenizer(f"hf:{tmp_path}")
    assert (folder.vocab_size, folder.eod, folder.bos) == (ours.vocab_size, ours.eod, ours.bos)
    assert folder.special == ours.special and len(SPECIAL.split()) < len(folder.special) == 256
    check(folder, ours.encode, texts)
    chat = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    assert encode_chat(chat, folder) == encode_chat(chat, ours)


def test_llama2(texts, tmp_path):
    model, lines = io.BytesIO(), (line[:1000] for text in texts for line in text.splitlines() if line)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        vocab_size=1500,
        model_type="bpe",
        byte_fallback=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    ours, theirs = (
        load_tokenizer(f"llama2:{tmp_path}/tokenizer.model"),
        transformers.LlamaTokenizer.from_pretrained(str(tmp_path)),
    )
    theirs.save_pretrained(tmp_path / "hf")
    folder = load_tokenizer(f"hf:{tmp_path}/hf")
    assert (folder.vocab_size, folder.eod, folder.bos) == (ours.vocab_size, ours.eod, None)
    for text in texts:
        ids = theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert folder.encode(text) == ids, text[:80]
        # SentencePiece, and so Meta's own code, puts a space also before a text that begins with one
        assert ours.encode(text) == ids or text.startswith(" "), text[:80]


def test_hf(hf, texts):
    tokenizer, theirs = load_tokenizer(f"hf:{hf}"), transformers.AutoTokenizer.from_pretrained(str(hf))
    check(tokenizer, lambda text: theirs(text).input_ids, texts)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos) == (len(theirs), theirs.eos_token_id, None)
    split = theirs(f"a {END} b", split_special_tokens=True).input_ids
    assert tokenizer.encode(f"a {END} b") == split and tokenizer.eod not in split
    assert tokenizer.decode([tokenizer.eod]) == END


def test_a_unigram_model_with_a_template_in_front(texts, tmp_path):
    """As T5's and Gemma's: pieces of Unigram, a begin token that the file's own template writes."""
    model = library.Tokenizer(library.models.Unigram())
    model.pre_tokenizer, model.decoder = library.pre_tokenizers.Metaspace(), library.decoders.Metaspace()
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    trainer = library.trainers.UnigramTrainer(
        vocab_size=600, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    model.train_from_iterator(texts[-8:], trainer)
    model.post_processor = library.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    model.enable_truncation(16)  # of a model that was fine-tuned: no document is to be cut here
    model.enable_padding(pad_id=0, pad_token="<pad>", length=16)
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    tokenizer = load_tokenizer(f"hf:{tmp_path}")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert (tokenizer.eod, tokenizer.bos) == (2, 1)
    for text in texts[-8:]:
        ids = theirs(text, add_special_tokens=False, split_special_tokens=True, truncation=False).input_ids
        assert tokenizer.encode(text) == ids and 0 not in ids


def test_a_vocabulary_with_a_gap_is_as_large_as_its_last_id(tmp_path):
    """As of a model with reserved ids: a run whose vocabulary has room for the count of tokens alone is refused."""
    words = {"the": 0, "end": 1, "?": 2, "</s>": 9}
    model = library.Tokenizer(library.models.WordLevel(words, unk_token="?"))
    model.pre_tokenizer = library.pre_tokenizers.Whitespace()
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "data.jsonl").write_text('{"prompt": "the", "completion": " end"}\n')
    data = DataConfig(
        source="sft",
        paths=(str(tmp_path / "data.jsonl"),),
        split="1",
        separate_documents=True,
        tokenizer=f"hf:{tmp_path}",
        cache_dir=str(tmp_path),
    )
    run = dict(seq_len=4, seed=1, train_samples=1, valid_samples=0, readers=READERS)
    opened = lambda size: build_datasets(data, vocab_size=size, **run)
    assert opened(10).train[0].tokens.tolist() == [0, 1, 9, 9, 9]
    with pytest.raises(ValueError, match="model.vocab_size=9"):
        opened(9)


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Load a tokenizer of words whose file puts `first` before a text, with these files beside it."""
    monkeypatch.setattr(tokenizers, "_try", lambda *_: "passed")

    def load(first=None, **files):
        vocabulary = {"the": 0, "<s>": 1, "</s>": 2, "?": 3, "it": 4}
        model = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token="?"))
        model.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
        model.add_special_tokens(["<s>", "</s>"])
        model.add_tokens(["it"])
        if first:
            place = [(first, model.token_to_id(first))]
            model.post_processor = library.processors.TemplateProcessing(f"{first} $A", special_tokens=place)
        model.save(str(tmp_path / "tokenizer.json"))
        for name in "special_tokens_map", "tokenizer_config":
            (tmp_path / f"{name}.json").write_text(json.dumps(files.get(name, {})))
        return load_tokenizer(f"hf:{tmp_path}")

    return load


@pytest.mark.parametrize(
    "first, settings, bos",
    [
        (None, {}, None),
        ("<s>", {}, 1),
        ("</s>", {}, None),  # of a model whose documents end with it: what fine-tuning does not put before a text
        ("the", {}, None),  # a word
        ("it", {}, 4),  # added, as the tokens of T5's tasks
        (None, {"bos_token": "<s>"}, None),
        (None, {"bos_token": "<s>", "add_bos_token": False}, None),
        (None, {"bos_token": "<s>", "add_bos_token": True}, 1),
        (None, {"bos_token": {"content": "</s>"}, "add_bos_token": True}, 2),
        ("<s>", {"bos_token": "no such", "add_bos_token": True}, 1),
    ],
)
def test_a_text_begins_as_settings_or_the_file_s_template_say(words, first, settings, bos):
    tokenizer = words(first, tokenizer_config={"eos_token": "</s>"} | settings)
    assert (tokenizer.bos, tokenizer.eod) == (bos, 2)
    assert tokenizer.special == {"<s>": 1, "</s>": 2} and tokenizer.encode("it the") == [4, 0]


@pytest.mark.parametrize(
    "older, newer, eod",
    [({"eos_token": "<s>"}, {"eos_token": "</s>"}, 2), ({"eos_token": "<s>"}, {"eos_token": None}, 1)],
)
def test_the_newer_file_of_settings_wins_unless_it_says_nothing(words, older, newer, eod):
    assert words(special_tokens_map=older, tokenizer_config=newer).eod == eod


def test_one_process_of_a_node_tries_a_file(hf, tmp_path, monkeypatch):
    tried = []
    monkeypatch.setattr(tokenizers, "_try", lambda text, *_: tried.append(text) or "passed")
    for first, trials in (False, 0), (True, 1), (True, 1):
        load_tokenizer(f"hf:{hf}", cache=Cache(tmp_path, first_on_node=first))
        assert tried == [(hf / "tokenizer.json").read_bytes()] * trials


def test_the_fingerprint_is_that_of_the_tokens(hf, tmp_path):
    content = json.loads((hf / "tokenizer.json").read_text())
    end = (hf / "tokenizer_config.json").read_text()
    prints = [load_tokenizer(f"hf:{hf}").fingerprint]
    turned = lambda value: {key: turned(value[key]) for key in reversed(value)} if isinstance(value, dict) else value
    added = [turned(token) for token in content["added_tokens"]]
    changes = (
        turned(content) | {"added_tokens": added},  # the same in another order
        {"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}},
        {"pre_tokenizer": None},
    )
    for i, change in enumerate(changes):
        (tmp_path / f"{i}").mkdir()
        (tmp_path / f"{i}/tokenizer.json").write_text(json.dumps(content | change))
        (tmp_path / f"{i}/tokenizer_config.json").write_text(end)
        prints.append(load_tokenizer(f"hf:{tmp_path}/{i}").fingerprint)
    assert prints[0] == prints[1] == prints[2] != prints[3] and len(prints[0]) == 16


@pytest.mark.parametrize("given, text", [("a", "a"), ({"content": "a", "lstrip": True}, "a"), (None, None)])
def test_a_token_is_a_text_or_an_object_with_one(given, text):
    assert _content(given) == text


@pytest.mark.parametrize("given", [True, 7, ["a"], {}, {"content": True}])
def test_a_setting_whose_name_ends_as_a_token_s_is_none(given):
    """As add_bos_token, which would be a variable of chat templates."""
    assert _content(given) is None


@pytest.mark.parametrize(
    "files, message",
    [
        ({}, r"tokenizer\.json: no such tokenizer file; nothing is downloaded"),
        (
            {"tokenizer.model": "x"},
            r"not a folder with a tokenizer\.json; for its tokenizer\.model write llama3:FILE or",
        ),
        ({"vocab.json": "{}"}, r"not a folder with a tokenizer\.json; for its vocab\.json write gpt2:DIR"),
        ({"tokenizer_config.json": None}, r"names an eos_token, which ends documents; write"),
        (
            {"tokenizer_config.json": '{"eos_token": "</end>"}'},
            r"'</end>', is not one of its tokens; correct eos_token",
        ),
        ({"tokenizer_config.json": "[1]"}, r"tokenizer_config\.json is not a JSON object"),
        ({"tokenizer.json": "{"}, r"no tokenizer\.json that can be read .*; copy the file again"),
        ({"tokenizer.json": '{"model": {"type": "None"}}'}, r"no tokenizer\.json that can be read .*; copy the file"),
    ],
)
def test_a_folder_that_will_not_do_is_named(hf, tmp_path, files, message):
    if any(name in files for name in ("tokenizer.json", "tokenizer_config.json")):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_text((hf / name).read_text())
    for name, text in files.items():
        (tmp_path / name).unlink(missing_ok=True)
        if text is not None:
            (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_tokenizer(f"hf:{tmp_path}")
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_the_folder_without_its_kind_is_answered_with_it(hf):
    with pytest.raises(ValueError, match=rf"hf:DIR; for its tokenizer\.json write hf:{hf}"):
        load_tokenizer(str(hf))
    with pytest.raises(ValueError, match=rf"not a folder with a tokenizer\.json; name its folder, hf:{hf}"):
        load_tokenizer(f"hf:{hf}/tokenizer.json")


def test_without_the_library_the_error_says_what_to_install(hf, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="needs the package tokenizers, .*; .*-m pip install .*data"):
        load_tokenizer(f"hf:{hf}")
