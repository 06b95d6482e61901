"""Every kind of recurrence, and the tiny families (`support.families`) that have it: one table for what all keep.

What goes by it: logits of `transformers` (tests/models/test_linear_attention.py), random schedules and past bugs
(tests/speculative/test_recurrence.py), bits (tests/speculative/test_bits.py), trees, retraction, hand-over and captured
rounds (tests/speculative/test_every_recurrence.py), which also fails where a kind is not here, and a GPU
(tests/gpu/test_gpu_families.py).
"""

from treetop.models.config import LinearSpec
from treetop.models.mixers.recurrences import ConvSpec, KimiSpec, LightningSpec, MambaSpec

FAMILIES_OF = {
    LinearSpec: ("qwen3 next", "qwen3.5", "qwen3.5 moe", "olmo hybrid"),
    ConvSpec: ("lfm2",),
    KimiSpec: ("kimi linear", "ling 3"),
    LightningSpec: ("minimax",),
    MambaSpec: ("falcon h1", "bamba", "granite 4 hybrid", "nemotron h"),
}
"""The first of each is the one that is tried every day."""
NAMES = tuple(name for names in FAMILIES_OF.values() for name in names)
FIRST = tuple(names[0] for names in FAMILIES_OF.values())
