"""The page at `/`: files of the package that chat with the served model, and load nothing from elsewhere."""

from collections.abc import Callable
from functools import partial
from importlib import resources

from fastapi import APIRouter, Request, Response

_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self'",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
)
_HEADERS = {
    "Content-Security-Policy": "; ".join(_POLICY),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


Files = dict[str, tuple[bytes, str]]
"""Content and media type by path."""


def page_files() -> Files:
    """Those of the page. They need no key: the page asks for one, and sends it with what it asks."""
    files = {}
    for file in (resources.files("treetop") / "assets" / "ui").iterdir():
        path = "/" if file.name == "index.html" else f"/ui/{file.name}"
        files[path] = (file.read_bytes(), _KINDS[f".{file.name.rpartition('.')[2]}"])
    return files


def page(files: Files) -> APIRouter:
    router = APIRouter()
    for path, (content, kind) in files.items():
        answer = partial(Response, content, media_type=kind, headers=_HEADERS)
        router.add_route(path, partial(_answered, answer), include_in_schema=False)
    return router


async def _answered(answer: Callable[[], Response], request: Request) -> Response:
    return answer()
