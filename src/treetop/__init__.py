"""treetop: exact LLM inference with EAGLE tree speculative decoding."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from treetop.types.config import EngineConfig
from treetop.types.constraint import Reasoning, StructuredOutput, TokenConstraint
from treetop.types.errors import (
    CapacityError,
    CheckError,
    CheckpointError,
    ConfigError,
    ConflictError,
    ContextLengthError,
    EngineError,
    InputError,
    InvariantError,
    OwnershipError,
    PromptError,
    TreetopError,
    UserError,
)
from treetop.types.sampling import SamplingParams
from treetop.version import __version__

if TYPE_CHECKING:
    from treetop.async_llm import AsyncLLM
    from treetop.llm import LLM
    from treetop.outputs import RequestMetrics, RequestOutput, TextDelta

__all__ = [
    "LLM",
    "AsyncLLM",
    "RequestMetrics",
    "RequestOutput",
    "TextDelta",
    "EngineConfig",
    "SamplingParams",
    "Reasoning",
    "StructuredOutput",
    "TokenConstraint",
    "TreetopError",
    "UserError",
    "ConfigError",
    "ConflictError",
    "CapacityError",
    "InputError",
    "PromptError",
    "ContextLengthError",
    "CheckpointError",
    "EngineError",
    "InvariantError",
    "OwnershipError",
    "CheckError",
    "__version__",
]

_LATER = {
    "LLM": "treetop.llm",
    "AsyncLLM": "treetop.async_llm",
    "RequestMetrics": "treetop.outputs",
    "RequestOutput": "treetop.outputs",
    "TextDelta": "treetop.outputs",
}
"""What is loaded when it is asked for: `LLM` loads PyTorch."""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
