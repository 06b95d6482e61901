"""treetop: exact LLM inference with EAGLE tree speculative decoding."""

from treetop.server.llm import LLM, RequestOutput
from treetop.types.sampling import SamplingParams
from treetop.version import __version__

__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__"]
