"""What is told of requests to systems that watch servers, beside /metrics."""
