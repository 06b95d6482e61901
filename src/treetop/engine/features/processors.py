"""What changes a row's logits beside its numbers: a word for each token of the vocabulary, and biases.

A row is written when a request that asks for it moves in; nothing else costs anything. What it is written with goes to
the device beside the step's own inputs, without waiting. From then on the device counts tokens itself.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from treetop.engine.buffers import Zeros
from treetop.engine.features.feature import AcceptedRound, NewRoots, RowFeature
from treetop.engine.features.sampling import RowNumbers, is_active
from treetop.kernels.sampling.process import BIAS_SHIFT, ENDS, IN_PROMPT, NEVER, ONE, LogitsProcessors
from treetop.kernels.table import Ops
from treetop.types.messages import RowHistory, RowSetup
from treetop.types.sampling import MAX_BIASES, SamplingMode, SamplingParams


@dataclass(frozen=True, slots=True)
class RowProcessors(RowFeature):
    """In the list where requests may change their logits. rows: what `process` reads."""

    rows: LogitsProcessors

    @classmethod
    def make(cls, numbers: RowNumbers, vocab_size: int, zeros: Zeros) -> "RowProcessors":
        n = len(numbers["active"])
        own = {
            "words": zeros((n, vocab_size), torch.int32),
            "biases": zeros((n, 1 + MAX_BIASES), torch.float32),
        }
        tables = own | numbers.lines
        return cls(LogitsProcessors(*(tables[field.name] for field in fields(LogitsProcessors))))

    @property
    def tables(self) -> Sequence[Tensor]:
        return (self.rows.words,)

    def move_in(self, rows: Tensor, setups: Sequence[RowSetup], columns: Iterator[Tensor]) -> None:
        """A retracted request goes on with what it had emitted."""
        for setup in setups:
            if is_active(setup) and setup.history is not None:
                self._write(setup.row, setup.params, setup.history)

    def _write(self, row: int, params: SamplingParams, history: RowHistory) -> None:
        rows, device = self.rows, self.rows.words.device
        words = words_of(params, history, rows.words.shape[1])
        columns = to_device(device, torch.tensor([[*words], [*words.values()]], dtype=torch.int64))
        rows.words[row] = NEVER if params.allowed_token_ids is not None else 0
        rows.words[row].index_copy_(0, columns[0], columns[1].to(torch.int32))
        biases = torch.tensor([0.0, *(bias for _, bias in params.logit_bias)], dtype=torch.float32)
        rows.biases[row, : len(biases)].copy_(to_device(device, biases))

    def rooted(self, ops: Ops, of: NewRoots) -> None:
        self._count(ops, of.choice, of.rows, of.tokens[:, None], of.emitted)

    def accepted(self, ops: Ops, of: AcceptedRound) -> None:
        self._count(ops, of.choice, of.paths.rows, of.accepted.tokens, of.accepted.accept_len)

    def _count(self, ops: Ops, choice: SamplingMode, rows: Tensor, tokens: Tensor, last: Tensor) -> None:
        """What a step emitted, tokens [rows, w] up to column `last` [rows], changes later logits of its rows.

        last: -1 where nothing was emitted.
        """
        if choice.processes:
            ops.count(self.rows, rows, tokens, last + 1)


def words_of(params: SamplingParams, history: RowHistory, vocab_size: int) -> dict[int, int]:
    """The words of tokens that differ from all others'; a token that is not allowed has `NEVER`, named here or not.

    A checkpoint may name tokens that end a text and are not in the vocabulary; they are never chosen.
    """
    words = dict.fromkeys(history.prompt_ids, IN_PROMPT)
    for token, times in Counter(history.output_ids).items():
        words[token] = words.get(token, 0) + times * ONE
    for place, (token, _) in enumerate(params.logit_bias, start=1):
        words[token] = words.get(token, 0) | place << BIAS_SHIFT
    for token in (each for each in history.stop_ids if each < vocab_size):
        words[token] = words.get(token, 0) | ENDS
    if params.allowed_token_ids is not None:
        allowed = set(params.allowed_token_ids)
        words = {token: word if token in allowed else word | NEVER for token, word in words.items()}
        words |= dict.fromkeys(allowed - words.keys(), 0)
    for token in history.never_ids:
        words[token] = words.get(token, 0) | NEVER
    return words


def to_device(device: torch.device, values: Tensor) -> Tensor:
    """A copy on the device that the host does not wait for: pinned memory is kept until the copy is done."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
