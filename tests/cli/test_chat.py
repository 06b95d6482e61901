"""`treetop chat`: piped, and at a terminal, where Ctrl-C ends an answer and not the chat."""

import io
import os
import pty
import select
import signal
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from support.command_line import refused, run
from support.holding import ANSWER, Held
from support.waiting import WAIT_S
from support.warm import Popen
from treetop import LLM
from treetop.checkpoints.folder import resolve_folder
from treetop.cli.chat import _typed
from treetop.cli.chat_session import ChatSession, DepthPainter
from treetop.outputs import TextDelta
from treetop.text.tokenizer import Tokenizer
from treetop.types.errors import InputError

HI = "def area(r):"


@pytest.fixture(scope="module")
def llm():
    return LLM()


def piped(capsys, monkeypatch, text: str, *flags):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return run(capsys, "chat", "--temperature", 0, *flags)


class Terminal:
    """A chat of a process of its own, at a pseudo-terminal."""

    def __init__(self, *flags: str, environment: dict[str, str]) -> None:
        self._mine, theirs = pty.openpty()
        environment = {**os.environ, **environment, "TERM": "xterm-256color"}
        command = [sys.executable, "-m", "treetop.cli", "chat", "--temperature", "0", *flags]
        self.process = Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)
        self.seen = ""

    def wait_for(self, words: str) -> str:
        """Until the terminal shows this behind what was waited for before. Returns what came until then."""
        deadline = time.monotonic() + WAIT_S
        while words not in self.seen:
            ready, _, _ = select.select([self._mine], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, self.seen
            try:
                self.seen += os.read(self._mine, 4096).decode(errors="replace")
            except OSError:  # the other end is closed
                raise AssertionError(self.seen) from None
        before, self.seen = self.seen.split(words, 1)
        return before

    def type(self, text: str) -> None:
        os.write(self._mine, text.encode())

    def interrupt(self) -> None:
        """As Ctrl-C at a terminal, for all processes of the chat."""
        os.killpg(self.process.pid, signal.SIGINT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        os.close(self._mine)


@contextmanager
def terminal(*flags: str, environment: dict[str, str]):
    chat = Terminal(*flags, environment=environment)
    try:
        yield chat
    finally:
        chat.close()


# ---------------------------------------------------------------------------------------------- piped


def test_piped_lines_are_messages_of_one_conversation(capsys, monkeypatch, llm):
    """Only answers are on stdout, each as `LLM.chat` gives it; commands are taken, too."""
    params = llm.default_sampling_params(temperature=0, max_tokens=9)
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": HI}]
    first = llm.chat(messages, params)[0].text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "/go on"}]
    second = llm.chat(messages, params)[0].text
    code, out, err = piped(capsys, monkeypatch, f"/system Be short.\n{HI}\n\n//go on\n/stats\n", "--max-tokens", 9)
    assert code == 0
    assert out == f"{first}\n{second}\n"
    assert "system: Be short." in err
    assert "2 answers [18 tokens," in err
    assert "tokens by draft depth: 0: " in err


def test_quit_ends_it_and_a_wrong_command_is_an_error(capsys, monkeypatch):
    code, out, err = piped(capsys, monkeypatch, "/temprature 1\n")
    assert (code, out) == (2, "")
    assert "/temprature: no such command; did you mean /temperature?" in err
    assert piped(capsys, monkeypatch, "/quit\nnever asked\n")[:2] == (0, "")


def test_what_cannot_work_is_refused_before_any_weight_is_read(capsys, monkeypatch):
    """A model without a template, and a template that is none."""
    monkeypatch.setattr("treetop.llm.LLM", None)
    model = "tests/checkpoints/nestling-hybrid"
    refused(capsys, ["chat", model], "has no chat template", "--chat-template FILE", "treetop generate")
    refused(capsys, ["chat", "--chat-template", "{% if %}"], "chat template")
    refused(capsys, ["chat", "--chat-template", "{{ messages[0].content * 10**10 }}"], "it takes more than 1024 MiB")
    refused(capsys, ["chat", "--chat-template", "/none"], "--chat-template /none")
    refused(capsys, ["chat", "--temperature", "-1"], "--temperature")


# ---------------------------------------------------------------------------------------------- commands


