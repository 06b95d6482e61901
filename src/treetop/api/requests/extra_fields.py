"""Fields beyond the choice of tokens: what an answer shows, how a prompt is cut, and whose a request is."""

from typing import Annotated, Any

from pydantic import BaseModel, Field

from treetop.types.errors import InputError
from treetop.types.sampling import MAX_BAD_WORDS, LogprobsMode, SamplingParams


class TextFields(BaseModel):
    """Fields of what an answer shows, how a prompt is cut and how tokens are found; see `SamplingParams`."""

    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(
        None, description="keep so many of the prompt's last tokens; -1: all that fit"
    )
    prompt_logprobs: int | None = Field(
        None, description="best tokens whose log-probabilities come with a prompt token's"
    )
    logprobs_mode: LogprobsMode = Field(
        "raw_logprobs",
        description="processed_logprobs: what each token was drawn with, and of raw logits beside it under `raw_...`",
    )
    bad_words: Annotated[list[str] | None, Field(max_length=MAX_BAD_WORDS)] = None
    speculative: bool = Field(True, description="false: no draft is accepted, each round gives one token")
    return_token_ids: bool = Field(False, description="token ids of prompt and output beside the text")
    return_draft_depths: bool = Field(False, description="text of each token, and the depth of the draft that it was")
    return_draft_trees: bool = Field(False, description="the tree that each round verified")
    return_routed_experts: bool = Field(
        False,
        description="routed_experts of each choice, at its end: base64 of a .npy file, [tokens, layers, top_k] uint8,"
        " of more than 256 experts uint16, 0 in layers without experts, of prompt and output but for the last token;"
        " with --enable-return-routed-experts",
    )
    routed_experts_start_len: Annotated[int, Field(ge=0)] = Field(
        0, description="without so many first tokens of these"
    )
    routed_experts_prompt_start: Annotated[int, Field(ge=0)] = Field(
        0, description="vLLM's name of routed_experts_start_len"
    )

    @property
    def experts_start(self) -> int:
        """The first token whose experts are told."""
        return self.routed_experts_start_len or self.routed_experts_prompt_start

    @property
    def shows_tokens(self) -> bool:
        """Whether an answer says something of each token beside the text."""
        return self.return_token_ids or self.return_draft_depths or self.return_draft_trees

    def text_options(self) -> dict[str, Any]:
        """What `SamplingParams` are told of these. Raises InputError."""
        if not (self.skip_special_tokens or self.spaces_between_special_tokens):
            raise InputError("spaces_between_special_tokens: only true where skip_special_tokens is false")
        return {
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "skip_special_tokens": self.skip_special_tokens,
            "bad_words": tuple(self.bad_words or ()),
            "speculative": self.speculative,
            "return_draft_trees": self.return_draft_trees,
            "return_routed_experts": self.return_routed_experts,
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
        }

    def reading(self, max_tokens: int | None) -> SamplingParams:
        """How a prompt is read, before it is known what else is asked. Raises InputError."""
        if self.truncate_prompt_tokens is None:
            return SamplingParams()
        return SamplingParams(max_tokens=max(max_tokens or 1, 1), truncate_prompt_tokens=self.truncate_prompt_tokens)


class UnusedFields(BaseModel):
    """OpenAI's fields that say whose a request is and where to keep it: taken, and no answer depends on them."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
