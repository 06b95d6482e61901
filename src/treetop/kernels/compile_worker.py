"""A process that compiles kernels for another one, into the cache on disk that both read.

Triton turns a kernel's source into code in Python, so the threads of one process wait for each other; processes do not.
A worker is asked for one kernel after another, by the name that it is imported by, and says when it is in the cache.
What it cannot make, whoever asked makes itself, and so has the error.

As a module it is that process. It imports PyTorch and kernels, touches no device, and ends with whoever started it.
"""

import io
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, BinaryIO

_LENGTH = struct.Struct("<Q")


class CompileWorker:
    """The process, of whoever asks it. Of one thread at a time."""

    def __init__(self) -> None:
        """Start it; it takes some seconds until it answers. Raises OSError where no process can be had."""
        paths = os.pathsep.join(each for each in sys.path if each)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "treetop.kernels.compile_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def compile(self, kernel: Any, source: Any, target: object, options: Mapping[str, Any]) -> bool:
        """Have a kernel compiled. False: it could not be asked for, or was not made.

        kernel: a `JITFunction`. source: its `ASTSource`. target, options: as `triton.compile` takes them.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        call = (kernel, source.signature, source.constants, source.attrs, target, dict(options))
        with suppress(OSError, pickle.PicklingError, AttributeError, TypeError):  # the two last: pickle's, of lambdas
            _write(self._process.stdin, call)
            return self._process.stdout.read(1) == b"y"
        return False

    def close(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


class _Pickler(pickle.Pickler):
    """Kernels go by name."""

    def persistent_id(self, obj: Any) -> tuple[str, str] | None:
        from triton import JITFunction  # noqa: PLC0415  # not in every build of PyTorch

        if not isinstance(obj, JITFunction):
            return None
        name = obj.fn.__module__, obj.fn.__qualname__
        if name[0] == "__main__" or _named(name) is not obj:
            raise pickle.PicklingError(f"{name} is not imported by its name")
        return name


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: tuple[str, str]) -> Any:
        return _named(pid)


def _named(name: tuple[str, str]) -> Any:
    return getattr(import_module(name[0]), name[1])


def _write(stream: BinaryIO | Any, what: object) -> None:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(what)
    stream.write(_LENGTH.pack(buffer.tell()) + buffer.getvalue())
    stream.flush()


def main() -> None:
    """Compile what comes, until nothing more can come."""
    asked, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a compiler prints is no answer
    import triton  # noqa: PLC0415  # whoever asks needs none of it from here
    from triton.compiler import ASTSource  # noqa: PLC0415
    from triton.experimental.gluon._runtime import GluonASTSource  # noqa: PLC0415

    while len(head := asked.read(_LENGTH.size)) == _LENGTH.size:
        answer = b"n"
        with suppress(Exception):
            kernel, signature, constants, attrs, target, options = _Unpickler(
                io.BytesIO(asked.read(*_LENGTH.unpack(head)))
            ).load()
            source = GluonASTSource if kernel.is_gluon() else ASTSource
            triton.compile(source(kernel, signature, constants, attrs), target=target, options=options)
            answer = b"y"
        answers.write(answer)


if __name__ == "__main__":
    main()
