"""Chats by templates: ids and masks equal transformers' and TRL's, a hostile template is one line.

The templates are those that TRL is installed with, read from there.
"""

import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from minitron.data import sft
from minitron.data.cache import Cache
from minitron.data.sft import SFTDataset, TokenizedFiles, encode_row
from minitron.data.tokenizers import UnusableTemplate
from minitron.interop import chat_template
from minitron.interop.chat import MARK, Chats
from minitron.interop.rows import READERS
from minitron.interop.tokenizers import HfTokenizer, load_tokenizer
from test_tokenizers import llama2_file  # noqa: F401  (a fixture)
from tools.generate import encode_question
from tools.preview_chat import marked

library = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[2]
FAMILIES = (
    *("cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "glm4moe", "gptoss", "lfm2_v2", "llama3"),
    *("muse_glimmer", "nemotron_3_nano", "phi3", "qwen2_5", "qwen3"),
)
SPECIAL = re.compile(r"<[|｜][^|｜<>\s'\"]{1,40}[|｜]>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>|</?think>")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Read the sky.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}},
    },
}
CALL = {"type": "function", "id": "a12345678", "function": {"name": "weather", "arguments": {"city": "Köln"}}}


def said(*texts, first="user"):
    """Messages in which user and assistant take turns, after one of the system if `first` is that."""
    roles = ["system"] if first == "system" else []
    roles += ["user", "assistant"] * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts)]


CHATS = {
    "one turn": (said("Hi, who?", "Hello wörld"), None),
    "turns": (said("Hi", " It is 7.\n", "\n\n\n M \n", "fine <b>"), None),
    "system": (said("Be kind.", "Hi", "Hello", first="system"), None),
    "tools": (
        [
            {"role": "user", "content": "The weather?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "weather", "tool_call_id": "a12345678", "content": "rain"},
            {"role": "assistant", "content": "It rains."},
        ],
        [TOOL],
    ),
}


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Transformers' clock, as ours, stands still: a text has the same tokens on each day."""
    clock = mock.Mock(now=lambda: chat_template.DATE)
    monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", clock)


@pytest.fixture(scope="module")
def bpe():
    """The text of a tokenizer.json: a byte-level BPE with some merges, without special tokens."""
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["<|im_end|> assistant user system the weather is fine"] * 9, trainer)
    return tokenizer.to_str()


def of_transformers(bpe, template, special=("<|im_start|>", "<|im_end|>"), **settings):
    settings = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"} | settings
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=library.Tokenizer.from_str(bpe), **settings)
    theirs.add_special_tokens({"additional_special_tokens": list(special)})
    theirs.chat_template = template
    return theirs


def ours_of(theirs, templates=None):
    """The same tokenizer as `load_tokenizer` makes it, without the trial in another process."""
    text, templates = theirs.backend_tokenizer.to_str().encode(), templates or theirs.chat_template or {}
    templates = {"default": templates} if isinstance(templates, str) else templates
    return HfTokenizer(text, theirs.eos_token, None, "here/tokenizer.json", (templates, theirs.special_tokens_map))


class Here(chat_template.ChatTemplate):
    """Renders in this process, since starting one takes longer than all templates of a family."""

    def encode(self, chat):
        source, tokens = self._given[0]["default"], self._given[1]
        template, in_blocks = chat_template._sandbox()(source), "generation %}" in source
        try:
            text, spans = chat_template._render(template, in_blocks, chat, tokens)
        except Exception as error:
            raise ValueError(f"chat template of here: {error!r}") from error
        encoded = self._encode(text)
        return text, spans, encoded.ids, encoded.offsets


def encode(tokenizer, messages, tools=None, special=False, **more):
    row = {"messages": messages} | ({"tools": tools} if tools else {}) | more
    return encode_row(row, tokenizer, special, Counter())


def ids_and_mask(parts):
    return [i for part in parts for i in part], [n % 2 for n, part in enumerate(parts) for _ in part]


