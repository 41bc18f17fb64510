"""Generation: cached equals computed anew, greedy equals transformers', draws are as asked for, mistakes one line."""

import json
from functools import partial

import pytest
import torch
import transformers

from layouts import GPT3, LLAMA, config, whole_model
from minitron import finetune
from minitron.comm.mesh import Mesh
from minitron.interop import convert_hf
from minitron.interop.hf_tokenizer import end_of_answers
from minitron.model.init import initialise
from minitron.testing import assert_close_rel
from test_chat import CHATML, of_transformers
from test_checkpoint_format import reindex
from test_pretrain import TINY, pretrain
from test_tokenizers import llama3_file  # noqa: F401  (a fixture)
from tools import generate

PROMPT = [7, 3, 80, 3, 11]
GREEDY = partial(generate.choose, vocab_size=90, temperature=0.0, top_p=1.0, generator=None)


@pytest.mark.parametrize("base", [LLAMA, GPT3], ids=["llama", "gpt"])
def test_a_cached_step_equals_a_full_forward(base):
    cfg = config(base)
    model = whole_model(cfg, Mesh.offline()).eval()
    initialise([model], seed=3)
    originals = [block.attention.attend for block in model.blocks.values()]
    tokens = list(PROMPT)
    with generate.cached(model):
        cached = [generate.next_logits(model, tokens, 0)]
        for _ in range(20):
            tokens.append(int(cached[-1].argmax()))
            cached.append(generate.next_logits(model, tokens[-1:], len(tokens) - 1))
    for n, logits in enumerate(cached, len(PROMPT)):
        # float32, the same sums in another order
        assert_close_rel(logits, generate.next_logits(model, tokens[:n], 0), 1e-5)
    greedy = generate.generate(model, PROMPT, 20, set(), GREEDY)
    assert list(greedy) == tokens[len(PROMPT) :]
    stopped = generate.generate(model, PROMPT, 20, {tokens[8]}, GREEDY)
    assert PROMPT + list(stopped) == tokens[: tokens.index(tokens[8], len(PROMPT))]
    assert all(block.attention.attend is original for block, original in zip(model.blocks.values(), originals))


def test_padding_is_never_drawn():
    """Padding rows that outweigh every token change neither greedy answers nor draws."""
    cfg = config(LLAMA)
    model = whole_model(cfg, Mesh.offline()).eval()
    initialise([model], seed=3)

    def answers():
        draw = partial(generate.choose, vocab_size=90, temperature=2.0, top_p=1.0, generator=torch.Generator())
        return [list(generate.generate(model, PROMPT, 20, set(), how)) for how in (GREEDY, draw)]

    before = answers()
    assert all(token < 90 for answer in before for token in answer)
    with torch.no_grad():
        model.head.weight[90:] = 100 * model.head.weight[:6]
        assert generate.next_logits(model, PROMPT, 0).argmax() >= 90
    assert answers() == before


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=300,
            max_position_embeddings=64,
            initializer_range=0.3,
        )
    ).eval()
    folder = tmp_path_factory.mktemp("hf") / "model"
    model.save_pretrained(folder)
    return folder, model


def run(*argv):
    generate.main([str(arg) for arg in argv])


def test_a_hugging_face_folder_answers_as_transformers_does(hugging_face, capsys):
    folder, theirs = hugging_face
    model, tokenizer, cfg = generate.load_model(str(folder), torch.device("cpu"), tokenizer="bytes")
    prompt = tokenizer.encode("ab ")
    ours = list(generate.generate(model, prompt, 30, set(), partial(GREEDY, vocab_size=300)))
    expected = theirs.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 3),
        do_sample=False,
        max_new_tokens=30,
        min_new_tokens=30,
        pad_token_id=0,
    )[0, 3:]
    assert cfg.model.max_positions == 64 and cfg.precision.dtype == "fp32"
    assert ours == expected.tolist()
    run(folder, "--tokenizer", "bytes", "--prompt", "ab ", "cd", "--max-tokens", 8)
    assert capsys.readouterr().out.startswith("ab ")


