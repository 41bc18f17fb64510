"""Fine-tuning data: tokens and masks equal plain twins, packed equals one document a sequence, mistakes are named."""

import dataclasses
import json
import re
from itertools import pairwise

import numpy as np
import pytest
import tiktoken
import torch
import torch.nn.functional as F

from layouts import GPT3, LLAMA, config, first_gradients, mesh_of, part_of, whole_model
from minitron.comm.mesh import Mesh
from minitron.config.schema import DataConfig
from minitron.data.build import build_datasets
from minitron.data.cache import Cache
from minitron.data.corpus import build_docstrings, explained
from minitron.data.gpt import Sample
from minitron.data.loader import Loader
from minitron.data.sft import TokenizedFiles, encode_chat
from minitron.interop.rows import READERS
from minitron.interop.tokenizers import LLAMA3_SPLIT, ByteTokenizer, load_tokenizer
from minitron.model.init import initialise
from minitron.testing import assert_close_rel
from minitron.train import build
from test_pretrain import pretrain, records
from test_tokenizers import llama3_file, vocabulary  # noqa: F401  (a fixture)

S = 64
# Summation order: float32 sums of some hundred terms.
TOLERANCE = 1e-5


def rows(count, longest=40):
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, longest // 2, (count, 2)).tolist()
    return [{"prompt": "?" * prompt, "completion": " " + "!" * answer} for prompt, answer in sizes]


def write(folder, lines, name="data.jsonl"):
    path = folder / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def datasets(folder, paths, seq_len=S, tokenizer="bytes", valid=0, vocab_size=300, seed=1, **data):
    data = DataConfig(
        source="sft",
        paths=tuple(paths),
        separate_documents=True,
        tokenizer=tokenizer,
        cache_dir=str(folder / "cache"),
        **data,
    )
    run = dict(seq_len=seq_len, seed=seed, train_samples=10, valid_samples=valid)
    return build_datasets(data, vocab_size=vocab_size, readers=READERS, **run)


def unpacked(dataset, samples):
    """Every document of these samples in a sample of its own."""
    s = dataset.seq_len
    for i in samples:
        for j in dataset.packing.documents(i):
            tokens, answers = dataset.documents.get(dataset.part[j], s + 1)
            hole = s + 1 - len(tokens)
            yield Sample(
                np.pad(tokens, (0, hole)),
                np.array([len(tokens)] if hole else [], np.int32),
                np.pad(answers, (0, hole))[1:].astype(np.float32),
                max(0, hole - 1),
            )


# ---- what a line becomes --------------------------------------------------------------------------------------------


def test_prompt_and_completion_are_told_apart_and_end_with_a_document(tmp_path):
    lines = [{"prompt": "Q: é?", "completion": " yes", "id": 7}, {"prompt": "", "completion": "no"}]
    documents = TokenizedFiles([write(tmp_path, [lines[0], "", lines[1]])], ByteTokenizer(), Cache(tmp_path), READERS)
    assert len(documents) == 2
    for i, line in enumerate(lines):
        tokens, answers = documents.get(i, 1000)
        prompt, answer = line["prompt"].encode(), line["completion"].encode()
        assert tokens.tolist() == [*prompt, *answer, ByteTokenizer.eod]
        first = max(1, len(prompt))  # of an answer without a prompt nothing foretells the first token
        assert answers.tolist() == [False] * first + [True] * (len(tokens) - first)


CHAT = [
    {"role": "system", "content": " Be kind.\n"},
    {"role": "user", "content": "Hi, <|eot_id|>"},
    {"role": "assistant", "content": "  Hello!\n\n1234"},
    {"role": "user", "content": "\n\nthe end?"},
    {"role": "assistant", "content": "it's\tthe"},
]


