"""What the suite changes about Triton's interpreter is its speed alone."""

from types import SimpleNamespace

from support.interpreted import interpreted, patched_places


@interpreted
def test_a_launch_replaces_what_triton_would():
    """By the function that Triton gives it; and nothing twice, as in a function that a kernel calls."""
    from triton.runtime import interpreter

    ours = interpreter._patch_builtin
    scope = interpreter._LangPatchScope()

    def replaced(patch):
        found = []
        record = SimpleNamespace(set_attr=lambda place, name, value: found.append((place, name, value.__kwdefaults__)))
        for place in patched_places():
            patch(place, interpreter.interpreter_builder, record)
        return found

    want = replaced(ours.__wrapped__)
    assert replaced(ours) == want
    try:
        ours(patched_places()[0], interpreter.interpreter_builder, scope)
        assert replaced(ours) == replaced(ours.__wrapped__)
        assert 0 < len(replaced(ours)) < len(want)
    finally:
        scope.restore()
    assert replaced(ours) == want
