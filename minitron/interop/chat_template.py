"""Render the chat template of a Hugging Face folder in a separate process: it is a program that a stranger wrote.

    chat_template.jinja, or chat_template in tokenizer_config.json      one template, or several with names
    additional_chat_templates/tool_use.jinja                            for chats with tools

The process has limits of CPU time for each chat, of memory and of text. It writes no files, and jinja's sandbox keeps
templates from Python's attributes. One process renders all chats: it reads a chat and writes a text, one line each.

The text equals that of transformers, except for dates. The assistant's spans are those of {% generation %} blocks.
Without such blocks chat_spans.py finds them. A template that leaves out tools, or the text of a message, is refused.

strftime_now is always the time DATE, so that a cache of tokens is the same on each day. A template that reads the date
from a variable gets it from `chat_template_kwargs`. Left out: images and other media.
"""

import hashlib
import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from itertools import accumulate
from pathlib import Path

from minitron.config.files import errors_as, read_bytes
from minitron.config.installed import pip_install
from minitron.data.tokenizers import REASONING, UnusableTemplate
from minitron.interop.chat_spans import Pins
from minitron.interop.limits import limit_memory

SECONDS, MEMORY_BYTES, CHARACTERS = 10.0, 1 << 30, 32 << 20
TEMPLATE_BYTES, TRIALS = 1 << 20, 3
DATE = datetime(2024, 7, 26)  # the templates of Llama 3.2 write it if there is no clock
BEGIN, END = "\ufdd1", "\ufdd2"  # the ends of a generation block
CHILD = """import json, sys
sys.path[:], *limits = json.loads(sys.argv[1])
from minitron.interop.chat_template import serve
serve(*limits)"""


def find_templates(folder: Path, settings: dict) -> dict[str, str]:
    """Read a folder's templates by their names: `default` is the usual one. settings: those of `hf_settings`."""
    named = settings.get("chat_template", [])
    if isinstance(named, str):
        named = [{"name": "default", "template": named}]
    paths = [*folder.glob("additional_chat_templates/*.jinja"), *folder.glob("chat_template.jinja")]
    line = lambda error: f"{folder}: its chat_template cannot be read ({error!r}); correct it"
    with errors_as(ValueError, line, OSError, ValueError, TypeError, KeyError):
        found = {entry["name"]: entry["template"] + "" for entry in named}
        texts = {path.stem: read_bytes(path, TEMPLATE_BYTES).decode() for path in paths}
    return found | {name.replace("chat_template", "default"): text for name, text in texts.items()}