def test_a_chat_prints_the_answer_alone(hugging_face, tmp_path, capsys):
    library = pytest.importorskip("tokenizers")
    folder, model = hugging_face
    byte_level = library.Tokenizer(library.models.BPE())
    byte_level.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    byte_level.train_from_iterator([], library.trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    theirs = of_transformers(byte_level.to_str(), CHATML)
    theirs.save_pretrained(tmp_path)
    run(folder, "--tokenizer", f"hf:{tmp_path}", "--chat", "--system", "b", "--prompt", "a", "c", "--max-tokens", 6)
    expected = ""
    for text in "a", "c":
        asked = [{"role": "system", "content": "b"}, {"role": "user", "content": text}]
        prompt = theirs.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        given = dict(attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=6, pad_token_id=0)
        given |= dict(suppress_tokens=list(range(len(theirs), 300)), eos_token_id=theirs.eos_token_id)
        [ids] = model.generate(torch.tensor([prompt]), **given)
        expected += theirs.decode(ids)[len(theirs.decode(prompt)) :] + "\n\n"
    assert capsys.readouterr().out == expected
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    run(tmp_path, "--chat", "--system", "b", "--prompt", "a", "c", "--max-tokens", 6)  # the folder's own tokenizer
    assert capsys.readouterr().out == expected
    end = theirs.convert_tokens_to_ids("<|im_end|>")
    assert end_of_answers(generate.load_tokenizer(f"hf:{tmp_path}")) == {end} != {theirs.eos_token_id}
    of_transformers(byte_level.to_str(), CHATML.replace("<|im_end|>", "")).save_pretrained(tmp_path / "endless")
    assert end_of_answers(generate.load_tokenizer(f"hf:{tmp_path}/endless")) == set()


def test_draws_come_from_the_top_p_set_with_its_probabilities():
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0, 2.5])
    temperature, top_p, draws = 0.7, 0.8, 4000
    p = torch.exp(logits.double() / temperature)
    p /= p.sum()
    kept, total = {}, 0.0
    for token in sorted(range(5), key=lambda i: -p[i]):
        if total < top_p:
            kept[token] = float(p[token])
            total += float(p[token])
    assert 1 < len(kept) < 5
    generator = torch.Generator().manual_seed(0)
    drawn = [generate.choose(logits, 5, temperature, top_p, generator) for _ in range(draws)]
    assert set(drawn) == set(kept)
    for token, share in kept.items():  # within 5 standard deviations of a binomial share, at most 1/2 each
        assert drawn.count(token) / draws == pytest.approx(share / total, abs=5 * 0.5 / draws**0.5)
    again = torch.Generator().manual_seed(0)
    assert [generate.choose(logits, 5, temperature, top_p, again) for _ in range(draws)] == drawn
    assert generate.choose(logits, 5, 0.0, 1.0, None) == 1
    assert {generate.choose(logits, 5, 1.0, 1e-6, generator) for _ in range(50)} == {1}
    assert generate.choose(logits, 5, 1e-45, 1.0, generator) == 1, "no overflow of logits / temperature"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A model that has learned to answer: JSONL -> training -> a checkpoint."""
    folder = tmp_path_factory.mktemp("tuned")
    rows = [{"prompt": f"{word}?", "completion": f" {word[0]}{word[0]}!"} for word in ("one", "two", "six")]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = pretrain(
        "data.source=sft",
        f"data.paths=[{folder}/data.jsonl]",
        "data.separate_documents=true",
        "data.split=1",
        "data.tokenizer=bytes",
        f"data.cache_dir={folder}/cache",
        f"checkpoint.dir={folder}/run",
        "train.steps=60",
        "train.micro_batch_size=8",
        "optimizer.lr=1e-2",
        "log.every=60",
    )
    assert done.returncode == 0, done.stderr
    assert "sft: an epoch is 3 documents in 1 samples of train.seq_len=32, " in done.stdout
    return folder


def test_a_tuned_model_gives_the_answers_it_was_taught(tuned, capsys):
    run(tuned / "run", "--prompt", "one?", "two?", "six?", "--dtype", "fp32", "--cpu")
    assert capsys.readouterr().out == "one? oo!\n\ntwo? tt!\n\nsix? ss!\n\n"
    outputs = []
    for seed in (1, 1, 2):
        run(tuned / "run", "--prompt", "xyz", "--temperature", 2, "--top-p", 0.95, "--seed", seed, "--max-tokens", 20)
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


def test_adapters_answer_with_the_weights_that_they_were_trained_beside(tuned, tmp_path, capsys):
    """As the model does that they are merged into; also where its base has moved."""
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "one?", "completion": " no."}) + "\n")
    base = (tuned / "run").rename(tuned / "before")
    try:
        finetune.main(
            [
                *TINY,
                "data.source=sft",
                f"data.paths=[{tmp_path}/data.jsonl]",
                "data.separate_documents=true",
                "data.split=1",
                "data.tokenizer=bytes",
                f"data.cache_dir={tmp_path}/cache",
                "train.steps=60",
                f"checkpoint.dir={tmp_path}/lora",
                f"finetune.base={base}",
                "finetune.kind=lora",
                "lora.targets=[q,v,o,down]",
                "optimizer.lr=3e-2",
                "log.every=60",
            ]
        )
    finally:
        base.rename(tuned / "run")
    with pytest.raises(ValueError, match=rf"the base of the adapter in .*: {base} holds no weights; .*--base"):
        run(tmp_path / "lora", "--prompt", "one?")
    convert_hf.main(["export", f"{tmp_path}/lora", f"{tmp_path}/merged", "--base", f"{tuned}/run"])
    capsys.readouterr()
    answers = []
    for argv in ([tmp_path / "lora", "--base", tuned / "run"], [tmp_path / "merged", "--tokenizer", "bytes"]):
        run(*argv, "--prompt", "one?", "xyz", "--max-tokens", 12, "--cpu")
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] and answers[0].startswith("one? no.\n")


def test_mistakes_are_one_line(tuned, hugging_face, llama3_file, tmp_path):  # noqa: F811
    folder, good = hugging_face[0], ["--tokenizer", "bytes", "--prompt", "a"]
    other = tmp_path / "mock"
    assert pretrain("train.steps=1", f"checkpoint.dir={other}").returncode == 0
    for argv, message in [
        ([folder, "--prompt", "a"], "does not say which tokenizer it was trained with; give --tokenizer="),
        ([other, "--prompt", "a"], "does not say which tokenizer"),
        (
            [tuned / "run", "--prompt", "a", "--tokenizer", f"llama3:{llama3_file}"],
            f"was not trained with the tokenizer llama3:{llama3_file}, which has ",
        ),
        (
            [folder, "--prompt", "a", "--tokenizer", f"llama3:{llama3_file}"],  # imported weights: only sizes are known
            f"more than the vocabulary of {folder}, model.vocab_size=300: only the sizes are compared",
        ),
        ([folder, *good, "--top-p", 0], "--top-p=0.0 is out of range"),
        ([folder, *good, "--temperature", -1], "--temperature=-1.0 is out of range"),
        ([folder, *good, "--max-tokens", 0], "--max-tokens=0 is out of range"),
        (
            [folder, *good, "--max-tokens", 64],
            "a prompt of 1 tokens and --max-tokens=64 do not fit into model.max_positions=64",
        ),
        ([folder, "--tokenizer", "bytes", "--prompt", ""], "--prompt='' has no token"),
        ([folder, *good, "--system", "b"], "--system has no effect without --chat"),
        ([folder, *good, "--chat"], "chat messages need a chat template"),
        ([folder, "--prompt", "a", "--tokenizer", "word"], "--tokenizer='word' is not one of"),
        (
            [tmp_path / "nothing", *good],
            "nothing holds no weights; name a Hugging Face folder or a minitron checkpoint",
        ),
        ([folder, *good, "--base", "x"], f"base=x is for adapters, and {folder} holds a whole model; leave it out"),
        ([folder], "the following arguments are required: --prompt"),
    ]:
        with pytest.raises(ValueError) as caught:
            run(*argv)
        assert message in str(caught.value) and "\n" not in str(caught.value), str(caught.value)
    [shard] = (tuned / "run" / "step_00000060").glob("*.safetensors")
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match="is damaged"):
        run(tuned / "run", "--prompt", "a")
    shard.write_bytes(content)


def test_a_checkpoint_without_a_part_of_its_index(tmp_path):
    """A missing section is refused by its name, for generation and for export; a missing key has its default."""
    assert pretrain("train.steps=1", f"checkpoint.dir={tmp_path}").returncode == 0
    [step] = tmp_path.glob("step_*")
    whole = json.loads((step / "index.json").read_text())
    words = tmp_path, "--tokenizer", "bytes", "--prompt", "a", "--max-tokens", 1, "--cpu"

    def save(config: dict, state: dict = whole["state"]) -> None:
        reindex(tmp_path, step.name, config=config, state=state)

    def both(match: str) -> None:
        for command in (lambda: run(*words), lambda: convert_hf.main(["export", str(step), str(tmp_path / "out")])):
            with pytest.raises(ValueError, match=match):
                command()

    for missing in ("model", "precision", "data"):
        save({name: section for name, section in whole["config"].items() if name != missing})
        both(f"index.json has no config.{missing}")
    for section, key, value in (("data", "tokenizer", [3]), ("checkpoint", "load", {}), ("finetune", "kind", 3)):
        save(whole["config"] | {section: whole["config"][section] | {key: value}})
        both(f"index.json: {section}.{key}=")
    save(whole["config"] | {"data": {"tokenizer": 3}})
    with pytest.raises(ValueError, match="'3' is not one of bytes"):
        run(tmp_path, "--prompt", "a", "--cpu")
    convert_hf.main(["export", str(step), str(tmp_path / "out")])
    save(whole["config"] | {"precision": {}}, {"data": {"x": 1}})
    run(*words)
    with pytest.raises(ValueError, match="does not say which tokenizer"):
        run(tmp_path, "--prompt", "a", "--cpu")
