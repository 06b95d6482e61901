"""Where weights that are handed to a running engine lie: folders as they are given, or new ones for tensors by name."""

import re
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetop.checkpoints.folder import resolve_folder
from treetop.types.changes import SentTensors, UpdateWeights
from treetop.types.errors import InputError, UserError, shown

if TYPE_CHECKING:  # takes seconds, and an API process needs none of it
    from torch import Tensor

Tensors = Mapping[str, "Tensor"] | Iterable[tuple[str, "Tensor"]]
"""By the names that a checkpoint has."""
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
_INTEGERS = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
_SHARD = 2**30
"""Bytes of a file, about: no more of an iterator's tensors is in memory."""


class WrittenFolder:
    """A folder of its own for tensors, beside the config of another; it goes with this object."""

    def __init__(self, like: Path) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="treetop-weights-"))
        self.remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        for file in like.iterdir():
            if file.is_file() and not file.name.endswith(_NOT_COPIED):
                shutil.copyfile(file, self.path / file.name)

    def write(self, tensors: Tensors) -> None:
        """Raises InputError for what are no tensors by name. Which there must be, a loader checks."""
        import torch  # noqa: PLC0415  # takes seconds

        seen, shard, size = set[str](), {}, 0
        for name, tensor in _pairs(tensors):
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or name in seen:
                twice = isinstance(name, str) and name in seen
                what = "is given twice" if twice else f"must be text and its value a tensor, got {shown(tensor)}"
                raise InputError(f"update_weights: name {shown(name)} {what}")
            seen.add(name)
            if (wrong := _not_plain(tensor)) is not None:
                raise InputError(f"update_weights: tensor {shown(name)} {wrong}: give plain numbers")
            shard[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            size += tensor.nbytes
            if size >= _SHARD:
                self._write(shard)
                shard, size = {}, 0
        if shard:
            self._write(shard)
        if not seen:
            raise InputError("update_weights: no tensors were given: all by the checkpoint's names, or leave it out")

    def _write(self, shard: "dict[str, Tensor]") -> None:
        from safetensors.torch import save_file  # noqa: PLC0415  # likewise

        save_file(shard, self.path / f"tensors-{len(list(self.path.glob('*.safetensors'))):05}.safetensors")


def _pairs(tensors: object) -> Iterator[tuple[Any, Any]]:
    """Raises InputError for what is neither a mapping nor pairs."""
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    if not isinstance(pairs, Iterable):
        raise InputError(f"update_weights: give a folder, or tensors by name, got {shown(tensors)}")
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(f"update_weights: tensors come as pairs of a name and a tensor, got {shown(pair)}")
        yield pair[0], pair[1]


def _not_plain(tensor: "Tensor") -> str | None:
    """Why a file cannot hold a tensor's numbers; None where it can."""
    import torch  # noqa: PLC0415  # takes seconds

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"is a {type(tensor).__name__}"
    if tensor.is_meta:
        return "has no numbers (device meta)"
    if tensor.layout is not torch.strided:
        return f"is laid out as {tensor.layout}"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return None if tensor.is_floating_point() or dtype in _INTEGERS else f"is of {dtype}"


class WeightFolders:
    """Which folders' weights an engine has. model, draft: as its options name them; draft None for no folder."""

    def __init__(self, model: str, draft: str | None) -> None:
        self._paths = {"model": model, "draft": draft}
        self._written: dict[str, list[WrittenFolder]] = {"model": [], "draft": []}
        """In force; or perhaps, of an update that nobody saw the end of."""

    @contextmanager
    def changing(
        self,
        model: str | Path | Tensors | SentTensors | None,
        draft: str | Path | Tensors | SentTensors | None,
        more: bool = False,
    ) -> Iterator[UpdateWeights]:
        """What to ask of the engine; its folders are in force once the block has ended.

        Tensors are written to a folder of their own, which is removed when others are in force or with this object, and
        where the block raises a UserError: nothing has changed then. After any other error the engine may have them, or
        take them yet. One block at a time, in the engine's order. more: others will come, of which each is sent.
        Without model and draft: parts that have come, else those in force, read again.
        Raises InputError and UserError.
        """
        if more and model is None and draft is None:
            raise InputError("update_weights: give a model or a draft: there is nothing more without either")
        for kind, given in (("model", model), ("draft", draft)):
            _check_sent(kind, given, more)
        paths, written, sent = dict[str, str](), dict[str, WrittenFolder](), dict[str, SentTensors]()
        try:
            for kind, given in (("model", model), ("draft", draft)):
                if isinstance(given, str | Path):
                    paths[kind] = str(given)
                elif isinstance(given, SentTensors):
                    sent[kind] = given
                elif given is not None:
                    written[kind] = WrittenFolder(self._like(kind))
                    written[kind].write(given)
                    paths[kind] = str(written[kind].path)
        except BaseException:
            _remove(written.values())
            raise
        try:
            yield UpdateWeights(
                *(paths.get("model"), paths.get("draft")),
                model_tensors=sent.get("model"),
                draft_tensors=sent.get("draft"),
                more=more,
            )
        except UserError as error:
            self._named(error, written)
            _remove(written.values())
            raise
        except GeneratorExit:
            _remove(written.values())
            raise
        except BaseException:
            for kind, folder in written.items():
                self._written[kind].append(folder)
            raise
        for kind in paths:
            _remove(self._written[kind])
            self._written[kind] = [written[kind]] if kind in written else []
        self._paths |= paths

    def _named(self, error: UserError, written: Mapping[str, WrittenFolder]) -> None:
        """An error says of what was given where it is wrong, not in which folder of tensors, which nobody has seen."""
        every = [(kind, folder) for kind, folders in self._written.items() for folder in folders]
        text = str(error)
        for kind, folder in (*every, *written.items()):
            file = re.escape(str(folder.path)) + r"(/tensors-\d+\.safetensors)?"
            text = re.sub(file, f"the tensors given for {kind}", text)
        if text != str(error):
            error.args = (text if text.startswith("update_weights") else f"update_weights: {text}",)

    def _like(self, kind: str) -> Path:
        now = self._paths[kind]
        if now is None:
            raise InputError(f"update_weights: {kind}: tensors need a {kind} in a folder of its own; there is none")
        return resolve_folder(now, kind)


def _check_sent(kind: str, given: object, more: bool) -> None:
    """Raises InputError."""
    if isinstance(given, SentTensors) and not given.names:
        raise InputError(f"{kind}: no tensors are named; leave it out")
    if more and not isinstance(given, SentTensors | None):
        raise InputError(f"more: {kind} is not sent (SentTensors), and nothing else comes in parts")


def _remove(folders: Iterable[WrittenFolder]) -> None:
    for folder in folders:
        folder.remove()
