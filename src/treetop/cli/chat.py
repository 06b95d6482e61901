"""`treetop chat`: a conversation in the terminal, or one line of stdin after the other."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from treetop.cli.options import (
    add_engine_options,
    add_sampling_options,
    engine_options,
    given_options,
    sampling_params,
    simulation,
)
from treetop.types.errors import EngineError, InputError, UserError
from treetop.types.sampling import SamplingParams

if TYPE_CHECKING:
    from treetop.cli.chat_session import ChatSession  # loads PyTorch

HELP = "a chat in the terminal; piped stdin is a message a line"
PROMPT = "> "


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="file with a chat template, or the template itself, instead of the model's",
    )
    parser.add_argument(
        "--color-depth", action="store_true", help="colour each token by the depth of the draft that it was"
    )
    add_sampling_options(parser)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    sampling_params(args)  # raises for what is wrong, by the flag's name
    given = given_options(args, SamplingParams)
    _check_template(args)
    from treetop.cli.chat_session import ChatSession
    from treetop.llm import LLM

    llm = LLM(args.model, **engine_options(args))
    if option := simulation(args):
        print(f"treetop: {option}: the output is wrong on purpose", file=sys.stderr)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    session = ChatSession(llm, given, args.chat_template, args.system, args.color_depth, figures=interactive)
    return _converse(session) if interactive else _answer_lines(session)


def _check_template(args: argparse.Namespace) -> None:
    """Raise UserError, before any weight is read, where there is no chat template or it cannot be used."""
    from treetop.checkpoints.folder import resolve_folder
    from treetop.serve_options import Unset, engine_config
    from treetop.text.chat_template import open_chat_template

    folder = resolve_folder(engine_config(args.model, Unset.UNSET, engine_options(args)).model)
    template = open_chat_template(folder, args.chat_template)
    if template is None:
        raise InputError(
            f"{folder} has no chat template; give one with --chat-template FILE, or complete text with treetop generate"
        )
    problem = template.problem() or template.overrun()
    template.close()
    if problem is not None:
        raise InputError(f"chat template: {problem}")


def _converse(session: "ChatSession") -> int:
    """At a terminal: until /quit, Ctrl-D or Ctrl-C twice. What goes wrong with a message does not end it."""
    with suppress(ImportError):
        import readline  # noqa: F401  # `input` edits lines and knows earlier ones with it
    session.say("/help lists commands. Ctrl-C ends an answer, Ctrl-D the chat.")
    for line in _typed(session):
        try:
            if not session.take(line):
                break
        except (UserError, EngineError) as error:
            session.say(f"treetop: {error}")
    return 0


def _typed(session: "ChatSession") -> Iterator[str]:
    """Lines that are typed. Ctrl-C drops the line that is open; with nothing typed in between a second one ends."""
    interrupted = False
    while True:
        try:
            line = input(PROMPT)
        except EOFError:
            session.say("")
            return
        except KeyboardInterrupt:
            session.say("" if interrupted else "\nCtrl-C again, Ctrl-D or /quit ends the chat.")
            if interrupted:
                return
            interrupted = True
            continue
        interrupted = False
        yield line


def _answer_lines(session: "ChatSession") -> int:
    """Piped: a message or a command a line, of one conversation; only answers are on stdout. Errors end it."""
    for line in sys.stdin:
        if not session.take(line.rstrip("\r\n")):
            break
    return 0
