"""MiMo, dense: Qwen2 with layers beside it that predict further tokens, which a target leaves unused.

Source: the configuration and the weights' names of XiaomiMiMo/MiMo-7B-RL.
"""

from pathlib import Path

from treetop.checkpoints.values import Config, require_value
from treetop.models.config import ModelConfig
from treetop.models.decoder import unused_tensors
from treetop.models.families import qwen2


def read(config: Config, where: Path) -> ModelConfig:
    require_value(config, "use_mrope", False, where)
    return qwen2.read(config, where)


def unused(config: ModelConfig) -> set[str]:
    return unused_tensors(config) | {"model.mtp_layers."}
