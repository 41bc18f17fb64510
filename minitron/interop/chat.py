"""Chats by the template that belongs to a tokenizer: which of its tokens are trained, which texts are special tokens.

A template writes a chat as one text with special tokens. It is rendered by chat_template.py, which also finds the
assistant's text. A token counts in the loss if its text overlaps such a span:

    text      <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    span                                                             ^^^^^^^^^^^^^^^^^
    parts     context, answer                  and so on in turn, see data/sft.py

A user may write "<|im_end|>", which must not end his message. So MARK, a character that no text may have, is put inside
such a text before the template is rendered. The text is then not a special token, and the tokens of MARK are dropped.
"""

import re
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from minitron.config.files import errors_as
from minitron.data.tokenizers import Tokenizer
from minitron.interop.chat_template import ChatTemplate

MARK = "\ufdd0"
# Noncharacters of Unicode: MARK, then BEGIN and END of chat_template.py, and PIN of chat_spans.py.
RESERVED = re.compile("[\ufdd0-\ufdd3]")


class Chats:
    """Encodes chats by the template of a tokenizer. fingerprint: the template's.

    tokenizer: constructed except for its `chat`, which is this object.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer):
        self.template, self.tokenizer = template, tokenizer
        self.fingerprint, self.close = template.fingerprint, template.close
        texts = map(re.escape, sorted(tokenizer.special, key=len, reverse=True))
        self._special = re.compile("|".join(texts) or "(?!)")

    def encode(self, chat: Mapping[str, Any], special: bool = False) -> list[list[int]]:
        """Encode a chat to context and answer in turn. special: text that spells a special token becomes that token.

        chat: messages, tools, and `chat_template_kwargs`, which are variables of the template. With
        add_generation_prompt (true or false) all of it is context, and true adds the beginning of an answer.
        Raises ValueError for what the template refuses, and for a chat without a token to train on.
        """
        with errors_as(ValueError, lambda error: "is nested too deeply; leave it out", RecursionError):
            marked = self._marked(chat)
        text, spans, ids, places = self.template.encode(chat if special else marked)
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

    def _marked(self, value: Any) -> Any:
        """Return a JSON value with MARK inside each special token in its texts.

        Raises ValueError for a text with a reserved character. MARK follows the first token that the text has without
        special tokens, so that its other tokens stay the same.
        """
        if isinstance(value, Mapping):
            return {self._marked(key): self._marked(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._marked(item) for item in value]
        if not isinstance(value, str):
            return value
        if found := RESERVED.search(value):
            raise ValueError(f"has the character {found[0]!r}, which is reserved; remove it")
        return self._special.sub(self._mark, value)

    def _mark(self, found: re.Match[str]) -> str:
        text = found[0]
        cut = len(self.tokenizer.decode(self.tokenizer.encode(text)[:1]))
        cut = max(1, min(cut, len(text) - 1))
        return text[:cut] + MARK + text[cut:]
