"""Options that commands share: a flag for each option of the engine and of sampling, from one table of each."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from treetop.types.config import CHOICES, EngineConfig, flag
from treetop.types.errors import InputError
from treetop.types.sampling import SamplingParams

ENGINE_HELP = {
    "draft": "folder of the draft head, or builtin:NAME; a model without one decodes plainly (default: none, and the"
    " embedded head for the embedded model)",
    "speculative_algorithm": "NONE forbids a draft; MTP and NGRAM need no folder of one (default: what the draft's"
    " tensors are)",
    "speculative_mtp_recurrence": "which state of an MTP layer feeds it again: before or after its norm (auto: as the"
    " family's reference does)",
    "speculative_num_steps": "levels of the tree (S)",
    "speculative_eagle_topk": "branches of each node (k); 1 is a chain",
    "speculative_num_draft_tokens": "nodes verified in one pass, root included (T)",
    "load_format": "dummy: random weights; a folder with config.json is enough; for measuring speed",
    "compress_weights": "keep weights in 12 bits too, without loss, which makes small batches faster; on by default in"
    " bfloat16 on a GPU like an H200 if that takes up to a quarter of what is left for KV pools",
    "simulate_accept_length": "tokens every round emits: the output is wrong; for measuring speed only",
    "page_size": "tokens a KV page holds",
    "max_running_requests": "requests decoded at a time (default: 16 on a CPU, up to 64 on a GPU by its memory)",
    "context_length": "tokens a request may hold, prompt and output (default: the model's)",
    "max_total_tokens": "tokens each KV pool holds, whatever the fraction below says (default: what fits, and no more"
    " than all running requests can use)",
    "mem_fraction_static": "share of the device's memory for weights, tables and KV pools",
    "chunked_prefill_size": "prompt tokens a prefill step processes, padding counted (default: 512 on a CPU, 2048 to"
    " 8192 on a GPU by its memory)",
    "prefill_tokens_per_round": "the same while requests decode, which wait for such a step between two rounds; fewer"
    " the more they attend to (default: about what a round computes)",
    "schedule_policy": "who runs first: fcfs by arrival, priority by each request's `priority`, lower first",
    "disable_radix_cache": "do not keep the K/V of prompts and outputs for prompts that begin alike",
    "disable_logits_processors": "refuse requests that change logits by penalties, biases, min_tokens or allowed"
    " tokens, and keep no memory for them",
    "attention_backend": "who computes attention",
    "overlap": "launch a round before the last one's results are known; on by default where rounds are captured",
    "graphs": "captured graphs; sim gives a CPU their semantics, for tests",
    "device": "auto is a GPU if there is one",
    "dtype": "what the model computes in; auto is float32 on a CPU and bfloat16 on a GPU",
    "check_level": "0 off, 1 host checks, 2 device probes, 3 poison and red zones",
    "disable_custom_all_reduce": "with --tp-size: exchange by NCCL alone, not by peer memory (docs/scale.md)",
    "tp_size": "GPUs that share the model, each with a part of every layer (docs/scale.md)",
    "ep_size": "GPUs that share the experts of a model that has some, each with requests of its own (docs/scale.md)",
    "step_timeout": "seconds after which a step that has not ended on every GPU ends them all; with --tp-size or"
    " --ep-size",
    "structured_output_timeout": "seconds that a structure may take to compile, and each token of it; its request then"
    " ends with an error",
    "structured_output_memory": "MiB that the parser of a structure may take",
    "disaggregation_slots": "staging slots, through which KV goes to another worker or comes from one; 0 for none",
    "disaggregation_slot_bytes": "bytes of each of these, on every GPU",
    "seed": "each prompt draws its own seed from this one: the same seed and prompts give the same sampled tokens",
}
"""Every option but the model."""

SAMPLING_HELP = {
    "max_tokens": "tokens to generate at most",
    "temperature": "0 is greedy",
    "top_k": "the most likely tokens to choose from; 0 is off",
    "top_p": "their probability together; 1 is off",
    "min_p": "least share of the most likely token's; 0 is off",
    "stop": "text that ends the completion; repeats",
    "ignore_eos": "go on past an end-of-sequence token",
}
"""`--seed` is the engine's: each prompt draws its own from it."""

