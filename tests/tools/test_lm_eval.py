"""The page's recipe for EleutherAI's lm-eval, offline, on a small task: its answers are those of minitron's model."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
import yaml

from minitron import pretrain
from minitron.interop import convert_hf
from minitron.interop.tokenizers import load_tokenizer
from readmes import ROOT, blocks
from tools import generate, train_tokenizer

pytest.importorskip("lm_eval")  # some forty packages: not an extra
TEXT = "def f(x):\n    return x + 1\nimport sys, os\nfor i in range(3): print(i)\n" * 50
QUESTIONS = [
    ("def f(x): return", ["x", "import sys"]),
    ("import", ["sys, os", "return x", "for"]),
    ("for i in", ["os", "range(3)"]),
    ("print(", ["import", "i)", "def"]),
]
TINY = (
    "model.num_layers=1 model.hidden_size=32 model.ffn_hidden_size=32 model.num_heads=2 model.num_kv_heads=2 "
    "model.vocab_size=300 train.seq_len=32 train.steps=20 precision.dtype=fp32 data.source=mock checkpoint.every=0"
).split()


def test_the_recipe_gives_the_model_s_answers(tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    words = ["--input", tmp_path / "in.jsonl", "--vocab-size", 300, "--output", tmp_path / "t"]
    train_tokenizer.main([str(word) for word in words])
    tokenizer = load_tokenizer(f"hf:{tmp_path}/t")
    pretrain.main([*TINY, f"model.vocab_size={tokenizer.vocab_size}", f"checkpoint.dir={tmp_path}/run"])
    convert_hf.main(["export", f"{tmp_path}/run", f"{tmp_path}/my-gpt2", "--tokenizer", f"hf:{tmp_path}/t"])
    rows = [{"question": q, "choices": choices, "answer": 0} for q, choices in QUESTIONS]
    (tmp_path / "tiny.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"task": "tiny", "dataset_path": "json", "output_type": "multiple_choice", "test_split": "test"}
    task |= {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "tiny.jsonl")}}, "doc_to_text": "{{question}}"}
    task |= {"doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}]}
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "tiny.yaml").write_text(yaml.safe_dump(task))

    (line,) = [
        line for block in blocks(ROOT / "tools" / "README.md") for line in block.splitlines() if "lm_eval" in line
    ]
    command = re.sub(r"--tasks \S+", "--tasks tiny --include_path tasks --device cpu --log_samples", line).split()
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, *command[1:], "--output_path", "out"],
        cwd=tmp_path,
        env=os.environ | offline,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    found = {row["doc"]["question"]: row for row in map(json.loads, samples.read_text().splitlines())}

    model, _, _ = generate.load_model(f"{tmp_path}/run", torch.device("cpu"), "fp32", f"hf:{tmp_path}/t")
    for question, choices in QUESTIONS:
        theirs = [float(pair[0]) for pair in found[question]["filtered_resps"]]
        for choice, score in zip(choices, theirs, strict=True):
            prompt, whole = tokenizer.encode(question), tokenizer.encode(f"{question} {choice}")
            ours = 0.0
            for i in range(len(prompt), len(whole)):
                with generate.cached(model):
                    ours += float(
                        generate.next_logits(model, whole[:i], 0)[: tokenizer.vocab_size].log_softmax(-1)[whole[i]]
                    )
            assert score == pytest.approx(ours, abs=1e-3), (question, choice)