def test_a_chat_is_llama3s_template(tmp_path, llama3_file):  # noqa: F811
    """As Meta's model card has it, encoded by tiktoken as one text in which only the template's tokens are special."""
    tokenizer = load_tokenizer(f"llama3:{llama3_file}")
    plain = tiktoken.Encoding(
        "twin",
        pat_str=LLAMA3_SPLIT,
        special_tokens=tokenizer.special,
        mergeable_ranks={token: i for i, token in enumerate(vocabulary()[0])},
    )
    text, spans = "<|begin_of_text|>", []
    for message in CHAT:
        text += f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n"
        content = message["content"].strip().replace("<|eot_id|>", "\0")  # text that looks like a token is text
        if message["role"] == "assistant":
            spans.append((len(text), len(text) + len(f"{content}<|eot_id|>")))
        text += f"{content}<|eot_id|>"
    expected, answers = [], []
    cuts = [0, *(cut for span in spans for cut in span)]
    for which, (begin, end) in enumerate(zip(cuts, cuts[1:])):
        pieces = text[begin:end].split("\0")
        ids = plain.encode(pieces[0], allowed_special="all")
        for piece in pieces[1:]:
            ids += plain.encode("<|eot_id|>", disallowed_special=()) + plain.encode(piece, allowed_special="all")
        expected += ids
        answers += [which % 2 == 1] * len(ids)
    documents = TokenizedFiles([write(tmp_path, [{"messages": CHAT}])], tokenizer, Cache(tmp_path), READERS)
    tokens, learned = documents.get(0, 1000)
    assert tokens.tolist() == expected and learned.tolist() == answers
    assert tokenizer.decode(tokens[learned].tolist()) == "Hello!\n\n1234<|eot_id|>it's\tthe<|eot_id|>"


def test_llamas_prompts_begin_with_their_token(tmp_path, llama3_file):  # noqa: F811
    tokenizer = load_tokenizer(f"llama3:{llama3_file}")
    documents = TokenizedFiles(
        [write(tmp_path, [{"prompt": "the", "completion": " end"}])], tokenizer, Cache(tmp_path), READERS
    )
    assert tokenizer.decode(documents.get(0, 99)[0].tolist()) == "<|begin_of_text|>the end<|end_of_text|>"


def test_tokens_are_made_once_and_found_by_content(tmp_path):
    path = write(tmp_path, rows(5))
    first = TokenizedFiles([path], ByteTokenizer(), Cache(tmp_path / "cache"), READERS)
    moved = TokenizedFiles(
        [write(tmp_path, rows(5), "moved.jsonl")], ByteTokenizer(), Cache(tmp_path / "cache"), READERS
    )
    assert moved.fingerprint == first.fingerprint
    assert (
        TokenizedFiles([write(tmp_path, rows(6))], ByteTokenizer(), Cache(tmp_path / "cache"), READERS).fingerprint
        != first.fingerprint
    )
    assert len([*(tmp_path / "cache").glob("sft-*")]) == 2


def test_two_tokenizers_read_one_file_each_by_its_own_tokens(tmp_path, llama3_file):  # noqa: F811
    path, cache = write(tmp_path, [{"prompt": "the", "completion": " end"}]), Cache(tmp_path / "cache")
    for tokenizer in ByteTokenizer(), load_tokenizer(f"llama3:{llama3_file}"), ByteTokenizer():
        tokens, answers = TokenizedFiles([path], tokenizer, cache, READERS).get(0, 99)
        assert tokens[answers].tolist() == [*tokenizer.encode(" end"), tokenizer.eod]


# ---- samples --------------------------------------------------------------------------------------------------------


def test_samples_hold_every_document_whole_and_pad_the_rest(tmp_path):
    data = datasets(tmp_path, [write(tmp_path, rows(60))], split="1")
    train, found = data.train, []
    for i in range(train.packing.num_sequences):
        sample = train[i]
        ends = [*sample.starts, S + 1] if sample.starts[-1] < S + 1 else sample.starts
        used = S + 1 if sample.padding == 0 and sample.starts[-1] < S else sample.starts[-1]
        assert sample.tokens.shape == (S + 1,) and sample.mask.shape == (S,) and sample.padding == max(0, S - used)
        for begin, end in zip([0, *sample.starts], ends):
            if begin < used:
                text = sample.tokens[begin:end]
                assert text[-1] == ByteTokenizer.eod
                found.append(bytes(text[:-1].tolist()).decode())
                # label i is token i + 1: those of the answer and its end, not the next document's first
                answers = [token == ord("!") or token == ord(" ") or token == ByteTokenizer.eod for token in text]
                assert sample.mask[begin : end - 1].tolist() == answers[1:]
        assert not sample.mask[used - 1 :].any() and not sample.mask[sample.starts - 1].any()
        assert (sample.tokens[used:] == ByteTokenizer.eod).all()
    assert sorted(found) == sorted(row["prompt"] + row["completion"] for row in rows(60))
    assert data.note == (
        f"sft: an epoch is 60 documents in {train.packing.num_sequences} samples of train.seq_len=64, "
        f"{train.fill:.2%} full"
    )


