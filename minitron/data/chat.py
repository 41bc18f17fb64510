"""Chats by the template that belongs to a tokenizer: which of its tokens are trained, which texts are special tokens.

A template writes a chat as one text with special tokens. It is rendered by interop/chat_template.py, which also finds
the assistant's text. A token counts in the loss if its text overlaps such a span:

    text      <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    span                                                             ^^^^^^^^^^^^^^^^^
    parts     context, answer                  and so on in turn, as sft.py has them

A user may write "<|im_end|>", which must not end his message. So MARK, a character that no text may have, is put inside
such a text before the template is rendered. The text is then no special token, and the tokens of MARK are dropped.
"""

import re
from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from minitron.data.tokenizers import Tokenizer

MARK = "\ufdd0"
RESERVED = re.compile("[\ufdd0-\ufdd3]")  # noncharacters of Unicode; interop puts the others into texts
ROLES = "system", "developer", "user", "assistant", "tool"


def encode_templated(chat: Mapping[str, Any], tokenizer: Tokenizer) -> list[list[int]]:
    """Encode a chat by the tokenizer's template to context and answer in turn. The tokens of MARK are dropped.

    chat: messages, tools, and `chat_template_kwargs`, which are variables of the template. With add_generation_prompt
    (true or false) all of it is context, and true adds the beginning of an answer.
    Raises ValueError for what the template refuses, and for a chat without a token to train on.
    """
    assert tokenizer.chat is not None
    text, spans, ids, places = tokenizer.chat.encode(chat)
    starts, ends = [*(begin for begin, _ in spans), len(text) + 1], [end for _, end in spans]
    parts: list[list[int]] = [[]]
    for token, (begin, end) in zip(ids, places):
        if MARK in text[begin:end]:
            if end - begin > 1:
                raise ValueError(f"has {text[begin:end]!r}, a special token that cannot be read as text; remove it")
            continue
        if (end > starts[bisect_right(ends, begin)]) == len(parts) % 2:
            parts.append([])
        parts[-1].append(token)
    if len(parts) == 1 and "add_generation_prompt" not in chat:
        raise ValueError("has no text of the assistant in its tokenizer's chat template; add an answer")
    return parts


def mark_special(value: Any, tokenizer: Tokenizer) -> Any:
    """Return a JSON value with MARK inside each special token in its texts.

    Raises ValueError for a text with a reserved character, if the tokenizer has a template.
    MARK follows the first token that the text has without special tokens, so that its other tokens stay the same.
    """

    def marked(found: re.Match[str]) -> str:
        cut = len(tokenizer.decode(tokenizer.encode(found[0])[:1]))
        cut = max(1, min(cut, len(found[0]) - 1))
        return found[0][:cut] + MARK + found[0][cut:]

    if isinstance(value, dict):
        return {key: mark_special(item, tokenizer) for key, item in value.items()}
    if isinstance(value, list):
        return [mark_special(item, tokenizer) for item in value]
    if not isinstance(value, str):
        return value
    if tokenizer.chat is not None and (found := RESERVED.search(value)):
        raise ValueError(f"has the character {found[0]!r}, which is reserved; remove it")
    return _any_of(tuple(tokenizer.special)).sub(marked, value)


@lru_cache(maxsize=4)
def _any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")
