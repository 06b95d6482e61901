"""What an engine whose target has recurrent layers does not do yet: refused or turned off by name."""

from dataclasses import replace

from treetop.models.config import ModelConfig
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError


def within_states(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """The configuration as a target allows it. Raises ConfigError for what recurrent layers cannot do.

    Without layers that attend there are no pages, by which requests are admitted and put back.
    """
    if not model.linear:
        return config
    if not model.attention:
        raise ConfigError("a model of recurrent layers alone is not supported: none of its layers has keys and values")
    if config.disaggregation_slots:
        raise ConfigError(
            f"--disaggregation-slots {config.disaggregation_slots}: states of recurrent layers are not handed over yet;"
            " leave it out"
        )
    return replace(config, disable_radix_cache=True)
