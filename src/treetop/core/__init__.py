"""The engine core: requests of ids in, updates out. It knows no text, and no client waits for another."""
