"""Errors in OpenAI's shape. What a caller sent never becomes a 500, and never reaches the log."""

import logging
import re
import traceback
from collections.abc import Collection, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from treetop.api.error_paths import problems_of
from treetop.api.unknown_routes import no_such_route
from treetop.types.errors import ConflictError, EngineError, InputError, UserError

log = logging.getLogger("treetop.server")


class ApiError(Exception):
    """An answer with an error.

    param: the field it is about.
    code: OpenAI's, None for the usual one of the status.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class ErrorDetail(BaseModel):
    """What went wrong.

    param: the field it is about.
    code: a word for programs.
    """

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


RESPONSES: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}
"""What the OpenAPI schema says of all endpoints."""

KINDS = {
    400: ("invalid_request_error", "invalid_value"),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "permission_denied"),
    404: ("not_found_error", "not_found"),
    409: ("invalid_request_error", "conflict"),
    405: ("invalid_request_error", "method_not_supported"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    500: ("server_error", "internal_error"),
    503: ("service_unavailable_error", "service_unavailable"),
    504: ("timeout_error", "timeout"),
}
"""OpenAI's `type` of an error, and its `code` if nothing better is known."""
_OF_ANTHROPIC = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's `type` of an error."""
MESSAGES = "/v1/messages"
"""What paths of Anthropic's API begin with."""
RESPONSES_PATH = "/v1/responses"
OLLAMA = "/api/"
_OWN_NAMES: dict[str, dict[str, str]] = {
    RESPONSES_PATH: {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text",
        "reasoning_effort": "reasoning",
    },
    OLLAMA: {
        "max_tokens": "options.num_predict",
        "repetition_penalty": "options.repeat_penalty",
        "temperature": "options.temperature",
        "response_format": "format",
        "reasoning_effort": "think",
        "enable_thinking": "think",
    },
    MESSAGES: {
        "stop strings": "stop_sequences",
        "stop": "stop_sequences",
        "max_completion_tokens": "max_tokens",
        "response_format": "output_config",
        "reasoning_effort": "output_config",
        "thinking_token_budget": "thinking",
        "parallel_tool_calls": "tool_choice",
        "continue_final_message": "messages",
    },
}
"""What endpoints whose requests are chats in other words call a chat's fields, by what their paths begin with."""
_PLACE = re.compile(r"^(messages)\[\d+\]\.tool_call[\w.\[\]]*")
"""A place in the chat that such a request becomes, which is not its own: a call of a conversation that is kept."""
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}}


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind, usual = KINDS.get(status, ("invalid_request_error", "invalid_request"))
    return {"error": {"message": message, "type": kind, "param": param, "code": code or usual}}


def anthropic_body(status: int, message: str, request_id: str | None = None) -> dict[str, Any]:
    """An error in Anthropic's shape."""
    kind = _OF_ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


class ErrorResponse(Response):
    """An answer with an error, in the shape of the endpoint that was asked."""

    def __init__(self, body: dict[str, Any], status: int, message: str, headers: Mapping[str, str]) -> None:
        """body: in OpenAI's shape."""
        super().__init__(status_code=status)
        self._body, self._message, self._more = body, message, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = self._body
        if scope["path"].startswith(OLLAMA):
            body = {"error": self._message}
        elif scope["path"].startswith(MESSAGES):
            body = anthropic_body(self.status_code, self._message, scope.get("state", {}).get("request_id"))
        await JSONResponse(body, self.status_code, self._more)(scope, receive, send)


def error_response(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    body = error_body(status, message, param, code)
    return ErrorResponse(body, status, message, {**_HEADERS.get(status, {}), **(headers or {})})


def as_api_error(error: Exception, scope: Scope) -> ApiError:
    """What a caller is told of an error of the engine or of their input. scope: of the request, for the log."""
    if isinstance(error, ApiError):
        return _in_own_names(error, scope["path"])
    if isinstance(error, UserError):
        status = 409 if isinstance(error, ConflictError) else 400
        told = ApiError(status, str(error), code=error.code if isinstance(error, InputError) else None)
        return _in_own_names(told, scope["path"])
    if isinstance(error, EngineError):
        return ApiError(503, str(error), code="engine_error")
    frames = "".join(traceback.format_tb(error.__traceback__))  # its words may be a prompt
    request_id = scope.get("state", {}).get("request_id", "-")
    log.error("request %s failed: %s\n%s", request_id, type(error).__name__, frames)
    return ApiError(500, f"internal error: {type(error).__name__}")


def _in_own_names(error: ApiError, path: str) -> ApiError:
    """The same, in the words of the endpoint: fields by the names that its requests have.

    A word that is no more than a name, such as `stop`, is one where the message begins with it alone.
    """
    names = next((names for begins, names in _OWN_NAMES.items() if path.startswith(begins)), {})
    words = [name for name in names if "_" not in name]
    fields = [name for name in names if "_" in name]
    if not names:
        return error
    message = _PLACE.sub(r"\1", str(error))
    message = re.sub(rf"^(?:{'|'.join(words)})(?=:| must| need)", lambda found: names[found[0]], message)
    message = re.sub(rf"(?<!['\"\w])(?:{'|'.join(fields)})(?!['\"\w])", lambda found: names[found[0]], message)
    param = None if error.param is None else _PLACE.sub(r"\1", error.param)
    param = names.get(param, param) if param is not None else None
    return ApiError(error.status, message, param, error.code)


def add_error_handlers(app: FastAPI, fields: Collection[str]) -> None:
    """fields: of all requests, one of which begins the message of an error about it."""

    async def handle(request: Request, error: Exception) -> Response:
        api = as_api_error(error, request.scope)
        param = _field_of(str(api), fields) if api.param is None and isinstance(error, UserError) else api.param
        return error_response(api.status, str(api), param, api.code)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        problems = problems_of(error.errors(), error.body)
        param, code = next(((path, code) for path, _, code in problems if path), (None, problems[0][2]))
        messages = dict.fromkeys(f"{path}: {text}" if path else text for path, text, _ in problems)
        return error_response(400, "; ".join(list(messages)[:8]), param, code)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        if "GET" in headers.get("Allow", ""):
            headers["Allow"] += ", HEAD"  # see `AccessMiddleware`
        detail = str(error.detail)
        if error.status_code == 404 and detail == "Not Found":
            detail = no_such_route(request.url.path)
        return error_response(error.status_code, detail, headers=headers)

    for kind in (ApiError, UserError, EngineError):
        app.add_exception_handler(kind, handle)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def _field_of(message: str, fields: Collection[str]) -> str | None:
    found = re.match(r"(?:the )?([a-z_]+)\b", message)
    return found[1] if found and found[1] in fields else None
