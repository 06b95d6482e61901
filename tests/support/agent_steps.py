"""An agent's task as agents send it: 46 tools, and 12 steps of which each has the calls and results of those before.

The shape is that in which calls came out broken under speculation elsewhere (spark-playbooks 89).
"""

import json
from typing import Any

NUM_TOOLS, NUM_STEPS = 46, 12
_VERBS = ("read", "write", "list", "move", "find", "run", "open", "close", "add", "drop")
_NOUNS = ("file", "folder", "branch", "issue", "page")
_PLACES = ("src/app.py", 'docs/"notes".md', "tests\\unit", "größe/Übung 1.txt", "a/b c/{x}.json", "")


def name_of(number: int) -> str:
    return f"{_VERBS[number % len(_VERBS)]}_{_NOUNS[number // len(_VERBS)]}"


def tools() -> list[dict[str, Any]]:
    """Functions of a text, a number, a switch and a list, in the proportions of a scheme agent."""
    listed = []
    for number in range(NUM_TOOLS):
        properties: dict[str, Any] = {"path": {"type": "string"}}
        if number % 2:
            properties["count"] = {"type": "integer"}
        if number % 3 == 0:
            properties["force"] = {"type": "boolean"}
        if number % 5 == 0:
            properties["lines"] = {"type": "array", "items": {"type": "string"}}
        schema = {"type": "object", "properties": properties, "required": ["path"]}
        listed.append({"type": "function", "function": {"name": name_of(number), "parameters": schema}})
    return listed


def call_of(step: int) -> tuple[str, dict[str, Any]]:
    """What a model that does the task calls in a step."""
    number = step * 11 % NUM_TOOLS
    arguments: dict[str, Any] = {"path": _PLACES[step % len(_PLACES)]}
    if number % 2:
        arguments["count"] = 10**step
    if number % 3 == 0:
        arguments["force"] = step % 2 == 0
    if number % 5 == 0:
        arguments["lines"] = [f"line {step}", "</tool_call>" if step % 2 else '"}', ""]
    return name_of(number), arguments


def messages(calls: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """The conversation before the next step. calls: names and arguments so far, as the answers had them."""
    said: list[dict[str, Any]] = [{"role": "user", "content": "Tidy up the project, one step at a time."}]
    for step, (name, arguments) in enumerate(calls):
        call = {"id": f"call_{step}", "type": "function", "function": {"name": name, "arguments": arguments}}
        said.append({"role": "assistant", "content": None, "tool_calls": [call]})
        result = json.dumps({"step": step, "ok": True, "left": ["item"] * step})
        said.append({"role": "tool", "tool_call_id": f"call_{step}", "content": result})
    return said
