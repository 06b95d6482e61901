"""An application for Ray Serve's command line, which takes the flags of `treetop serve`, without dashes.

serve run treetop.cli.replicas:app model=FOLDER replicas=4 max-running-requests=32
"""

import io
import re
from collections.abc import Mapping
from contextlib import redirect_stderr
from typing import TYPE_CHECKING, Any

from treetop.types.errors import ConfigError, UserError
from treetop.version import DISTRIBUTION

if TYPE_CHECKING:
    from treetop.ray.app import Scale

_WHERE = "the application's arguments"
_SWITCH: dict[Any, Any] = {"true": True, "false": False}
"""What the command line of Ray gives as text."""


def app(given: Mapping[str, Any]) -> Any:
    """Replicas of a server. given: names and values, as in a file for `treetop serve --config`, and two more.

    replicas: N, or A-B for as many as the load needs (default 1). queue-bound: requests that the replica with most of a
    prompt's pages may have more than the one that has fewest (default: a quarter of those it runs at a time, at
    least 2).
    Raises UserError.
    """
    try:
        from treetop.ray.app import RefusedError
    except ModuleNotFoundError as error:
        raise ConfigError(f"replicas need {error.name}; pip install {DISTRIBUTION}[ray]") from None
    try:
        return _build(given)
    except UserError as error:
        raise RefusedError(str(error)) from None


def _build(given: Mapping[str, Any]) -> Any:
    from treetop.cli.command_line import build_parser, with_defaults_of_the_place
    from treetop.cli.config_file import words_of
    from treetop.cli.serve import asked_for
    from treetop.ray.app import build_app

    own: dict[str, Any] = {}
    for name, value in given.items():
        flag = str(name).replace("_", "-")
        if flag in own or flag in ("help", "h"):
            raise ConfigError(f"{_WHERE}: {name}: {'it is given twice' if flag in own else 'see treetop serve --help'}")
        own[flag] = _SWITCH.get(value, value) if isinstance(value, str) else value
    scale = _scale(own.pop("replicas", 1), own.pop("queue-bound", None))
    path = own.pop("config", None)
    words = ["serve", *([] if path is None else [f"--config={path}"]), *words_of(own, _WHERE)]
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            parser = build_parser()
            args = with_defaults_of_the_place(parser.parse_args(words), parser, words)
    except SystemExit:
        raise ConfigError(f"{_WHERE}: {said.getvalue().strip()}") from None
    return build_app(*asked_for(args), scale)


def _scale(replicas: Any, queue_bound: Any) -> "Scale":
    from treetop.ray.app import Scale

    found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", str(replicas))
    if found is None or not (queue_bound is None or re.fullmatch(r"\d{1,6}", str(queue_bound))):
        raise ConfigError(f"replicas must be N or A-B, queue-bound a number, got {replicas} and {queue_bound}")
    minimum = int(found[1])
    return Scale(minimum, int(found[2] or minimum), None if queue_bound is None else int(queue_bound))