def test_the_order_is_of_seed_and_sample_alone(tmp_path):
    path = write(tmp_path, rows(60))
    a, b, c = (datasets(tmp_path, [path], seed=seed).train for seed in (1, 1, 2))
    order = [a[i].tokens.tolist() for i in range(3 * a.packing.num_sequences)]
    assert [b[i].tokens.tolist() for i in reversed(range(len(order)))] == order[::-1]
    assert [c[i].tokens.tolist() for i in range(len(order))] != order
    assert a.fingerprint == b.fingerprint != c.fingerprint


def test_validation_is_a_share_of_the_lines_or_files_of_its_own(tmp_path):
    train, other = write(tmp_path, rows(60)), write(tmp_path, rows(9), "valid.jsonl")
    data = datasets(tmp_path, [train], valid=4, split="9,1")
    assert data.train.part == range(54) and data.valid.part == range(54, 60)
    data = datasets(tmp_path, [train, other], valid=4, valid_paths=(other,))
    assert data.train.part == range(69) and data.valid.part == range(9)
    assert data.info["train"] != data.info["valid"]
    blend = ("0.5", train, "0.5", other)
    data = datasets(tmp_path, [train], valid=4, valid_paths=blend)
    assert data.train.part == range(60) and [part.part for part in data.valid.parts] == [range(60), range(9)]
    data = datasets(tmp_path, blend, valid=4, valid_paths=(other,))
    assert [part.part for part in data.train.parts] == [range(60), range(9)] and data.valid.part == range(9)
    late = write(tmp_path, [*rows(57), {"prompt": "?" * (S + 1), "completion": "!"}, *rows(2)], "late.jsonl")
    with pytest.raises(ValueError, match=r"^.*late.jsonl: row 58 has a prompt of 65 tokens"):
        datasets(tmp_path, [late], valid=4, split="9,1")
    with pytest.raises(ValueError, match=r"^data.split=1 leaves none of the 60 sequences of .*data.jsonl to validate"):
        datasets(tmp_path, [train], valid=4, split="1")


def test_a_long_answer_is_cut_and_counted(tmp_path):
    lines = [{"prompt": "?" * S, "completion": "!!"}, {"prompt": "?", "completion": "!" * 99}]
    data = datasets(tmp_path, [write(tmp_path, lines)], split="1")
    assert "2 documents (2 cut at the end) in 2 samples of train.seq_len=64, 100.00% full" in data.note
    masks = sorted(data.train[i].mask.sum() for i in range(2))
    assert masks == [1, S] and data.train[0].padding == 0


def test_a_resumed_run_goes_on_with_the_next_samples_however_long_it_is_now(tmp_path):
    path = write(tmp_path, rows(60))
    options = [
        "data.source=sft",
        f"data.paths=[{path}]",
        "data.separate_documents=true",
        "data.tokenizer=bytes",
        f"data.cache_dir={tmp_path / 'cache'}",
        "train.seq_len=64",
        "optimizer.lr_schedule=constant",
    ]

    def losses(name, *argv):
        done = pretrain(*options, f"log.dir={tmp_path / name}", f"checkpoint.dir={tmp_path / name}", *argv)
        assert done.returncode == 0, done.stderr
        return [record["loss"] for record in records(tmp_path / name, "step")]

    whole = losses("whole", "train.steps=5")
    losses("parts", "train.steps=2")
    assert losses("parts", "train.steps=5") == whole