@pytest.mark.slow
def test_commands_change_what_the_next_answer_is_drawn_with(llm, capsys):
    """A seed gives the same draw again, off leaves it to chance, and a bad value changes nothing."""
    session = ChatSession(llm, {"max_tokens": 12}, None, None, False, figures=False)

    def answer() -> str:
        capsys.readouterr()
        session.take("/reset")
        session.take(HI)
        return capsys.readouterr().out

    session.take("/temperature 1.5")
    session.take("/seed 4")
    drawn = answer()
    assert answer() == drawn
    session.take("/seed 5")
    assert answer() != drawn
    for line, words in [
        ("/temperature -1", "temperature"),
        ("/temperature warm", "must be a number or off, got 'warm'"),
        ("/seed", "give a number, or off"),
        ("/max-tokens 0", "max_tokens must be at least 1"),
    ]:
        with pytest.raises(InputError, match=words):
            session.take(line)
    session.take("/seed 4")
    assert answer() == drawn
    session.take("/max-tokens 2")
    assert len(answer()) < len(drawn)
    session.take("/help")
    err = capsys.readouterr().err
    assert all(f"/{name}" in err for name in ("temperature", "seed", "system", "stats", "reset", "quit"))


def test_a_message_that_has_no_room_leaves_the_conversation_as_it_was(capsys):
    session = ChatSession(LLM(context_length=64), {"max_tokens": 4}, None, None, False, figures=False)
    session.take(HI)
    before = list(session._messages)
    with pytest.raises(InputError, match="context of 64"):
        session.take("word " * 200)
    assert session._messages == before
    session.take("on")


def test_text_is_divided_by_the_tokens_that_it_comes_of():
    """Also where a piece waits, as before a stop string, or a character comes in several tokens."""
    tokenizer = Tokenizer(resolve_folder("builtin:nestling"))
    text = "naïve 日本: return 3 * r"
    ids = tuple(tokenizer.encode(text, special=False))
    depths = tuple(place % 4 for place in range(len(ids)))
    for held in (0, 1, 5):
        painter, shown, left = DepthPainter(tokenizer.stream([])), [], text
        for at in range(0, len(ids), 3):
            known = tokenizer.decode(list(ids[: at + 3])).rstrip("\ufffd")
            until = max(len(known) - held, len(text) - len(left))
            piece, left = text[len(text) - len(left) : until], text[until:]
            shown += painter.painted(TextDelta(0, piece, token_ids=ids[at : at + 3], draft_depths=depths[at : at + 3]))
        shown += painter.painted(TextDelta(0, left))
        assert "".join(piece for piece, _ in shown) == text
        assert {depth for _, depth in shown} == {0, 1, 2, 3}
        if not held:
            stream = tokenizer.stream([])
            alone = [(stream.push((token,)), depth) for token, depth in zip(ids, depths, strict=True)]
            assert shown == [pair for pair in alone if pair[0]]


# ---------------------------------------------------------------------------------------------- a terminal


def test_ctrl_c_ends_an_answer_and_not_the_chat(tmp_path):
    """In the middle of it, where it stands still. What came stays in the conversation; Ctrl-D ends the chat."""
    held = Held(tmp_path, ANSWER)
    with terminal("--ignore-eos", "--color-depth", environment=held.environment) as chat:
        chat.wait_for("/help lists commands")
        chat.wait_for("> ")
        chat.type(f"{HI}\n")
        chat.wait_for("\x1b[38;5;34m")  # a draft of depth 1
        chat.interrupt()
        chat.wait_for("[stopped]")
        held.go()
        chat.wait_for("> ")
        chat.type("/max-tokens 4\n")
        chat.wait_for("max-tokens: 4")
        chat.type("and then\n")
        chat.wait_for("[4 tokens,")
        chat.type("/seed x\n")
        chat.wait_for("/seed: must be a number or off, got 'x'")
        chat.wait_for("> ")
        chat.type("\x04")
        assert chat.process.wait(WAIT_S) == 0


def test_at_the_prompt_ctrl_c_ends_the_chat_the_second_time_in_a_row(monkeypatch):
    """A line in between counts anew."""
    typed = iter([KeyboardInterrupt, "a line", KeyboardInterrupt, KeyboardInterrupt, "never read"])

    def read(_prompt: str) -> str:
        given = next(typed)
        if given is KeyboardInterrupt:
            raise KeyboardInterrupt
        return given

    monkeypatch.setattr("builtins.input", read)
    said: list[str] = []
    assert [*_typed(SimpleNamespace(say=said.append))] == ["a line"]
    assert [next(typed)] == ["never read"]
    assert sum("Ctrl-C again" in words for words in said) == 2
