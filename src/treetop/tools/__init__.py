"""Tools over a checkpoint or a run: inspect, quantize, trace."""
