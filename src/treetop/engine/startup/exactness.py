"""Whether speculative decoding can give the bits of plain decoding here.

What `bits` asks of each operation of a target is written down in docs/exactness.md.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch

from treetop.attention import exact_backend as on_a_cpu
from treetop.attention.capabilities import HALF, BackendRefusal, Need
from treetop.attention.registry import BACKENDS, exact_backend
from treetop.checkpoints.loader import LoadContext
from treetop.checkpoints.lora_folder import LoraFolder
from treetop.engine.startup.adapters import rank_of_tables
from treetop.engine.startup.mkl_probe import suffices
from treetop.engine.startup.operation_probes import kept_operation_problem
from treetop.engine.startup.probed_products import probed_products
from treetop.engine.startup.weight_copies import product_weights
from treetop.exact.first_calls import call_once_alone
from treetop.exact.machine import cpu_model, found_once
from treetop.exact.mkl_mode import choose_mode, needs_another, remedy
from treetop.kernels.exact import elementwise_problem
from treetop.kernels.profile import Integers, Profile, profile_of
from treetop.kernels.tree import topk
from treetop.kernels.triton_guard import why_not
from treetop.models.config import ModelConfig, UngatedSpec
from treetop.models.registry import TargetSpec
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.weights.cpu_products import ChosenProduct, without_exact_call

_TIES = "use --exactness ties"
_INTEGERS = "use --exact-sums integers"


def chosen_profile(
    config: EngineConfig,
    target: TargetSpec,
    place: LoadContext,
    adapters: tuple[LoraFolder, ...] = (),
    probes: bool = True,
) -> Profile:
    """How a target computes. Raises ConfigError where `--exactness bits` cannot be honoured.

    probes: without them the library's sums count as exact.
    """
    profile = profile_of(config.exactness, place.device)
    problem = why_not_exact(config, target, place, adapters, probes) if profile.batch_invariant else None
    if problem is not None:
        raise ConfigError(f"--exactness bits: {problem.reason}; {problem.remedy}")
    if probes and place.device.type == "cpu":
        call_once_alone()  # now that MKL's mode is chosen
    if profile.products != "one call":
        return profile
    by_integers = config.exact_sums == "integers"
    integers = Integers(by_integers, _integers(config, target.config) if probes else by_integers)
    return profile_of(config.exactness, place.device, integers)


def whose_sums(place: LoadContext, products: Iterable[ChosenProduct] = ()) -> list[str]:
    """On a CPU with `--exactness bits`, which sums define a row's bits. products: as they were chosen."""
    if place.profile.products != "one call":
        return []
    calls = sorted({each.calls[0].value for each in products if each.exact})
    attention = "integers in float64" if place.profile.integers.attention else "the library's chains"
    return [*([f"products by {' and '.join(calls)}"] if calls else []), f"attention by {attention}"]


def sums_words(place: LoadContext, products: Iterable[ChosenProduct] = ()) -> list[str]:
    """The same, and what decided it."""
    words = whose_sums(place, products)
    mode = choose_mode(suffices) if words else None
    return [*words, *([] if mode is None else [mode]), *([f"as first found on {cpu_model()}"] if words else [])]


def why_not_exact(
    config: EngineConfig,
    target: TargetSpec,
    place: LoadContext,
    adapters: tuple[LoraFolder, ...] = (),
    probes: bool = True,
) -> BackendRefusal | None:
    """What stands against `--exactness bits`; None if nothing does.

    Operations but products are probed: on a CPU once a process, on a GPU once a machine. What ranks do together is
    tried when they have met (`engine.startup.exact_ranks`). adapters: of `--lora-modules`. probes: whether to.
    """
    on_cpu, problem = place.device.type == "cpu", unfit_options(config, place)
    if problem is not None:
        return problem
    unbuilt = why_not_model(target.config)
    if unbuilt is not None:
        return unbuilt
    if not probes:
        return None
    found = (
        _probed_on_a_cpu(config, target.config)
        if on_cpu
        else _probed_on_a_gpu(target, place, rank_of_tables(config, adapters, True))
    )
    if found is None:
        return None
    ways = [each for each in (remedy(suffices), _INTEGERS) if each] if on_cpu else []
    return BackendRefusal(f"on this machine the bits of {found} depend on the batch", ", or ".join([*ways, _TIES]))


def why_not_model(config: ModelConfig) -> BackendRefusal | None:
    """What a model has for which it is not built."""
    if any(spec.score_cap is not None for spec in config.attention.values()):
        return BackendRefusal("attention with capped scores is not exact yet", _TIES)
    if config.norm != "rms":
        return BackendRefusal("norms that subtract the mean are not exact yet", _TIES)
    forwards = (layer.feed_forward for layer in config.layers)
    kinds = {each.activation for each in forwards if isinstance(each, UngatedSpec)} - {"relu2"}
    return BackendRefusal(f"{sorted(kinds)[0]} without a gate is not exact yet", _TIES) if kinds else None


def unfit_options(config: EngineConfig, place: LoadContext) -> BackendRefusal | None:
    """What options have against `bits` on a device, whatever the machine and the model."""
    most, nodes = on_a_cpu.MOST_NODES, max(shape.num_draft_tokens for shape in config.shapes)
    problem = _of_device(config, place)
    if problem is not None or nodes <= most:
        return problem
    return BackendRefusal(f"a tree may have {most} nodes", f"lower --speculative-num-draft-tokens {nodes} or {_TIES}")


