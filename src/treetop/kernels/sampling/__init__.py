"""From logits to a token: processors, uniforms and draws."""
