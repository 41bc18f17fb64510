"""Generate text from a prompt with a trained model.

    python tools/generate.py runs/base --prompt "Explain shutil.move(src, dst):" "Explain heapq.heappush(heap, item):"
    python tools/generate.py Qwen3-8B --chat --system "Answer in one sentence." --prompt "Why is the sky blue?" \\
        --temperature 0.7 --top-p 0.9

The model is a checkpoint of minitron, saved in any layout, or a Hugging Face folder; it runs in one process, on a GPU
if there is one.  Without a temperature the likeliest token is taken (greedy); with one, tokens are drawn from the
fewest whose probabilities sum to top-p (Holtzman et al. 2020).  It ends with a document or an answer.  A chat is by the
tokenizer's own template, or Llama 3's if it has none; only the answer is printed.

Only attention reads earlier tokens, and only their keys and values, which later tokens do not change.  So they are
cached, and each step computes one token instead of all of them:

    prompt  a b c     queries a b c, keys a b c           causal, fills the cache
    then    d         query d, keys a b c (kept) d        everything is visible

The cache is an attention backend around another one (minitron/kernels/attention.py): the model is unchanged.

Left out: several prompts at once, beams, more than one GPU.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also without an installed minitron

from minitron.checkpoint.load import check_tensors
from minitron.comm.mesh import Mesh
from minitron.config.command import Parser, run
from minitron.config.files import errors_as
from minitron.config.schema import Config, DataConfig, PrecisionConfig, changed
from minitron.data.batch import Batch
from minitron.data.cache import Cache
from minitron.data.corpus import build_corpus
from minitron.data.sft import encode_chat, encode_prompt
from minitron.data.tokenizers import Tokenizer
from minitron.interop import hf
from minitron.interop.hf_tokenizer import end_of_answers, spec_of
from minitron.interop.tokenizers import load_tokenizer
from minitron.interop.weights import best_kind, config_of, open_weights
from minitron.kernels.attention import Backend, ForwardResult, Options
from minitron.kernels.gemm import DTYPES
from minitron.kernels.kernels import choose as choose_kernels
from minitron.model.gpt import GPT
from minitron.parallel.layer_context import make_layer_context


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="a checkpoint, a directory of checkpoints (then its newest), or a Hugging Face folder")
    add("--prompt", nargs="+", required=True, metavar="TEXT", help="one or several, each answered by itself")
    add("--chat", action="store_true", help="the prompt is what the user says; print the answer alone")
    add("--system", metavar="TEXT", help="with --chat: what the system says first")
    add("--max-tokens", type=int, default=64, metavar="N", help="longest answer (%(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0: the likeliest token (%(default)s)")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest of this sum (%(default)s)")
    add("--seed", type=int, default=0, help="of the draws for each prompt (%(default)s)")
    add("--dtype", choices=DTYPES, help="number format (that of training, or of the Hugging Face files)")
    add("--cpu", action="store_true", help="not on the GPU, if there is one")
    add("--base", metavar="FOLDER", help="of LoRA: where the frozen weights are now")
    add("--tokenizer", metavar="SPEC", help="as data.tokenizer; needed where the model's folder does not say it")
    add("--cache-dir", default=DataConfig.cache_dir, metavar="DIR", help="where the corpus is kept (%(default)s)")
    o = parser.parse_args(argv)
    for name, value, good in (
        ("max-tokens", o.max_tokens, o.max_tokens > 0),
        ("top-p", o.top_p, 0 < o.top_p <= 1),
        ("temperature", o.temperature, 0 <= o.temperature < float("inf")),
    ):
        if not good:
            raise ValueError(
                f"--{name}={value} is out of range; --max-tokens is at least 1, --temperature at least 0, "
                "--top-p above 0 and at most 1"
            )
    if o.system is not None and not o.chat:
        raise ValueError("--system has no effect without --chat; add it, or write the text into the prompt")
    device = torch.device("cuda" if torch.cuda.is_available() and not o.cpu else "cpu")
    model, tokenizer, cfg = load_model(o.model, device, o.dtype, o.tokenizer, o.cache_dir, o.base)
    stop = {tokenizer.eod, tokenizer.special.get("<|eot_id|>")} | (end_of_answers(tokenizer) if o.chat else set())
    first = [] if o.system is None else [{"role": "system", "content": o.system}]
    for text in o.prompt:
        asked = [*first, {"role": "user", "content": text}]
        with errors_as(ValueError, lambda error: f"--prompt={text[:40]!r} {error}", ValueError):
            prompt = encode_question(asked, tokenizer) if o.chat else encode_prompt(text, tokenizer)
        if not prompt:
            raise ValueError(f"--prompt={text!r} has no token to go on from; give at least one character")
        if len(prompt) + o.max_tokens > cfg.model.max_positions:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and --max-tokens={o.max_tokens} do not fit into "
                f"model.max_positions={cfg.model.max_positions}; use fewer of either"
            )
        draw = partial(
            choose,
            vocab_size=tokenizer.vocab_size,
            temperature=o.temperature,
            top_p=o.top_p,
            generator=torch.Generator().manual_seed(o.seed),
        )
        answer = list(generate(model, prompt, o.max_tokens, stop, draw))
        # a SentencePiece model drops the space before the first token it decodes
        answered = tokenizer.decode(prompt + answer)[len(tokenizer.decode(prompt)) :]
        print((answered.strip() if o.chat else text + answered) + "\n", flush=True)


def encode_question(messages: list[dict[str, str]], tokenizer: Tokenizer) -> list[int]:
    """Encode messages that an answer is to follow, with the beginning of the answer."""
    if tokenizer.chat is None:
        return encode_chat([*messages, {"role": "assistant", "content": ""}], tokenizer)[0]
    return tokenizer.chat.encode({"messages": messages, "add_generation_prompt": True})[0]


# ---- generation -----------------------------------------------------------------------------------------------------


def generate(
    model: GPT, prompt: list[int], max_tokens: int, stop: set[int | None], draw: Callable[[Tensor], int]
) -> Iterator[int]:
    """Yield the tokens after `prompt`, up to one of `stop`, which is left out. draw: logits [v] on the CPU -> token."""
    with cached(model):
        new, seen = prompt, 0
        for _ in range(max_tokens):
            token = draw(next_logits(model, new, seen))
            if token in stop:
                return
            yield token
            new, seen = [token], seen + len(new)


@torch.no_grad()
def next_logits(model: GPT, new: list[int], seen: int) -> Tensor:
    """Return the logits of the token after `new`, float32 [v] on the CPU. The cache holds the `seen` tokens before."""
    device = model.mesh.device
    tokens = torch.tensor(new, device=device)[:, None]
    order = torch.arange(seen, seen + len(new), device=device)
    batch = Batch(
        tokens,
        labels=tokens,
        mask=torch.zeros_like(tokens, dtype=torch.float32),
        positions=order[:, None],
        order=order,
        samples=torch.zeros(1, dtype=torch.int64, device=device),
        count=0.0,
    )
    return model.logits(batch)[-1, 0].float().cpu()


def choose(logits: Tensor, vocab_size: int, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Choose a token by its logits [v]: the likeliest at temperature 0, else a draw from the top-p set."""
    logits = logits[:vocab_size]  # the rest pads the embedding
    if temperature == 0:
        return int(logits.argmax())
    below = (logits - logits.max()).double()  # so that no temperature, however low, overflows
    likeliest, tokens = (below / temperature).softmax(-1).sort(descending=True)
    likeliest[likeliest.cumsum(-1) - likeliest >= top_p] = 0  # the sum before it has reached top-p
    return int(tokens[torch.multinomial(likeliest, 1, generator=generator)])


