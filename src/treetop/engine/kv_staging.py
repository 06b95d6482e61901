"""What an engine has to transfer KV with: its staging slots, and what other workers must have in common with it."""

from treetop.engine.engine import Engine
from treetop.engine.kv_names import draft_name, target_name
from treetop.types.errors import ConfigError
from treetop.types.kv_transfer.layout import Schema, Staging, words_of_groups
from treetop.types.kv_transfer.transport import Memory
from treetop.types.kv_transfer.wire import WIRE_VERSION


def staging_of(engine: Engine) -> Staging:
    """Raises ConfigError for an engine without slots."""
    slots, config = engine.slots, engine.config
    if slots is None:
        raise ConfigError("no staging slots for KV transfer; set --disaggregation-slots")
    memory, layout, ranks = slots.memory, slots.spec.whole, engine.parallel
    assert slots.spec.own == layout.of_rank(ranks.size)
    shape = config.shape
    schema = Schema(
        wire=WIRE_VERSION,
        target=target_name(engine),
        draft=draft_name(engine),
        dtype=str(engine.dtype).removeprefix("torch."),
        groups=words_of_groups(layout.groups),
        record=tuple(field.words for field in engine.runner.state.record.fields),
        shape=(shape.topk, shape.num_steps, shape.num_draft_tokens),
        vocab_size=engine.spec.vocab_size,
        slot_bytes=config.disaggregation_slot_bytes,
        exactness=", ".join([config.exactness, *engine.sums]),
    )
    device = memory.device.index or 0 if memory.device.type == "cuda" else None
    reached = Memory(memory.data_ptr(), memory.nbytes, device)
    size = config.disaggregation_slot_bytes
    return Staging(reached, config.disaggregation_slots, size, layout, schema, ranks.rank, ranks.size)
