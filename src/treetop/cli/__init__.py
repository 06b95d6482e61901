"""The command line: a file for each command of `treetop`, and the options they share.

Exit codes: 0 ok; 1 a failure at run time, unequal outputs in bench, failed conformance or an uncaught
fault in doctor; 2 bad input or configuration, one line on
stderr; 130 Ctrl-C.
"""

from treetop.cli.command_line import OneLineParser, build_parser, exit_code, main

__all__ = ["OneLineParser", "build_parser", "exit_code", "main"]
