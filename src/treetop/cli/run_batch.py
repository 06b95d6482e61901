"""`treetop run-batch`: requests of a file, answered into another."""

import argparse

from treetop.cli.serve import add_serving_options, asked_for

HELP = "answer the requests of a JSONL file, in OpenAI's batch format; goes on where it was stopped"

_OF_CONNECTIONS = (
    "host",
    "port",
    "uds",
    "root_path",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "api_workers",
    "api_key",
    "admin_api_key",
    "allow_origin",
    "max_connections",
    "http_read_timeout",
    "http_min_rate",
    "http_write_timeout",
    "timeout_keep_alive",
    "drain_timeout",
    "shutdown_delay",
    "enable_sleep_mode",
    "enable_update_weights",
    "responses_db",
    "batch_dir",
    "batch_bytes",
    "batch_requests",
    "no_ui",
    "access_log",
    "api_restarts",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    files = parser.add_argument_group("files")
    files.add_argument("-i", "--input-file", required=True, metavar="FILE", help="JSON lines: custom_id, url, body")
    files.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="answers, a line each, as they come; what it has already is not asked again",
    )
    add_serving_options(parser, _OF_CONNECTIONS)


def run(args: argparse.Namespace) -> int:
    process, options = asked_for(args)
    from treetop.serve.run_batch import run as run_batch  # needs the serve extra

    return run_batch(process, options, args.input_file, args.output_file)
