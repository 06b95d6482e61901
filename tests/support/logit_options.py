"""Options that change logits, and a slow oracle of what they make of a request."""

import math

import torch
from transformers import LlamaForCausalLM

from support.oracles import drawn, float32, philox4x32_10, warped
from support.tiny_models import EOS
from treetop import SamplingParams

VOCAB = 12

SHAPE = (4, 5, 16)

OPTIONS = {
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "a reward for repeating": {"frequency_penalty": -0.4, "presence_penalty": -0.3, "repetition_penalty": 0.8},
    "logit_bias": {"logit_bias": {5: 2.5, 0: -100, 11: 0.75}},
    "min_tokens": {"min_tokens": 17, "ignore_eos": False, "stop_token_ids": (7, 9)},
    "allowed_token_ids": {"allowed_token_ids": (1, 4, 5, 6, 8, 11)},
    "all at once": {
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {4: 1.0, 7: -0.5},
        "min_tokens": 9,
        "ignore_eos": False,
        "allowed_token_ids": (EOS, 4, 5, 6, 7, 8, 10),
    },
}

WAYS = {
    "greedy": {},
    "sampled": {"temperature": 1.1},
    "filtered": {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.02},
}


def params_of(option: str, way: str, seed: int = 5, max_tokens: int = 30) -> SamplingParams:
    given = {"ignore_eos": True, "max_tokens": max_tokens, "seed": seed, **WAYS[way], **OPTIONS[option]}
    return SamplingParams(**given)


def changed(logits: list[float], prompt, output, params: SamplingParams) -> list[float]:
    """The formulas, token by token."""
    result = []
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    for token, logit in enumerate(logits):
        value, count = logit + float32(dict(params.logit_bias).get(token, 0.0)), output.count(token)
        if token in prompt or count:
            penalty = float32(params.repetition_penalty)
            value = value / penalty if value > 0 else value * penalty
        value -= count * float32(params.frequency_penalty) + (count > 0) * float32(params.presence_penalty)
        early = token in ends and len(output) < params.min_tokens
        out = params.allowed_token_ids is not None and token not in params.allowed_token_ids
        result.append(-math.inf if early or out else value)
    return result


class Oracle:
    """One token at a time, from the logits of `transformers`."""

    def __init__(self, pair) -> None:
        self.model = LlamaForCausalLM.from_pretrained(pair.target, dtype=torch.float64).eval()
        self.known: dict[tuple[int, ...], list[float]] = {}

    def logits(self, ids) -> list[float]:
        if tuple(ids) not in self.known:
            with torch.no_grad():
                self.known[tuple(ids)] = self.model(torch.tensor([list(ids)])).logits[0, -1].tolist()
        return self.known[tuple(ids)]

    def weights(self, prompt, output, params: SamplingParams) -> list[float]:
        logits = changed(self.logits([*prompt, *output]), prompt, output, params)
        return warped(logits, float32(params.temperature), params.top_k, float32(params.top_p), float32(params.min_p))

    def run(self, prompt, params: SamplingParams) -> tuple[int, ...]:
        output: list[int] = []
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
        while len(output) < params.max_tokens:
            weights = self.weights(prompt, output, params)
            uniform = philox4x32_10([len(prompt) + len(output), 0, 0, 0], [params.seed, 0])[0] / 2**32
            output.append(drawn(weights, uniform))
            if output[-1] in ends:
                break
        return tuple(output)
