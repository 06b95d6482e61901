"""What errors show of what a caller gave."""

import pytest
import torch

from treetop.checkpoints.weight_folders import WrittenFolder
from treetop.types.errors import InputError, shown

LONG = "n" * 10**5


@pytest.mark.parametrize(
    "value",
    [LONG, [LONG] * 9, {LONG: [LONG] * 9, "b": {"c": LONG}}, 10**70, [10**5000], torch.zeros(99, 99), LONG.encode()],
)
def test_a_value_is_shown_in_one_short_line(value):
    text = shown(value)
    assert len(text) <= 250
    assert "\n" not in text


def test_a_short_value_is_shown_whole():
    assert shown(["a", {"b": 1.5}, None]) == "['a', {'b': 1.5}, None]"


@pytest.mark.parametrize("wrong", [[(LONG, [LONG] * 9)], [[LONG] * 9], [(LONG, torch.zeros(3), 1)]])
def test_weights_that_are_none_are_refused_in_few_words(wrong, tmp_path):
    folder = WrittenFolder(tmp_path)
    with pytest.raises(InputError, match="update_weights: ") as raised:
        folder.write(wrong)
    assert len(str(raised.value)) < 600
