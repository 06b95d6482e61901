"""The pages of docs/ that are generated, each from what it tells of: `python scripts/reference.py` writes them all.

`tests/test_reference.py` holds the pages to it.
"""

import ast
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from prometheus_client.metrics import MetricWrapperBase

from treetop.api.api_state import ApiState
from treetop.api.app import OPEN, make_app
from treetop.api.errors import KINDS, error_body
from treetop.api.keys.administration import ADMIN_PATHS
from treetop.api.metric_names import ALIASES, OWN
from treetop.api.requests import fields_page
from treetop.checkpoints.folder import resolve_folder
from treetop.cli import models, options_page
from treetop.distributed.in_flight import InFlightCounter
from treetop.kernels.table import Op, operations
from treetop.serve_options import ServeOptions
from treetop.types import errors
from treetop.types.layout import SpecShape
from treetop.types.requests import CoreInfo, PrefixPages
from treetop_debug.kernels import place_of

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
API = ROOT / "src" / "treetop" / "api"
_HEADS = {
    "benchmarks": """\
# Benchmarks

Release RELEASE. VERSIONS, if nothing else is said; each table has its card, date, commit and command. Weights are
random where no others are named, so accept lengths are forced or drawn from measured rates. Real answers are in
[smollm2.md](smollm2.md), what the load decides in [policy.md](policy.md).

This page is written by `scripts/reference.py` from `docs/figures/benchmarks.json`.
""",
    "endpoints": """\
# Endpoints

Every route of `treetop serve`, with those that an option adds: `/v1/files` and `/v1/batches` by `--batch-dir`,
`/sleep` and `/wake_up` by `--enable-sleep-mode`, adapters by `--enable-lora`, `/update_weights_...` and their
groups by `--enable-update-weights`. The last column says which need a key where the server has keys, and
which an [admin's](serving.md#the-admin-key) where it has any. HEAD works wherever GET
does. `/` is a [page](serving.md#the-page) to chat on. What bodies hold is in [fields.md](fields.md), what errors say
in [errors.md](errors.md); `/openapi.json` has it all for programs.

This page is written by `scripts/reference.py`, and a test holds it to the routes.
""",
    "metrics": """\
# Metrics

What `/metrics` tells Prometheus, under `treetop:` and under the names that vLLM and SGLang have for the same. Figures
hold for all API processes together; `process_...`, of the API process that answers, are Prometheus' own. Metrics of
keys, transfers and the tier on the host are there where there are such. [grafana.json](grafana.json) is a dashboard
to import, and more is said in [serving.md](serving.md#metrics).

This page is written by `scripts/reference.py`, and a test holds it to the metrics.
""",
    "operations": """\
# Operations

Every operation has a reference in plain tensor operations, which runs anywhere, and a kernel. An engine takes
the kernel where it serves, once, when it is made. The tolerance is how far the two may differ in float32, as a share of
the largest value; 0 is equal bits.

This page is written by `scripts/reference.py` from `src/treetop/kernels/table.py`, and a test holds it to that.

| operation | what it does | code | Triton kernels | tolerance | kernel where |
|---|---|---|---|---|---|
""",
    "errors": """\
# Errors

A failed request has a body in OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`, in Anthropic's under
`/v1/messages`, in Ollama's under `/api/`. `param` is the field that it is about, or a path such as
`messages[30].content[0].text`. 405 comes with `Allow`, 401 with `WWW-Authenticate`, 429 and 503 with `Retry-After`.

This page is written by `scripts/reference.py`, and a test holds it to the code.
""",
    "models": """\
# Models

Targets that load, as `treetop models` prints them, with the drafts that each may have. Every one is compared with
`transformers`, or where that is no oracle with one of ours, on random tiny configurations: logits, and greedy tokens
in float64, plain and with trees, in batches, chunks and pages, past windows, from the prefix cache. What a folder
holds and which draft fits is in [checkpoints.md](checkpoints.md).

This page is written by `scripts/reference.py`, and a test holds it to the registry.

Every target may have a draft of EAGLE (1 and 2), EAGLE3, PEAGLE, DFLASH, DFLASH2, DSPARK, DOMINO, STANDALONE or NGRAM;
the last column has what some have beside these.

## Targets
""",
}


