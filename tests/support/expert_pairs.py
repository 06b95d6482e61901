"""Targets with experts and an MTP layer, and engines whose ranks share them."""

import torch
from safetensors.torch import load_file

from support.families import FAMILIES, SIZES
from support.tiny_models import copy_folder, save_random_experts
from treetop import LLM
from treetop.debug.random_checkpoint import random_tensors, write_config, write_tensors
from treetop.engine.startup.plan import plan_engine
from treetop.types.config import EngineConfig

TREE, CHAIN = (2, 3, 6), (1, 3, 4)


def save_glm_with_mtp(folder, **changes):
    """GLM-4.5 with the layer of MTP after its last, whose feed-forward has experts, too."""
    small = {"vocab_size": 12, "num_hidden_layers": 3, **changes}
    whole = save_random_experts(folder / "whole", "glm4_moe", seed=8, **small)
    generator = torch.Generator().manual_seed(2)
    prefix, hidden = "model.layers.2", load_file(whole / "model.safetensors")["lm_head.weight"].shape[1]
    more = {
        f"{prefix}.{name}.weight": torch.rand(hidden, generator=generator) + 0.5
        for name in ("enorm", "hnorm", "shared_head.norm")
    }
    projection = torch.randn((hidden, 2 * hidden), generator=generator) * (2 * hidden) ** -0.5
    more[f"{prefix}.eh_proj.weight"] = projection
    changes = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    return copy_folder(whole, folder / "both", tensors=more, **changes)


def save_glm5_with_mtp(folder, **changes):
    """GLM-5.2, of four layers the third shares a choice of few keys; its MTP layer has an indexer of its own."""
    tiny = {**SIZES, **FAMILIES["glm 5.2"].config, "num_nextn_predict_layers": 1, **changes}
    write_config(folder, {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", **tiny})
    planned = plan_engine(EngineConfig(str(folder), speculative_algorithm="MTP", load_format="dummy", device="cpu"))
    params = [*planned.target.params, *planned.draft.params]
    write_tensors(folder, random_tensors(params, torch.Generator().manual_seed(8)))
    return folder


def build(folder, shape, ranks, **options):
    """shape: (k, S, T), of MTP if nothing else is asked for; None decodes plainly."""
    if shape is not None and "draft" not in options:
        options.setdefault("speculative_algorithm", "MTP")
    own = {"dtype": "float64", "context_length": 96, "page_size": 4, "max_running_requests": 4}
    options = {**own, "speculative_policy": "fixed", "speculative_calibration": "off", **options}
    if shape is not None:
        k, steps, size = shape
        tree = {"speculative_eagle_topk": k, "speculative_num_steps": steps, "speculative_num_draft_tokens": size}
        options |= tree
    return LLM(str(folder), ep_size=ranks, **options)


def send_to(core, rank):
    """From now on `rank()` is where a request goes. core: an `EngineProcessClient` of one engine of several ranks."""
    (engine,) = core.engines
    engine.place = lambda request, index: engine.links[rank()]


def answers(folder, shape, ranks, prompts, asked, **options):
    """What an engine says to each of (params, ranks that the prompts go to, or None); one takes long to start."""
    llm = build(folder, shape, ranks, **options)
    try:
        outputs = []
        for params, places in asked:
            if places is not None:
                send_to(llm._core.core, iter(places).__next__)
            outputs.append(llm.generate(prompts, params))
        return outputs
    finally:
        llm.close()
