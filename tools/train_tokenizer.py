"""A tokenizer of your own: byte-pair encoding trained on your text, for those who have none that fits it.

    python tools/train_tokenizer.py --input my.jsonl --text-field body --vocab-size 32000 --output tokenizers/my
    -> tokenizers/my/tokenizer.json, tokenizer_config.json: data.tokenizer=hf:tokenizers/my
    python tools/train_tokenizer.py --input my.jsonl --kind sentencepiece --vocab-size 32000 --output tokenizers/my
    -> tokenizers/my/tokenizer.model: data.tokenizer=llama2:tokenizers/my/tokenizer.model

`bpe` is byte-level, as GPT-2's and Llama 3's, cut into words by Llama 3's rule; transformers and servers read it as it
is, and the `tokenizers` library trains it. `sentencepiece` is of Llama 2's kind, with bytes for what it has no piece
for. Both encode any text. They learn from the first --sample-mb megabytes of it, which are held in memory (BPE needs
some five times as much); more than a few hundred change little. So name all kinds of text, the shortest first.

Left out: chat templates, and special tokens but the end of a document.
"""

import argparse
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import sentencepiece

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also without an installed minitron

from minitron.config.command import Parser, positive, run
from minitron.config.files import write_json
from minitron.config.installed import pip_install
from minitron.config.text import printable
from minitron.data.corpus import PIECES, UNCHANGED
from minitron.interop.new_folder import new_folder, new_path
from minitron.interop.tokenizers import LLAMA3_SPLIT, load_tokenizer
from tools.rows import documents, files_of, read_batches

END = "<|endoftext|>"
SENTENCE = 1000  # characters; SentencePiece drops sentences beyond 4192 bytes


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="as of tools/preprocess_data.py")
    add("--output", required=True, type=new_path, metavar="DIR", help="new")
    add("--vocab-size", type=int, default=32000, metavar="N", help="ids, all counted (%(default)s)")
    add("--kind", choices=("bpe", "sentencepiece"), default="bpe", help="see above (%(default)s)")
    add("--text-field", default="text", metavar="NAME", help="the field or column (%(default)s)")
    add("--sample-mb", type=positive(float), default=500, metavar="MB", help="text to learn from (%(default)s)")
    options = parser.parse_args(argv)
    least = 257 if options.kind == "bpe" else 300
    if not least <= options.vocab_size <= 1 << 20:
        why = f"a vocabulary has at least its bytes and an end, {least} ids, and at most {1 << 20}"
        raise ValueError(f"--vocab-size={options.vocab_size}: {why}; use 32000 or so")
    texts = sample(files_of(options.input), options.text_field, int(options.sample_mb * 1e6))
    with new_folder(options.output) as folder:
        spec = (train_bpe if options.kind == "bpe" else train_sentencepiece)(folder, texts, options.vocab_size)
        tokenizer = load_tokenizer(spec.format(folder))
        shown = " ".join(texts)[:100_000]
        each = len(shown.encode()) / max(1, len(tokenizer.encode(shown)))
    if tokenizer.vocab_size < options.vocab_size:
        print(f"note: the text has no more than {tokenizer.vocab_size} pieces, fewer than --vocab-size")
    print(
        f"{tokenizer.vocab_size} ids, {each:.2f} bytes each on its own text; to train with them:\n"
        f"data.tokenizer={printable(spec.format(options.output))} model.vocab_size={tokenizer.vocab_size}"
    )


def sample(files: list[str], field: str, most_bytes: int) -> list[str]:
    """The texts of the first `most_bytes` bytes of all files, the last one cut. Raises ValueError if there are none."""
    texts, size = [], 0
    for batch in read_batches(files, (field,)):
        for document in documents(batch, (field,)):
            text = document[field].encode()[: most_bytes - size]
            texts.append(text.decode(errors="ignore"))  # the cut can halve a character
            size += len(text)
            if size >= most_bytes:
                return texts
    if not size:
        raise ValueError(f"--input {' '.join(files)}: no text under the key {field!r}; give files with documents")
    return texts


def train_bpe(folder: Path, texts: list[str], vocab_size: int) -> str:
    """Write tokenizer.json and tokenizer_config.json; returns the spec of data.tokenizer with {} for the folder."""
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        fix = f"{pip_install('data')}, or use --kind sentencepiece"
        raise ValueError(f"--kind bpe needs the package tokenizers, which is not installed; {fix}") from error
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bar = sys.stderr.isatty()  # elsewhere it is only empty lines
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=bar)
    tokenizer.train_from_iterator(texts, trainer, len(texts))
    tokenizer.add_special_tokens([AddedToken(END, special=True)])  # the last id, as GPT-2's
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", settings)
    return "hf:{}"


def train_sentencepiece(folder: Path, texts: list[str], vocab_size: int) -> str:
    """Write tokenizer.model; returns the spec of data.tokenizer with {} for the folder."""
    model = io.BytesIO()
    ids = dict(unk_id=0, bos_id=1, eos_id=2, pad_id=-1)  # as Llama 2's
    options = dict(model_type="bpe", hard_vocab_limit=True, minloglevel=2) | UNCHANGED | PIECES | ids
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(texts), model_writer=model, vocab_size=vocab_size, **options
        )
    except RuntimeError as error:
        why, characters = " ".join(str(error).split()), sum(map(len, texts))
        fix = "use a smaller --vocab-size, or more text"
        raise ValueError(
            f"--vocab-size={vocab_size} cannot be had of {characters} characters ({why}); {fix}"
        ) from error
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return "llama2:{}/tokenizer.model"


def _sentences(texts: list[str]) -> Iterator[str]:
    for text in texts:
        for begin in range(0, len(text), SENTENCE):
            yield text[begin : begin + SENTENCE]


if __name__ == "__main__":
    run(main)
