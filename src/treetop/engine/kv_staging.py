"""What an engine has to transfer KV with: its staging slots, and what other workers must have in common with it."""

from treetop.checkpoints.fingerprint import fingerprint
from treetop.engine.engine import Engine
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


def target_name(engine: Engine) -> str:
    """Whose K/V these are: another checkpoint's, or those of other activations, are other numbers."""
    config = engine.config
    name = f"dummy {config.seed or 0}" if config.load_format == "dummy" else fingerprint(engine.model_path)
    return f"{name} with activations in FP8" if config.quantize_activations else name


def draft_name(engine: Engine) -> str:
    """What drafts: which kind, and the fingerprint of a folder of its own."""
    if engine.draft is None:
        return "none"
    folder, algorithm = engine.draft_path, engine.config.algorithm
    if folder is None or engine.config.load_format == "dummy":
        return str(algorithm)
    return f"{algorithm} {fingerprint(folder)}"
