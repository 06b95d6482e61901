"""What every soak has: random requests, a summary, and a fresh engine that answers a part of them again."""

import argparse
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from treetop import LLM, SamplingParams
from treetop.bench.equality import NEAR_TIE, equal_outputs
from treetop.debug.random_checkpoint import random_tensors, write_config, write_tensors
from treetop.engine.startup.plan import plan_engine
from treetop.kernels.sampling.sampling import RowSamplingParams, draw, philox_uniform, warp
from treetop.llm import RequestOutput
from treetop.types.config import EngineConfig
from treetop.types.errors import InputError

MOST_FAILURES = 10
"""That are told."""
MOST_TIMES = 10
"""Times the rounds that were asked for, and requests to give up, until something has happened that threads decide."""
LEASE_S = 3.0

_MIXED = {
    "vocab_size": 16, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1, "first_k_dense_replace": 1, "num_attention_heads": 4, "head_dim": 32,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
    "routed_scaling_factor": 1.5, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "eos_token_id": 1,
}  # fmt: skip
GLM = {
    **_MIXED, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5, "use_qk_norm": True,
}  # fmt: skip
GLM_5 = {
    **_MIXED, "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "num_key_value_heads": 4,
    "kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "index_topk": 12, "index_n_heads": 16, "index_head_dim": 16, "indexer_types": ["full", "full", "shared"],
}  # fmt: skip
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 16, "hidden_size": 64,
    "intermediate_size": 96, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 8,
    "num_experts_per_tok": 3, "num_hidden_layers": 4, "num_nextn_predict_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 32, "partial_rotary_factor": 0.5, "full_attention_interval": 4,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "eos_token_id": 1,
}  # fmt: skip
TINY = {"glm-4.5": GLM, "glm-5": GLM_5, "qwen3-next": QWEN3_NEXT}
"""With experts and an MTP layer: plain attention; compressed and sparse; gated delta nets beside it."""


@dataclass(slots=True, kw_only=True)
class Summary:
    """What a soak did and found. unequal: requests that a fresh engine answers otherwise; ties: near ties.

    growth_bytes: of memory, from half time to the end.
    """

    seed: int
    arrived: int = 0
    finished: int = 0
    aborted: int = 0
    retractions: int = 0
    tokens: int = 0
    accept_length: float = 0.0
    compared: int = 0
    ties: int = 0
    unequal: int = 0
    elapsed_s: float = 0.0
    growth_bytes: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def fail(self, what: str) -> None:
        if len(self.failures) < MOST_FAILURES:
            self.failures.append(what)

    def grew(self, of: str, growth: Mapping[str, int], slack: Mapping[str, int]) -> None:
        """Note growth of memory by kind, and fail for more than its slack."""
        self.growth_bytes |= growth
        for name, count in growth.items():
            if count > slack[name]:
                self.fail(f"{of} ({name}) grew by {count} bytes after half time")


@dataclass(slots=True, eq=False)
class Answered:
    """A request and its tokens. finish: None if any reason is right; accept_lens: None if any lengths are."""

    prompt: Sequence[int]
    params: SamplingParams
    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    accept_lens: list[int] | None = None

    def equals(self, want: RequestOutput) -> bool:
        lengths = self.accept_lens is None or tuple(self.accept_lens) == want.metrics.accept_lens
        return lengths and self.finish in (None, want.finish_reason) and tuple(self.ids) == want.token_ids

    @property
    def met(self) -> str:
        """What happened to it, as a failure says it."""
        return ""


def compare(done: Summary, fresh: LLM, answers: Sequence[Answered]) -> int:
    """Answer requests again on an engine that has seen nothing. Returns the tokens that were compared."""
    tokens, has_ties = 0, fresh.engine.dtype == torch.float32
    again = fresh.generate([[*each.prompt] for each in answers], [each.params for each in answers])
    for each, want in zip(answers, again, strict=True):
        done.compared += 1
        tokens += len(want.token_ids)
        if each.equals(want):
            continue
        have = replace(want, token_ids=tuple(each.ids))
        parted = each.accept_lens is not None and have.token_ids == want.token_ids  # in drafts that were refused alone
        if has_ties and (parted or near_tie(fresh, each.params, want, have)):
            done.ties += 1
        else:
            done.unequal += 1
            done.fail(
                f"a fresh engine answers {each.params} after {[*each.prompt]} otherwise: {want.token_ids} "
                f"({want.finish_reason}), not {have.token_ids} ({each.finish}){each.met}"
            )
    return tokens


