"""A core around an engine of this process: a scheduler for it, and what others know of it."""

from typing import TypeVar

from treetop.checkpoints.folder import extra_eos_ids
from treetop.core.engine_core import EngineCore, StepEngine
from treetop.engine.engine import Engine
from treetop.engine.startup.round_costs import work_clock
from treetop.scheduler.scheduler import Scheduler
from treetop.structured.grammars import GrammarCompiler
from treetop.structured.structured_output import StructuredOutputManager
from treetop.types.constraint import StructureLimits
from treetop.types.requests import CoreInfo, PrefixPages
from treetop.types.sampling import MAX_LOGPROBS

Step = TypeVar("Step")


def core_of(runs: StepEngine[Step], engine: Engine) -> EngineCore[Step]:
    """A core with a scheduler for the engine. runs: what its steps are launched on."""
    info = info_of(engine)
    vocab_size = info.vocab_size if info.can_constrain else None
    grammars = GrammarCompiler(engine.model_path, info.vocab_size, info.eos_ids, info.structure_limits.whitespace)
    structures = StructuredOutputManager(grammars, info.structure_limits.timeout_s)
    scheduler = Scheduler(
        engine.layout,
        engine.config,
        info.eos_ids,
        vocab_size=vocab_size,
        pace=engine.pace,
        costs=engine.costs,
        head=lambda: engine.head.chances,
        keep_head=engine.keep_head,
        work_clock=work_clock(engine.runner.buffers.rows.device),
        structures=structures,
    )
    engine.set_tree_masks(scheduler.node_masks)
    return EngineCore(runs, scheduler)


def info_of(engine: Engine) -> CoreInfo:
    config, layout = engine.config, engine.layout
    return CoreInfo(
        model_path=str(engine.model_path),
        vocab_size=engine.spec.vocab_size,
        max_context=layout.max_context,
        max_requests=layout.max_requests,
        shape=max(config.shapes, key=lambda shape: (shape.num_steps, shape.num_draft_tokens)),
        by_priority=config.schedule_policy == "priority",
        can_change_logits=not config.disable_logits_processors,
        max_logprobs=MAX_LOGPROBS,
        eos_ids=(*engine.spec.eos_token_ids, *extra_eos_ids(engine.model_path)),
        can_constrain=not config.disable_logits_processors and not config.simulates,
        prefix=None if config.disable_radix_cache else PrefixPages.of(layout),
        structure_limits=StructureLimits(
            config.structured_output_timeout, config.structured_output_memory, config.structured_output_whitespace
        ),
        exactness=config.exactness,
        can_withhold=not config.simulates,
        has_trees=any(shape.num_steps for shape in config.shapes),
    )
