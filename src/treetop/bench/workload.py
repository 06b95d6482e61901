"""What is asked of a server: prompts, conversations with a common beginning, and in which words."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treetop.checkpoints.folder import resolve_folder
from treetop.types.config import BUILTIN_MODEL
from treetop.types.errors import InputError

_WORDS = (
    "time",
    "state",
    "list",
    "value",
    "right",
    "left",
    "open",
    "close",
    "first",
    "last",
    "node",
    "edge",
    "tree",
    "path",
)

_IDS = (300, 3000)
"""Random ids lie between: above the special and the single bytes of most vocabularies, and below the end of all."""


@dataclass(slots=True)
class Conversation:
    """Turns of one user, one after the other.

    texts: so far, the user's and the answers in turn.
    ids: the prompt instead, of one turn.
    output_len: tokens of an answer, None for as many as all have.
    """

    prefix: str
    turns: list[str]
    texts: list[str] = field(default_factory=list)
    ids: list[int] | None = None
    output_len: int | None = None

    def ask(self, chat: bool) -> dict[str, Any]:
        """The prompt of the next turn, as fields of a request."""
        self.texts.append(self.turns[len(self.texts) // 2])
        if self.ids is not None:
            return {"prompt": self.ids}
        if not chat:
            return {"prompt": self.prefix + "".join(self.texts)}
        system = [{"role": "system", "content": self.prefix}] if self.prefix else []
        roles = ("user", "assistant")
        return {"messages": system + [{"role": roles[i % 2], "content": text} for i, text in enumerate(self.texts)]}

    @property
    def ended(self) -> bool:
        return len(self.texts) >= 2 * len(self.turns)


def conversations(
    count: int, num_turns: int, shared_prefix_words: int, input_words: int | None, file: str | None, rng: random.Random
) -> list[Conversation]:
    """`count` conversations that begin with the same words.

    file: JSON lines with a `prompt` each, of which each turn takes the next; None is the embedded model's held-out
    prompts. input_words: random words instead. Raises InputError.
    """
    prefix = _words(shared_prefix_words, rng) if shared_prefix_words else ""
    if input_words is not None:
        return [Conversation(prefix, [_words(input_words, rng) for _ in range(num_turns)]) for _ in range(count)]
    texts = read_texts(Path(file) if file is not None else resolve_folder(BUILTIN_MODEL).parent / "prompts.jsonl")
    first = rng.randrange(len(texts))
    taken = [texts[(first + index) % len(texts)] for index in range(count * num_turns)]
    return [Conversation(prefix, taken[at : at + num_turns]) for at in range(0, len(taken), num_turns)]


def conversations_of_ids(lengths: list[tuple[int, int | None]], rng: random.Random) -> list[Conversation]:
    """One turn each, of random ids that every vocabulary has: no two begin alike. lengths: of prompt and answer."""
    return [
        Conversation("", [""], ids=[rng.randint(*_IDS) for _ in range(prompt)], output_len=answer)
        for prompt, answer in lengths
    ]


def read_texts(path: Path) -> list[str]:
    """The prompts of a file. Raises InputError unless it is JSON lines with a `prompt` each."""
    try:
        texts = [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()]
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError("it needs a line, and prompts that are text")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"--prompts {path}: not JSON lines with a `prompt` each: {error}") from None
    return texts


def _words(count: int, rng: random.Random) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(count)) + "\n"
