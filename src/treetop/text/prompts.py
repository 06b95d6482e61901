"""What callers ask, checked before any work: prompts become ids, parameters pair with them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from treetop.text.tokenizer import Tokenizer, open_tokenizer
from treetop.types.constraint import TokenConstraint
from treetop.types.errors import InputError, PromptError, shown
from treetop.types.options import is_integer
from treetop.types.requests import CoreInfo, check_length, check_prompt
from treetop.types.sampling import SamplingParams

Prompt = str | Sequence[int]
BadWords = dict[tuple[str, ...], tuple[tuple[int, ...], ...]]
"""Sequences of ids that may not come, by the words they stand for."""
SERVE_WITHOUT = "serve without --disable-logits-processors, simulated acceptance and --mock-engine"
"""What to change where a core can hold no tokens to a structure."""
_BYTES = (bytes, bytearray, memoryview)
_LONG = 2**20
"""Characters of a text that is encoded no further than the context goes."""


class PromptReader:
    """Reads prompts for one model. tokenizer: None if its folder has none."""

    def __init__(self, info: CoreInfo) -> None:
        self._info = info
        self.tokenizer: Tokenizer | None = open_tokenizer(Path(info.model_path))

    def ids_of(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[list[int]]:
        """Ids of each prompt; text or a list of ids is one. Raises InputError for what can never run.

        sampling_params: one for all or one each; they may cut prompts.
        """
        if not isinstance(prompts, Sequence) or isinstance(prompts, _BYTES):
            raise InputError(f"prompts must be text, token ids, or a list of these, got {type(prompts).__name__}")
        one = isinstance(prompts, str) or (len(prompts) > 0 and is_integer(prompts[0]))
        listed = cast(Sequence[Prompt], [prompts] if one else prompts)
        kept = [self._kept(params) for params in paired(sampling_params, len(listed))]
        return [self._checked(prompt, index, len(listed), kept[index]) for index, prompt in enumerate(listed)]

    def encode(self, text: str, special: bool = True, cut: bool = False) -> list[int]:
        """Ids of a text, not checked for an empty one. special: add the special tokens of the tokenizer's template.

        cut: it may be too long. Else raises InputError, before it is encoded, for one that is known to be so.
        """
        if self.tokenizer is None:
            raise InputError(f"{self._info.model_path} has no tokenizer.json; pass token ids instead of text")
        if cut:
            return self.tokenizer.encode(text, special)
        maximum = self._info.max_context
        check_length(self.tokenizer.fewest_tokens(text), maximum, exact=False)
        is_long = len(text) > _LONG
        ids = self.tokenizer.encode(text, special, most=maximum if is_long else None)
        if is_long and len(ids) > maximum:  # there may be more
            check_length(len(ids), maximum, exact=False)
        return ids

    def _kept(self, params: SamplingParams) -> int | None:
        """How many of a prompt's last tokens are kept; None for all."""
        maximum = params.truncate_prompt_tokens
        room = self._info.max_context - params.max_tokens
        return max(room if room > 0 else self._info.max_context - 1, 1) if maximum == -1 else maximum

    def last(self, ids: list[int], params: SamplingParams) -> list[int]:
        """What is kept of a prompt."""
        maximum = self._kept(params)
        return ids if maximum is None else ids[-maximum:]

    def check_params(self, params: SamplingParams, constraint: TokenConstraint | None = None) -> None:
        """Raise InputError, which names the option, for what this core or its model cannot do.

        A structured_output is checked by `check_structure`, which takes longer.
        """
        info, allowed = self._info, params.allowed_token_ids
        self.check_ids("stop", params.stop_token_ids)
        self.check_ids("logit_bias", [token for token, _ in params.logit_bias])
        self.check_ids("allowed_token_ids", allowed or ())
        if params.changes_logits and not info.can_change_logits:
            raise InputError(
                f"{', '.join(params.logit_options)}: this engine changes no logits; drop it, or serve without"
                " --disable-logits-processors and --mock-engine"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (maximum := getattr(params, name)) is not None and maximum > info.max_logprobs:
                raise InputError(
                    f"{name}: this engine has no log-probabilities; drop it, or serve without --mock-engine"
                )
        if params.logprobs is not None and info.simulates:
            raise InputError(
                "logprobs: acceptance is simulated, and tokens are not those that were drawn; drop it,"
                " or serve without --simulate-acceptance and --simulate-accept-length"
            )
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else info.eos_ids)}
        if params.min_tokens and allowed is not None and ends.issuperset(allowed):
            raise InputError("min_tokens, allowed_token_ids: every allowed token would end the request too early")
        if (params.structured_output is not None or constraint is not None) and not info.can_constrain:
            raise InputError(
                f"structured_output, constraints: this engine holds no tokens to a structure; {SERVE_WITHOUT}"
            )
        if not (params.speculative or info.can_withhold):
            raise InputError(
                "speculative: this engine withholds no drafts; serve without simulated acceptance and --mock-engine"
            )
        if params.return_draft_trees and not info.has_trees:
            raise InputError(
                "return_draft_trees: this engine drafts no trees; serve with a draft head or"
                " --speculative-algorithm NGRAM, and without --mock-engine"
            )
        if params.return_routed_experts and info.expert_layers is None:
            raise InputError(
                "return_routed_experts: this engine keeps no experts of tokens; start it with"
                " --enable-return-routed-experts, and without --mock-engine"
            )
        if params.structured_output is not None and constraint is not None:
            raise InputError("structured_output, constraints: give one of them")
        if params.stop and self.tokenizer is None:
            raise InputError(f"stop strings need a tokenizer, and {self._info.model_path} has no tokenizer.json")

    def bad_words(self, params: Sequence[SamplingParams]) -> BadWords:
        """The ids that the `bad_words` of each of these stand for. Raises InputError for what this core cannot do."""
        found: BadWords = {}
        for each in params:
            if each.bad_words not in found:
                found[each.bad_words] = ids = tuple(dict.fromkeys(self._spelled(each.bad_words)))
                single = {word[0] for word in ids if len(word) == 1}
                if each.allowed_token_ids is not None and single.issuperset(each.allowed_token_ids):
                    raise InputError("bad_words, allowed_token_ids: no token is left")
                if len(single) < len(ids) and not self._info.can_constrain:
                    raise InputError(
                        "bad_words: one is several tokens, and this engine holds no tokens to a structure;"
                        f" {SERVE_WITHOUT}"
                    )
        return found

    def _spelled(self, words: Sequence[str]) -> Iterator[tuple[int, ...]]:
        """Each word's ids; those behind a space, too, if they are as many and begin otherwise. This is vLLM's rule."""
        for word in words:
            if self.tokenizer is None:
                raise InputError(f"bad_words need a tokenizer, and {self._info.model_path} has no tokenizer.json")
            plain, spaced = (tuple(self.tokenizer.encode(each + word.lstrip(), False)) for each in ("", " "))
            yield from (plain,) if plain else ()
            if len(spaced) == len(plain) > 0 and spaced[0] != plain[0]:
                yield spaced

    def bounded(self, params: SamplingParams) -> SamplingParams:
        """The same with numbers that a message can carry: what exceeds context or vocabulary is off."""
        maximum, vocab = self._info.max_context, self._info.vocab_size
        return replace(
            params,
            max_tokens=min(params.max_tokens, maximum),
            min_tokens=min(params.min_tokens, maximum),
            top_k=params.top_k if params.top_k < vocab else 0,
        )

    def check_ids(self, whose: str, ids: Sequence[int]) -> None:
        vocab = self._info.vocab_size
        outside = next((token for token in ids if not 0 <= token < vocab), None)
        if outside is not None:
            raise InputError(f"{whose} token id {shown(outside)} lies outside the vocabulary [0, {vocab})")

    def _checked(self, prompt: Prompt, index: int, count: int, maximum: int | None) -> list[int]:
        """A prompt's ids, the last `maximum`. Raises PromptError, which names it among several, if it can never run."""
        try:
            ids = self._ids(prompt, maximum)
            check_prompt(ids, self._info.max_context)
        except InputError as error:
            raise PromptError(index, count, str(error), error.code) from None
        return ids

    def _ids(self, prompt: Prompt, maximum: int | None) -> list[int]:
        if isinstance(prompt, str):
            ids = self.encode(prompt, cut=maximum is not None)[-(maximum or 0) :]
        else:
            listed = isinstance(prompt, Sequence) and not isinstance(prompt, _BYTES)
            if listed:
                prompt = prompt[-(maximum or 0) :]
                check_length(len(prompt), self._info.max_context)  # before each of its ids is looked at
            if not listed or not all(map(is_integer, prompt)):
                raise InputError(f"a prompt must be text or a list of token ids, got {shown(prompt)}")
            ids = [int(token) for token in prompt]
        self.check_ids("prompt", ids)
        return ids


def paired(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Parameters of each of `count` prompts: one for all, or one each."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or any(not isinstance(each, SamplingParams) for each in params):
        raise InputError(f"params must be SamplingParams, or a list of them, got {shown(params)}")
    if len(params) != count:
        raise InputError(f"{len(params)} SamplingParams for {count} prompts; give one for all, or one each")
    return list(params)


def one_each(
    constraints: TokenConstraint | Sequence[TokenConstraint | None] | None, count: int
) -> list[TokenConstraint | None]:
    """The constraint of each of `count` prompts, which nothing else may use."""
    if constraints is None:
        return [None] * count
    listed: list[TokenConstraint | None] = [*constraints] if isinstance(constraints, Sequence) else [constraints]
    given = [each for each in listed if each is not None]
    if any(not callable(getattr(each, "allowed", None)) for each in given):
        raise InputError("constraints: each must have a method `allowed`, as treetop.TokenConstraint says, or be None")
    if len(listed) != count or len({id(each) for each in given}) != len(given):
        raise InputError(f"constraints: give each of {count} prompts one of its own, or None; got {len(listed)}")
    return listed
