"""The tokenizer in a GGUF file's metadata, as the `tokenizers` library has it. Needs no PyTorch.

Two kinds: `gpt2`, BPE over bytes with merges, and `llama`, SentencePiece's BPE, whose scores say what is merged first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from treetop.types.errors import CheckpointError, shown

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER, _BYTE = 1, 2, 3, 4, 6
"""Types of tokens."""
_STOPS = ("eos_token_id", "eot_token_id", "eom_token_id")
_STOP_NAMES = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>")
"""Control tokens that end an output whether the file says so or not, as llama.cpp has it."""
_HARMONY = ("<|return|>", "<|call|>")
"""Of GPT-OSS, in whose format `<|end|>` ends a message and no output."""
_MESSAGE_END = "<|end|>"
_SPACE = "\u2581"
_LETTERS = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d|{_LETTERS}|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED, _SHORT = r"[^\r\n\p{L}\p{N}]?%s", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BY_CASE = (
    rf"{_CASED % f'{_UPPER}*{_LOWER}+'}%s|{_CASED % f'{_UPPER}+{_LOWER}*'}%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Words end where small letters do, perhaps with a contraction. Source: tiktoken's `o200k_base`."""
_SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_WORDS % r"\p{N}{1,3}",),
    "gpt-4o": (_BY_CASE % (_SHORT, _SHORT, r"\p{N}{1,3}"),),
    "tekken": (_BY_CASE % ("", "", r"\p{N}"),),
    "dbrx": (_WORDS % r"\p{N}{1,3}",),
    "smaug-bpe": (_WORDS % r"\p{N}{1,3}",),
    "refact": (r"\p{N}", _GPT2),
    "qwen2": (_WORDS % r"\p{N}",),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
"""`tokenizer.ggml.pre`: what cuts a text, one pattern after the other. Source: llama.cpp's `llama-vocab.cpp`."""
_BEGINS = ("llama-bpe", "tekken")
"""Those that put BOS before a text where the file says nothing of it."""
_MERGED_WHOLE = ("llama-bpe", "tekken")
"""Those in which a word that is a token is that token, whatever its merges are."""


@dataclass(frozen=True)
class Vocabulary:
    """tokenizer: None if the file has none. stops: ids that end an output; bos may be None."""

    tokenizer: Tokenizer | None
    bos: int | None
    stops: tuple[int, ...]
    tokens: tuple[str, ...]
    chat_template: str | None


def vocabulary(metadata: Mapping[str, Any], size: int, path: Path) -> Vocabulary:
    """size: of the model's vocabulary. Raises CheckpointError, which names the entry, for what is not supported."""
    return _FieldReader(metadata, size, path).vocabulary()