ENGINE_ALIASES = {
    "draft": ("--speculative-draft-model", "--spec-model"),
    "context_length": ("--max-model-len",),
    "max_running_requests": ("--max-num-seqs",),
    "mem_fraction_static": ("--gpu-memory-utilization",),
    "chunked_prefill_size": ("--max-num-batched-tokens",),
    "page_size": ("--block-size",),
    "disable_radix_cache": ("--no-enable-prefix-caching",),
    "schedule_policy": ("--scheduling-policy",),
    "seed": ("--random-seed",),
    "disaggregation_slots": ("--handover-slots",),
    "disaggregation_slot_bytes": ("--handover-slot-bytes",),
    "tp_size": ("--tensor-parallel-size", "--tp"),
    "ep_size": ("--expert-parallel-size", "--ep"),
}
"""Engine options in the spellings of vLLM and SGLang."""

_METAVAR = {int: "N", float: "X", str: "TEXT"}


def add_engine_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The model, and flags of all engine options. Returns the group of those that stand for another one's value."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder of the target; the embedded pair by default")
    parser.add_argument("-v", "--verbose", action="store_true", help="say on stderr what the engine is made of")
    hints = get_type_hints(EngineConfig)
    for field in fields(EngineConfig):
        if field.name != "model":
            spellings = (flag(field.name), *ENGINE_ALIASES.get(field.name, ()))
            _add_option(parser, field, hints[field.name], ENGINE_HELP[field.name], spellings)
    aliases = parser.add_argument_group("the same in vLLM's and SGLang's words")
    graphs = {"dest": "graphs", "action": "store_const", "const": "off", "help": "as --graphs off"}
    aliases.add_argument("--enforce-eager", "--disable-cuda-graph", **graphs)  # type: ignore[arg-type]  # of many kinds
    overlap = {"dest": "overlap", "action": "store_false", "default": None, "help": "as --no-overlap"}
    aliases.add_argument("--disable-overlap-schedule", **overlap)  # type: ignore[arg-type]  # of many kinds
    cached = {"dest": "disable_radix_cache", "action": "store_false", "default": None, "help": "the default"}
    aliases.add_argument("--enable-prefix-caching", **cached)  # type: ignore[arg-type]  # of many kinds
    return aliases


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Flags of how tokens are chosen and when a completion ends."""
    hints, known = get_type_hints(SamplingParams), {field.name: field for field in fields(SamplingParams)}
    for name, words in SAMPLING_HELP.items():
        _add_option(parser, known[name], hints[name], words, (flag(name),))


def _add_option(
    parser: argparse.ArgumentParser, field: "Field[Any]", hint: Any, words: str, spellings: Sequence[str]
) -> None:
    """A flag for an option, by its type; None unless it is given, so that the default stays the option's own."""
    kinds = (hint, *get_args(hint))
    known = isinstance(field.default, int | float | str) and not isinstance(field.default, bool)
    options: dict[str, Any] = {"dest": field.name, "default": None}
    options["help"] = words + (f" (default {field.default})" if known else "")
    if isinstance(field.default, bool):
        options["action"] = "store_true"
    elif bool in kinds:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["type"] = next((kind for kind in (int, float) if kind in kinds), str)
        options["choices"] = CHOICES.get(field.name)
        options["metavar"] = None if field.name in CHOICES else _metavar(field.name, options["type"])
        if isinstance(field.default, tuple):
            options["action"] = "append"
    parser.add_argument(*spellings, **options)


def _metavar(name: str, kind: type) -> str:
    return "FOLDER" if name == "draft" else _METAVAR[kind]


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given; the others keep their defaults."""
    return _given(args, ENGINE_HELP)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The sampling options that were given. Raises InputError, which names them as flags."""
    try:
        return SamplingParams(**_given(args, SAMPLING_HELP))
    except InputError as error:  # its sentences begin with the parameter's name
        names = "|".join(SAMPLING_HELP)
        raise InputError(re.sub(rf"(^|; )({names})\b", lambda m: m[1] + flag(m[2]), str(error))) from None


def _given(args: argparse.Namespace, names: Mapping[str, str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def read_prompt(name: str) -> str:
    """The text of a `--prompt-file`."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a null byte in the name
        raise InputError(f"--prompt-file {name}: {error}") from None