class ChatTemplate:
    """The templates of a tokenizer, by name.

    tokens: variables such as bos_token. encode: encodes a text with special tokens, by the library tokenizers. name:
    the folder, for errors.
    """

    def __init__(self, templates: dict[str, str], tokens: dict[str, str], encode: Callable, name: str):
        self._given, self._encode, self._name = [templates, tokens], encode, name
        self._process, self._ended = None, 0
        self.fingerprint = hashlib.sha256(json.dumps(self._given, sort_keys=True).encode()).hexdigest()[:16]

    def encode(self, chat):
        """Return the text of a chat, the assistant's spans in it, its ids and their places in the text.

        chat: see Chats.encode in chat.py.
        Raises ValueError for a chat that the template refuses, and for a template that exceeds its limits.
        """
        process = self._process = self._process or self._start()
        try:
            process.stdin.write(json.dumps(chat, default=str) + "\n")  # a date of a Parquet file: as text
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            said = " ".join(process.stderr.read().split())[-200:]
            self.close()
            self._ended += 1
            how = signal.Signals(-process.returncode).name if process.returncode < 0 else said
            limits = f"{SECONDS:g} s, {MEMORY_BYTES >> 20} MiB and {CHARACTERS >> 20} M characters for a chat"
            raise UnusableTemplate(
                f"the chat template of {self._name} has {limits}, and was ended ({how}); correct it, or drop the row"
            )
        text, found = json.loads(answer)
        if text is None:
            raise ValueError(f"cannot be written by the chat template of {self._name}: {found}; correct one of them")
        encoded = self._encode(text)
        return text, found, encoded.ids, encoded.offsets

    def close(self) -> None:
        """End the process. The next chat starts another one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen:
        if self._ended == TRIALS:  # else each line of a file would take its time
            raise UnusableTemplate(
                f"the chat template of {self._name} exceeded its limits in {TRIALS} chats; correct it"
            )
        try:
            import jinja2  # noqa: F401  (for the other process)
        except ImportError as error:
            why = f"the chat template of {self._name} needs the package jinja2, which is not installed"
            raise UnusableTemplate(f"{why}; {pip_install('chat')}") from error
        given = json.dumps([[str(path) for path in sys.path], SECONDS, MEMORY_BYTES, CHARACTERS])
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = subprocess.Popen([sys.executable, "-I", "-c", CHILD, given], text=True, encoding="utf-8", **pipes)
        process.stdin.write(json.dumps(self._given) + "\n")
        return process


# ---- in the other process -------------------------------------------------------------------------------------------


def serve(seconds: float, memory: int, characters: int) -> None:
    """For each chat on stdin, print its text and the assistant's spans, or null and what is wrong."""
    (templates, tokens), compile_template, compiled = json.loads(sys.stdin.readline()), _sandbox(), {}
    for limit in resource.RLIMIT_CORE, resource.RLIMIT_FSIZE:
        resource.setrlimit(limit, (0, 0))
    limit_memory(memory)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # CPU time, so that no chat fails on a busy machine
        try:
            chat = json.loads(line)
            name = "tool_use" if "tools" in chat and "tool_use" in templates else "default"
            compiled[name] = compiled.get(name) or compile_template(templates[name])
            in_blocks = re.search(r"\{%[-+]?\s*generation\b", templates[name]) is not None
            answer = _render(compiled[name], in_blocks, chat, tokens)
            if len(answer[0]) > characters:
                raise MemoryError(f"a text of {len(answer[0])} characters")
        except Exception as error:  # a template may raise any
            answer = None, " ".join(str(error).split())[:300] or type(error).__name__
        print(json.dumps(answer), flush=True)


def _render(template, in_blocks: bool, chat: dict, tokens: dict) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a chat and the assistant's spans.

    in_blocks: the template has generation blocks.
    """

    def text_of(messages: list[dict], prompt: bool = False, tools: list | None = chat.get("tools")) -> str:
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        own = chat.get("chat_template_kwargs", {})
        if taken := given.keys() & own.keys():
            raise ValueError(f"chat_template_kwargs may not set {', '.join(sorted(taken))}")
        return template.render(given | tokens | own)

    messages = [{key: value for key, value in m.items() if value is not None} for m in chat["messages"]]
    for i, message in enumerate(messages):
        for thought in [message[key] for key in REASONING if key in message][:1]:
            messages[i] = {"thinking": thought} | message | {"reasoning_content": thought}
    whole = text_of(messages, chat.get("add_generation_prompt", False))
    pieces = re.split(f"{BEGIN}(.*?){END}", whole, flags=re.DOTALL)  # every second piece is an answer
    ends = list(accumulate(map(len, pieces)))
    spans = list(zip(ends[::2], ends[1::2]))
    if "add_generation_prompt" in chat:
        return "".join(pieces), []
    without_tools = None
    with suppress(Exception):  # a template that raises without tools does read them
        without_tools = text_of(messages, tools=None) if "tools" in chat else None
    if without_tools == whole:
        raise ValueError("it leaves out the tools")
    pins = Pins(text_of, messages, whole, tokens.get("eos_token", ""))
    return "".join(pieces), spans if in_blocks else pins.spans()


def _sandbox() -> Callable[[str], object]:
    """Return the function that compiles a template, in an environment like that of transformers."""
    from jinja2 import TemplateError, ext, nodes, sandbox

    class Generation(ext.Extension):
        """Mark the text of {% generation %} ... {% endgeneration %}."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_between"), [], [], body).set_lineno(line)

        def _between(self, caller):
            return BEGIN + caller() + END

    class Sandbox(sandbox.ImmutableSandboxedEnvironment):
        def unsafe_undefined(self, obj, attribute):
            raise sandbox.SecurityError(f"the attribute {attribute} may not be read")

    def to_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):  # jinja's escapes HTML
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def refuse(message):
        raise TemplateError(str(message))

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": DATE.strftime}
    return environment.from_string
