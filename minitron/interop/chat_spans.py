"""Find the assistant's answers in the text of a chat, by a template that does not mark them.

Many templates write the last answer in another way: Qwen 3 adds a thought, gpt-oss and Phi-3 end it with another
token. So the rendering of the first messages may not be a prefix of the whole. A second rendering has pins in its
messages: characters that no message has. Without the pins it must equal the whole. The pins show where each message is.

    whole   <|user|>Hi<|end|><|assistant|>Hello<|end|><|user|>More?<|end|><|assistant|>Yes<|end|><|endoftext|>
    pins             ^                         ^                ^                         ^
    spans                                 ^^^^^^^^^^^^                                 ^^^^^^^^^^^^^^^^^^^^^^^^

Two short chats give the text between a pin and the beginning or end of an answer. Both begin with the messages before
the first answer. One adds the messages since the last answer and a generation prompt; the span begins behind it. The
other adds this answer alone; the span ends as that chat ends, with or without a generation prompt. The last answer ends
with the whole.
"""

import re
from collections.abc import Callable
from functools import cached_property
from itertools import accumulate

from minitron.data.tokenizers import REASONING

PIN = "\ufdd3"
PINS = re.compile(f"{PIN}(\\d+) (.*?){PIN}")  # the number of the message, and its part
BLOCKS = "put {% generation %} and {% endgeneration %} around the assistant's text in chat_template.jinja"

Pin = tuple[int, str]


class Pins:
    """A chat with pins, and their places in `whole`, its text.

    text_of: renders messages, with a generation prompt or not. ending: may follow the last message, as eos_token.
    Raises ValueError if the text lacks a part of a message, and would lack it even if the message were the last one.
    """

    def __init__(self, text_of: Callable[[list[dict], bool], str], messages: list[dict], whole: str, ending: str):
        self._text_of, self._whole, self._ending = text_of, whole, ending
        needed: list[Pin] = []
        self._pinned = [_pin(i, message, needed) for i, message in enumerate(messages)]
        self._answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        self._first = self._pinned[: self._answers[0]] if self._answers else []
        text, places = self._read(self._pinned)
        self._is_whole = text == whole
        self._of: list[list[tuple[int, Pin]]] = [[] for _ in messages]  # places and pins of a message, in order
        for pin, place in places.items():
            self._of[pin[0]].append((place, pin))
        for i, what in needed if self._is_whole else []:
            role = messages[i]["role"]
            if (i, what) not in places and (role != "assistant" or (i, what) not in self._read(self._alone(i))[1]):
                raise ValueError(f"it leaves out the {what} of message {i + 1} ({role})")

    def spans(self) -> list[tuple[int, int]]:
        """Return where each answer begins and ends: without a generation prompt, with its end token.

        Raises ValueError if that is not found.
        """
        if not self._is_whole:
            raise ValueError(f"its text changes if its messages are marked to find the answers; {BLOCKS}")
        spans, last = [], 0
        for before, i in zip([None, *self._answers], self._answers):
            if not self._of[i]:
                raise ValueError(f"it leaves out message {i + 1} (assistant)")
            begin, end = self._begin(i, before), self._end(i)
            if begin is None or end is None or not last <= begin < end:
                what = "end" if end is None else "beginning"
                raise ValueError(f"the {what} of message {i + 1} (assistant) is not found in its text; {BLOCKS}")
            spans.append((begin, last := end))
        return spans

    def _begin(self, i: int, before: int | None) -> int | None:
        """Return where answer i begins in the whole. before: the answer before it."""
        places = (found for j in reversed(range(i)) for found in reversed(self._of[j]) if found < self._of[i][0])
        place, pin = next(places, (0, None))
        asked = self._first + self._pinned[i if before is None else before : i]
        text, pins = self._read(asked, prompt=True)
        header = text[pins.get(pin, 0) :]
        if not self._whole.startswith(header, place):  # a prompt may begin a thought that only a last answer has
            header, longer = self._header(asked, pin), header
            if not (header and longer.startswith(header) and self._whole.startswith(header, place)):
                return None
        return place + len(header)

    def _header(self, asked: list[dict], pin: Pin | None) -> str:
        """Return what is between a pin and an answer that is not the last one."""
        answer = {"role": "assistant", "content": f"{PIN}{len(self._pinned)} content{PIN}"}
        text, pins = self._read([*asked, answer, *self._first[-1:]])
        return text[pins.get(pin, 0) : pins.get((len(self._pinned), "content"), 0)]

    def _end(self, i: int) -> int | None:
        """Return where answer i ends in the whole."""
        if i + 1 == len(self._pinned):
            return len(self._whole)
        place, pin = self._of[i][-1]
        for prompt in False, True:
            text, pins = self._read(self._alone(i), prompt)
            end = text[pins.get(pin, len(text)) :].removesuffix(self._prompt if prompt else "")
            if pin in pins and self._whole.startswith(end, place):
                return place + len(end)
        return None

    @cached_property
    def _prompt(self) -> str:
        """The generation prompt."""
        text, asked = self._read(self._first)[0], self._read(self._first, prompt=True)[0]
        return asked.removeprefix(text if asked.startswith(text) else text.removesuffix(self._ending))

    def _alone(self, i: int) -> list[dict]:
        return [*self._first, self._pinned[i]]

    def _read(self, pinned: list[dict], prompt: bool = False) -> tuple[str, dict[Pin, int]]:
        """Return the text of messages without their pins, and the first place of each pin, in order."""
        pieces = PINS.split(self._text_of(pinned, prompt))  # text, message, what, text, and so on
        places: dict[Pin, int] = {}
        for i, what, place in zip(pieces[1::3], pieces[2::3], accumulate(map(len, pieces[::3]))):
            places.setdefault((int(i), what.lower()), place)  # a template may write in capitals
        return "".join(pieces[::3]), places


def _pin(i: int, message: dict, needed: list[Pin]) -> dict:
    """Return message i with pins. needed: gets those that the text must have.

    An answer's pins are behind its texts, since a template may drop a thought before them. Others are in the middle,
    since a template may read how a question begins and ends.
    """
    is_answer = message["role"] == "assistant"

    def pin(text, what: str):
        body = text.rstrip() if isinstance(text, str) else ""
        if not body:
            return text
        needed.append((i, what))
        cut = len(body) if is_answer else (len(text) - len(text.lstrip()) + len(body)) // 2  # of what strip() leaves
        return f"{text[:cut]}{PIN}{i} {what}{PIN}{text[cut:]}"

    def pin_call(call: dict, what: str) -> dict:
        key = "function" if "function" in call else "name"
        return call | {key: pin_call(call[key], what) if key == "function" else pin(call[key], what)}

    pinned = message | {key: pin(message[key], "reasoning") for key in REASONING if key in message}
    if "content" in message:
        thought, tag, content = message["content"].rpartition("</think>") if is_answer else ("", "", message["content"])
        thought = pin(thought, "reasoning") if thought.replace("<think>", "").strip() else thought
        pinned["content"] = thought + tag + pin(content, "content")
    if calls := message.get("tool_calls"):
        try:
            pinned["tool_calls"] = [pin_call(call, f"tool call {n}") for n, call in enumerate(calls, 1)]
        except (TypeError, KeyError):
            raise ValueError(f"the tool_calls of message {i + 1} are not a list of objects with a name") from None
    return pinned
