"""What a server needs beside weights: tokenizer, ids, chat template, dropout; and exports beside a run's saves."""

import base64
import itertools
import json
import re
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minitron import pretrain
from minitron.config import cli, rules
from minitron.data.corpus import read_sources
from minitron.data.indexed import IndexedWriter
from minitron.data.sft import HEADER, encode_chat
from minitron.interop import convert_hf, hf_tokenizer
from minitron.interop import export as exporting
from minitron.interop.export import Exporter
from minitron.interop.hf_write import settings_of
from minitron.interop.tokenizers import load_tokenizer
from test_tokenizers import sentencepiece_file

transformers = pytest.importorskip("transformers")
library = pytest.importorskip("tokenizers")
ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "model.num_layers=1 model.hidden_size=32 model.ffn_hidden_size=32 model.num_heads=2 model.num_kv_heads=2 "
    "model.vocab_size=600 train.seq_len=32 train.micro_batch_size=2 train.global_batch_size=2 precision.dtype=fp32 "
    "optimizer.warmup_steps=1 train.steps=4"
).split()
CHAT = [{"role": "user", "content": " Why? "}, {"role": "assistant", "content": "So.\n"}]


@pytest.fixture(scope="module")
def texts():
    return [content.decode(errors="ignore") for _, content in read_sources()[:8]]


@pytest.fixture(scope="module")
def ranks(texts):
    bpe = library.ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=320, special_tokens=[], show_progress=False)
    return {token: i for token, i in sorted(bpe.get_vocab().items(), key=lambda item: item[1])}, json.loads(
        bpe.to_str()
    )


