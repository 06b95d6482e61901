"""Past bugs of the field, put back by name, and what shows that they are caught: `pip install treetop-llm[debug]`.

A distribution of its own, `treetop-debug`, so that what serves holds no fault. It replaces private parts of the treetop
of its version, so it asks for that very version. treetop imports it in two places: for `TREETOP_FAULT`, and for
`treetop doctor --faults`.
"""
