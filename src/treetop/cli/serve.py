"""`treetop serve`: an HTTP server with OpenAI's API."""

import argparse

from treetop.cli.options import add_engine_options, engine_options
from treetop.server import command

HELP = "an HTTP server with OpenAI's API"


def add_options(parser: argparse.ArgumentParser) -> None:
    command.add_serve_flags(parser, add_engine_options(parser))


def run(args: argparse.Namespace) -> int:
    return command.run_serve(args, engine_options(args))
