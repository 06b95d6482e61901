"""What a configuration that names no policy of shapes stands for, by its device.

On a GPU rounds of a fixed tree fall behind plain ones as rows fill up, so shapes are chosen there, and the draft's
chances learned. On a CPU a start that times rounds of every shape takes longer than many a run: the shape is fixed.
"""

from dataclasses import replace

from treetop.checkpoints.loader import compute_device
from treetop.types.config import EngineConfig


def with_policy(config: EngineConfig) -> EngineConfig:
    """The configuration with `speculative_policy` and `speculative_calibration` said, as asked or by default."""
    policy, learns = config.speculative_policy, config.speculative_calibration
    if policy is None:
        chooses = config.speculative_shapes is not None or compute_device(config.device).type == "cuda"
        policy = "auto" if config.speculates and chooses and config.speculative_node_budget is None else "fixed"
    if learns is None:
        learns = "learn" if policy == "auto" else "off"
    return replace(config, speculative_policy=policy, speculative_calibration=learns)
