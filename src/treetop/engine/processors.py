"""Requests that change their logits move into their rows: the host says what the device then keeps up by itself."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from treetop.kernels.sampling.process import BIAS_SHIFT, ENDS, IN_PROMPT, NEVER, ONE, LogitsProcessors
from treetop.types.messages import RowHistory, RowSetup
from treetop.types.sampling import SamplingParams


class LogitsProcessorWriter:
    """Writes the rows of `LogitsProcessors`, which is None where no request may change its logits.

    A row is written when such a request enters it, and made inactive when another request follows; nothing else costs
    anything. What it is written with goes to the device beside the step's own inputs, without waiting.
    """

    def __init__(self, processors: LogitsProcessors | None) -> None:
        self._processors = processors
        self._active: set[int] = set()

    def move_in(self, setups: Sequence[RowSetup]) -> None:
        """Prepare the rows of requests that move in. A retracted request goes on with what it had emitted."""
        for setup in setups:
            if setup.history is not None:
                self._write(setup, setup.history)
                self._active.add(setup.row)
            elif setup.row in self._active:
                assert self._processors is not None
                for flags in (self._processors.active, self._processors.constrained):
                    flags[setup.row] = False
                self._active.discard(setup.row)

    def _write(self, setup: RowSetup, history: RowHistory) -> None:
        rows, row, params = self._processors, setup.row, setup.params
        assert rows is not None, "the client is told that no logits can be changed"
        rows.constrained[row] = setup.constrained
        rows.active[row] = active = not setup.constrained or _weighs(params)
        if not active:
            return
        words = words_of(params, history, rows.words.shape[1])
        every = NEVER if params.allowed_token_ids is not None else 0
        columns = to_device(rows.words.device, torch.tensor([[*words], [*words.values()]], dtype=torch.int64))
        rows.words[row] = every
        rows.words[row].index_copy_(0, columns[0], columns[1].to(torch.int32))
        biases = torch.tensor([0.0, *(bias for _, bias in params.logit_bias)], dtype=torch.float32)
        rows.biases[row, : len(biases)].copy_(to_device(rows.biases.device, biases))
        rows.presence[row], rows.frequency[row] = params.presence_penalty, params.frequency_penalty
        rows.repetition[row] = params.repetition_penalty
        rows.may_end[row] = len(history.prompt_ids) + params.min_tokens


def _weighs(params: SamplingParams) -> bool:
    """Whether logits become others; what is ruled out is in the masks of a constrained row."""
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1 or params.logit_bias
    )


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
