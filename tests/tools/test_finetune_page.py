"""From chats and a downloaded model to an answer: the commands of configs/FINETUNE.md as they stand there."""

import json
import random
import re
import shlex

import pytest
import torch

import warm
from minitron.config.installed import COMMANDS
from readmes import ROOT, blocks

library, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
PAGE = ROOT / "configs" / "FINETUNE.md"
# What is smaller than on the page, so that two CPU ranks train it in seconds.
SMALLER = ("seq_len: 2048", "seq_len: 64"), ("epochs: 3", "epochs: 1")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_chats(path) -> list[str]:
    """Write 60 sums as chats. Returns the answers."""
    draw, answers = random.Random(0), []
    with open(path, "w") as file:
        for _ in range(60):
            a, b = draw.randint(0, 9), draw.randint(0, 9)
            answers.append(f"It is {a + b}.")
            turns = {"user": f"What is {a} plus {b}?", "assistant": answers[-1]}
            file.write(json.dumps({"messages": [{"role": r, "content": text} for r, text in turns.items()]}) + "\n")
    return answers


def write_model(folder) -> None:
    """Write a tiny Qwen 3 with a byte-level tokenizer, as transformers saves them."""
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], library.trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    words.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    words.chat_template = TEMPLATE
    words.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8, num_key_value_heads=2)
    sizes |= dict(num_attention_heads=4, vocab_size=len(words), max_position_embeddings=512)
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)).bfloat16().save_pretrained(folder)


def commands() -> list[list[str]]:
    """The page's six, each as the words that follow `python`."""
    (block,) = [block for block in blocks(PAGE) if "minitron-generate" in block]
    found = []
    for line in block.splitlines():
        program, *words = shlex.split(re.sub(r"\s{2,}# .*", "", line))
        words = ["2" if word == "8" else word for word in words]
        start = ["-m", "torch.distributed.run", "--standalone"] if program == "torchrun" else [ROOT / COMMANDS[program]]
        found.append([*start, *words])
    return found


def test_the_page_s_six_commands_give_an_answer(tmp_path):
    write_model(tmp_path / "Qwen3-8B")
    answers = write_chats(tmp_path / "chats.jsonl")
    (text,) = blocks(PAGE, "yaml")
    for before, after in SMALLER:
        assert before in text
        text = text.replace(before, after)
    (tmp_path / "my.yaml").write_text(text)
    preview, check, plan, train, export, generate = commands()
    printed = [warm.run(*words, cwd=tmp_path) for words in (preview, check, plan, train, export, generate)]
    for done in printed:
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    assert f"\u27e6{answers[0]}<|im_end|>" in printed[0].stdout
    assert {line.split()[0] for line in printed[1].stdout.splitlines()} == {"ok"}
    assert "fits" in printed[2].stdout
    base, ours = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        for name in ("Qwen3-8B", "my-model")
    )
    moved = {name for name, p in base.named_parameters() if not torch.equal(p, ours.get_parameter(name))}
    assert moved == {name for name, _ in base.named_parameters() if name.endswith("proj.weight")}
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "my-model")
    assert words.chat_template == TEMPLATE
    answer = printed[5].stdout
    assert answer.strip() and "3 plus 4" not in answer and "<|im_end|>" not in answer