def by_prefixes(theirs, messages, tools):
    """The twin of a template without generation blocks: ids, and the mask; None if a prefix is none of the whole."""
    ids = lambda part, prompt: theirs.apply_chat_template(
        part, tools=tools, add_generation_prompt=prompt, return_dict=False
    )
    whole = ids(messages, False)
    mask = [0] * len(whole)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = ids(messages[:i], True), ids(messages[: i + 1], False)
            if whole[: len(before)] != before or whole[: len(after)] != after:
                return None
            mask[len(before) : len(after)] = [1] * (len(after) - len(before))
    return whole, mask


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_masks_are_those_of_transformers_and_trl(bpe, family):
    utils = pytest.importorskip("trl.chat_template_utils", reason="trl has the templates")
    path = Path(utils.__file__).with_name("chat_templates") / f"{family}.jinja"
    if not path.exists():
        pytest.skip(f"the installed trl has no template of {family}")
    source = path.read_text()
    theirs = of_transformers(bpe, source, sorted(set(SPECIAL.findall(source))))
    with_blocks = utils.get_training_chat_template(processing_class=theirs)  # by which TRL trains this model
    for template, blocks in (source, False), (with_blocks, True):
        theirs.chat_template = template
        ours, calls_tools = ours_of(theirs), utils.supports_tool_calling(theirs)
        ours.chat.template.__class__ = Here
        for name, (messages, tools) in CHATS.items():
            expected, is_refused = None, name == "tools" and not calls_tools
            try:
                if is_refused:
                    pass
                elif blocks:
                    found = theirs.apply_chat_template(
                        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
                    )
                    expected = found["input_ids"], found["assistant_masks"]
                else:
                    expected = by_prefixes(theirs, messages, tools)
            except Exception:
                is_refused = True
            assert expected or name != "one turn" or not blocks
            if is_refused:
                with pytest.raises(ValueError, match="chat template of here"):
                    encode(ours, messages, tools)
            elif expected:  # other masks: test_answers_where_the_text_of_a_part_is_no_beginning_of_the_whole
                assert ids_and_mask(encode(ours, messages, tools)) == expected, (name, blocks)
                assert sum(expected[1]), name
            if name != "tools" and expected:
                asked = theirs.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
                assert encode_question(messages[:-1], ours) == asked


# Of families that write the last answer otherwise: the end-of-sequence token, and what is trained, in the whole text.
ANSWERS = {
    "qwen3": ("<|im_end|>", r"<\|im_start\|>assistant\n(.*?<\|im_end\|>\n)"),
    "phi3": ("<|endoftext|>", r"<\|assistant\|>\n(.*?<\|end\|>\n(?:<\|endoftext\|>)?)"),
    "gptoss": ("<|return|>", r"<\|start\|>assistant(.*?<\|(?:end|return|call)\|>)(?=<\|start\|>(?!assistant)|\Z)"),
}
NO_THOUGHT = r"<\|im_start\|>assistant\n(?:<think>\n\n</think>\n\n)?(.*?<\|im_end\|>\n)"
CALLS = [
    *said("The weather?"),
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "Hm."},
    {"role": "tool", "name": "weather", "tool_call_id": "a12345678", "content": "rain"},
]
THOUGHTS = {"role": "assistant", "content": "Yes.", "reasoning_content": "Really?\n\nOh."}
TURNS = {
    "one": said("Hi", "Hello wörld"),
    "two": said("Hi", " <b>\n", "\nMore? \n", "fine <b>"),
    "five": said(*"a<c/eghi|k"),
    "a system": said("Be kind.", *"abcdefgh", first="system"),
    "a question last": said("a", "b", "c"),
    "no question first": said("Be kind.", "a", "b", "c", first="system")[:1] + said("a", "b", "c", "d")[1:],
    "a thought in a text": said("a", "<think>\nb\n</think>\n\n<c", "d", "<think>\ne\n</think>\n\nf"),
    "thoughts": [*said("a"), THOUGHTS, *said("b"), THOUGHTS],
    "tools": [*CALLS, *said("x", "Rain.")[1:]],
    "tools and turns": [
        *CALLS,
        *said("x", "Rain.", "Sure?")[1:],
        *CALLS[1:],
        *CALLS[1:],
        *said("y", "Yes.", "z", "0")[1:],
    ],
}


def mask_of(ids_and_places, spans):
    return [int(any(begin < last and end > first for first, last in spans)) for begin, end in ids_and_places]


@pytest.mark.parametrize("family", ANSWERS)
def test_answers_where_the_text_of_a_part_is_no_beginning_of_the_whole(bpe, family):
    """Masks are those of a regular expression for the family, and TRL's, whose template writes the same text.

    TRL marks answers of gpt-oss with the generation prompt, and other families' without it, as we do all.
    """
    utils = pytest.importorskip("trl.chat_template_utils", reason="trl has the templates")
    source = Path(utils.__file__).with_name("chat_templates").joinpath(f"{family}.jinja").read_text()
    eos, pattern = ANSWERS[family]
    special = {*SPECIAL.findall(source), "<|return|>", "<|call|>"} - {"<think>", "</think>"}
    theirs = of_transformers(bpe, source, sorted(special), eos_token=eos)
    training = utils.get_training_chat_template(processing_class=theirs)
    ours, of_trl = ours_of(theirs), 0
    ours.chat.template.__class__ = Here
    prompt = theirs("<|start|>assistant", add_special_tokens=False).input_ids if family == "gptoss" else []
    for name, messages in TURNS.items():
        tools = [TOOL] if "tools" in name else None
        for kwargs in ({}, {"enable_thinking": False}) if family == "qwen3" and "thought" not in name else ({},):
            if family == "phi3" and (tools or name == "thoughts"):
                with pytest.raises(ValueError, match="leaves out the (tools|reasoning)"):
                    encode(ours, messages, tools)
                continue
            text = theirs.apply_chat_template(messages, tools=tools, tokenize=False, **kwargs)
            spans = [found.span(1) for found in re.finditer(NO_THOUGHT if kwargs else pattern, text, re.DOTALL)]
            assert len(spans) == sum(message["role"] == "assistant" for message in messages), name
            found = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
            given = {"chat_template_kwargs": kwargs} if kwargs else {}
            ids, mask = ids_and_mask(encode(ours, messages, tools, special=True, **given))
            asked = {"tools": tools, "return_dict": True, **kwargs}
            assert ids == found.input_ids == theirs.apply_chat_template(messages, **asked)["input_ids"], name
            assert mask == mask_of(found.offset_mapping, spans), name
            trl = theirs.apply_chat_template(
                messages, chat_template=training, return_assistant_tokens_mask=True, **asked
            )
            if trl["input_ids"] == ids and not kwargs:
                more = [i for i, is_ours, is_theirs in zip(ids, mask, trl["assistant_masks"]) if is_ours != is_theirs]
                assert more == prompt * len(spans) and all(map(int.__le__, mask, trl["assistant_masks"])), name
                of_trl += 1
    assert of_trl


