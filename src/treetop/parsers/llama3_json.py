"""Calls of Llama 3.1 to 3.3: an output that is a JSON object, or several behind `;`, perhaps behind `<|python_tag|>`.

    {"name": "f", "parameters": {"a": 1}}

Any other output is content; so is an object that calls no tool of the request. Source: the chat template of
meta-llama/Llama-3.1-8B-Instruct.
"""

from treetop.parsers.arguments import Tools
from treetop.parsers.json_call import json_call
from treetop.parsers.source import END, Source, Steps
from treetop.parsers.writer import Writer


def llama3_json(source: Source, out: Writer, tools: Tools) -> Steps[None]:
    more = True
    while more:
        source.keep()
        yield from source.space()
        yield from source.word("<|python_tag|>")
        yield from source.space()
        is_call = yield from json_call(source, out, tools.names, strict=True)
        text = source.kept()
        if not is_call:
            out.content(text)
            break
        source.keep()
        yield from source.space()
        more = bool((yield from source.word(";")))
        text = source.kept()
        out.content("" if more else text)
    yield from source.until(END, out.content)