def _of_device(config: EngineConfig, place: LoadContext) -> BackendRefusal | None:
    """What device, dtype and attention backend have against it."""
    name, topk_of = config.attention_backend, max(shape.topk for shape in config.shapes)
    if place.device.type == "cpu":
        if place.dtype != torch.float32:
            return BackendRefusal("it is built for float32", f"{_TIES} or --dtype float32")
        if name not in ("auto", "torch"):
            return BackendRefusal(f"attention backend {name} is not exact", "use --attention-backend torch")
        return None
    if place.dtype not in HALF:
        return BackendRefusal("on a GPU it is built for bfloat16 and float16", f"{_TIES} or --dtype bfloat16")
    missing = why_not(place.device)
    if missing is not None:
        return BackendRefusal(missing, _TIES)
    if name == "auto" and exact_backend(Need(place.dtype, place.device)) is None:
        return BackendRefusal("no attention backend is exact on this GPU", f"{_TIES} or --device cpu")
    if name != "auto" and not BACKENDS[name].capabilities.exact:
        return BackendRefusal(f"attention backend {name} is not exact", f"use --attention-backend auto or {_TIES[4:]}")
    if topk_of > topk.MOST:
        return BackendRefusal(
            f"kernels choose among {topk.MOST} branches", f"lower --speculative-eagle-topk {topk_of} or {_TIES}"
        )
    return None


def why_not_by_libraries(
    config: EngineConfig, target: TargetSpec, place: LoadContext, probes: bool = True
) -> str | None:
    """On a CPU, why `bits` would cost more than the library's sums, by which it was measured; None if nothing says so.

    Only probes do, and never a timing. Where a mode of the library's might help that this process missed, it is named:
    a process that began in that mode comes to `bits`, and each is refused where they meet. probes: whether to.
    """
    if place.device.type != "cpu":
        return None
    if config.exact_sums == "integers":
        return "sums of integers (--exact-sums) cost more"
    if not probes:
        return None
    if needs_another(suffices):  # asked before any probe, for those of `bits` choose the mode
        return "on this machine bits depend on the batch in MKL's own mode, and its strict one costs more"
    found = _no_operations() or _no_chains(target.config)
    if found is None:
        weights = product_weights(target, None, place)
        shapes = (each.shape for each in weights if each.format.copy_bytes(each, place.dtype, None))
        shape = without_exact_call(shapes, config.exact_sums)
        found = None if shape is None else f"a product with a weight [{shape[0]}, {shape[1]}]"
    if found is None:
        return None
    words, way = f"on this machine the bits of {found} depend on the batch", remedy(suffices)
    return f"{words}, and sums of integers cost more" if way is None else f"{words}; for bits {way}"


def why_not_by_probes(target: TargetSpec, place: LoadContext) -> str | None:
    """On a GPU, what is not exact there; None for nothing.

    Sums over ranks are not tried. As a start would find it later, and what is found is kept.
    """
    if place.device.type == "cpu":
        return None
    problem = _probed_on_a_gpu(target, place, 0)
    if problem is not None:
        return f"on this machine the bits of {problem} depend on the batch"
    try:
        probed_products(product_weights(target, None, place), place.dtype, place.device)
    except ConfigError as error:
        return str(error).removeprefix("--exactness bits: ").removesuffix(f"; {_TIES}")
    return None


def _probed_on_a_cpu(config: EngineConfig, model: ModelConfig) -> str | None:
    """What of a target's operations but products is not exact and has no other form."""
    return _no_operations() or (None if _integers(config, model) else _no_chains(model))


def _no_operations() -> str | None:
    """What beside products and attention is not exact on this CPU."""
    choose_mode(suffices)
    threads = torch.get_num_threads()
    found: str = found_once("exact-operations", threads, lambda: elementwise_problem(threads) or "")
    return found or None


def _integers(config: EngineConfig, model: ModelConfig) -> bool:
    """Whether attention on a CPU has sums of integers.

    Without being asked for that is where the library's are not exact and no mode of it could help: so it is the same in
    every process of a machine.
    """
    if config.exact_sums != "auto":
        return config.exact_sums == "integers"
    return _no_chains(model) is not None and remedy(suffices) is None


def _no_chains(model: ModelConfig) -> str | None:
    """What of attention by the library is not exact on this CPU."""
    choose_mode(suffices)
    threads = torch.get_num_threads()
    for kv in dict.fromkeys(spec.kv for spec in model.attention.values()):
        sizes = kv.head_dim - kv.index_dim, threads, kv.value_dim
        found: str = found_once("exact-attention", sizes, partial(_problem_of_chains, *sizes))
        if found:
            return found
    return None


def _problem_of_chains(dim: int, threads: int, value_dim: int | None) -> str:
    return on_a_cpu.problem(dim, threads, value_dim) or ""


def _probed_on_a_gpu(target: TargetSpec, place: LoadContext, rank: int) -> str | None:
    ops = replace(place, profile=profile_of("bits", place.device)).ops
    return kept_operation_problem(ops, target.config, place.own(target.params), rank)
