"""What a model's `generation_config.json` says of sampling, for the server and for `default_sampling_params`."""

from pathlib import Path
from typing import Any

from treetop.checkpoints.folder import generation_config
from treetop.types.errors import CheckpointError, InputError
from treetop.types.sampling import SamplingParams


def sampling_defaults(folder: Path) -> dict[str, float]:
    """What a request that does not say gets: of `generation_config.json`, else temperature 1 and no filter."""
    config, where = generation_config(folder), folder / "generation_config.json"
    defaults: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    defaults |= {name: config[name] for name in defaults if config.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except InputError as error:
        raise CheckpointError(f"{where}: {error}") from None
    return defaults


def unsupported(folder: Path) -> list[str]:
    """What `generation_config.json` asks for beside that."""
    config = generation_config(folder)
    neutral = {"length_penalty": 1, "no_repeat_ngram_size": 0}
    return [f"{name} {config[name]}" for name, value in neutral.items() if config.get(name, value) not in (value, None)]