def test_a_chat_is_rendered_as_often_as_it_has_turns(bpe):
    """Ten times the turns render some ten times the messages, and not a hundred times."""
    environment, counts = chat_template._sandbox(), []

    def rendered(source, turns):
        template, chat = environment(source), {"messages": said(*map(str, range(2 * turns)))}
        counted = type(
            "", (), {"render": lambda _, given: counts.append(len(given["messages"])) or template.render(given)}
        )
        spans = chat_template._render(counted(), False, chat, {"eos_token": "<|eos|>"})[1]
        assert len(spans) == turns
        return sum(counts), counts.clear()

    for source in CHATML, CHATML.replace("{% if add", "{% if not add_generation_prompt %}<|eos|>{% endif %}{% if add"):
        assert rendered(source, 400)[0] < 11 * rendered(source, 40)[0]


LEFT_OUT = {
    "a thought": (CHATML, [*said("a"), THOUGHTS], "leaves out the reasoning of message 2"),
    "a thought in a text": (
        CHATML.replace("m.content +", "m.content.split('</think>')[-1] +"),
        said("a", "<think>b</think>c"),
        "leaves out the reasoning of message 2",
    ),
    "the end of a text": (CHATML.replace("m.content", "m.content[:3]"), said("abc", "a text"), "messages are marked"),
    "an earlier answer": (
        CHATML.replace("{{", "{% if m.role == 'user' or loop.last %}{{", 1).replace(
            "{% endfor", "{% endif %}{% endfor"
        ),
        said("a", "b", "c", "d"),
        "leaves out message 2",
    ),
    "a question": (
        CHATML.replace("{{", "{% if m.role != 'user' %}{{", 1).replace("{% endfor", "{% endif %}{% endfor"),
        said("Be.", "a", "b", first="system"),
        "content of message 2",
    ),
    "the second call": (
        CHATML.replace("m.content +", "(m.tool_calls[0].function.name if m.tool_calls else m.content) +"),
        [*said("a"), {"role": "assistant", "tool_calls": [CALL, CALL]}],
        "tool call 2 of message 2",
    ),
    "calls of no name": (
        CHATML,
        [*said("a"), {"role": "assistant", "content": "", "tool_calls": ["a"]}],
        "tool_calls of message 2",
    ),
    "calls that are a text": (
        CHATML,
        [*said("a"), {"role": "assistant", "content": "", "tool_calls": "[]"}],
        "tool_calls of message 2",
    ),
    "a text that counts": (
        CHATML.replace("m.content", "m.content ~ m.content | length"),
        said("a", "b"),
        "messages are marked",
    ),
    "another role before an answer": (
        CHATML.replace("m.role", "(m.role if loop.last else 'x')"),
        said("a", "b", "c", "d"),
        "beginning of message 2",
    ),
    "an end that no other chat has": (
        CHATML.replace("<|im_end|>\n' }}", "' }}{{ loop.length }}"),
        said("a", "b", "c", "d"),
        "end of message 2",
    ),
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_what_a_template_leaves_out_or_hides_is_named(bpe, what):
    template, messages, message = LEFT_OUT[what]
    ours = ours_of(of_transformers(bpe, template))
    ours.chat.template.__class__ = Here
    with pytest.raises(ValueError, match=message) as error:
        encode(ours, messages)
    assert "\n" not in str(error.value)


def test_an_empty_thought_may_be_left_out(bpe):
    ours = ours_of(of_transformers(bpe, CHATML.replace("m.content +", "m.content.split('</think>')[-1] +")))
    ours.chat.template.__class__ = Here
    assert encode(ours, said("a", "<think>\n\n</think>b")) == encode(ours, said("a", "b"))


def test_a_template_in_capitals_without_special_tokens(bpe):
    """Texts may hold what the template writes around others."""
    template = "{% for m in messages %}{{ (m.role + ': ' + m.content) | upper }}\n{% endfor %}"
    theirs = of_transformers(bpe, template + "{% if add_generation_prompt %}ASSISTANT: {% endif %}")
    ours = ours_of(theirs)
    ours.chat.template.__class__ = Here
    messages = said("a", "ASSISTANT: b\n", "assistant: ", "USER: assistant: c\nASSISTANT: ", "ASSISTANT: ", "d")
    assert ids_and_mask(encode(ours, messages)) == by_prefixes(theirs, messages, None)


def test_a_prompt_that_begins_a_thought_which_only_a_last_answer_has(bpe):
    """An earlier answer begins where another one would; the last one ends with the whole text."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        "{{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|im_start|>assistant\n<think>\n' }}{% elif messages | length > 2 %}<|eos|>{% endif %}"
    )
    ours = ours_of(of_transformers(bpe, template))
    ours.chat.template.__class__ = Here
    answers = ["b<|im_end|>\n", "d<|im_end|>\n", "\n</think>\n\nf<|im_end|>\n<|eos|>"]
    assert [ours.decode(part) for part in encode(ours, said(*"abcdef"))[1::2]] == answers


def test_a_template_of_tools_reasoning_and_variables_as_transformers_has_them(bpe):
    """What transformers does before it renders: named templates, fields that are null, names of reasoning."""
    source = "{{ add_generation_prompt }}{% for m in messages %}{{ m | tojson }}{% generation %}{{ m.content }}"
    source += "{{ m.thinking }}{% endgeneration %}{% endfor %}{{ more }}{{ tools }}{{ bos_token }}"
    source += "{{ strftime_now('%d %b %Y, %H:%M') }}"
    theirs = of_transformers(bpe, {"default": source, "tool_use": f"with tools {source}"})
    ours = ours_of(theirs)
    messages = [
        {"role": "user", "content": "<é>", "name": None},
        {"role": "assistant", "content": "b", "reasoning": "c"},
    ]
    for tools in None, [TOOL]:
        kwargs = {"return_dict": True, "return_assistant_tokens_mask": True}
        found = theirs.apply_chat_template(messages, tools=tools, more="x", **kwargs)
        wanted = found["input_ids"], found["assistant_masks"]
        for given in [tools, json.dumps(tools)] if tools else [None]:
            assert ids_and_mask(encode(ours, messages, given, chat_template_kwargs={"more": "x"})) == wanted
    ours.chat.close()


@pytest.mark.parametrize("marked", ["default", "tool_use"])
def test_each_template_of_a_tokenizer_marks_answers_by_its_own_blocks_or_has_none(bpe, marked):
    """Blocks here have the text of each message. Without blocks answers are found, and the end of a turn with them."""
    templates = {"default": CHATML, "tool_use": "{{ tools | length }}" + CHATML}
    blocks = "' }}{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>"
    templates[marked] = templates[marked].replace("' + m.content + '<|im_end|>", blocks)
    ours = ours_of(of_transformers(bpe, templates))
    for name, tools in ("default", None), ("tool_use", [TOOL]):
        parts = encode(ours, said("a", "b"), tools)
        assert [ours.decode(part) for part in parts[1::2]] == (["a", "b"] if name == marked else ["b<|im_end|>\n"])
    ours.chat.close()


def save(folder, theirs):
    theirs.save_pretrained(folder)
    return folder


def test_templates_of_a_folder(bpe, tmp_path):
    theirs, chat = of_transformers(bpe, CHATML), said("a", "b")
    expected = theirs.apply_chat_template(chat, return_dict=False)
    save(tmp_path, theirs)
    cache = Cache(tmp_path / "cache")

    def found(tools=None):
        tokenizer = load_tokenizer(f"hf:{tmp_path}", cache=cache)
        ids = ids_and_mask(encode(tokenizer, chat, tools))[0]
        tokenizer.chat.close()
        return ids

    assert found() == expected  # chat_template.jinja
    (tmp_path / "chat_template.jinja").unlink()
    assert load_tokenizer(f"hf:{tmp_path}", cache=cache).chat is None
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())

    def write(value):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": value}))

    write(CHATML)
    assert found() == expected
    write([{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "{{ tools }}" + CHATML}])
    assert found() == expected
    with_tools = found([TOOL])
    assert with_tools[-len(expected) :] == expected != with_tools
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}." + CHATML)
    assert found([TOOL])[-len(expected) :] == expected and len(found([TOOL])) == len(with_tools) + 1
    for bad in ([{"name": "default"}], 7, [CHATML]):
        write(bad)
        with pytest.raises(ValueError, match=rf"^{tmp_path}: .*chat_template"):
            load_tokenizer(f"hf:{tmp_path}", cache=cache)


def test_a_table_s_text_of_no_tools_is_none(bpe):
    """A column in which other rows have tools holds it: the template is told that there are none."""
    ours = ours_of(of_transformers(bpe, "{{ tools is none }}" + CHATML))
    ours.chat.template.__class__ = Here
    plain = encode(ours, said("a", "b"))
    for tools in "[]", "null", [], "", None:
        assert encode_row({"messages": said("a", "b"), "tools": tools}, ours, False, Counter()) == plain


ASKED = {"role": "user", "content": "a"}
BLOCK = "{% for m in messages %}{{ m.role }}: {% generation %}\n{{ m.content }}\n\n{% endgeneration %}{% endfor %}!"


@pytest.mark.parametrize(
    "template, chat, text, spans",
    [
        ("{{ messages[0].name is defined }}", {"messages": [ASKED | {"name": None}]}, "False", []),
        ("{{ documents is none }}{{ tools is none }}", {}, "TrueTrue", []),
        ("{{ messages[0].content }}{{ add_generation_prompt }}", {"add_generation_prompt": ...}, "aFalse", []),
        ("{{ add_generation_prompt }}", {"add_generation_prompt": False}, "False", []),
        ("{{ add_generation_prompt }}", {"add_generation_prompt": True}, "True", []),
        ("{{ bos_token }}{{ eos_token }}", {"chat_template_kwargs": {"eos_token": "<e>", "x": 1}}, "<b><e>", []),
        ("{{ tools | length }}", {"tools": [1, 2], "add_generation_prompt": True}, "2", []),
        ("{{ 'aé<' | tojson }}", {}, '"aé<"', []),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}", {}, '{\n "b": 1,\n "a": [\n  2\n ]\n}', []),
        ("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}", {}, '{"a":2,"b":1}', []),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", {}, '"\\u00e9"', []),
        ("{% for i in range(9) %}{% if i > 1 %}{% break %}{% endif %}{{ i }}{% endfor %}", {}, "01", []),
        ("a\n  {% if true %}\n  b\n  {% endif %}\nc", {}, "a\n  b\nc", []),
        ("{{ strftime_now('%d %b %Y') }}", {}, "26 Jul 2024", []),
        (
            BLOCK,
            {"messages": said("ab", "c\nd"), "add_generation_prompt": ...},
            "user: ab\n\nassistant: c\nd\n\n!",
            [(6, 10), (21, 26)],
        ),
        (BLOCK, {"add_generation_prompt": False}, "user: a\n\n!", []),
    ],
)
def test_what_a_template_reads_and_what_it_writes(template, chat, text, spans):
    """A space before a block and the newline after it do not belong to the text."""
    chat = {"messages": [ASKED], "add_generation_prompt": False} | chat
    chat = {key: value for key, value in chat.items() if value is not ...}
    tokens = {"bos_token": "<b>", "eos_token": "</s>"}
    assert chat_template._render(chat_template._sandbox()(template), True, chat, tokens) == (text, spans)


@pytest.mark.parametrize(
    "given, reasoning, thinking",
    [
        ({}, "-", "-"),
        ({"reasoning_content": "a"}, "a", "a"),
        ({"thinking": "b"}, "b", "b"),
        ({"reasoning": "c"}, "c", "c"),
        ({"reasoning": "c", "thinking": "b"}, "b", "b"),
        ({"thinking": "b", "reasoning_content": "a"}, "a", "b"),
        ({"thinking": "b", "reasoning_content": None}, "b", "b"),
    ],
)
def test_a_thought_has_both_names_that_templates_read(given, reasoning, thinking):
    template = chat_template._sandbox()("{{ messages[1].reasoning_content or '-' }}{{ messages[1].thinking or '-' }}")
    chat = {"messages": [ASKED, {"role": "assistant", "content": "x"} | given], "add_generation_prompt": False}
    assert chat_template._render(template, False, chat, {})[0] == reasoning + thinking


def test_tokens_are_trained_that_overlap_an_answer_and_marks_are_dropped():
    text, spans = f"ab{MARK}cdefgh{MARK}ijk", [(3, 5), (5, 7), (9, 12)]
    random = np.random.default_rng(0)

    def parts_of(places):
        encode = lambda _: (text, spans, range(len(places)), places)
        template = SimpleNamespace(fingerprint="", close=None, encode=encode)
        return Chats(template, SimpleNamespace(special={})).encode({"messages": []})

    for _ in range(60):
        cuts = [0, *sorted({*random.integers(1, 12, 7).tolist(), 2, 3, 9, 10}), len(text)]
        places = [place for place in pairwise(cuts)] + [(4, 4)] * int(random.integers(2))
        places.sort()
        parts = parts_of(places)
        kept = [i for i, (begin, end) in enumerate(places) if MARK not in text[begin:end]]
        mask = mask_of([places[i] for i in kept], spans)
        assert ids_and_mask(parts) == (kept, mask) and all(parts[1:])
    for wide in (1, 3), (2, 4), (1, 4):
        with pytest.raises(ValueError, match="a special token that cannot be read as text"):
            parts_of([wide])


# ---- templates that do harm, or are wrong ---------------------------------------------------------------------------

HOSTILE = {
    "never ends": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "an endless number": "{{ messages | length ** 10 ** 9 }}{{ 10 ** 10 ** 9 }}",
    "a huge range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "a huge text": "{{ 'a' * 10 ** 10 }}",
    "a text that doubles": "{% set n = namespace(t='a') %}{% for i in range(99) %}{% set n.t = n.t * 2 %}{% endfor %}",
    "much text": "{% for i in range(9999) %}{{ 'a' * 999 }}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "an attribute": "{{ messages.__class__ }}",
    "an attribute by a filter": "{{ messages | attr('__class__') }}",
    "an attribute in a format": "{{ '{0.__class__}'.format(messages) }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "a change of the messages": "{{ messages.append(1) }}",
    "another file": "{% include '/etc/passwd' %}",
    "no template": "{% for %}",
    "an unknown tag": "{% trans %}a{% endtrans %}",
    "an exception": "{{ raise_exception('No ' ~ messages[0].role) }}",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_template_that_does_harm_is_one_line(bpe, monkeypatch, what):
    limits = {"SECONDS": 0.3, "MEMORY_BYTES": 300 << 20, "CHARACTERS": 1 << 20}
    for name, value in limits.items():
        monkeypatch.setattr(chat_template, name, value)
    ours = ours_of(
        of_transformers(bpe, "{% if messages[0].content == 'do' %}" + HOSTILE[what] + "{% endif %}" + CHATML)
    )
    with pytest.raises(ValueError, match="chat template of here") as error:
        encode(ours, said("do", "b"))
    assert "\n" not in str(error.value) and len(str(error.value)) < 600
    if what not in ("no template", "an unknown tag"):  # the next chat is rendered, by this process or another
        assert ids_and_mask(encode(ours, said("a", "b")))[1][-1]
    ours.chat.close()
    assert ours.chat.template._process is None


def test_what_libraries_reserve_is_no_part_of_a_templates_memory(bpe, monkeypatch):
    reserve = f"import mmap\nreserved = mmap.mmap(-1, {chat_template.MEMORY_BYTES})\n"
    monkeypatch.setattr(chat_template, "CHILD", reserve + chat_template.CHILD)
    ours = ours_of(of_transformers(bpe, "{% set large = 'x' * (messages | length * 20000000) %}" + CHATML))
    assert encode(ours, said("a", "b"))
    ours.chat.close()


def test_the_limits_of_time_and_text_are_those_of_each_chat(monkeypatch, capsys):
    limits, timers = [], []
    monkeypatch.setattr(resource, "setrlimit", lambda *limit: limits.append(limit))
    monkeypatch.setattr(chat_template, "limit_memory", limits.append)
    monkeypatch.setattr(signal, "setitimer", lambda *timer: timers.append(timer))
    templates = {"default": CHATML, "tool_use": "{{ tools | length }}" + CHATML}
    chats = [{"messages": said("a", "b")}, {"messages": said("aa", "b")}, {"messages": said("a", "b"), "tools": [TOOL]}]
    lines = [json.dumps(line) + "\n" for line in ([templates, {}], *chats, chats[0])]
    text = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(lines)))
    chat_template.serve(7.0, 1 << 30, len(text))
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert answers[0] == answers[3] == [text, [[text.index("b<"), len(text)]]]
    assert [answer[0] for answer in answers[1:3]] == [None, None]  # one more character
    assert timers == [(signal.ITIMER_PROF, 7.0)] * 4
    assert limits[:2] == [(resource.RLIMIT_CORE, (0, 0)), (resource.RLIMIT_FSIZE, (0, 0))]
    assert limits[2:] == [1 << 30]


def test_a_template_that_never_ends_stops_a_file_of_many_lines(bpe, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.05)
    ours, starts = ours_of(of_transformers(bpe, HOSTILE["never ends"])), []
    monkeypatch.setattr(subprocess, "Popen", lambda *a, popen=subprocess.Popen, **k: starts.append(a) or popen(*a, **k))
    for _ in range(10):
        with pytest.raises(ValueError, match="chat template of here"):
            encode(ours, said("a", "b"))
    assert len(starts) == chat_template.TRIALS


def test_a_template_that_never_ends_is_no_bad_line(bpe, monkeypatch, tmp_path):
    """data.bad_lines=skip leaves out rows that are wrong, and not all that follow."""
    monkeypatch.setattr(chat_template, "SECONDS", 0.05)
    ours, path = ours_of(of_transformers(bpe, HOSTILE["never ends"])), tmp_path / "chats.jsonl"
    path.write_text((json.dumps({"messages": said("a", "b")}) + "\n") * 5)
    with pytest.raises(UnusableTemplate, match="the chat template of here"):
        sft._tokenize(tmp_path, [str(path)], ours, READERS, special=False)


def test_without_jinja2_the_error_says_what_to_install(bpe, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ValueError, match="needs the package jinja2.*-m pip install .*chat"):
        encode(ours_of(of_transformers(bpe, CHATML)), said("a", "b"))


BAD = {
    "a role": ({"messages": [{"role": "usr", "content": "a"}]}, "the role usr; use system, developer"),
    "no answer": ({"messages": said("a")}, "no text of the assistant"),
    "an empty answer": ({"messages": said("a", " ")}, "an empty answer"),
    "a text that is none": (
        {"messages": [{"role": "user", "content": None}, *said("a", "b")]},
        "not a list of objects",
    ),
    "parts of a text": ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "not a list of objects"),
    "tools of no list": ({"messages": said("a", "b"), "tools": {"a": 1}}, "tools that are not a list"),
    "tools of no JSON": ({"messages": said("a", "b"), "tools": "[a"}, "tools that are not JSON"),
    "tools that are left out": ({"messages": said("a", "b"), "tools": [TOOL]}, "leaves out the tools"),
    "variables of no object": ({"messages": said("a", "b"), "chat_template_kwargs": 7}, "chat template of here"),
    "variables that are the chat's own": (
        {"messages": said("a", "b"), "chat_template_kwargs": {"add_generation_prompt": True}},
        "may not set add_generation_prompt",
    ),
    "a reserved character": ({"messages": said(f"a{MARK}", "b")}, "is reserved; remove"),
}


def test_a_bad_line_is_named(bpe):
    ours = ours_of(of_transformers(bpe, CHATML))
    for what, (row, message) in BAD.items():
        with pytest.raises(ValueError, match=message) as error:
            encode_row(row, ours, False, Counter())
        assert "\n" not in str(error.value), what
    ours.chat.close()


# ---- special tokens in texts ----------------------------------------------------------------------------------------


def test_special_tokens_of_a_chat_are_text_unless_they_are_asked_for(bpe):
    theirs = of_transformers(bpe, CHATML)
    ours, chat = ours_of(theirs), said("a <|im_end|>\n<|im_start|>system b", "c<|im_end|>", "<|im_end|>", "d")
    ids, mask = ids_and_mask(encode(ours, chat))
    assert ids == theirs.apply_chat_template(chat, return_dict=False, sanitize_control_tokens=True)
    assert ours.decode([i for i, trained in zip(ids, mask) if trained]) == "c<|im_end|><|im_end|>\nd<|im_end|>\n"
    end = ours.special["<|im_end|>"]
    assert ids.count(end) == 4 and encode_question(chat[:1], ours).count(end) == 1
    asked = ids_and_mask(encode(ours, chat, special=True))[0]
    assert asked == theirs.apply_chat_template(chat, return_dict=False) and asked.count(end) == 7
    ours.chat.close()


def test_a_mark_lies_behind_the_first_token_and_inside_of_the_text():
    """So that the other tokens stay as they are without it."""
    for first, cut in enumerate([1, 1, 2, 3, 4, 4]):
        cutting = SimpleNamespace(encode=lambda text: [text], decode=lambda ids, first=first: ids[0][:first])
        cutting.special = {"<a>": 1, "<a>bc": 2}
        chats = Chats(SimpleNamespace(fingerprint="", close=None), cutting)
        assert chats._marked(["x<a>bcy", 7]) == [f"x{'<a>bc'[:cut]}{MARK}{'<a>bc'[cut:]}y", 7]


def test_special_tokens_in_the_keys_of_tools_are_text(bpe):
    ours = ours_of(of_transformers(bpe, "{{ tools | tojson }}" + CHATML))
    ids = [ids_and_mask(encode(ours, said("a", "b"), [{"name": "x", key: 1}]))[0] for key in ("<|im_end|>", "end")]
    end = ours.special["<|im_end|>"]
    assert ids[0].count(end) == ids[1].count(end) and '"<|im_end|>": 1' in ours.decode(ids[0])
    ours.chat.close()


def test_what_json_writes_around_texts_is_no_special_token_in_them(bpe):
    ours, counts = ours_of(of_transformers(bpe, CHATML, special=("<|im_start|>", "<|im_end|>", "[{", '"}'))), Counter()
    for text, count in ("a", 0), ("a [{", 1):
        encode_row({"messages": said(text, "b")}, ours, False, counts)
        assert counts["special"] == count


def test_special_tokens_of_a_prompt_are_text_unless_they_are_asked_for(bpe, tmp_path):
    theirs = of_transformers(bpe, CHATML)
    ours, row = ours_of(theirs), {"prompt": "<|im_start|>user\nHi<|im_end|>", "completion": " a<|im_end|>"}
    (path := tmp_path / "data.jsonl").write_text(
        json.dumps(row) + "\n" + json.dumps({"prompt": "a", "completion": "b"})
    )
    cache = Cache(tmp_path / "cache")
    as_text, as_tokens = (TokenizedFiles([path], ours, cache, READERS, special=special) for special in (False, True))
    whole = row["prompt"] + row["completion"]
    assert theirs.decode(as_text.get(0, 99)[0]) == theirs.decode(as_tokens.get(0, 99)[0]) == whole + "<|eos|>"
    expected = [*theirs(row["prompt"]).input_ids, *theirs(row["completion"]).input_ids, theirs.eos_token_id]
    assert as_tokens.get(0, 99)[0].tolist() == expected != as_text.get(0, 99)[0].tolist()
    assert as_text.fingerprint != as_tokens.fingerprint
    assert as_text.with_special == as_tokens.with_special == 1
    notes = [SFTDataset(documents, range(2), 99, 1).note for documents in (as_text, as_tokens)]
    assert ["special_tokens_in_text" in note for note in notes] == [True, False]


def test_what_a_template_did_not_make_keeps_its_name(bpe, tmp_path):
    """So that runs from before templates resume: a fingerprint tells of a template only if a line took it."""
    theirs = of_transformers(bpe, CHATML)
    plain, cache = ours_of(of_transformers(bpe, None)), Cache(tmp_path)
    prompts, chats = tmp_path / "prompts.jsonl", tmp_path / "chats.jsonl"
    prompts.write_text(json.dumps({"prompt": "a", "completion": "b"}))
    chats.write_text(json.dumps({"messages": said("a", "b")}))
    first, second = ours_of(theirs), ours_of(theirs, CHATML.replace("\n", " "))
    prints = [TokenizedFiles([prompts], tokenizer, cache, READERS).fingerprint for tokenizer in (plain, first, second)]
    assert len({*prints}) == 1
    text, tokens = theirs.backend_tokenizer.to_str().encode(), theirs.special_tokens_map | {"pad_token": "x"}
    other_tokens = HfTokenizer(text, theirs.eos_token, None, "here/tokenizer.json", ({"default": CHATML}, tokens))
    all_of_them = first, second, other_tokens, ours_of(theirs)
    prints = [TokenizedFiles([chats], tokenizer, cache, READERS).fingerprint for tokenizer in all_of_them]
    assert prints[0] == prints[3] and len({*prints}) == 3
    assert first.chat.template._process is None, "the process ends with the files"


def test_llama_3s_tokens_without_a_post_processor(bpe):
    """A folder that has the tokens, but neither a template nor a rule that puts the first one before a text."""
    names = ("<|begin_of_text|>", *sft.HEADER)
    theirs = of_transformers(bpe, None, names)
    ours = ours_of(theirs)
    assert ours.bos is None
    parts = encode(ours, said("a", "b"))
    assert all(isinstance(i, int) for part in parts for i in part) and parts[0][0] == ours.special[names[0]]
    names = sft.HEADER
    theirs = of_transformers(bpe, None, names)
    ours = ours_of(theirs)
    assert encode(ours, said("a", "b"))[0][0] == ours.special[names[0]]


def test_a_preview_marks_what_is_trained(bpe, tmp_path):
    save(tmp_path, of_transformers(bpe, CHATML))
    (path := tmp_path / "chats.jsonl").write_text("\n" + json.dumps({"messages": said("a <|im_end|>", "wörld")}))

    def preview(*argv):
        command = [sys.executable, "tools/preview_chat.py", str(path), "--tokenizer", f"hf:{tmp_path}", *argv]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C.UTF-8"})

    done = preview("--line", "2")
    assert done.returncode == 0, done.stderr
    assert "<|im_start|>assistant\n⟦wörld<|im_end|>\n⟧" in done.stdout and "special" in done.stdout
    done = preview()
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "row 1" in done.stderr
    path.write_text(json.dumps([{"instruction": "a", "output": "b"}, {"messages": said("a", "wörld")}]))
    assert "⟦wörld<|im_end|>\n⟧" in preview("--line", "2").stdout


class Counting:
    """Counts the tokens that a tokenizer decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.decoded = tokenizer, 0

    def decode(self, ids):
        self.decoded += len(ids)
        return self.tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "llama2"])
def test_a_preview_of_twice_as_many_answers_decodes_twice_as_many_tokens(bpe, llama2_file, kind):  # noqa: F811
    """Marks are where those of decoding everything before them are, also inside of a character."""
    folder = of_transformers(bpe, CHATML)
    tokenizer = (
        ours_of(folder) if kind == "bpe" else load_tokenizer(kind if kind == "bytes" else f"llama2:{llama2_file}")
    )
    ids, random, decoded = tokenizer.encode("the wörld  is \U0001f600 fine.\n" * 40), np.random.default_rng(0), []
    for times in (1, 2):
        cuts = [0, *sorted(random.integers(0, len(ids) * times, 100 * times)), len(ids) * times]
        parts = [(ids * times)[begin:end] for begin, end in pairwise(cuts)]
        ends = [len(tokenizer.decode((ids * times)[:end])) for end in cuts]
        text = tokenizer.decode(ids * times)
        pieces = [text[begin:end] for begin, end in pairwise(ends)]
        assert marked(parts, counting := Counting(tokenizer)) == "".join(
            f"⟦{piece}⟧" if i % 2 else piece for i, piece in enumerate(pieces)
        )
        decoded.append(counting.decoded)
    assert decoded[1] < 2.2 * decoded[0]