def test_a_damaged_cache_names_the_folder_to_delete(tmp_path):
    path = write(tmp_path, rows(5))
    datasets(tmp_path, [path])
    [folder] = (folder for folder in (tmp_path / "cache").glob("sft-*") if folder.is_dir())
    for name in ("documents.bin", "documents.idx", "rows.npy", "bad.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-9])
        with pytest.raises(ValueError, match=rf"^{folder}: this folder of data.cache_dir is damaged .*; delete it"):
            datasets(tmp_path, [path])
        (folder / name).write_bytes(content)


# ---- what the model makes of it -------------------------------------------------------------------------------------


def toy(base, **sections):
    return config(
        base,
        {
            "model": {"vocab_size": 260, "max_positions": S},
            "train": {"seq_len": S},
            "data": {"separate_documents": True},
        }
        | sections,
    )


def document_losses(cfg, samples):
    """Of every document in these samples, the loss of its answer: the real model on what the loader gives it."""
    model = whole_model(cfg, Mesh.offline())
    initialise([model], seed=3)
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, global_batch_size=len(samples)))
    losses = []
    for batch in Loader(samples, cfg, Mesh.offline()).step(0, 0):
        with torch.no_grad():
            values = F.cross_entropy(model.logits(batch)[:, 0], batch.labels[:, 0], reduction="none") * batch.mask[:, 0]
        for begin, end in pairwise(batch.documents.cu_seqlens[0]):
            assert batch.positions[begin:end, 0].tolist() == list(range(end - begin))
            losses += [values[begin:end].sum()] if batch.mask[begin:end].any() else []  # padding has none
    return torch.stack(losses)


@pytest.mark.parametrize("base", [LLAMA, GPT3], ids=["llama", "gpt"])
def test_packed_equals_unpacked_per_document(tmp_path, base):
    train = datasets(tmp_path, [write(tmp_path, rows(60))]).train
    samples = range(train.packing.num_sequences)
    alone = list(unpacked(train, samples))
    assert len(alone) == len(train.part) > 2 * len(samples)
    packed, expected = (document_losses(toy(base), s) for s in ([train[i] for i in samples], alone))
    assert packed.shape == expected.shape == (len(alone),)
    torch.testing.assert_close(packed, expected, rtol=TOLERANCE, atol=0)


def gradients_of(cfg, samples):
    """Loss per token and first gradients of one step over all of these samples, in the layout of `cfg`."""
    torch.set_num_threads(1)
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, global_batch_size=len(samples), steps=1))
    trainer = build(cfg, mesh_of(cfg))
    gradients = first_gradients(trainer)
    batches = Loader(samples, cfg, trainer.mesh).step(0, 1)
    return float(trainer.step(batches, 1e-3).read()["loss"]), gradients


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "parallel", [{}, {"cp": 2}, {"cp": 2, "cp_style": "allgather"}, {"tp": 2}, {"pp": 2}, "dp 2"], ids=str
)
def test_any_layout_and_packing_trains_the_same(tmp_path, ranks, parallel):
    """Every answer token weighs the same, however many documents share its sequence, or ranks its batch."""
    train = datasets(tmp_path, [write(tmp_path, rows(60))]).train
    alone = list(unpacked(train, range(8)))
    [(expected, wanted)] = ranks(1, gradients_of, toy(LLAMA), alone)
    cfg = toy(LLAMA, parallel=parallel if isinstance(parallel, dict) else {})
    for loss, gradients in ranks(2 if parallel else 1, gradients_of, cfg, [train[i] for i in range(8)]):
        assert loss == pytest.approx(expected, rel=TOLERANCE)
        assert gradients
        for name, (gradient, how) in gradients.items():
            assert_close_rel(gradient, part_of(wanted[name][0], how), TOLERANCE)


# ---- mistakes -------------------------------------------------------------------------------------------------------

GOOD = {"prompt": "a", "completion": "b"}


def turns(*roles, content="x"):
    return {"messages": [{"role": role, "content": content} for role in roles]}


