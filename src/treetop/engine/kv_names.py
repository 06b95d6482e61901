"""Whose K/V an engine has: what others must have in common to go on from them."""

from treetop.checkpoints.fingerprint import fingerprint
from treetop.engine.engine import Engine


def target_name(engine: Engine) -> str:
    """Whose K/V these are: another checkpoint's, or those of other activations, are other numbers."""
    config = engine.config
    name = f"dummy {config.seed or 0}" if config.load_format == "dummy" else fingerprint(engine.model_path)
    return f"{name} with activations in FP8" if config.quantize_activations else name


def draft_name(engine: Engine) -> str:
    """What drafts: which kind, and the fingerprint of a folder of its own."""
    if engine.draft is None:
        return "none"
    folder, algorithm = engine.draft_path, engine.config.algorithm
    if folder is None or engine.config.load_format == "dummy":
        return str(algorithm)
    return f"{algorithm} {fingerprint(folder)}"
