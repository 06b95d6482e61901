"""Reading checkpoints: folders, hub, safetensors and pickles; every tensor is checked."""
