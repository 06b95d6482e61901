"""Errors in OpenAI's shape. What a caller sent never becomes a 500, and never reaches the log."""

import logging
import traceback
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from treetop.types.errors import EngineError, UserError

log = logging.getLogger("treetop.server")


class ApiError(Exception):
    """An answer with an error. param: the field it is about. kind, code: OpenAI's `type` and `code`."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = _KINDS.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return JSONResponse(error_body(status, message, param, code), status, headers)


def as_api_error(error: Exception) -> ApiError:
    """What a caller is told of an error of the engine or of their input."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    if isinstance(error, EngineError):
        return ApiError(503, str(error), code="engine_error")
    frames = "".join(traceback.format_tb(error.__traceback__))  # its words may be a prompt
    log.error("a request failed: %s\n%s", type(error).__name__, frames)
    return ApiError(500, f"internal error: {type(error).__name__}")


def add_error_handlers(app: FastAPI) -> None:
    async def told(request: Request, error: Exception) -> Response:
        api = as_api_error(error)
        return error_response(api.status, str(api), api.param, api.code)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        problems = [_problem(each) for each in error.errors()]
        param = next((name for name, _ in problems if name), None)
        messages = dict.fromkeys(f"{name}: {text}" if name else text for name, text in problems)
        return error_response(400, "; ".join(list(messages)[:8]), param)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(error.status_code, str(error.detail))

    for kind in (ApiError, UserError, EngineError):
        app.add_exception_handler(kind, told)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def _problem(error: dict[str, Any]) -> tuple[str | None, str]:
    """The field and what is wrong with it. The input itself stays out: it may be a prompt, or large."""
    where = [str(part) for part in error["loc"][1:] if not str(part).startswith(("function-", "list[", "constrained-"))]
    if error["type"] == "json_invalid":
        return None, f"the body is not JSON: {error.get('ctx', {}).get('error', '')}"
    if (error["type"] == "missing" and not where) or error["type"] == "model_attributes_type":
        return None, "the body must be a JSON object, with Content-Type: application/json"
    if error["type"] == "unsupported":
        return str(error["ctx"]["name"]), str(error["msg"])
    name = where[0][:100] if where else None
    return name, "unknown field" if error["type"] == "extra_forbidden" else str(error["msg"])
