"""Write the tokenizer of an exported folder, in the files that transformers, vLLM and lm-eval read.

    tokenizer.json, tokenizer_config.json   or tokenizer.model of SentencePiece; chat_template.jinja
    generation_config.json                  the ids that begin and end a text, and what the source's author added

They come from the first of these sources that exists and has the ids that the run was trained with:

  1. the Hugging Face folder that the weights began with (finetune.base, checkpoint.load): its own files. An import
     keeps them in CHECKPOINT_DIR/tokenizer, so that they outlive the folder
  2. data.tokenizer of the run, or --tokenizer: hf:DIR as it is; gpt2:DIR and llama3:FILE as a tokenizer.json, whose
     merges are found again from the ranks; llama2:FILE as tokenizer.model

A text begins with bos only if the run trained with it: pretraining has none, fine-tuning has. A fine-tuned model also
ends a text with the token that ends an answer of a chat, and gets Llama 3's chat template if it was trained with that
(minitron/data/sft.py).

Left out: `corpus` and `bytes`, for which transformers has no tokenizer.
"""

import os
import shutil
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

from minitron.checkpoint.reader import Reader
from minitron.checkpoint.weights import Weights, base_of, config_of
from minitron.config.files import read_json, write_json
from minitron.data.sft import HEADER
from minitron.data.tokenizers import SentencePieceTokenizer, Tokenizer
from minitron.interop.chat_template import find_templates
from minitron.interop.tokenizers import TiktokenTokenizer, _printable_bytes, load_tokenizer

KEPT = "tokenizer"  # folder beside an imported checkpoint
GENERATION = "generation_config.json"
FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", GENERATION),
)
SPECS = {"tokenizer.json": "hf:{}", "tokenizer.model": "llama2:{}/tokenizer.model", "vocab.json": "gpt2:{}"}
SAMPLE = "It isn't 1,234567 o'clock,\n\n  she says:\tdef f(x): return x\r\n Ol\u00e9, \u4eca\u65e5\u306f \U0001f600!  "
HERE = Path(__file__).parent
CHAT_TEMPLATE = (HERE / "llama3_chat.jinja").read_text().strip()