def endpoints() -> str:
    """Routes by what their paths begin with, from the OpenAPI schema of a server with every option that adds one."""
    with TemporaryDirectory() as folder:
        schema = _app(folder).openapi()
    groups: dict[str, list[str]] = {}
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            needs_key = "" if path in OPEN else "admin" if path in ADMIN_PATHS else "yes"
            row = f"| {method.upper()} | `{path}` | {_words(operation, method, path)} | {needs_key} |"
            groups.setdefault(_group(path), []).append(row)
    parts = [_HEADS["endpoints"]]
    for title, rows in groups.items():
        parts += [f"## {title}\n", "| method | path | what it does | key |\n|---|---|---|---|", "\n".join(rows) + "\n"]
    return "\n".join(parts)


_GROUPS = {
    "/v1/completions": "OpenAI",
    "/v1/chat": "OpenAI",
    "/v1/models": "OpenAI",
    "/v1/responses": "OpenAI's Responses",
    "/v1/conversations": "OpenAI's Responses",
    "/v1/files": "OpenAI's batches",
    "/v1/batches": "OpenAI's batches",
    "/v1/messages": "Anthropic",
    "/api/": "Ollama",
    "/completion": "llama.cpp",
    "/props": "llama.cpp",
    "/generate": "SGLang",
    "/abort_request": "SGLang",
}
"""Whose API a path is of, by what it begins with; any other is the server's own."""


def _group(path: str) -> str:
    return next((whose for begins, whose in _GROUPS.items() if path.startswith(begins)), "The server")


def _words(operation: dict[str, Any], method: str, path: str) -> str:
    """Of a route's docstring. Raises SystemExit for a route that has none."""
    words = " ".join(operation.get("description", "").split())
    if not words:
        raise SystemExit(f"{method.upper()} {path}: its function needs a docstring")
    return words


def metrics() -> str:
    """What `/metrics` may have, from the registry of a server with every option that adds a metric."""
    with TemporaryDirectory() as folder:
        registry = _state(folder).metrics.registry
    lines = [
        _HEADS["metrics"],
        "| `treetop:` | kind | what | labels | elsewhere |\n|---|---|---|---|---|",
    ]
    for collector in registry._collector_to_names:  # a family without samples says no labels
        assert isinstance(collector, MetricWrapperBase)
        (metric,) = collector.describe()
        own = metric.name.removeprefix(OWN)
        aliases = ", ".join(f"`{each}`" for each in ALIASES.get(own, ()))
        total = "_total" if metric.type == "counter" else ""
        shown = ", ".join(f"`{each}`" for each in collector._labelnames if each != "model_name")
        lines.append(f"| `{own}{total}` | {metric.type} | {metric.documentation} | {shown} | {aliases} |")
    return "\n".join(lines) + "\n"


def _errors_of(kind: type[Exception]) -> Iterator[str]:
    doc = " ".join((kind.__doc__ or "").split())
    exit_code = 2 if issubclass(kind, errors.UserError) else 1
    status = 400 if issubclass(kind, errors.UserError) else 503 if issubclass(kind, errors.EngineError) else 500
    status = 409 if kind is errors.ConflictError else status
    yield f"| `{kind.__name__}` | `{kind.__bases__[0].__name__}` | {doc} | {exit_code} | {status} |"
    for below in kind.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from _errors_of(below)


CODES = {
    "batch_ended": "the batch has ended, and cannot be cancelled",
    "batch_not_found": "no such batch",
    "context_length_exceeded": "prompt and output need more tokens than the context has; the message says how many fit",
    "conversation_not_found": "no such conversation of this key",
    "empty_prompt": "the chat template makes no text of the messages",
    "weights_lost": "weights that had been sent went with an engine, or it failed while it took some: send them again",
    "engine_asleep": "the engine sleeps, or was put to sleep meanwhile: wake it, ask again",
    "engine_error": "the engine failed; another is started where it can be: ask again",
    "file_in_use": "a batch of this file has not ended",
    "file_not_found": "no such file",
    "invalid_json": "the body is no JSON object",
    "invalid_type": "a field holds another kind of value",
    "invalid_value": "a value out of its range, or of no use here",
    "item_not_found": "no such item of the conversation",
    "missing_required_parameter": "a field that is required",
    "model_not_found": "no model and no adapter of this name",
    "prefill_worker": "the worker only prefills: ask a decode worker or the router",
    "previous_response_not_found": "no such response, or one that cannot be gone on from",
    "queue_full": "more requests run and wait than `--max-queued-requests` allows: ask later",
    "request_failed": "this request alone failed in the engine",
    "response_not_found": "no such response of this key",
    "shutting_down": "the server ends, or what the request was doing was ended",
    "storage_full": "the files of `--batch-dir` would be larger than allowed",
    "timeout": "the time of `timeout` or `--request-timeout` is over",
    "unknown_parameter": "no such field; the message names one that is near",
    "unsupported_parameter": "the field asks for what cannot be honoured",
    "weights_replaced": "other weights came while it ran: ask again",
}
"""`code` of an error beside the usual one of its status, by what it means."""


