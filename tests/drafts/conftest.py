"""Heads are tested as they are in batches: their last layer goes on with the tokens alone whose states are read. Of few
tokens, as here, it would make all; the rest of the suite has that.
"""

import pytest


@pytest.fixture(autouse=True)
def _leaves_tokens_out(monkeypatch):
    monkeypatch.setattr("treetop.engine.model_runner.FEW_TOKENS", 0)
