"""From logits to a token: processors, coins and draws."""
