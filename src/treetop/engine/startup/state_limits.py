"""What an engine whose target has recurrent layers does not do yet: refused or turned off by name."""

from dataclasses import replace

import torch

from treetop.checkpoints.loader import LoadContext
from treetop.engine.memory import GIB, gib
from treetop.kernels.recurrent.fla import why_not_fla
from treetop.models.config import ModelConfig
from treetop.types.config import EngineConfig
from treetop.types.errors import CapacityError, ConfigError
from treetop.types.ids import STATE
from treetop.types.layout import Layout

USUAL_DISTANCE = 1024
"""Tokens from one checkpoint of a prompt's states to the next, rounded up to pages."""
MOST_SLOTS = 2**16


def within_states(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """The configuration as a target allows it. Raises ConfigError for what recurrent layers cannot do.

    Without layers that attend there are no pages, by which requests are admitted and put back.
    """
    if not model.recurrent:
        for name in ("state_checkpoint_every", "state_checkpoint_memory"):
            if getattr(config, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')}: {config.model} has no recurrent layers; leave it out")
        return config
    if not model.attention:
        raise ConfigError("a model of recurrent layers alone is not supported: none of its layers has keys and values")
    every, page = config.state_checkpoint_every, config.page_size
    assert page is not None, "plan_engine has chosen"
    if every is not None and every % page:
        raise ConfigError(f"--state-checkpoint-every {every} must be a multiple of --page-size {page}")
    if config.state_checkpoint_memory == 0:
        return replace(config, disable_radix_cache=True)
    return config


def uses_fla(config: EngineConfig, model: ModelConfig, place: LoadContext) -> bool:
    """Whether flash-linear-attention takes prompts in. Raises ConfigError where it is asked for and cannot."""
    if config.linear_attn_prefill_backend != "fla":
        return False
    kinds = [spec.state(STATE, 1) for spec in model.recurrent.values()]
    problems = {
        "no layer has linear attention": not kinds,
        "its layers have no delta rule with decays by head": any(not kind.delta or kind.per_channel for kind in kinds),
        f"it runs on a GPU, not on {place.device.type}": place.device.type != "cuda",
        f"it computes in 16 bits, not in {place.dtype}": place.dtype not in (torch.bfloat16, torch.float16),
        "its bits depend on chunks, and --exactness is bits": place.profile.batch_invariant,
    }
    problem = next((what for what, so in problems.items() if so), None) or why_not_fla()
    if problem is not None:
        raise ConfigError(f"--linear-attn-prefill-backend fla: {problem}; use auto")
    return True


def with_checkpoints(config: EngineConfig, layout: Layout, element_size: int) -> Layout:
    """The layout with as many slots for states as the configuration gives memory for, or as there are rows.

    element_size: of a number of the engine's dtype. Raises CapacityError for memory that holds none.
    """
    if not layout.state_groups or config.disable_radix_cache:
        return layout
    each = sum(group.row_bytes(element_size) for group in layout.state_groups)
    given = config.state_checkpoint_memory
    slots = layout.max_requests if given is None else int(given * GIB) // each
    if slots == 0:
        raise CapacityError(
            f"--state-checkpoint-memory {given:g} GiB: the states of one row take {gib(each)}; give more, or 0 for none"
        )
    every = config.state_checkpoint_every or layout.pages_for(USUAL_DISTANCE) * layout.page_size
    return replace(layout, checkpoints=min(slots, MOST_SLOTS), checkpoint_every=every)
