"""Prompts of a benchmark: a file's texts, by kind or not, or token ids of a wanted length."""

import json
import random
from importlib import resources
from pathlib import Path

from treetop.checkpoints.folder import resolve_folder
from treetop.llm import LLM
from treetop.text.chat_prompt import chat_ids
from treetop.text.chat_template import open_chat_template
from treetop.text.prompts import PromptReader
from treetop.text.tokenizer import Tokenizer
from treetop.types.config import BUILTIN_MODEL
from treetop.types.default_model import PAIRS
from treetop.types.errors import InputError
from treetop.types.layout import PLAIN
from treetop.types.requests import CoreInfo


def read_prompts(file: str | None, count: int, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Prompts as ids, `count` evenly spaced over the file; None is the embedded pair's held-out prompts.

    Raises InputError unless the file is JSON lines with a `prompt` each.
    """
    path = Path(file) if file else held_out()
    if tokenizer is None:
        raise InputError("bench needs a tokenizer.json beside the model")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        if not lines:
            raise ValueError("it is empty")
        chosen = lines[:: max(len(lines) // count, 1)][:count]
        texts = [json.loads(line)["prompt"] for line in chosen]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a prompt must be text")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"--prompts {path}: not JSON lines with a `prompt` each: {error}") from None
    return [tokenizer.encode(text) for text in texts]


def prompt_ids(llm: LLM, batch: int, length: int) -> list[list[int]]:
    """`batch` prompts of `length` ids: pieces of the held-out prompts for builtin models, random ids for others.

    Random ids say nothing about accept lengths; with real weights they only serve to measure time.
    """
    if llm.config.model not in [model for model, _ in PAIRS.values()]:
        return random_prompts(batch, length, llm.engine.spec.vocab_size)
    text = [token for prompt in read_prompts(None, 64, llm.tokenizer) for token in prompt]
    starts = [index * len(text) // batch for index in range(batch)]
    endless = text * (1 + (length + len(text)) // len(text))
    return [endless[start : start + length] for start in starts]


def random_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """The same each time."""
    rng = random.Random(0)
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def held_out() -> Path:
    """The embedded pair's held-out prompts."""
    return resolve_folder(BUILTIN_MODEL).parent / "prompts.jsonl"


def read_kinds(file: str | None) -> dict[str, list[str]]:
    """Texts of prompts by kind, in the order of the file: JSON lines with a `prompt` each, and a `kind` or none.

    None is the package's own: questions, code, summaries and JSON. Raises InputError.
    """
    path = Path(file) if file else Path(str(resources.files("treetop") / "assets" / "bench_prompts.jsonl"))
    kinds: dict[str, list[str]] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            kind, text = row.get("kind", "prompts"), row["prompt"]
            if not (isinstance(text, str) and isinstance(kind, str)):
                raise ValueError("a prompt and its kind must be text")
            kinds.setdefault(kind, []).append(text)
        if not kinds:
            raise ValueError("it is empty")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"--prompts {path}: not JSON lines with a `prompt` each: {error}") from None
    return kinds


def as_questions(folder: Path, max_context: int, texts: list[str]) -> tuple[list[list[int]], bool]:
    """Ids of each text as a user's only message, where the model of `folder` has a chat template; else as plain text.

    max_context: longer prompts are an InputError. Also returns whether there is a template.
    """
    reader = PromptReader(CoreInfo(str(folder), 0, max_context, 1, PLAIN))
    template = open_chat_template(folder)
    if template is None:
        return [reader.encode(text) for text in texts], False
    try:
        return [chat_ids(template, reader, [{"role": "user", "content": text}], {}) for text in texts], True
    finally:
        template.close()