def error_pages() -> str:
    lines = [
        _HEADS["errors"],
        "## By status\n",
        "| status | `type` | usual `code` |\n|---|---|---|",
    ]
    for status in sorted(KINDS):
        error = error_body(status, "")["error"]
        lines.append(f"| {status} | `{error['type']}` | `{error['code']}` |")
    lines += ["\n## Other codes\n", "| `code` | what it means |\n|---|---|"]
    lines += [f"| `{code}` | {CODES[code]} |" for code in sorted(CODES)]
    lines += [
        "\n## Exceptions\n",
        "What `LLM`, `AsyncLLM` and commands raise on purpose, all of `treetop.types.errors`. The exit code is that of "
        "commands, the status that of a request which meets it.\n",
        "| exception | is a | what | exit code | status |\n|---|---|---|---|---|",
        *_errors_of(errors.TreetopError),
    ]
    return "\n".join(lines) + "\n"


def codes_in_use() -> set[str]:
    """What the API's sources give as the code of an error: the fourth argument, or the one of that name."""
    found = {code for kind, code in KINDS.values()}
    for file in API.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("ApiError", "error_response"):
                given = [*node.args[3:4], *(each.value for each in node.keywords if each.arg == "code")]
                found |= {
                    each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)
                }
    return found


def model_page() -> str:
    refused = "\n## Refused\n\nWhat `treetop models --refused` prints: refused by name, with the reason.\n"
    return "\n".join([_HEADS["models"], models.as_markdown(), refused, models.refused_as_markdown()])


def benchmarks() -> str:
    """`docs/figures/benchmarks.json`, table by table."""
    results = json.loads((DOCS / "figures" / "benchmarks.json").read_text(encoding="utf-8"))
    parts = [_HEADS["benchmarks"].replace("RELEASE", results["release"]).replace("VERSIONS", results["versions"])]
    for table in results["tables"]:
        at = f" at {table['commit']}" if table["commit"] else ""
        columns = table["columns"]
        parts += [
            f"## {table['title']}\n\n{table['what']} {table['card']}, {table['date']}{at}: `{table['command']}`\n",
            _row(columns) + "\n" + _row(["---"] * len(columns)).replace(" ", ""),
            "\n".join(map(_row, table["rows"])) + "\n",
            "".join(f"- {note}\n" for note in table["notes"]),
        ]
    return "\n".join(parts).rstrip() + "\n"


def _row(cells: list[object]) -> str:
    return "| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells) + " |"


def operations_page() -> str:
    """The table of operations, a line each."""
    return _HEADS["operations"] + "".join(map(_operation, operations().values()))


def _operation(op: Op) -> str:  # type: ignore[type-arg]  # of any function
    module = op.kernel.__module__.replace(".", "/")
    launches = ", ".join(f"`{place_of(kernel).rpartition('.')[2]}`" for kernel in op.launches) or "none"
    tolerance = f"{op.tolerance:g}" if op.tolerance else "0"
    what, where = _first_sentence(op.reference), _first_sentence(op.applies)
    return f"| `{op.name}` | {what} | `src/{module}.py` | {launches} | {tolerance} | {where} |\n"


def _first_sentence(function: object) -> str:
    """Of a docstring, up to its first full stop that ends a line or is followed by a space."""
    text = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    return text.split(". ")[0].rstrip(".")


PAGES: dict[str, Callable[[], str]] = {
    "benchmarks.md": benchmarks,
    "endpoints.md": endpoints,
    "errors.md": error_pages,
    "fields.md": fields_page.page,
    "metrics.md": metrics,
    "models.md": model_page,
    "operations.md": operations_page,
    "options.md": options_page.page,
}


def _state(folder: str) -> ApiState:
    """Of a server that has not started, with every option that adds a route or a metric."""
    info = CoreInfo(str(resolve_folder("builtin:nestling")), 256, 1024, 8, SpecShape(2, 2, 4), by_priority=True)
    core: Any = SimpleNamespace(info=info._replace(prefix=PrefixPages(32, 1, 64)), failure=None, pause=None)
    options = ServeOptions(batch_dir=folder, enable_sleep_mode=True, enable_update_weights=True)
    return ApiState(core, options, "model", 0, InFlightCounter())


def _app(folder: str) -> FastAPI:
    return make_app(_state(folder))


def main() -> None:
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