def near_tie(fresh: LLM, params: SamplingParams, want: RequestOutput, have: RequestOutput) -> bool:
    """Whether float32 may break the first mismatch either way: two best logits, or a uniform at the edge of two
    tokens."""
    if params.greedy:
        return equal_outputs(fresh, [want], [have]).unequal == 0
    pairs = zip(want.token_ids, have.token_ids, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return False
    ids = [*want.prompt_token_ids, *want.token_ids[:at]]
    logits = fresh.engine.next_logits(ids).to("cpu", torch.float64)[None]
    row = [params.temperature, params.top_k, params.top_p, params.min_p]
    probs = warp(logits, RowSamplingParams(*(torch.tensor([value]) for value in row)))
    assert params.seed is not None
    uniform = philox_uniform(torch.tensor([params.seed]), torch.tensor([len(ids)]))
    near = {int(draw(probs, (uniform + shift).clamp(0, 1 - 2.0**-32))) for shift in (-NEAR_TIE, 0.0, NEAR_TIE)}
    return {want.token_ids[at], have.token_ids[at]} <= near


def random_params(rng: random.Random, llm: LLM) -> SamplingParams:
    """Greedy or sampled, filtered or not, with stops or without, of one token or up to the context wall."""
    sampled = rng.random() < 0.4
    return SamplingParams(
        temperature=rng.choice((0.5, 1.0, 1.5)) if sampled else 0.0,
        top_p=rng.choice((1.0, 0.9, 0.6)) if sampled else 1.0,
        top_k=rng.choice((0, 0, 5, 50)) if sampled else 0,
        min_p=rng.choice((0.0, 0.0, 0.1)) if sampled else 0.0,
        max_tokens=rng.choice((1, 2, 7, 20, 40, 80, 10_000)),
        stop=("\n\n",) if llm.tokenizer is not None and rng.random() < 0.1 else (),
        stop_token_ids=tuple(rng.randrange(llm.engine.spec.vocab_size) for _ in range(rng.choice((0, 0, 0, 2)))),
        ignore_eos=rng.random() < 0.5,
        seed=rng.getrandbits(62),
    )


def random_prompt(rng: random.Random, context: int, vocab: int, finished: Sequence[Answered]) -> list[int]:
    """Random ids, mostly few; the first half now and then of a request that has finished lately."""
    length = rng.randint(1, rng.choice((8, context // 3, context - 2)))
    begin = rng.choice(finished[-8:]).prompt[: length // 2] if finished and rng.random() < 0.3 else ()
    return [*begin, *rng.choices(range(vocab), k=length - len(begin))]


def check_least(args: argparse.Namespace, least: Iterable[tuple[str, float]]) -> None:
    """Raise InputError for an option below its least value, or that is no number."""
    for name, minimum in least:
        if not getattr(args, name) >= minimum:
            raise InputError(f"--{name.replace('_', '-')} must be at least {minimum:g}, got {getattr(args, name):g}")


# ------------------------------------------------------- two workers of several ranks, with a model that has experts


def save_tiny(folder: Path, name: str = "glm-4.5") -> Path:
    """A checkpoint of this kind with an MTP layer and random weights, which all matter to the logits."""
    write_config(folder, TINY[name])
    planned = plan_engine(EngineConfig(str(folder), speculative_algorithm="MTP", load_format="dummy", device="cpu"))
    assert planned.draft is not None
    params = [*planned.target.params, *planned.draft.params]
    write_tensors(folder, random_tensors(params, torch.Generator().manual_seed(8)))
    return folder


def config_of(args: argparse.Namespace, model: Path) -> EngineConfig:
    """Of each worker."""
    try:
        steps, topk, size = map(int, args.speculative.split(","))
    except ValueError:
        raise InputError(f"--speculative must be S,K,T, got {args.speculative}") from None
    return EngineConfig(
        str(model),
        speculative_algorithm="MTP",
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=size,
        ep_size=args.ranks,
        device=args.device,
        dtype=args.dtype,
        graphs=args.graphs,
        check_level=args.check_level,
        page_size=args.page_size,
        context_length=args.context_length,
        max_running_requests=6,
        chunked_prefill_size=32,
        max_total_tokens=5 * args.context_length // 2,
        overlap=True,
        disaggregation_slots=4,
        disaggregation_slot_bytes=args.slot_bytes,
    )


def alone(config: EngineConfig) -> dict[str, Any]:
    """Options of one engine for the same requests, with room for all."""
    changes = {"ep_size": 1, "disaggregation_slots": 0, "disable_radix_cache": True, "max_total_tokens": None}
    return {**asdict(config), **changes, "graphs": "off", "overlap": None}
