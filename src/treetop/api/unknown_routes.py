"""What is said of a path that is no route: what to use instead, or that there is no such thing."""

_LORA = "POST /v1/load_lora_adapter or /v1/unload_lora_adapter; a request gives an adapter's name as its model"
_POOLING = "embeddings, scores and ranks are not supported: this server generates text"
_NO_FETCH = "models are not fetched here: one is served, by `treetop serve MODEL`"
_HINTS = {
    "/v1/embeddings": _POOLING,
    "/v1/score": _POOLING,
    "/v1/rerank": _POOLING,
    "/v2/rerank": _POOLING,
    "/v1/classify": _POOLING,
    "/score": _POOLING,
    "/rerank": _POOLING,
    "/pooling": _POOLING,
    "/classify": _POOLING,
    "/embedding": _POOLING,
    "/embeddings": _POOLING,
    "/reranking": _POOLING,
    "/encode": _POOLING,
    "/api/embed": _POOLING,
    "/api/embeddings": _POOLING,
    "/api/pull": _NO_FETCH,
    "/api/push": _NO_FETCH,
    "/api/create": _NO_FETCH,
    "/api/copy": _NO_FETCH,
    "/api/delete": _NO_FETCH,
    "/load_lora_adapter": _LORA,
    "/unload_lora_adapter": _LORA,
    "/v1/messages/batches": "batches are not supported; POST /v1/messages",
    "/v1/batches": "start the server with --batch-dir FOLDER, or use treetop run-batch",
    "/v1/files": "start the server with --batch-dir FOLDER",
    "/v1/images": "images are not supported: this server generates text",
    "/v1/audio": "audio is not supported: this server generates text",
    "/v1/moderations": "moderation is not supported",
    "/v1/complete": "POST /v1/messages or /v1/completions",
    "/chat/completions": "POST /v1/chat/completions: a client's base URL ends with /v1",
    "/completions": "POST /v1/completions: a client's base URL ends with /v1",
    "/responses": "POST /v1/responses: a client's base URL ends with /v1",
    "/models": "GET /v1/models: a client's base URL ends with /v1",
    "/messages": "POST /v1/messages",
    "/infill": "POST /completion: the models here fill no gaps",
    "/slots": "GET /load",
    "/get_model_info": "GET /server_info or /v1/models",
    "/model_info": "GET /server_info or /v1/models",
    "/get_load": "GET /load",
    "/v1/v1/": "a client of Anthropic's API takes the base URL without /v1",
    "/reset_prefix_cache": "POST /flush_cache",
    "/pause_generation": "updates of weights say what becomes of requests: in_flight",
    "/docs": "the pages are docs/serving.md; GET /openapi.json has the schema",
    "/redoc": "the pages are docs/serving.md; GET /openapi.json has the schema",
}
"""By a path, or by what it begins with up to a slash. The longest that fits is taken."""


def no_such_route(path: str) -> str:
    """The text of a 404."""
    fitting = [known for known in _HINTS if path == known or path.startswith(f"{known.rstrip('/')}/")]
    hint = _HINTS[max(fitting, key=len)] if fitting else "GET /openapi.json lists what there is"
    return f"there is no {path[:100]}: {hint}"
