"""`docs/fields.md`, what bodies hold, is written by `scripts/reference.py`."""

import json
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from treetop.api.batches.routes import BatchRequest
from treetop.api.completions import CompletionRequest
from treetop.api.conversations import ConversationRequest, ItemsRequest, MetadataRequest
from treetop.api.keys.administration import LoadLoraRequest, UnloadLoraRequest, UpdateWeightsRequest
from treetop.api.keys.weight_transfer_routes import (
    DestroyGroupRequest,
    FromDistributedRequest,
    FromTensorRequest,
    InitGroupRequest,
)
from treetop.api.llama_cpp import LlamaCppRequest
from treetop.api.ollama import OllamaChat, OllamaGenerate, ShowRequest
from treetop.api.operations import DetokenizeRequest, TokenizeRequest
from treetop.api.requests.chat_body import ChatRequest
from treetop.api.requests.fields import Body
from treetop.api.requests.messages_body import CountRequest, MessagesRequest
from treetop.api.requests.responses_body import ResponsesRequest
from treetop.api.sglang import AbortBody, GenerateRequest

BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/conversations": ConversationRequest,
    "/v1/conversations/{name}": MetadataRequest,
    "/v1/conversations/{name}/items": ItemsRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/v1/batches": BatchRequest,
    "/api/chat": OllamaChat,
    "/api/generate": OllamaGenerate,
    "/api/show": ShowRequest,
    "/completion": LlamaCppRequest,
    "/generate": GenerateRequest,
    "/abort_request": AbortBody,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/update_weights_from_disk": UpdateWeightsRequest,
    "/init_weights_update_group": InitGroupRequest,
    "/destroy_weights_update_group": DestroyGroupRequest,
    "/update_weights_from_distributed": FromDistributedRequest,
    "/update_weights_from_tensor": FromTensorRequest,
    "/v1/load_lora_adapter": LoadLoraRequest,
    "/v1/unload_lora_adapter": UnloadLoraRequest,
}
"""Of POST requests, by route."""
_HEAD = """\
# Fields of requests

Every field of the body of every route, from what checks it. *Taken*: the answer follows it. *Hint*: it may be there,
and no answer depends on it. *Refused*: a 400 that names the field, unless it says what asks for nothing. Any other
field is a 400, too, or left out under `--ignore-unknown-fields`. Null is as good as leaving a field out. What the
fields mean: [serving.md](serving.md#options-of-a-request). Members of messages, items and tools are not in the table.

This page is written by `src/treetop/api/requests/fields_page.py`, and a test holds it to the routes.
"""
_COLUMNS = "| field | | values |\n|---|---|---|"


def page() -> str:
    """The whole text."""
    parts = [_HEAD]
    for path, body in BODIES.items():
        parts.append(f"## `{path}`\n\n{_COLUMNS}\n" + "\n".join(_rows(body, "")) + "\n")
    return "\n".join(parts)


def _rows(body: type[Body], inside: str) -> Iterator[str]:
    """inside: the object that the fields are of, with a dot."""
    schema = body.model_json_schema()
    for name, field in body.model_fields.items():
        said = field.alias or name
        kind = "hint" if said in body.hints else "taken, required" if field.is_required() else "taken"
        words = _words(schema["properties"][said], schema.get("$defs", {}))
        about = field.description or ""
        yield _row(inside + said, kind, f"{words}; {about}" if about else words)
        own = _alternatives(field.annotation)
        if len(own) == 1 and _is_body(own[0]):
            yield from _rows(own[0], f"{inside}{said}.")
    for name in sorted({*body.hints} - {each.alias or name for name, each in body.model_fields.items()}):
        yield _row(inside + name, "hint", "any")
    for name, neutral in sorted(body.neutral.items()):
        if name not in body.model_fields:
            allowed = ", ".join(f"`{json.dumps(each)}`" for each in neutral)
            yield _row(inside + name, "refused", f"unless {allowed}" if allowed else "")


def _row(*cells: str) -> str:
    name, kind, words = (each.replace("|", "\\|").replace("\n", " ") for each in cells)
    return f"| `{name}` | {kind} | {words} |"


def _alternatives(kind: Any) -> list[Any]:
    """What a value may be but for null."""
    several = get_args(kind) if get_origin(kind) in (UnionType, Union) else (kind,)
    return [each for each in several if each is not NoneType]


def _is_body(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Body)


def _words(schema: Mapping[str, Any], kinds: Mapping[str, Any]) -> str:
    """What a value may be, by its JSON schema. kinds: that it refers to."""
    if "$ref" in schema:
        return _words(kinds[schema["$ref"].rpartition("/")[2]], kinds)
    choices = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    if choices:
        return " or ".join(f"`{each}`" for each in choices)
    several = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if several:
        words = [_words(each, kinds) for each in several if each != {"type": "null"}]
        return " or ".join(dict.fromkeys(words))
    kind = schema.get("type")
    if kind == "array":
        items = _words(schema.get("items", {}), kinds)
        return f"list of ({items})" if " or " in items else f"list of {items}"
    return _PLAIN.get(str(kind), "any") + _bounds(schema)


_PLAIN = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false", "object": "object"}


def _bounds(schema: Mapping[str, Any]) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    most = schema["exclusiveMaximum"] - 1 if "exclusiveMaximum" in schema else most
    if least is None and most is None:
        return ""
    return f" from {least}" * (least is not None) + f" to {most}" * (most is not None)