def keep(source: Path, folder: Path) -> None:
    """Copy the tokenizer and its ids from a Hugging Face folder to folder/tokenizer, if there are any."""
    kept = folder / KEPT
    kept.mkdir()
    if not copy_files(source, kept):
        settings = read_json(source / "config.json")
        ids = {key: settings.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        write_ids(kept, {key: number for key, number in ids.items() if number is not None})
    if not any(kept.iterdir()):
        kept.rmdir()


def copy_files(source: Path, folder: Path) -> dict:
    """Copy those of FILES that exist. Returns the content of generation_config.json; {} if there is none."""
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    return dict(read_json(folder / GENERATION)) if (folder / GENERATION).exists() else {}


def write_ids(folder: Path, ids: dict) -> dict:
    """Write generation_config.json, unless a copied one holds these ids. Return those that are not None."""
    path = folder / GENERATION
    if ids and not (path.exists() and read_json(path) == ids):
        write_json(path, ids)
    return {key: value for key, value in ids.items() if value is not None}


def write_tokenizer(folder: Path, reader: Weights, vocab_size: int, spec: str | None) -> tuple[dict, str]:
    """Write tokenizer files and generation_config.json. Returns the ids of the latter, and a note on the former.

    spec: --tokenizer, None for the run's own. Raises ValueError if a spec's tokenizer cannot be read; the run's own is
    then left out.
    """
    cfg = config_of(reader)
    finetuned, named = cfg.finetune.kind is not None, spec or cfg.data.tokenizer
    own, why = None, f"{named} is not a tokenizer that transformers has"
    if named != "corpus":
        try:
            own = load_tokenizer(named, "--tokenizer")
            if own.vocab_size > vocab_size:
                raise ValueError(f"--tokenizer={named} has {own.vocab_size} ids, the model {vocab_size}; name its own")
        except ValueError as error:
            if spec is not None:
                raise
            own, why = None, str(error)
    kept = None if spec is not None else find_kept(reader)
    chats, ends, note = own if finetuned else None, set(), ""
    if chats is not None:
        try:
            ends = end_of_answers(chats)
        except ValueError as error:  # for example without jinja2
            note = f", but without the token that ends an answer ({error})"
    kind, _, path = named.partition(":")
    file = Path(os.path.expanduser(path))
    ids = {} if own is None else {"bos_token_id": own.bos, "eos_token_id": own.eod}
    ids = {name: number for name, number in ids.items() if number is not None}
    if kept is not None and (own is None or same_ids(kept, own)):
        named = str(kept.parent if kept.name == KEPT else kept)
        ids = copy_files(kept, folder)
    elif own is None:
        return {}, f"without a tokenizer ({why}); copy its files there, or name it with --tokenizer"
    elif kind == "hf":
        ids = copy_files(file, folder) or ids
    elif isinstance(own, TiktokenTokenizer):
        write_json(folder / "tokenizer.json", tokenizer_json(own, own.bos if finetuned else None))
        write_settings(folder, own, "PreTrainedTokenizerFast")
    elif isinstance(own, SentencePieceTokenizer):
        shutil.copyfile(file, folder / "tokenizer.model")
        more = {"legacy": False, "add_bos_token": finetuned, "unk_token": "<unk>", "add_prefix_space": own.space_first}
        write_settings(folder, own, "LlamaTokenizer", **more)
    ids = write_ids(folder, ids if chats is None else add_answers(folder, ids, chats, ends))
    if not any((folder / name).exists() for name in SPECS):
        fix = "" if kind == "bytes" else "; copy its files there"
        return ids, f"without a tokenizer, since {named} has none that transformers reads{fix}"
    return ids, f"with the tokenizer of {named}{note}"


def add_answers(folder: Path, ids: dict, own: Tokenizer, ends: set[int]) -> dict:
    """Add to the files and ids of a tokenizer what a chat model needs and their author may not have trained.

    own: the tokenizer of the run. ends: see end_of_answers. Writes Llama 3's template if there is none. Returns the ids
    with the ends.
    """
    path = folder / "tokenizer_config.json"
    settings = dict(read_json(path)) if path.exists() else {}
    if own.special.keys() >= set(HEADER) and not find_templates(folder, settings):
        write_json(path, settings | {"chat_template": CHAT_TEMPLATE})
    known = own.eod if ids.get("eos_token_id") is None else ids["eos_token_id"]
    known = known if isinstance(known, list) else [known]
    new = sorted(ends - set(known))
    return ids | {"eos_token_id": known + new} if new else ids


def end_of_answers(tokenizer: Tokenizer) -> set[int]:
    """Find the special tokens after the text of an answer, as <|im_end|>. Raises ValueError for the template."""
    if tokenizer.chat is None:
        return {tokenizer.special[HEADER[2]]} if HEADER[2] in tokenizer.special else set()
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    [tokens] = tokenizer.chat.encode({"messages": turns, "add_generation_prompt": False})
    special = set(tokenizer.special.values())
    return special & set(takewhile(lambda i: i in special or not tokenizer.decode([i]).strip(), reversed(tokens)))


def find_kept(reader: Weights) -> Path | None:
    """Return the folder with the source's tokenizer files; None if the weights have no such source, or it was moved."""
    for _ in range(8):  # a run may begin with the weights of another run
        for folder in (reader.path / KEPT, reader.path.parent / KEPT):
            if folder.is_dir():
                return folder
        try:
            base = base_of(config_of(reader))
            if base is None:
                return None
            path = Path(os.path.expanduser(base))
            if (path / "config.json").exists():
                return path
            reader = Reader(path)
        except ValueError:
            return None
    return None


def spec_of(reader: Weights, data: Mapping[str, object] = {}) -> str | None:
    """Return the spec of the tokenizer that the weights were trained with, else of their source's files, else None.

    data: the state of the data in their checkpoint.
    """
    if (own := config_of(reader).data.tokenizer) != "corpus" or data.get("source") in ("corpus", "sft"):
        return own
    folder = reader.path if reader.index.name == "config.json" else find_kept(reader)
    return next((spec.format(folder) for name, spec in SPECS.items() if folder and (folder / name).is_file()), None)


def same_ids(folder: Path, own: Tokenizer) -> bool:
    """Tell whether a folder's tokenizer encodes as the run's does; False also if it cannot be read."""
    for spec in SPECS.values():
        try:
            kept = load_tokenizer(spec.format(folder))
        except ValueError:
            continue
        return kept.vocab_size == own.vocab_size and kept.encode(SAMPLE) == own.encode(SAMPLE)
    return False


def write_settings(folder: Path, tokenizer: Tokenizer, kind: str, **more: object) -> None:
    """Write tokenizer_config.json."""
    texts = {i: text for text, i in tokenizer.special.items()}
    settings = {"tokenizer_class": kind, "clean_up_tokenization_spaces": False} | more
    settings |= {"eos_token": texts.get(tokenizer.eod)}
    settings |= {"bos_token": texts[tokenizer.bos]} if tokenizer.bos in texts else {}
    write_json(folder / "tokenizer_config.json", settings)


def tokenizer_json(tokenizer: TiktokenTokenizer, bos: int | None) -> dict:
    """Fill in a tokenizer.json. bos: the id put before every text; None: nothing.

    As in tiktoken, a word that is a token becomes that token: `ignore_merges`.
    """
    made = read_json(HERE / "tokenizer.json")
    shown = _printable_bytes()
    made["model"]["vocab"] = {"".join(shown[byte] for byte in token): i for token, i in tokenizer.ranks.items()}
    merges = merges_of(tokenizer.ranks)
    made["model"]["merges"] = [["".join(shown[byte] for byte in part) for part in pair] for pair in merges]
    made["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = tokenizer.split
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    made["added_tokens"] = [{"id": i, "content": text} | flags for text, i in tokenizer.special.items()]
    if bos is not None:
        text = next(text for text, i in tokenizer.special.items() if i == bos)
        first, rest = {"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
        second = {"Sequence": {"id": "B", "type_id": 1}}
        template = {"type": "TemplateProcessing", "single": [first, rest], "pair": [first, rest, first, second]}
        made["post_processor"] = template | {"special_tokens": {text: {"id": text, "ids": [bos], "tokens": [text]}}}
    return made


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Find the pair that each token is joined from: byte-pair encoding by the lower ranks ends with this pair."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            best, i = min((ranks.get(parts[i] + parts[i + 1], rank), i) for i in range(len(parts) - 1))
            if best >= rank:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges
