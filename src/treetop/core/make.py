"""A core around an engine that runs a model."""

from treetop.core.engine_core import EngineCore
from treetop.engine.engine import Engine, InFlightStep
from treetop.models.folder import extra_eos_ids
from treetop.scheduler.scheduler import Scheduler
from treetop.types.requests import CoreInfo
from treetop.types.sampling import MOST_LOGPROBS


def make_core(engine: Engine) -> tuple[EngineCore[InFlightStep], CoreInfo]:
    """A core around an engine."""
    config = engine.config
    eos_ids = (*engine.spec.eos_token_ids, *extra_eos_ids(engine.model_path))
    info = CoreInfo(
        model_path=str(engine.model_path),
        vocab_size=engine.spec.vocab_size,
        max_context=engine.layout.max_context,
        max_requests=engine.layout.max_requests,
        shape=config.shape,
        by_priority=config.schedule_policy == "priority",
        can_change_logits=not config.disable_logits_processors,
        max_logprobs=MOST_LOGPROBS,
        eos_ids=eos_ids,
    )
    return EngineCore(engine, Scheduler(engine.layout, config, eos_ids)), info
