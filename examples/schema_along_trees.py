"""A JSON schema, held along draft trees: the answer is that of plain decoding under the schema, in fewer rounds.

    python examples/schema_along_trees.py

Keys and quotes that the schema forces begin a tree. Between draft and verification the host finds out what may follow
each node, and the target chooses among that. Needs the extra `serve`.
"""

import json

from treetop import LLM, RequestOutput, SamplingParams, StructuredOutput

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "arguments": {"type": "array", "items": {"enum": ["int", "float", "str"]}, "minItems": 1, "maxItems": 3},
        "is_async": {"type": "boolean"},
    },
    "required": ["name", "arguments", "is_async"],
    "additionalProperties": False,
}
PROMPT = "def area(width, height):\n    return width * height\n\n# as JSON: "


def answer(draft: str | None) -> RequestOutput:
    """What the model says, by trees or, without a draft, token by token."""
    llm = LLM("builtin:nestling", draft)
    held = StructuredOutput("json_schema", json.dumps(SCHEMA))
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=96, structured_output=held))
    llm.close()
    return output


def main() -> None:
    by_trees, plain = answer("builtin:nestling-eagle3"), answer(None)
    print(json.dumps(json.loads(by_trees.text)))
    assert by_trees.token_ids == plain.token_ids
    rounds, alone = by_trees.metrics.target_forwards, plain.metrics.target_forwards
    print(f"{len(plain.token_ids)} tokens: {rounds} rounds of the target, {alone} without trees")


if __name__ == "__main__":
    main()