class KVCache:
    """An attention backend that keeps keys and values [b, g, s, d]: `inner` attends to all since it was made."""

    def __init__(self, inner: Backend):
        self.inner, self.past = inner, None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> ForwardResult:
        assert self.past is None or q.shape[2] == 1, "after the prompt, one token at a time"
        if self.past is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(self.past, (k, v)))
            options = options._replace(causal=False)
        self.past = k, v
        return self.inner.forward(q, k, v, options)


@contextmanager
def cached(model: GPT) -> Iterator[None]:
    """Give every attention of the model a cache, empty at first, inside the context."""
    layers = [block.attention for block in model.blocks.values()]
    originals = [layer.attend for layer in layers]
    for layer in layers:
        layer.attend = replace(layer.attend, backend=KVCache(layer.attend.backend))
    try:
        yield
    finally:
        for layer, original in zip(layers, originals):
            layer.attend = original


# ---- the model ------------------------------------------------------------------------------------------------------


def load_model(
    path: str,
    device: torch.device,
    dtype: str | None = None,
    tokenizer: str | None = None,
    cache_dir: str = DataConfig.cache_dir,
    base: str | None = None,
) -> tuple[GPT, Tokenizer, Config]:
    """Return the whole model in evaluation mode, its tokenizer, and the configuration it was built with.

    dtype, tokenizer, base (of an adapter): in place of those that the folder names. Raises ValueError for what cannot
    be read, or does not match.
    """
    reader, folder = open_weights(path, base=base), Path(os.path.expanduser(path))
    reader.verify()
    data = {} if isinstance(reader, hf.FolderReader) else reader.state.get("data", {})
    saved = config_of(reader)
    precision = PrecisionConfig(dtype or saved.precision.dtype)
    cfg = Config(model=saved.model, data=saved.data, precision=precision)
    words = find_tokenizer(folder, tokenizer or spec_of(reader, data), cfg, data, cache_dir)
    # The number of keys varies as documents' lengths do; cuDNN would compile a plan for each.
    cfg = changed(cfg, data=dict(separate_documents=True))
    mesh = Mesh.offline(device=device)
    context = make_layer_context(cfg, mesh, choose_kernels(cfg, device))
    model = GPT(cfg, mesh, context, range(cfg.model.num_layers), first=True, last=True).eval()
    check_tensors(reader, {param.spec.name: list(param.shape) for param in model.parameters()})
    with torch.no_grad():
        for param in model.parameters():
            name, shape = param.spec.name, tuple(param.shape)
            param.copy_(reader.read(name, best_kind(reader, name), (0,) * len(shape), shape))
    return model, words, cfg


