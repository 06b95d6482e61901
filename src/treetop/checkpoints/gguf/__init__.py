"""GGUF files, as llama.cpp writes them: metadata and tensors in one file."""
