"""What an answer says of its drafts: each token's text and depth, and the trees that rounds verified."""

from collections.abc import Sequence
from typing import Any

from treetop.api.requests.fields import SamplingFields
from treetop.outputs import RequestOutput, TextDelta
from treetop.text.tokenizer import Tokenizer, TokenStream
from treetop.types.verified_tree import VerifiedTree


class DraftWriters:
    """Writes `treetop` of each choice of a request, if it asks for it; choice i of prompt j has index j * n + i."""

    def __init__(self, body: SamplingFields, tokenizer: Tokenizer | None, prompts: Sequence[Sequence[int]]) -> None:
        self._body, self._tokenizer, self._prompts = body, tokenizer, prompts
        self._streams: dict[int, TokenStream] = {}
        self._known: dict[int, str] = {}  # texts of single tokens

    def of(self, index: int, given: RequestOutput | TextDelta) -> dict[str, Any]:
        """What is new of a choice, or all of it: {} if nothing is asked for."""
        said: dict[str, Any] = {}
        if self._body.return_draft_depths:
            said |= {"draft_depths": given.draft_depths, "texts": self._texts(index, given)}
        if self._body.return_draft_trees:
            said["draft_trees"] = [None if tree is None else self._tree(tree) for tree in given.trees]
        return {"treetop": said} if said else {}

    def _texts(self, index: int, given: RequestOutput | TextDelta) -> list[str]:
        """Of each token; one whose bytes are the beginning of a character has "", and the one that ends it has it."""
        if self._tokenizer is None:
            return [""] * len(given.token_ids)
        if index not in self._streams:
            prompt = self._prompts[index // self._body.n]
            self._streams[index] = self._tokenizer.stream(prompt, not self._body.skip_special_tokens)
        stream = self._streams[index]
        texts = [stream.push((token,)) for token in given.token_ids]
        if texts and (isinstance(given, RequestOutput) or given.output is not None):
            texts[-1] += stream.flush()
        return texts

    def _tree(self, tree: VerifiedTree) -> dict[str, Any]:
        """logprobs: null where the draft gave no number."""
        return {
            "tokens": tree.tokens,
            "texts": [self._text(token) for token in tree.tokens],
            "parents": tree.parents,
            "logprobs": tree.logprobs,
            "accepted": tree.path,
            "bonus": tree.bonus,
            "bonus_text": self._text(tree.bonus),
        }

    def _text(self, token: int) -> str:
        if self._tokenizer is None:
            return ""
        if token not in self._known:
            self._known[token] = self._tokenizer.token_bytes(token).decode(errors="replace")
        return self._known[token]