@pytest.mark.parametrize(
    "bad, message",
    [
        ('{"prompt": "a"', r"is not JSON \(Expecting ',' delimiter at character 15\); correct it"),
        ("nonsense", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("3", "has none of the keys prompt, completion and messages; give prompt and completion, or messages"),
        ({"input": "a", "output": "b"}, "has none of the keys"),
        ({"prompt": "a"}, "has prompt of the keys"),
        ({**GOOD, "messages": []}, "has completion, messages, prompt of the keys"),
        ({"prompt": "a", "completion": ["b"]}, "has a completion that is not text"),
        ({"prompt": None, "completion": "b"}, "has a prompt that is not text"),
        ({"prompt": "a", "completion": "\ud800"}, "has an escape of half a character"),
        ({"prompt": "\udfff", "completion": "a"}, "has an escape of half a character"),
        (turns("user", "assistant", content="\ud83d"), "has an escape of half a character"),
        ('{"prompt": "a", "completion": "\\uD83D"}', "has an escape of half a character"),
        ({"prompt": "a", "completion": " \n"}, "has an empty completion; fill it in, or drop the row"),
        ({"messages": []}, "has messages that are not a list of objects with the texts role and content"),
        ({"messages": {"role": "user"}}, "has messages that are not a list"),
        ({"messages": [{"role": "user"}]}, "has messages that are not a list"),
        (turns("system"), "has the roles system; begin with system or not, then user and assistant in turn"),
        (turns("user"), "has the roles user;"),
        (turns("assistant", "user"), "has the roles assistant, user;"),
        (turns("user", "user", "assistant", "assistant"), "has the roles user, user, assistant, assistant;"),
        (turns("user", "tool"), "has the roles user, tool;"),
        (turns("user", "assistant", content=" "), "has an empty answer of the assistant; fill it in"),
        (turns("user", "assistant"), "chat messages need a chat template"),
        (
            {"prompt": "?" * (S + 1), "completion": "b"},
            "has a prompt of 65 tokens, .* train.seq_len=64 .* data.too_long=skip",
        ),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, bad, message):
    good, path = write(tmp_path, [GOOD], "good.jsonl"), write(tmp_path, [GOOD, "", bad, GOOD])
    with pytest.raises(ValueError, match=rf"^{re.escape(path)}: row 3 .*{message}") as caught:
        datasets(tmp_path, [good, path], split="1")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_files_without_lines_or_at_all(tmp_path):
    with pytest.raises(ValueError, match=r"^data.paths: there is no row in .*empty.jsonl; give prompt and completion"):
        datasets(tmp_path, [write(tmp_path, ["", "  "], "empty.jsonl")])
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(ValueError, match=rf"^data.paths: {path} cannot be read \(.*\); name"):
            datasets(tmp_path, [str(path)])
    with pytest.raises(ValueError, match="^model.vocab_size=100 is smaller than the 257 ids of data.tokenizer=bytes; "):
        datasets(tmp_path, [write(tmp_path, [GOOD])], vocab_size=100)


# ---- docstrings -----------------------------------------------------------------------------------------------------

MODULE = '''
def f(a, *b, c: int = 3, **d):
    """Say it.

    More.
    """

async def g(): "Also this."
def _private(): "Not this."
def cut(): """Begins here
    and ends there."""
def bare(): pass

class C:
    def m(self, x="\\n"): "A method."
    class _D:
        def n(self): "Not this."

async def g(): "Said again."
'''


def test_docstrings_are_pairs_of_signature_and_sentence(tmp_path):
    expected = [
        ("p.q.f(a, *b, c: int=3, **d)", "Say it."),
        ("p.q.g()", "Also this."),
        ("p.q.C.m(self, x='\\n')", "A method."),
    ]
    assert list(explained("p/q.py", MODULE.encode())) == [*expected, ("p.q.g()", "Said again.")]
    assert [s for s, _ in explained("p/__init__.py", MODULE.encode())][1] == "p.g()"
    assert not list(explained("p.py", b"print 'Python 2'")) and not list(explained("p.py", b"\0"))
    (tmp_path / "lib" / "p").mkdir(parents=True)
    (tmp_path / "lib" / "p" / "q.py").write_text(MODULE)
    path = build_docstrings(Cache(tmp_path / "cache"), tmp_path / "lib")
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"prompt": f"Explain {signature}:", "completion": f" {sentence}"} for signature, sentence in expected
    ]
    assert build_docstrings(Cache(tmp_path / "cache"), tmp_path / "lib") == path


def test_the_standard_library_explains_thousands_of_functions(tmp_path):
    data = datasets(tmp_path, ["docstrings"], seq_len=1024, valid=2)
    assert len(data.train.part) > 2000 and data.train.fill > 0.97 and data.train.cut == 0
    text = data.tokenizer.decode(data.train[0].tokens.tolist())
    assert "Explain " in text and "): " in text


def test_chats_for_generation_end_where_the_answer_begins(llama3_file):  # noqa: F811
    tokenizer = load_tokenizer(f"llama3:{llama3_file}")
    context, answer = encode_chat([{"role": "user", "content": "the"}, {"role": "assistant", "content": ""}], tokenizer)
    assert tokenizer.decode(context).endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")
    assert answer == [tokenizer.special["<|eot_id|>"]]
