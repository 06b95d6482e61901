"""Putting something else where callers look an attribute up, for as long as a context is held.

Production code knows nothing of it: a function is looked up in the module that calls it, a method or a property in its
class, a kernel in the module that launches it.
"""

import importlib
import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any
from unittest.mock import patch

from treetop.engine.model_runner import ModelRunner
from treetop.engine.startup.build import BuiltRunner
from treetop.engine.startup.plan import EnginePlan
from treetop.types.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Patch:
    """target: "module:attribute" or "module:Class.attribute".
    make: the twin, from what stands there.
    """

    target: str
    make: Callable[[Any], Any]

    def place(self) -> tuple[Any, str]:
        """The module or class that holds the target, and the attribute. Raises InvariantError if it is not there."""
        module, _, path = self.target.partition(":")
        *classes, name = path.split(".")
        try:
            owner = importlib.import_module(module)
            for each in classes:
                owner = getattr(owner, each)
            inspect.getattr_static(owner, name)
        except (ImportError, AttributeError) as error:
            raise InvariantError(f"{self.target} is not there to be replaced: {error}") from error
        return owner, name


def instead(target: str, twin: Any) -> Patch:
    """`twin` in the place of the target, whatever stands there."""
    return Patch(target, lambda _: twin)


def kernel_twin(target: str, *changes: tuple[str, str]) -> Patch:
    """A Triton kernel whose source is that of the target, with some of its text changed: (text, other text) each.

    So the shipping kernel is what is tested, all of it but these lines.
    """

    def make(real: Any) -> Any:
        function = getattr(real, "fn", real)
        source = textwrap.dedent(inspect.getsource(function))
        for text, other in changes:
            if source.count(text) != 1:
                raise InvariantError(f"{target} holds {text!r} {source.count(text)} times, expected once")
            source = source.replace(text, other)
        file = f"<twin of {target}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # Triton reads the source
        names = dict(function.__globals__)
        exec(compile(source, file, "exec"), names)
        return names[function.__name__]

    return Patch(target, make)


@contextmanager
def replaced(patches: Sequence[Patch]) -> Iterator[list[str]]:
    """Hold twins in the places of their targets. Yields the targets whose twins have run, in order, while they run.

    All modules are there before the first change, so that none imports a twin for good.
    """
    places = [each.place() for each in patches]
    ran: list[str] = []
    with ExitStack() as stack:
        for each, (owner, name) in zip(patches, places, strict=True):
            twin = each.make(inspect.getattr_static(owner, name))
            stack.enter_context(patch.object(owner, name, _noted(twin, each.target, ran)))
        yield ran


def _noted(twin: Any, target: str, ran: list[str]) -> Any:
    """The twin, which notes when it is called, or launched if it is a kernel."""
    if isinstance(twin, property):
        assert twin.fget is not None
        return property(_noted(twin.fget, target, ran))
    if hasattr(twin, "fn"):
        return _NotedKernel(twin, target, ran)

    @wraps(twin)
    def noted(*args: Any, **options: Any) -> Any:
        ran.append(target)
        return twin(*args, **options)

    return noted


class _NotedKernel:
    """A kernel that notes when a launch of it is asked for."""

    def __init__(self, kernel: Any, target: str, ran: list[str]) -> None:
        self._kernel, self._target, self._ran = kernel, target, ran

    def __getitem__(self, grid: Any) -> Any:
        self._ran.append(self._target)
        return self._kernel[grid]


@contextmanager
def wrapped_runner(change: Callable[[ModelRunner], ModelRunner]) -> Iterator[None]:
    """Engines that are made inside run on `change(runner)`, which puts an instrument around a part of it."""

    def make(real: Callable[[EnginePlan], BuiltRunner]) -> Callable[[EnginePlan], BuiltRunner]:
        def build_runner(engine_plan: EnginePlan) -> BuiltRunner:
            built = real(engine_plan)
            return replace(built, runner=change(built.runner))

        return build_runner

    with replaced([Patch("treetop.engine.engine:build_runner", make)]):
        yield
