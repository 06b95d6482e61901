"""Chats to ids for many clients at a time: two processes, so that a small chat never waits for a large one."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from treetop.text.chat_input import Message, rendering
from treetop.text.chat_prompt import chat_ids
from treetop.text.chat_template import ChatTemplate
from treetop.text.prompts import PromptReader
from treetop.text.size_class_pools import SizeClassPools

LARGE_CHAT = 2**16
"""Characters of JSON from which on a chat is large. A smaller one takes some milliseconds."""


class Rendering:
    """Renders small chats in one process and large ones in another, each in the order of their coming."""

    def __init__(self, template: ChatTemplate) -> None:
        self._small, self._large = template, template.twin()
        self._pools = SizeClassPools("render", LARGE_CHAT)
        self.template = template
        """For what it says of itself."""

    async def ids_of(
        self,
        reader: PromptReader,
        messages: Sequence[Message],
        options: Mapping[str, Any],
        continues: bool = False,
        cut: bool = False,
    ) -> list[int]:
        """As `chat_ids` of `text/chat_prompt.py`. Raises InputError."""
        size = len(rendering(messages, options))
        template = self._large if size >= LARGE_CHAT else self._small
        work = partial(chat_ids, template, reader, messages, options, continues=continues, cut=cut)
        return await self._pools.run(size, work)

    def close(self) -> None:
        self._pools.close()
        self._small.close()
        self._large.close()
