"""What `--mock-engine` says, and the text that a mock engine replays."""

import re
from pathlib import Path

from treetop.checkpoints.folder import resolve_folder
from treetop.core.wire import MockOptions
from treetop.text.tokenizer import open_tokenizer
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError

TEXT = (
    "The quick brown fox jumps over the lazy dog; the dog, it is said, was not so lazy after all. "
    "def area(r):\n    return 3.14159 * r ** 2\n\nZwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. "
    "Съешь же ещё этих мягких французских булок. 素早い茶色の狐は怠け者の犬を飛び越える。 🦊🐶 "
)


def mock_options(given: str | None, config: EngineConfig) -> MockOptions | None:
    """Of STEP_MS,TOKENS; None for a real engine. Raises ConfigError."""
    if given is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?),(\d+)(?:-(\d+))?", given)
    minimum, maximum = (int(match[2]), int(match[3] or match[2])) if match else (0, 0)
    if match is None or not 1 <= minimum <= maximum <= 64:
        raise ConfigError(f"--mock-engine must be STEP_MS,TOKENS or STEP_MS,A-B with 1 to 64 tokens, got {given}")
    folder: Path = resolve_folder(config.model)
    tokenizer = open_tokenizer(folder)
    stream = tuple(tokenizer.encode(TEXT, special=False)) if tokenizer is not None else tuple(range(4, 64))
    return MockOptions(stream, float(match[1]) / 1000, minimum, maximum)
