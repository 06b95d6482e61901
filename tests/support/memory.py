"""Every tensor that an engine owns, by name."""

import torch


def state_tensors(state) -> dict[str, torch.Tensor]:
    """The tables by request row."""
    found = {f"page_table.{name}": table.data for name, table in state.page_tables.items()}
    found |= {name: getattr(state, name) for name in ("committed", "root")}
    found |= {f"numbers.{name}": getattr(state.numbers, name) for name in ("integers", "floats", "flags")}
    return found | {f"draft.{name}": getattr(state.draft, name) for name in state.draft.__dataclass_fields__}


def buffer_tensors(buffers) -> dict[str, torch.Tensor]:
    """What passes between the phases of a round."""
    found = {"row_lists": buffers.row_lists}
    for part in ("tree", "places", "accepted"):
        value = getattr(buffers, part)
        found |= {f"{part}.{name}": getattr(value, name) for name in value.__dataclass_fields__}
    found["features"] = buffers.aux_hidden
    for part in ("draft_tails", "verify_tails", "extend_tails"):
        found |= {f"{part}.{group}": tail for group, tail in getattr(buffers, part).items()}
    return found


def all_tensors(llm) -> dict[str, torch.Tensor]:
    device = llm.engine.runner
    pools = {f"pool.{name}": pool.data for name, pool in device.pools.items()}
    return state_tensors(device.state) | buffer_tensors(device.buffers) | pools


def beside(tensor, after: bool) -> torch.Tensor:
    """The element of memory just before or after a tensor; a byte for flags, which hold more than true and false."""
    tensor = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
    offset = tensor.storage_offset() + (tensor.numel() if after else -1)
    return tensor.as_strided((1,), (1,), offset)
