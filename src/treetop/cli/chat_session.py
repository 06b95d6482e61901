"""A conversation as a terminal shows it: messages, what is said of them, and commands that begin with a slash."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from treetop.cli.output import summary
from treetop.llm import LLM, RequestOutput, TextDelta
from treetop.text.tokenizer import TokenStream
from treetop.types.errors import InputError, close_name
from treetop.types.sampling import SamplingParams

DEPTH_STYLES = ("color(172)", "color(34)", "color(35)", "color(36)", "color(37)", "color(38)", "color(39)")
"""Of a token by its depth, the last for any beyond; they can be read on light and on dark."""
_OFF = ("off", "none")


class ChatSession:
    """One conversation with one engine. figures: a line of them follows each answer."""

    def __init__(
        self,
        llm: LLM,
        sampling: dict[str, Any],
        template: str | None,
        system: str | None,
        color_depth: bool,
        *,
        figures: bool,
    ) -> None:
        """sampling: options that were given; the others are the model's own. template: instead of the model's."""
        self._llm, self._template, self._figures = llm, template, figures
        self._sampling = {"max_tokens": llm.max_context, **sampling}
        self._system, self._color_depth = system, color_depth
        self._messages: list[dict[str, str]] = []
        self._outputs: list[RequestOutput] = []
        self._elapsed_s = 0.0
        self._console = Console(highlight=False, soft_wrap=True)
        self._notes = Console(stderr=not figures, highlight=False, soft_wrap=True, style="dim")
        self._commands: dict[str, tuple[Callable[[str], object], str]] = {
            "help": (self._help, "this list"),
            "temperature": (self._set_temperature, "X: 0 is greedy; off for the model's own"),
            "seed": (self._set_seed, "N: of draws from now on; off draws one for each answer"),
            "max-tokens": (self._set_max_tokens, "N: of an answer at most; off for all that the context holds"),
            "system": (self._set_system, "TEXT: the system prompt; off for none; alone shows it"),
            "stats": (self._show_statistics, "tokens, rounds, accept length and speed so far"),
            "reset": (self._reset, "forget the conversation"),
            "quit": (lambda _: None, "end the chat; so does Ctrl-D"),
        }

    def say(self, words: str) -> None:
        """What is not of the model."""
        self._notes.print(Text(words))

    def take(self, line: str) -> bool:
        """A message, or a command. False if that ends the chat. Raises InputError and EngineError; nothing has changed.

        Two slashes begin a message that begins with one.
        """
        if not line.strip():
            return True
        if not line.startswith("/") or line.startswith("//"):
            self._answer(line.removeprefix("/") if line.startswith("//") else line)
            return True
        name, _, argument = line[1:].strip().partition(" ")
        if name not in self._commands:
            meant = close_name(name, self._commands)
            raise InputError(
                f"/{name}: no such command; " + (f"did you mean /{meant}?" if meant else "/help lists them")
            )
        self._commands[name][0](argument.strip())
        return name != "quit"

    def _answer(self, text: str) -> None:
        """Stream the next message. Ctrl-C ends it; what came stays in the conversation."""
        message = {"role": "user", "content": text}
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        params = self._params()
        (ids,) = self._llm.chat_prompts([*system, *self._messages, message], params, self._template)
        said, output, started_s = list[str](), None, time.perf_counter()
        deltas = self._llm.stream(ids, params)
        painter = DepthPainter(self._llm.tokenizer.stream(ids) if self._color_depth and self._llm.tokenizer else None)
        try:
            for delta in deltas:
                said.append(delta.text)
                self._show(painter.painted(delta))
                output = delta.output
        except KeyboardInterrupt:
            close = getattr(deltas, "close", None)  # of a generator: the engine is told
            if close is not None:
                close()
        self._messages += [message, {"role": "assistant", "content": "".join(said)}]
        sys.stdout.write("\n")
        sys.stdout.flush()
        elapsed_s = time.perf_counter() - started_s
        if output is None:
            self.say("[stopped]")
            return
        self._outputs.append(output)
        self._elapsed_s += elapsed_s
        if output.error is not None:
            self.say(f"the answer was aborted: {output.error}")
        if self._figures:
            self.say(summary([output], elapsed_s))

    def _show(self, pieces: Iterator[tuple[str, int | None]]) -> None:
        """Text as it comes. On a terminal nothing in it can move the cursor or change the screen."""
        for piece, depth in pieces:
            shown = _without_controls(piece) if self._console.is_terminal else piece
            if depth is None or not self._console.is_terminal:
                sys.stdout.write(shown)
            else:
                style = DEPTH_STYLES[min(depth, len(DEPTH_STYLES) - 1)]
                self._console.print(Text(shown, style), end="")
        sys.stdout.flush()

    def _params(self, **changes: Any) -> SamplingParams:
        given = {name: value for name, value in {**self._sampling, **changes}.items() if value is not None}
        return self._llm.default_sampling_params(**given)

    # ------------------------------------------------------------------ commands

    def _change(self, name: str, kind: type, argument: str) -> None:
        """Set a sampling option, or leave it to the model. Raises InputError, and nothing has changed."""
        command = name.replace("_", "-")
        if not argument:
            raise InputError(f"/{command}: give a number, or off")
        value = None if argument in _OFF else _number(kind, argument, command)
        if value is None and name == "max_tokens":
            value = self._llm.max_context
        self._params(**{name: value})
        self._sampling[name] = value
        self.say(f"{command}: {argument}")

    def _set_temperature(self, argument: str) -> None:
        self._change("temperature", float, argument)

    def _set_seed(self, argument: str) -> None:
        self._change("seed", int, argument)

    def _set_max_tokens(self, argument: str) -> None:
        self._change("max_tokens", int, argument)

    def _set_system(self, argument: str) -> None:
        if argument:
            self._system = None if argument in _OFF else argument
        self.say(f"system: {self._system or 'none'}")

    def _show_statistics(self, _: str) -> None:
        if not self._outputs:
            self.say("no answer yet")
            return
        self.say(f"{len(self._outputs)} answers " + summary(self._outputs, self._elapsed_s))
        depths = Counter(depth for output in self._outputs for depth in output.draft_depths)
        self.say("tokens by draft depth: " + ", ".join(f"{depth}: {count}" for depth, count in sorted(depths.items())))

    def _reset(self, _: str) -> None:
        self._messages.clear()
        self.say("the conversation is forgotten")

    def _help(self, _: str) -> None:
        for name, (_call, words) in self._commands.items():
            self.say(f"/{name:<12} {words}")
        self.say("//... is a message that begins with a slash. Ctrl-C ends an answer.")
        if self._color_depth:
            self._console.print("colours: ", *(Text(f"depth {i}", style) for i, style in enumerate(DEPTH_STYLES)))


class DepthPainter:
    """Divides text as it streams by the tokens that it comes of. stream: of single tokens; None divides nothing."""

    def __init__(self, stream: TokenStream | None) -> None:
        self._stream = stream
        self._waiting: list[tuple[str, int]] = []  # text of tokens that has not been shown, as where a stop may begin

    def painted(self, delta: TextDelta) -> Iterator[tuple[str, int | None]]:
        """Pieces of a delta's text, each with its token's draft depth; None if that is not known."""
        if self._stream is None:
            yield delta.text, None
            return
        for token, depth in zip(delta.token_ids, delta.draft_depths, strict=True):
            self._waiting.append((self._stream.push((token,)), depth))
        if delta.output is not None:
            self._waiting.append((self._stream.flush(), 0))
        left = delta.text
        while left and self._waiting:
            text, depth = self._waiting.pop(0)
            if len(text) > len(left):
                self._waiting.insert(0, (text[len(left) :], depth))
            if text:
                yield left[: len(text)], depth
            left = left[len(text) :]
        if left:
            yield left, None


def _without_controls(text: str) -> str:
    """Text whose control characters, but for line ends and tabs, are marked as unreadable."""
    return "".join(each if each in "\n\t" or not _is_control(ord(each)) else "\ufffd" for each in text)


def _is_control(code: int) -> bool:
    return code < 32 or 127 <= code < 160


def _number(kind: type, text: str, command: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise InputError(f"/{command}: must be a number or off, got {text[:50]!r}") from None
