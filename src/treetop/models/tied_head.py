"""Whether a folder whose config ties output matrix and embedding holds another output matrix than the embedding.

`transformers` 5 then uses both as they are stored (`modeling_utils.tie_weights`). Sizes, ranks and formats follow from
that, so it is known before anything is planned: the two are compared where the files lie, piece by piece.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from treetop.checkpoints.checkpoint import equal_tensors, tensor_files
from treetop.checkpoints.params import in_formats, of_vocab, stored_tensors
from treetop.models.config import ModelConfig
from treetop.models.multimodal import StoredNames
from treetop.types.errors import CheckpointError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def holds_own_head(folder: Path, config: ModelConfig, names: StoredNames) -> bool:
    """Whether the output matrix is there and differs from the embedding; quantized it always does.

    False for a folder that cannot be read, which is an error where its weights are.
    """
    try:
        files = tensor_files(folder)
    except CheckpointError:
        return False
    embedding, head = names.stored(EMBEDDING), names.stored(HEAD)
    if embedding not in files:
        return False
    if head in files:
        return not _equal(*((each, *_state(files[each])) for each in (embedding, head)))
    return _is_quantized(config, names, files)


def _is_quantized(config: ModelConfig, names: StoredNames, files: Mapping[str, Path]) -> bool:
    """Whether all that its format consists of is there, under names of its own."""
    param = names.of(of_vocab("lm_head", HEAD, config.vocab_size, config.hidden_size))
    try:
        stored = stored_tensors(in_formats([param], config.formats))
    except CheckpointError:
        return False  # a shape that the format cannot have
    return all(name in files for name, each in stored.items() if each.read)


def _state(path: Path) -> tuple[Path, int, int]:
    """A file, and what changes with its content."""
    stat = path.stat()
    return path, stat.st_mtime_ns, stat.st_size


_Place = tuple[str, Path, int, int]


@lru_cache(maxsize=16)  # a plan is made for several numbers of rows, each from the folder
def _equal(embedding: _Place, head: _Place) -> bool:
    return equal_tensors({name: path for name, path, *_ in (embedding, head)}, embedding[0], head[0])
