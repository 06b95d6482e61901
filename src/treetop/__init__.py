"""treetop: exact LLM inference with EAGLE tree speculative decoding."""

from typing import TYPE_CHECKING, Any

from treetop.types.constraint import StructuredOutput, TokenConstraint
from treetop.types.sampling import SamplingParams
from treetop.version import __version__

if TYPE_CHECKING:
    from treetop.server.async_llm import AsyncLLM
    from treetop.server.llm import LLM, RequestOutput

__all__ = ["LLM", "AsyncLLM", "RequestOutput", "SamplingParams", "StructuredOutput", "TokenConstraint", "__version__"]


def __getattr__(name: str) -> Any:
    """`LLM` and `RequestOutput` load PyTorch, so they are loaded when they are asked for."""
    if name == "AsyncLLM":
        from treetop.server.async_llm import AsyncLLM

        return AsyncLLM
    if name in ("LLM", "RequestOutput"):
        from treetop.server import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
