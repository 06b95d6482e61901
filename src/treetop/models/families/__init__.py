"""Model families, one a file: a `config.json` into a `ModelConfig`."""
