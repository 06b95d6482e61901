"""Hand-over of prefilled requests: what both sides do and say, and how bytes travel. Host code without tensors."""