class _FieldReader:
    def __init__(self, metadata: Mapping[str, Any], size: int, path: Path) -> None:
        self._metadata, self._size, self._path = metadata, size, path

    def vocabulary(self) -> Vocabulary:
        kind, template = self._get("model", str), self._metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise CheckpointError(f"{self._path}: tokenizer.chat_template is no text")
        if kind is None:
            return Vocabulary(None, None, (), (), template)
        if kind not in ("gpt2", "llama"):
            raise self._wrong("model", kind, "only gpt2 and llama are supported")
        tokens = self._strings("tokens")
        if len(tokens) > self._size or len(set(tokens)) < len(tokens):
            raise CheckpointError(
                f"{self._path}: {_PREFIX}tokens has {len(tokens)} tokens, {len(set(tokens))} of them different,"
                f" for a vocabulary of {self._size}"
            )
        types = [int(each) for each in self._numbers("token_type", len(tokens), (_NORMAL,) * len(tokens))]
        stops = self._stops(tokens, types)
        tokenizer = self._byte_pairs(tokens) if kind == "gpt2" else self._sentence_piece(tokens, types)
        self._add(tokenizer, tokens, types, stops)
        bos = self._id("bos_token_id", tokens)
        pre = self._get("pre", str) or "default"
        begins = self._get("add_bos_token", bool, kind == "llama" or pre in _BEGINS)
        self._frame(tokenizer, tokens, bos if begins else None)
        return Vocabulary(tokenizer, bos, stops, tokens, template)

    def _byte_pairs(self, tokens: Sequence[str]) -> Tokenizer:
        pre, merges = self._get("pre", str) or "default", []
        if pre not in _SPLITS:
            raise self._wrong("pre", pre, f"only {', '.join(_SPLITS)} are supported")
        known = set(tokens)
        for merge in self._strings("merges"):
            left, _, right = merge.partition(" ")
            if not {left, right, left + right} <= known:
                raise self._wrong("merges", merge, "its parts and the whole must be tokens")
            merges.append((left, right))
        vocab = {token: index for index, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _MERGED_WHOLE))
        if pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
        over_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, over_bytes])
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentence_piece(self, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
        scores = self._numbers("scores", len(tokens), None)
        unknown = self._id("unknown_token_id", tokens)
        if unknown is None:
            unknown = next((index for index, type_ in enumerate(types) if type_ == _UNKNOWN), None)
        model = models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=_merges(tokens, scores, types),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
        tokenizer = Tokenizer(model)
        prefix = self._get("add_space_prefix", bool, True)
        first = [normalizers.Prepend(_SPACE)] if prefix else []
        tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _SPACE)])
        steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
        return tokenizer

    def _add(self, tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int], stops: Sequence[int]) -> None:
        """Tokens that are found in a text before it is cut: special ones, and those of users."""
        special = {_CONTROL, _UNKNOWN}
        for index, (token, type_) in enumerate(zip(tokens, types, strict=True)):
            if type_ in special or index in stops:
                tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
            elif type_ == _USER:
                tokenizer.add_tokens([AddedToken(token, normalized=False)])

    def _frame(self, tokenizer: Tokenizer, tokens: Sequence[str], bos: int | None) -> None:
        """What stands around a text that is no chat."""
        ends = self._get("add_eos_token", bool, False)
        eos = self._id("eos_token_id", tokens) if ends else None
        around = {name: index for name, index in (("<b>", bos), ("<e>", eos)) if index is not None}
        if around:
            single = " ".join([*(["<b>"] if "<b>" in around else []), "$A", *(["<e>"] if "<e>" in around else [])])
            special = [{"id": name, "ids": [index], "tokens": [tokens[index]]} for name, index in around.items()]
            tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)

    def _stops(self, tokens: Sequence[str], types: Sequence[int]) -> tuple[int, ...]:
        controls = {token: index for index, token in enumerate(tokens) if types[index] in (_CONTROL, _USER)}
        harmony = all(name in controls for name in _HARMONY)
        ends = (set(_STOP_NAMES) - {_MESSAGE_END}).union(_HARMONY) if harmony else set(_STOP_NAMES)
        said = [self._id(key, tokens) for key in _STOPS]
        named = [index for token, index in controls.items() if token in ends]
        return tuple(dict.fromkeys(index for index in (*said, *named) if index is not None))

    def _id(self, key: str, tokens: Sequence[str]) -> int | None:
        value: int | None = self._get(key, int)
        if value is not None and not 0 <= value < len(tokens):
            raise self._wrong(key, value, f"there are {len(tokens)} tokens")
        return value

    def _strings(self, key: str) -> tuple[str, ...]:
        found = self._get(key, tuple, ())
        if not found or not all(isinstance(each, str) for each in found):
            raise self._wrong(key, found, "must be a list of text")
        return tuple(found)

    def _numbers(self, key: str, count: int, default: tuple[int, ...] | None) -> tuple[float, ...]:
        found = self._get(key, tuple, default)
        if found is None or len(found) != count or not all(isinstance(each, int | float) for each in found):
            raise self._wrong(key, found, f"must be {count} numbers")
        return tuple(found)

    def _get(self, key: str, type_: type, default: Any = None) -> Any:
        value = self._metadata.get(_PREFIX + key, default)
        if value is not None and type(value) is not type_:
            raise self._wrong(key, value, f"must be one {type_.__name__}")
        return value

    def _wrong(self, key: str, value: Any, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {_PREFIX}{key} {shown(value)}: {why}")


def _merges(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every way to put a token together from two, the best score first; of one score the earlier token."""
    pieces = {token for token, type_ in zip(tokens, types, strict=True) if type_ in (_NORMAL, _USER)}
    order = sorted((index for index, token in enumerate(tokens) if token in pieces), key=lambda i: (-scores[i], i))
    return [
        (tokens[index][:cut], tokens[index][cut:])
        for index in order
        for cut in range(1, len(tokens[index]))
        if tokens[index][:cut] in pieces and tokens[index][cut:] in pieces
    ]
