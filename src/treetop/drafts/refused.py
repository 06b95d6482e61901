"""Drafters that people have and treetop does not run, by name.

Source of the signs: the heads of hao-ai-lab (JetSpec), DeepSeek-V4's own DSpark and AMD (PARD), and what vLLM and
`speculators` read of them; google's assistants of Gemma 4, `transformers`' gemma4_assistant.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from treetop.checkpoints.config_fields import Config
from treetop.types.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class _Kind:
    """What shows a drafter: words in its architecture or its `speculators_model_type`, keys of its config, beginnings
    of its tensors' names."""

    name: str
    words: tuple[str, ...]
    keys: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()


_KINDS = (
    _Kind("XPress", ("xpress",), (), ("mix_l",)),
    _Kind("DeepSeek-V4 DSpark", (), ("dspark_noise_token_id",)),
    _Kind("Medusa", ("medusa",), ("medusa_num_heads", "medusa_num_layers")),
    _Kind("JetSpec of another layout", ("jetspec",), ("jetspec_config",)),
    _Kind(
        "Gemma 4 assistant",
        ("assistant",),
        ("backbone_hidden_size",),
        ("pre_projection.", "masked_embedding."),
    ),
    _Kind("PARD", ("pard",), ("pard_token", "ptd_token_id")),
)
"""The first that fits counts: the earlier ones have the signs of DFlash too."""


def refuse_draft(config: Config, where: Path, tensors: Collection[str]) -> None:
    """Raises CheckpointError, with the sign, for a head of a kind that is known and not supported.

    config: of the head, whose path errors name. tensors: the names of all of its tensors.
    """
    for kind in _KINDS:
        sign = _sign(kind, config, tensors)
        if sign is not None:
            raise CheckpointError(
                f"{where}: a {kind.name} head ({sign}), which is not supported; give an EAGLE, EAGLE-3, DFlash or"
                " DSpark head to --speculative-draft-model-path, or use --speculative-algorithm NGRAM"
            )


def _sign(kind: _Kind, config: Config, tensors: Collection[str]) -> str | None:
    architectures = config.get("architectures")
    said = {
        "speculators_model_type": [config.get("speculators_model_type")],
        "architectures": architectures if isinstance(architectures, list) else [architectures],
    }
    for key, values in said.items():
        for value in values:
            if isinstance(value, str) and any(word in value.lower() for word in kind.words):
                return f"{key} has {value[:64]!r}"
    for path in kind.keys:
        outer, _, inner = path.partition(".")
        found = config.get(outer)
        if inner:
            found = found.get(inner) if isinstance(found, dict) else None
        if found not in (None, False):
            return f"config.json has {path}"
    held = next((name for name in sorted(tensors) if name.removeprefix("model.").startswith(kind.tensors)), None)
    return None if held is None or not kind.tensors else f"it holds {held}"
