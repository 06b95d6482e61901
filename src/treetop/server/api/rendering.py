"""Chats to text for many clients at a time: two processes, so that a small chat never waits for a large one."""

from collections.abc import Mapping, Sequence
from typing import Any

from treetop.server.chat_input import Message
from treetop.server.chat_template import ChatTemplate, template_line
from treetop.server.lanes import Lanes

LARGE_CHAT = 2**16
"""Characters of JSON from which on a chat is large. A smaller one takes some milliseconds."""


class Rendering:
    """Renders small chats in one process and large ones in another, each in the order of their coming."""

    def __init__(self, template: ChatTemplate) -> None:
        self._small, self._large = template, template.twin()
        self._lanes = Lanes("render", LARGE_CHAT)

    async def text_of(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        """As `ChatTemplate.render`. Raises InputError."""
        line = template_line(messages, options)
        template = self._large if len(line) >= LARGE_CHAT else self._small
        return await self._lanes.run(len(line), template.render_line, line)

    def close(self) -> None:
        self._lanes.close()
        self._small.close()
        self._large.close()
