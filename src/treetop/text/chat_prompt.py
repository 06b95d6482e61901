"""A conversation's prompt: messages through a chat template to ids. What they say is text, never a special token."""

from collections.abc import Mapping, Sequence
from typing import Any

from treetop.text.chat_input import Message, rendering
from treetop.text.chat_template import ChatTemplate
from treetop.text.prompts import PromptReader
from treetop.text.special_text import Marks, SpecialText
from treetop.types.errors import InputError


def chat_ids(
    template: ChatTemplate,
    reader: PromptReader,
    messages: Sequence[Message],
    options: Mapping[str, Any],
    *,
    continues: bool = False,
    cut: bool = False,
) -> list[int]:
    """Ids of a conversation. options: of the template. continues: the last message is open, and the output goes on.

    cut: the prompt may be longer than the context. Raises InputError for messages that the template refuses.
    """
    if continues and options.get("add_generation_prompt"):
        raise InputError("continue_final_message, add_generation_prompt: give one of them")
    options = {**options, "add_generation_prompt": options.get("add_generation_prompt", not continues)}
    special = None if reader.tokenizer is None else reader.tokenizer.special_text
    if special is None:
        return reader.encode("", False)  # which says what is missing
    rendering(messages, options)  # raises for what is no JSON
    marks = special.marks([[*messages], options])
    given = _given(messages, special, marks, continues)
    try:
        text = template.render(given, **special.hidden(options, marks))
    except InputError as error:
        raise InputError(marks.removed(str(error))) from None
    if continues:
        text = _open_end(text, marks)
    ids = reader.encode(marks.removed(text), False, cut)
    if not marks.in_text(text) and special.are_names_alone(text, ids):
        return ids
    return special.encode(text, marks)


def _given(messages: Sequence[Message], special: SpecialText, marks: Marks, continues: bool) -> list[Message]:
    """The messages as the template gets them: without names of special tokens, and with a mark where the last ends."""
    given = []
    for message in messages:
        hidden, content = special.hidden(message, marks), message.get("content")
        if isinstance(content, str):
            hidden["content"] = special.hidden_content(content, marks)
        given.append(hidden)
    if continues:
        if not given or not isinstance(given[-1].get("content"), str):
            raise InputError("continue_final_message: the last message has no text to go on with")
        given[-1]["content"] += marks.end + " "  # a space, so that it shows whether the template trims
    return given


def _open_end(text: str, marks: Marks) -> str:
    """A rendered text up to the end of its last message."""
    at = text.rfind(marks.end)
    if at < 0:
        raise InputError("continue_final_message: the chat template does not show the last message's end")
    return text[:at] if text.startswith(marks.end + " ", at) else text[:at].rstrip()