@pytest.fixture(scope="module")
def tokenizers(ranks, texts, tmp_path_factory):
    """A spec of each kind that has files."""
    root, (vocabulary, whole) = tmp_path_factory.mktemp("tokenizers"), ranks
    for kind in ("gpt2", "hf"):
        (root / kind).mkdir()
    (root / "gpt2" / "vocab.json").write_text(json.dumps(vocabulary | {"<|endoftext|>": len(vocabulary)}))
    merges = [" ".join(pair) for pair in whole["model"]["merges"]]
    (root / "gpt2" / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    byte_of = {character: byte for byte, character in enumerate(hf_tokenizer._printable_bytes())}
    rows = [(bytes(byte_of[c] for c in token), i) for token, i in vocabulary.items()]
    lines = "".join(f"{base64.b64encode(token).decode()} {i}\n" for token, i in rows)
    (root / "llama3.model").write_text(lines)
    from tools import train_tokenizer

    (root / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ["--input", str(root / "in.jsonl"), "--vocab-size", "500"]
    train_tokenizer.main([*words, "--output", str(root / "bpe")])
    train_tokenizer.main([*words, "--output", str(root / "sp"), "--kind", "sentencepiece"])
    specs = {"gpt2": f"gpt2:{root}/gpt2", "llama3": f"llama3:{root}/llama3.model", "hf": f"hf:{root}/bpe"}
    return specs | {"llama2": f"llama2:{root}/sp/tokenizer.model"}


def run(tmp_path, spec, *more):
    """Train a few steps on tokens of that tokenizer; returns the directory of checkpoints."""
    tokenizer, prefix = load_tokenizer(spec), tmp_path / "data"
    sidecar = {"tokenizer": spec, "fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size}
    with IndexedWriter(str(prefix), "uint16", sidecar) as writer:
        for _ in range(40):
            writer.add_document([tokenizer.encode("def f(x):\n    return x\n" * 5) + [tokenizer.eod]])
    data = [
        f"data.paths=[{prefix}]",
        "data.source=indexed",
        f"data.tokenizer={spec}",
        f"data.cache_dir={tmp_path}/cache",
    ]
    saves = [f"checkpoint.dir={tmp_path / 'saves'}", "checkpoint.every=0"]
    pretrain.main([*TINY, *data, *saves, *more])
    return tmp_path / "saves"


def convert(*words):
    convert_hf.main([str(word) for word in words])


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "hf", "llama2"])
def test_an_export_has_the_run_s_tokenizer(kind, tokenizers, texts, tmp_path, capsys):
    """transformers reads it as AutoTokenizer, gives our ids, and generates to our end of documents."""
    spec = tokenizers[kind]
    saves, ours = run(tmp_path, spec), load_tokenizer(spec)
    convert("export", saves, tmp_path / "out")
    assert f"with the tokenizer of {spec}" in capsys.readouterr().out
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    for text in [*texts, " Olé 今日は 😀  x"]:
        begins = kind == "llama2" and text.startswith(" ")  # SentencePiece adds a space there, transformers does not
        assert begins or theirs(text, split_special_tokens=True).input_ids == ours.encode(text), text[:60]
    assert theirs.eos_token_id == ours.eod and theirs.chat_template is None
    model = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"))
    assert model.config.eos_token_id == model.generation_config.eos_token_id == ours.eod
    assert model.config.bos_token_id == ours.bos
    ids = model.generate(torch.tensor([ours.encode("def")]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert ids.shape[1] <= len(ours.encode("def")) + 4


def test_a_chat_model_has_its_template_and_ends_its_turns(tokenizers, tmp_path):
    """The template gives the ids that minitron was fine-tuned on; generation ends with a document or an answer."""
    spec = tokenizers["llama3"]
    ours, saves = load_tokenizer(spec), run(tmp_path, spec)
    reader = convert_hf.open_weights(str(saves))
    reader.config["finetune"]["kind"] = "sft"
    (tmp_path / "out").mkdir()
    ids, _ = hf_tokenizer.write_tokenizer(tmp_path / "out", reader, 600, None)
    assert ids == {"bos_token_id": ours.bos, "eos_token_id": [ours.eod, ours.special["<|eot_id|>"]]}
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    assert theirs("x").input_ids == [ours.bos, *ours.encode("x")]
    assert theirs("x", "y").input_ids == [ours.bos, *ours.encode("x"), ours.bos, *ours.encode("y")]
    whole = theirs.apply_chat_template(CHAT, tokenize=False)
    assert theirs(whole, add_special_tokens=False).input_ids == [i for part in encode_chat(CHAT, ours) for i in part]
    asked = theirs.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    turns = [CHAT[0], {"role": "assistant", "content": ""}]
    assert theirs(asked, add_special_tokens=False).input_ids == encode_chat(turns, ours)[0]


@pytest.mark.parametrize("template", [None, "{{ messages }}"], ids=["no template", "its own"])
def test_a_base_model_s_files_end_the_answers_of_chats(template, tokenizers, tmp_path):
    """Its author ends documents alone: a server would not stop after an answer, and know no template."""
    spec = tokenizers["llama3"]
    ours, saves = load_tokenizer(spec), run(tmp_path, spec)
    reader = convert_hf.open_weights(str(saves))
    reader.config["finetune"]["kind"] = "sft"
    kept = saves / hf_tokenizer.KEPT
    kept.mkdir()
    hf_tokenizer.write_tokenizer(kept, reader, 600, None)
    settings = json.loads((kept / "tokenizer_config.json").read_text())
    llama3 = settings.pop("chat_template")
    own = {} if template is None else {"chat_template": template}
    (kept / "tokenizer_config.json").write_text(json.dumps(settings | own))
    (kept / "generation_config.json").write_text(json.dumps({"eos_token_id": ours.eod, "temperature": 0.6}))
    (tmp_path / "out").mkdir()
    hf_tokenizer.write_tokenizer(tmp_path / "out", reader, 600, None)
    theirs = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert theirs.eos_token_id == [ours.eod, ours.special["<|eot_id|>"]] and theirs.temperature == 0.6
    words = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    assert words.chat_template == (template or llama3)
    reader.config["finetune"]["kind"] = None
    (tmp_path / "pretrained").mkdir()
    ids, _ = hf_tokenizer.write_tokenizer(tmp_path / "pretrained", reader, 600, None)
    assert ids["eos_token_id"] == ours.eod and "chat_template" not in settings


def test_what_a_chat_model_gets_depends_on_the_tokens_it_has(tmp_path):
    """Llama 3's template needs all of its three tokens, and an answer ends with the last of them."""
    for missing in None, *HEADER:
        special = {name: i for i, name in enumerate(HEADER) if name != missing}
        own, folder = SimpleNamespace(chat=None, special=special, eod=9), tmp_path / f"{missing}"
        folder.mkdir()
        ends = hf_tokenizer.end_of_answers(own)
        assert ends == (set() if missing == HEADER[2] else {2})
        for known in [], [2], [9, 2], [9]:
            ids = {"bos_token_id": 7} | ({"eos_token_id": known} if known else {})
            found = hf_tokenizer.add_answers(folder, ids, own, ends)
            more = [9] * (not known and bool(ends)) + [2] * (2 in ends - set(known))
            assert found == ids | ({"eos_token_id": known + more} if more else {})
        assert (folder / "tokenizer_config.json").exists() == (missing is None)
    settings = tmp_path / "None" / "tokenizer_config.json"
    assert json.loads(settings.read_text()) == {"chat_template": hf_tokenizer.CHAT_TEMPLATE}
    own.special = dict.fromkeys(HEADER, 2)
    settings.write_text(json.dumps({"chat_template": "{{ messages }}"}))
    hf_tokenizer.add_answers(settings.parent, {}, own, set())
    assert json.loads(settings.read_text()) == {"chat_template": "{{ messages }}"}


def test_a_token_that_no_merges_lead_to_has_none():
    """It is found as a whole word alone (ignore_merges), and other tokens may be joined from it."""
    ranks = {token: rank for rank, token in enumerate([b"a", b"b", b"c", b"abc", b"ab", b"abcab", b"bab"])}
    assert hf_tokenizer.merges_of(ranks) == [(b"a", b"b"), (b"abc", b"ab"), (b"b", b"ab")]


@pytest.fixture
def source(tokenizers, tmp_path):
    """A model of others with a tokenizer, a chat template and settings of generation."""
    cfg = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=500, n_positions=64, resid_pdrop=0.2)
    transformers.GPT2LMHeadModel(cfg).save_pretrained(tmp_path / "source")
    for path in Path(tokenizers["hf"][3:]).iterdir():
        (tmp_path / "source" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "source" / "chat_template.jinja").write_text("{{ messages }}")
    generation = {"eos_token_id": [499, 3], "pad_token_id": 2, "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    (tmp_path / "source" / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "source" / "tokenization_custom.py").write_text("raise SystemExit")
    return tmp_path / "source"


def test_an_import_keeps_what_an_export_gives_back(source, tmp_path, capsys):
    convert("import", source, tmp_path / "imported")
    for path in source.iterdir():
        path.unlink()  # the copy outlives it
    convert("export", tmp_path / "imported", tmp_path / "out")
    out = {path.name for path in (tmp_path / "out").iterdir()}
    kept = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    assert out == kept | {"config.json", "model.safetensors"}, "no code of others"
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (settings["eos_token_id"], settings["pad_token_id"]) == ([499, 3], 2) and "temperature" not in settings
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.6
    assert f"with the tokenizer of {tmp_path / 'imported'}" in capsys.readouterr().out


def test_a_run_from_an_import_passes_its_files_on(source, tokenizers, tmp_path, capsys):
    """Two runs later too; not with other ids than the run's."""
    convert("import", source, tmp_path / "imported")
    model = f"{tmp_path / 'imported' / 'model.yaml'}"
    tokenizer = f"data.tokenizer={tokenizers['hf']}"
    for name, load in (("a", tmp_path / "imported"), ("b", tmp_path / "a" / "saves")):
        (tmp_path / name).mkdir()
        words = [model, "model.vocab_size=500", f"checkpoint.load={load}", "train.steps=1", "train.seq_len=32"]
        tiny = [word for word in TINY if not word.startswith(("model.", "train.steps"))]
        run_like = ["data.source=mock", "checkpoint.every=0", f"checkpoint.dir={tmp_path / name / 'saves'}"]
        pretrain.main([*words, *tiny, *run_like])
        convert("export", tmp_path / name / "saves", tmp_path / name / "out")
        assert (tmp_path / name / "out" / "chat_template.jinja").exists(), name
        assert f"with the tokenizer of {tmp_path / 'imported'}" in capsys.readouterr().out
    reader = convert_hf.open_weights(str(tmp_path / "b" / "saves"))
    reader.config["data"]["tokenizer"] = tokenizer.removeprefix("data.tokenizer=")
    (tmp_path / "same").mkdir()
    assert "with the tokenizer of" in hf_tokenizer.write_tokenizer(tmp_path / "same", reader, 500, None)[1]
    (tmp_path / "named").mkdir()
    hf_tokenizer.write_tokenizer(tmp_path / "named", reader, 500, tokenizers["hf"])
    assert not (tmp_path / "named" / "chat_template.jinja").exists()
    reader.config["data"]["tokenizer"] = tokenizers["gpt2"]
    (tmp_path / "other").mkdir()
    ids, words = hf_tokenizer.write_tokenizer(tmp_path / "other", reader, 500, None)
    assert words == f"with the tokenizer of {tokenizers['gpt2']}"
    assert ids["eos_token_id"] == load_tokenizer(tokenizers["gpt2"]).eod
    assert not (tmp_path / "other" / "chat_template.jinja").exists()


TOKENIZER_FILES = (
    "tokenizer.json tokenizer.model tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json "
    "merges.txt chat_template.jinja chat_template.json generation_config.json"
).split()


def test_an_import_keeps_files_and_ids_of_a_tokenizer_alone(tmp_path):
    """Without settings of generation an import keeps the ids of config.json, of which any may be 0."""
    (source := tmp_path / "source").mkdir()

    def kept(**config):
        (folder := tmp_path / f"{len(list(tmp_path.iterdir()))}").mkdir()
        (source / "config.json").write_text(json.dumps(config | {"vocab_size": 9}))
        hf_tokenizer.keep(source, folder)
        found = {path.name: path.read_text() for path in folder.glob("tokenizer/*")}
        assert bool(found) == (folder / "tokenizer").exists()
        return found

    for pad in None, 3:
        ids = {"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": pad}
        ((name, text),) = kept(**ids).items()
        assert name == "generation_config.json"
        assert json.loads(text) == {key: number for key, number in ids.items() if number is not None}
    assert not kept(eos_token_id=None) and not kept()
    for name in *TOKENIZER_FILES, "tokenization_custom.py", "model.safetensors":
        (source / name).write_text('{"eos_token_id": 5}')
    assert kept(**ids) == dict.fromkeys(TOKENIZER_FILES, '{"eos_token_id": 5}')


def reader_of(path, spec="corpus", load=None, kind=None):
    """Weights of a run, as far as an export asks for them."""
    sections = {"data": {"tokenizer": spec}, "checkpoint": {"load": load}, "finetune": {"kind": kind}}
    return SimpleNamespace(path=path, index=path / "index.json", config={"model": {}, "precision": {}} | sections)


def test_a_source_is_found_behind_many_runs_unless_one_has_its_files(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    runs = {
        tmp_path / f"{i}": reader_of(tmp_path / f"{i}" / "step_1", load=f"~/{i - 1}" if i else "~/source")
        for i in range(8)
    }

    def opened(path):
        if path not in runs:
            raise ValueError("no weights")
        return runs[path]

    monkeypatch.setattr(hf_tokenizer, "Reader", opened)
    found = lambda: [hf_tokenizer.find_kept(run) for run in runs.values()]
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").touch()
    assert found() == [tmp_path / "source"] * 8
    (tmp_path / "5" / "tokenizer").mkdir(parents=True)  # of the checkpoint above its step
    assert found() == [tmp_path / "source"] * 5 + [tmp_path / "5" / "tokenizer"] * 3
    (tmp_path / "6" / "step_1" / "tokenizer").mkdir(parents=True)
    (tmp_path / "source" / "config.json").unlink()
    assert found() == [None] * 5 + [tmp_path / "5" / "tokenizer"] + [tmp_path / "6" / "step_1" / "tokenizer"] * 2


def test_ids_are_the_same_if_their_number_and_a_text_s_are(tokenizers, tmp_path, monkeypatch):
    monkeypatch.setattr("minitron.interop.tokenizers._try", lambda *_: "passed")
    for kind in "hf", "gpt2":
        folder, own = Path(tokenizers[kind].partition(":")[2]), load_tokenizer(tokenizers[kind])
        for more, encode in itertools.product((0, 1), (own.encode, lambda text: [*own.encode(text), 1])):
            run = SimpleNamespace(vocab_size=own.vocab_size + more, encode=encode)
            assert hf_tokenizer.same_ids(folder, run) == (not more and encode == own.encode)
    assert not hf_tokenizer.same_ids(tmp_path, own)
    shutil.copytree(folder, tmp_path / "gpt2")
    (tmp_path / "gpt2" / "tokenizer.json").write_text("{")  # then the other files are read
    assert hf_tokenizer.same_ids(tmp_path / "gpt2", own)


def test_settings_of_a_tokenizer(tmp_path):
    for bos in 0, None, 9:
        own = SimpleNamespace(special={"<b>": 0, "<e>": 3}, eod=3, bos=bos)
        hf_tokenizer.write_settings(tmp_path, own, "Kind", legacy=False)
        expected = {"tokenizer_class": "Kind", "clean_up_tokenization_spaces": False, "legacy": False}
        expected |= {"eos_token": "<e>"} | ({"bos_token": "<b>"} if bos == 0 else {})
        assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == expected


@pytest.mark.parametrize("kind", [None, "sft"])
@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_model_begins_as_its_run_did(tmp_path, kind, prefix):
    path = sentencepiece_file(tmp_path, add_dummy_prefix=prefix)
    (tmp_path / "out").mkdir()
    hf_tokenizer.write_tokenizer(tmp_path / "out", reader_of(tmp_path, f"llama2:{path}", kind=kind), 600, None)
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (settings["add_bos_token"], settings["add_prefix_space"]) == (kind == "sft", prefix)


def test_a_folder_s_settings_of_generation_are_its_ids_else_those_of_its_tokens(tokenizers, tmp_path, monkeypatch):
    """A vocabulary as large as the model's fits."""
    monkeypatch.setattr("minitron.interop.tokenizers._try", lambda *_: "passed")
    shutil.copytree(tokenizers["hf"][3:], tmp_path / "hf")
    spec, own = f"hf:{tmp_path / 'hf'}", load_tokenizer(tokenizers["hf"])
    for settings in None, {"eos_token_id": [499, 3], "pad_token_id": None, "temperature": 0.6}:
        if settings:
            (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(settings))
        (folder := tmp_path / f"{settings is None}").mkdir()
        ids, _ = hf_tokenizer.write_tokenizer(folder, reader_of(tmp_path, spec), own.vocab_size, None)
        written = json.loads((folder / "generation_config.json").read_text())
        assert ids == {key: value for key, value in written.items() if value is not None}
        assert written == settings or settings is None and written == {"eos_token_id": own.eod}


def test_a_tokenizer_that_cannot_be_had(tokenizers, tmp_path, capsys):
    """The run's own is missed with a word; one that is asked for is an error, and nothing is written."""
    saves = run(tmp_path, "bytes")
    convert("export", saves, tmp_path / "out")
    assert "without a tokenizer, since bytes has none" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 256
    convert("export", saves, tmp_path / "named", "--tokenizer", tokenizers["hf"])
    assert (tmp_path / "named" / "tokenizer.json").exists()
    with pytest.raises(ValueError, match=r"hf:/no/such.*|/no/such/tokenizer\.json: no such tokenizer file"):
        convert("export", saves, tmp_path / "x", "--tokenizer", "hf:/no/such")
    reader = convert_hf.open_weights(str(saves))
    with pytest.raises(ValueError, match=r"has 500 ids, the model 400; name its own"):
        hf_tokenizer.write_tokenizer(tmp_path, reader, 400, tokenizers["hf"])
    reader.config["data"]["tokenizer"] = "hf:/gone"
    assert (
        "without a tokenizer (/gone/tokenizer.json: no such"
        in hf_tokenizer.write_tokenizer(tmp_path, reader, 600, None)[1]
    )
    assert not (tmp_path / "x").exists()


def test_the_source_s_dropout_is_said_and_the_run_s_is_exported(source, tmp_path, capsys):
    convert("import", source, tmp_path / "imported")
    keys = "model.hidden_dropout=0.2 model.attention_dropout=0.1"
    assert f"has dropout, which belongs to a run and is not copied; to train with it: {keys}" in capsys.readouterr().out
    words = [str(tmp_path / "imported" / "model.yaml"), *keys.split()]
    cfg = cli.load([*words, "train.seq_len=32"])
    settings = settings_of(cfg.model, "fp32")
    assert (settings["resid_pdrop"], settings["embd_pdrop"], settings["attn_pdrop"]) == (0.2, 0.2, 0.1)
    tiny = [word for word in TINY if not word.startswith("model.")]
    pretrain.main([words[0], *tiny, "train.steps=1", f"checkpoint.load={source}", "data.source=mock"])
    assert f"{source}/config.json has dropout" in capsys.readouterr().out


# ---- beside the saves of a run --------------------------------------------------------------------------------------


def test_exports_lie_beside_each_nth_save_and_the_last(tokenizers, tmp_path, capsys):
    saves = run(
        tmp_path,
        tokenizers["hf"],
        "checkpoint.every=1",
        "checkpoint.keep=0",
        "train.steps=5",
        "checkpoint.export=hf",
        "checkpoint.export_every=3",
    )
    assert sorted(path.name for path in saves.glob("step_*")) == sorted(
        [f"step_{i:08d}" for i in range(1, 6)] + ["step_00000003-hf", "step_00000005-hf"]
    )
    assert f"exported to {saves}/step_00000005-hf" in capsys.readouterr().out
    convert("export", saves, tmp_path / "by_hand")
    for path in (tmp_path / "by_hand").iterdir():
        assert (saves / "step_00000005-hf" / path.name).read_bytes() == path.read_bytes(), path.name
    capsys.readouterr()
    run(tmp_path, tokenizers["hf"], "train.steps=6")
    assert "resumed from" in capsys.readouterr().out, "folders of exports are in nobody's way"


def exporter(tmp_path, tool, monkeypatch, steps=9):
    """An exporter whose tool is a program of the test's."""
    (tmp_path / "tool.py").write_text(tool)
    monkeypatch.setattr(exporting, "TOOL", tmp_path / "tool.py")
    cfg = cli.load(
        [*TINY, f"checkpoint.dir={tmp_path}", "checkpoint.every=1", f"train.steps={steps}", "checkpoint.export=hf"]
    )
    lines = []
    log = type(
        "Log", (), {"info": lambda _, text: lines.append(text), "warn": lambda _, text: lines.append(f"! {text}")}
    )
    return Exporter(cfg, log()), lines


def test_an_export_that_fails_or_is_late_costs_a_line(tmp_path, monkeypatch):
    tool = "import time; time.sleep(1); raise SystemExit('error: no room')"
    one, lines = exporter(tmp_path, tool, monkeypatch)
    one.saved(tmp_path / "step_1", 1)
    one.saved(tmp_path / "step_2", 2)
    assert lines == [
        f"! no export of step 2: {tmp_path}/step_1-hf is still being written; raise checkpoint.export_every"
    ]
    one.saved(tmp_path / "step_9", 9)  # the last one waits for it
    assert lines[1] == f"! export to {tmp_path}/step_1-hf failed, training goes on: error: no room"
    one.close(0)
    assert "step_9-hf failed" in lines[2] and len(lines) == 3


@pytest.mark.parametrize("every", [["checkpoint.every=10"], ["checkpoint.every=auto", "checkpoint.mtbf_hours=1"]])
def test_each_third_save_and_the_last_are_exported(tmp_path, monkeypatch, every):
    """Of saves at steps that are not known before, each third that was made."""
    keys = [f"checkpoint.dir={tmp_path}", "train.steps=70", "checkpoint.export=hf", "checkpoint.export_every=3"]
    one, started = Exporter(cli.load([*TINY, *keys, *every]), SimpleNamespace(info=lambda _: None)), []
    ended = SimpleNamespace(poll=lambda: 0, communicate=lambda: ("", ""), returncode=0)
    begun = lambda words, start_new_session, **_: started.append(start_new_session and words[-2].name) or ended
    monkeypatch.setattr(exporting.subprocess, "Popen", begun)
    for step in range(10, 80, 10):
        one.saved(tmp_path / f"step_{step}", step)
    assert started == ["step_30", "step_60", "step_70"], "each in its own process group: Ctrl-C is for the run"
    one.saves = 0
    for step in range(10, 80, 10):
        (tmp_path / f"step_{step}-hf").mkdir()
        one.saved(tmp_path / f"step_{step}", step)
    assert started[3:] == [], "a folder that is there stays as it is"


@pytest.mark.parametrize("every, due", [("10", [30, 60, 70]), ("0", [70]), ("null", [70])])
def test_saves_between_the_interval_s_are_not_exported(every, due):
    """A signal asks for one of the saves, and others lie in local_dir."""
    keys = ["train.steps=70", "checkpoint.export=hf", "checkpoint.export_every=3", f"checkpoint.every={every}"]
    one = Exporter(cli.load([*TINY, *keys, "checkpoint.dir=a"]), None)
    assert [step for step in range(1, 71) if one.due(step)] == due


def test_a_signal_ends_the_export_and_leaves_nothing(tmp_path, monkeypatch):
    tool = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
path = pathlib.Path(sys.argv[3])
path.with_name(f"{path.name}.partial-{os.getpid()}").mkdir()
time.sleep(600)
"""
    one, lines = exporter(tmp_path, tool, monkeypatch)
    one.saved(tmp_path / "step_1", 1)
    end = time.monotonic() + 600
    while not list(tmp_path.glob("*.partial-*")) and time.monotonic() < end:
        time.sleep(0.02)
    one.close(signal.SIGTERM)
    assert lines == [f"{tmp_path}/step_1-hf is not exported: the run was stopped first"]
    assert [path.name for path in tmp_path.iterdir()] == ["tool.py"]


def test_a_signal_leaves_an_export_that_has_ended(tmp_path, monkeypatch):
    one, lines = exporter(tmp_path, "", monkeypatch)
    one.saved(tmp_path / "step_1", 1)
    one.running.wait()
    one.close(signal.SIGTERM)
    assert lines == [f"exported to {tmp_path}/step_1-hf"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["checkpoint.export=hf"], "checkpoint.export=hf does not go with checkpoint.dir=null; drop it, or set"),
        (["checkpoint.export_every=2", "checkpoint.dir=x"], "checkpoint.export_every=2 does not go with"),
        (
            ["checkpoint.export=hf", "checkpoint.dir=x", "model.positions=learned"],
            "model.positions=learned cannot be exported: transformers' llama has rope; export another",
        ),
        (
            ["checkpoint.export=hf", "checkpoint.dir=x", "model.family=gpt", "model.positions=learned"],
            "model.num_kv_heads=4 cannot be exported: transformers' gpt has 8; export another",
        ),
    ],
)
def test_what_cannot_be_exported_is_said_before_the_run(words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        rules.check(cli.load(words), 1)