def find_tokenizer(folder: Path, chosen: str | None, cfg: Config, data: dict, cache_dir: str) -> Tokenizer:
    """Load the tokenizer `chosen`, if it is that of the run that saved `folder`. data: that run's state of its data."""
    if chosen is None:
        raise ValueError(
            f"{folder} does not say which tokenizer it was trained with; give --tokenizer=llama3:FILE, "
            "gpt2:DIR, llama2:FILE, hf:DIR, bytes or corpus"
        )
    if chosen == "corpus":
        tokenizer = build_corpus(Cache(Path(cache_dir).expanduser()), cfg.model.vocab_size).tokenizer
    else:
        with errors_as(ValueError, lambda error: f"{error}; --tokenizer names another one", ValueError):
            tokenizer = load_tokenizer(chosen, "--tokenizer")
    trained = data.get("tokenizer")
    if trained in (None, tokenizer.fingerprint) and tokenizer.vocab_size > cfg.model.vocab_size:
        raise ValueError(
            f"the tokenizer {chosen} has {tokenizer.vocab_size} ids, more than the vocabulary of {folder}, "
            f"model.vocab_size={cfg.model.vocab_size}: only the sizes are compared, since the weights do not say which "
            "tokenizer made their data; give the one that came with them with --tokenizer"
        )
    if trained not in (None, tokenizer.fingerprint):
        raise ValueError(
            f"{folder} was not trained with the tokenizer {chosen}, which has {tokenizer.vocab_size} ids "
            f"and the fingerprint {tokenizer.fingerprint}, not {cfg.model.vocab_size} and {trained}; give "
            "the right one with --tokenizer (that of the corpus differs from Python to Python)"
        )
    return tokenizer


if __name__ == "__main__":
    run(main)
