"""Chat templates: messages to the text of a prompt, rendered in a process of limits (`render.py`)."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from treetop.checkpoints.json_file import read_object
from treetop.serve_options import is_installed
from treetop.text.chat_input import Message, rendering
from treetop.types.errors import CheckpointError, ConfigError, InputError, shown
from treetop.version import DISTRIBUTION

_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_RESERVED = ("messages", "self", "raise_exception", "strftime_now")
"""What a template is given beside its options, under names that mean something else to it then."""
_HELLO: Message = {"role": "user", "content": "Hello"}
_TOOL = {
    "name": "search",
    "description": "Search",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
}
_TOOLS = {"tools": [{"type": "function", "function": _TOOL}]}


def _called(arguments: object) -> list[Message]:
    """A call and what came of it."""
    call = {"id": "call00001", "type": "function", "function": {"name": _TOOL["name"], "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": call["id"], "name": _TOOL["name"], "content": "1"}
    return [_HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}, result]


class ChatTemplate:
    """A template and the process that renders it, which starts with the first rendering. Threads may share it."""

    def __init__(self, source: str, tokens: dict[str, str], tool_use: str | None = None) -> None:
        """tokens: names and texts of special tokens. tool_use: another template, for chats with tools.

        Raises ConfigError without jinja2.
        """
        if not is_installed("jinja2"):
            raise ConfigError(f"chat templates need jinja2; pip install {DISTRIBUTION}[serve]")
        self.source, self.tool_use, self._tokens = source, tool_use, tokens
        self.code = source if tool_use is None else f"{source}\n{tool_use}"
        """Of both, which tells what this model reads and writes."""
        self._header = json.dumps({"source": source, "tool_use": tool_use, "tokens": tokens})
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._end: Callable[[], object] = lambda: None

    def render(self, messages: Sequence[Message], /, **options: Any) -> str:
        """The prompt's text. options: variables of the template, of any name but the reserved ones.

        Raises InputError if the template refuses the messages, fails or takes too long.
        """
        return self.render_line(template_line(messages, options))

    def render_line(self, line: str) -> str:
        """As `render`, of what `template_line` gave."""
        with self._lock:
            answer = self._ask(line)
        if "text" not in answer:
            raise InputError(f"the chat template fails with these messages: {_problem(answer)}")
        return answer["text"]

    def reads(self, name: str) -> bool:
        """Whether a variable of this name stands in the template's code."""
        return re.search(rf"{{[{{%][^{{}}%]*(?<![\w.'\"]){name}\b(?!['\"])", self.code) is not None

    @property
    def joins_arguments(self) -> bool:
        """Whether it adds the arguments of tool calls to other text, so that they must be text and no object."""
        return (
            re.search(r"\+\s*\w+(\.function|\['function'\])?(\.arguments|\['arguments'\])\s*\+", self.code) is not None
        )

    def twin(self) -> "ChatTemplate":
        """The same template with a process of its own."""
        return ChatTemplate(self.source, self._tokens, self.tool_use)

    def problem(self) -> str | None:
        """What is wrong with the template before it has seen a message; None if nothing is."""
        with self._lock:
            return _problem(self._ask("null"))

    def overrun(self) -> str | None:
        """With which of some short chats, and into which limit of its process, it runs; None for none of them.

        A chat that it refuses is none: whoever sends such is told its words.
        """
        query = {"query": "a"}
        probes: Mapping[str, tuple[list[Message], Mapping[str, Any]]] = {
            "one message of a user": ([_HELLO], {}),
            "a system message": ([{"role": "system", "content": "Be brief"}, _HELLO], {}),
            "tools": ([_HELLO], _TOOLS),
            "a tool's result": (_called(json.dumps(query) if self.joins_arguments else query), _TOOLS),
        }
        for name, (messages, options) in probes.items():
            with self._lock:
                limit = self._ask(template_line(messages, options)).get("limit")
            if limit is not None:
                return f"with {name} {limit}"
        return None

    def close(self) -> None:
        self._end()
        self._process = None

    def _ask(self, line: str) -> dict[str, str]:
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            return dict(json.loads(answer))
        code = process.wait()
        self.close()
        return {"limit": "it takes too long" if code == -signal.SIGPROF else f"its process ended with {code}"}

    def _start(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-P", "-m", "treetop.text.render"]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        self._end = weakref.finalize(self, _end, process)
        assert process.stdin is not None
        process.stdin.write(self._header + "\n")
        return process


def _problem(answer: Mapping[str, str]) -> str | None:
    return answer.get("limit") or answer.get("error")


def template_line(messages: Sequence[Message], options: Mapping[str, Any]) -> str:
    """A line of JSON that asks for a rendering. Raises InputError for what a template cannot be given."""
    check_options(options)
    return rendering(messages, options)


def check_options(names: Iterable[str], reserved: Sequence[str] = ()) -> None:
    """Raise InputError for a name that no option of a template can have. reserved: more of these."""
    for name in names:
        if name in _RESERVED or name in reserved:
            raise InputError(f"{name} is not an option of the template")
        if not name.isidentifier():
            raise InputError(f"{shown(name)} is not a name that a template can read")


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(BrokenPipeError):
                stream.close()


def open_chat_template(folder: Path, given: str | None = None) -> ChatTemplate | None:
    """The template of `--chat-template` (a file, or the template itself), or the model's; None without one.

    The model's is `chat_template.jinja`, with `additional_chat_templates/*.jinja`, or `chat_template` of
    `tokenizer_config.json`. Of several by name tool_use is for chats with tools. Raises UserError.
    """
    path = folder / "tokenizer_config.json"
    config = read_object(path) if os.path.lexists(path) else {}
    by_name = {"default": _given(given)} if given is not None else _of_model(folder, config.get("chat_template"), path)
    if "default" not in by_name:
        return None
    older = folder / "special_tokens_map.json"  # read by Transformers where the other lists no tokens
    if "added_tokens_decoder" not in config and os.path.lexists(older):
        config = {**config, **read_object(older)}
    named = {name: config.get(name) for name in _TOKENS}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    tokens = {name: text for name, text in texts.items() if isinstance(text, str)}
    return ChatTemplate(by_name["default"], tokens, by_name.get("tool_use"))


def _given(given: str) -> str:
    if not isinstance(given, str):
        raise ConfigError(f"--chat-template must be a file or the template itself, got {shown(given)}")
    if "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # also of a name that no file can have
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--chat-template {shown(given)[1:-1]}: {why}") from None


def _of_model(folder: Path, value: Any, where: Path) -> dict[str, str]:
    """Its templates by name, of files if there are any, else what tokenizer_config.json has; none if it has none.

    Files are named as Transformers names them: chat_template.jinja, and others by name in a folder beside it.
    """
    main, others = folder / "chat_template.jinja", sorted((folder / "additional_chat_templates").glob("*.jinja"))
    files = {**({"default": main} if os.path.lexists(main) else {}), **{each.stem: each for each in others}}
    if files:
        return {name: _read(file) for name, file in files.items()}
    listed = value if isinstance(value, list) else [] if value is None else [{"name": "default", "template": value}]
    by_name: dict[str, str] = {}
    for each in listed:
        name, text = (each.get("name"), each.get("template")) if isinstance(each, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise CheckpointError(f"{where}: chat_template must be text, or a list of {{name, template}}")
        by_name[name] = text
    return by_name


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: {error}") from None
