"""Keep Triton's autotuner to configurations that fit the GPU's shared memory.

`shared_memory_budget` returns the shared memory of a block. `shared_memory_pruner` makes a callback from an
estimate, for `triton.autotune(prune_configs_by={"early_config_prune": ...})`. An estimate is one of:

- `matmul`, `attention`, `chunk_fwd_o` and `chunk_gated_delta_rule_fwd_h`, which know their kernels' tiles;
- `exact`, which compiles each configuration and reads its size;
- a function of your own.

Importing this needs neither Triton nor PyTorch nor a GPU.
"""

import importlib
import inspect
import operator
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from poorwill import _native

__all__ = [
    "Capability",
    "Config",
    "Device",
    "Estimator",
    "Launch",
    "attention",
    "chunk_fwd_o",
    "chunk_gated_delta_rule_fwd_h",
    "exact",
    "matmul",
    "shared_memory_budget",
    "shared_memory_pruner",
]

Capability: TypeAlias = tuple[int, int]


class TorchDevice(Protocol):
    """A `torch.device`, or an object like it."""

    @property
    def type(self) -> str: ...

    @property
    def index(self) -> int | None: ...


# `None`, 1, "cuda:1" and a `torch.device` are GPUs of this machine; "sm_120" and (12, 0) are kinds of GPU.
Device: TypeAlias = int | str | Capability | TorchDevice | None


class Config(Protocol):
    """A `triton.Config`, or an object like it."""

    @property
    def kwargs(self) -> dict[str, Any]: ...

    @property
    def num_stages(self) -> int: ...

    @property
    def num_warps(self) -> int: ...


AnyConfig = TypeVar("AnyConfig", bound=Config)


@dataclass(frozen=True)
class Launch:
    """Input of an estimate: a configuration, and the launch that the autotuner was called for."""

    config: Config
    named_args: Mapping[str, Any] = field(default_factory=dict)
    """Positional arguments of the kernel, by name."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments, with `grid`."""
    capabilities: Sequence[Capability] = ()
    """Possible kinds of GPU: the named one, or all with its shared memory."""

    @property
    def parameters(self) -> dict[str, Any]:
        """Everything by name: arguments, meta-parameters, `num_stages` and `num_warps`."""
        own = {"num_stages": self.config.num_stages, "num_warps": self.config.num_warps}
        return {**self.named_args, **self.options, **self.config.kwargs, **own}


class Estimator(Protocol):
    """Estimates the shared memory of a kernel's block."""

    def estimate_bytes(self, launch: Launch) -> int: ...


Estimate: TypeAlias = Estimator | Callable[[dict[str, Any]], int]


def shared_memory_budget(device: Device = None) -> int:
    """Shared memory, in bytes, of a block on `device` whose kernel opts in.

    A GPU of this machine is queried once: `None` (PyTorch's current one if PyTorch uses CUDA, otherwise the
    first), a number, "cuda:1", or a `torch.device`. Without a driver the result is the 48 KiB of every GPU.
    A kind of GPU, "sm_120" or (12, 0), is looked up in a table. Raises ValueError for a GPU that does not
    exist and for an unknown kind.
    """
    return _target(device).budget_bytes


def shared_memory_pruner(
    estimate: Estimate,
    *,
    margin_bytes: int = 1024,
    on_empty: Literal["smallest", "error"] = "smallest",
    device: Device = None,
    budget_bytes: int | None = None,
) -> "Pruner":
    """A callback for `early_config_prune` that drops configurations which cannot fit `device`.

    It drops a configuration whose estimate exceeds the budget less `margin_bytes`, in bytes; the others keep
    their order. `estimate` is an estimator of this module, or a function that returns bytes. The function
    gets everything known by name: arguments, meta-parameters, `num_stages`, `num_warps`. A configuration
    whose estimate raises is kept, with one warning. Another warning says why the 48 KiB of every GPU are
    used where no GPU can be queried.

    If none fits, "smallest" keeps the smallest and warns once; "error" raises `ValueError` with all sizes.
    Triton does not call the pruner of a kernel with a single configuration.

    `budget_bytes` bounds the device's own budget. The kernel is still compiled for that device, so its size
    may differ from that on a smaller GPU.
    """
    margin_bytes = _number("margin_bytes", margin_bytes)
    if margin_bytes < 0:
        raise ValueError(f"margin_bytes is {margin_bytes}; it is taken off the budget, so 0 is the least")
    if budget_bytes is not None:
        budget_bytes = _number("budget_bytes", budget_bytes)
        if budget_bytes < 1:
            raise ValueError(f"budget_bytes is {budget_bytes}; nothing fits less than 1")
    if on_empty not in ("smallest", "error"):
        raise ValueError(f'on_empty is {on_empty!r}; it is "smallest" or "error"')
    if not (callable(estimate) or hasattr(estimate, "estimate_bytes")):
        raise TypeError(f"{estimate!r} estimates nothing; take a function, or an estimator like matmul()")
    makers: list[Any] = [matmul, attention, chunk_fwd_o, chunk_gated_delta_rule_fwd_h, exact]
    for name, maker in [(maker.__name__, maker) for maker in makers]:
        if estimate is maker:
            raise TypeError(f"{name} makes an estimator; call it, as in {name}(...)")
    if (kind := _kind(device)) is not None:
        _of_kind(kind)
    elif device is not None:
        _native.cuda_ordinal(device)
    return Pruner(estimate, margin_bytes, on_empty, device, budget_bytes)


def _number(name: str, value: int) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} is {value}; it is a number of bytes")
    return operator.index(value)


@dataclass
class Pruner:
    """The callback of `shared_memory_pruner`. It also prunes a list by hand, given only configurations."""

    estimate: Estimate
    margin_bytes: int
    on_empty: Literal["smallest", "error"]
    device: Device
    budget_bytes: int | None = None
    _warned: set[str] = field(default_factory=set, repr=False)

    def __call__(
        self,
        configs: Sequence[AnyConfig],
        named_args: Mapping[str, Any] | None = None,
        /,
        **options: Any,
    ) -> list[AnyConfig]:
        target = _target(self.device)
        if target.fallback is not None:
            self._warn(
                "fallback", f"configurations are held to the {target.budget_bytes} bytes of {target.fallback}"
            )
        if self.budget_bytes is not None and self.budget_bytes < target.budget_bytes:
            target = replace(target, budget_bytes=self.budget_bytes)
        if isinstance(self.estimate, _Exact):
            self.estimate.check_names()
        limit_bytes = target.budget_bytes - self.margin_bytes
        launches = [Launch(config, named_args or {}, options, target.capabilities) for config in configs]
        sizes = [self._size(launch) for launch in launches]
        kept = [
            config
            for config, size_bytes in zip(configs, sizes, strict=True)
            if size_bytes is None or size_bytes <= limit_bytes
        ]
        if kept or not configs:
            return kept
        known = [size_bytes for size_bytes in sizes if size_bytes is not None]
        if self.on_empty == "error":
            raise ValueError(f"{self._none_fits(target, known)}: {_described(configs, known)}")
        least = min(range(len(known)), key=known.__getitem__)
        taken = _described(configs[least : least + 1], known[least : least + 1])
        self._warn("empty", f"{self._none_fits(target, known)}; keeping the smallest, {taken}")
        return [configs[least]]

    def _size(self, launch: Launch) -> int | None:
        """The estimate, or `None` where there is none."""
        try:
            if callable(self.estimate):
                size_bytes = operator.index(self.estimate(launch.parameters))
            else:
                size_bytes = self.estimate.estimate_bytes(launch)
            if size_bytes < 0:
                raise ValueError(f"the estimate is {size_bytes} bytes")
            return size_bytes
        except Exception as error:
            name = _name(launch.config)
            self._warn("raised", f"no estimate for {name}, which is kept: {type(error).__name__}: {error}")
            return None

    def _none_fits(self, target: "Target", sizes: list[int]) -> str:
        return (
            f"none of {len(sizes)} configurations fits {target.name}, where a block may have "
            f"{target.budget_bytes} bytes of shared memory (less a margin of {self.margin_bytes})"
        )

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, stacklevel=_callers_level())


PACKAGE = os.path.dirname(__file__) + os.sep


def _callers_level() -> int:
    """The `stacklevel` of the nearest caller outside of the package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    return level


def _described(configs: Sequence[Config], sizes: list[int]) -> str:
    pairs = zip(configs, sizes, strict=True)
    return ", ".join(f"{_name(config)} takes {_bytes(size_bytes)}" for config, size_bytes in pairs)


def _name(config: Config) -> str:
    parameters = {**config.kwargs, "num_stages": config.num_stages, "num_warps": config.num_warps}
    return " ".join(f"{name}={value}" for name, value in parameters.items())


def _bytes(size_bytes: int) -> str:
    return "more than any GPU has" if size_bytes >= DOES_NOT_FIT_BYTES else f"{size_bytes} bytes"


# A number, or the name of a parameter; for an element's size, also the name of a tensor.
Size: TypeAlias = int | str
# None is the size of the widest tensor's elements in the launch.
ElementSize: TypeAlias = Size | None


def matmul(
    *,
    block_m: Size = "BLOCK_M",
    block_n: Size = "BLOCK_N",
    block_k: Size = "BLOCK_K",
    a_bytes: ElementSize = None,
    b_bytes: ElementSize = None,
    output_bytes: ElementSize = None,
) -> Estimator:
    """Estimates a matrix product: a loop over K, and an accumulator.

    Without a given size, elements are as wide as the widest tensor's in the launch, or four bytes without
    tensors. Tensors of 64-bit integers are not operands and do not count.
    """
    sizes = {"block_m": block_m, "block_n": block_n, "block_k": block_k}
    elements = {"a_bytes": a_bytes, "b_bytes": b_bytes, "output_bytes": output_bytes}

    def of(launch: Launch, capability: Capability) -> int:
        return _native.estimate_matmul(
            capability, **_sizes(launch, sizes), **_elements(launch, elements), **_options(launch)
        )

    return _Tiles("matmul", of)


def attention(
    *,
    block_m: Size = "BLOCK_M",
    block_n: Size = "BLOCK_N",
    head_dim: Size = "HEAD_DIM",
    element_bytes: ElementSize = None,
) -> Estimator:
    """Estimates a flash attention kernel, forward: queries stay, keys and values are loaded in a loop.

    The default of `element_bytes` is as for `matmul`.
    """
    sizes = {"block_m": block_m, "block_n": block_n, "head_dim": head_dim}
    elements = {"element_bytes": element_bytes}

    def of(launch: Launch, capability: Capability) -> int:
        return _native.estimate_attention(
            capability, **_sizes(launch, sizes), **_elements(launch, elements), **_options(launch)
        )

    return _Tiles("attention", of)


def chunk_fwd_o(
    *,
    block_t: Size = "BT",
    block_k: Size = "BK",
    block_v: Size = "BV",
    key_dim: Size = "K",
    element_bytes: Size = "q",
    state_v_first: bool | str = "STATE_V_FIRST",
) -> Estimator:
    """Estimates flash-linear-attention's `chunk_fwd_kernel_o`.

    If the launch lacks `key_dim`, `element_bytes` or `state_v_first`, the estimate uses the value that takes
    most. Elements count as up to four bytes.
    """
    sizes = {"block_t": block_t, "block_k": block_k, "block_v": block_v}

    def of(launch: Launch, capability: Capability) -> int:
        keys = None if _is_missing(launch, key_dim) else _size(launch, key_dim)
        return max(
            _native.estimate_chunk_fwd_o(
                capability,
                key_dim=keys,
                element_bytes=element,
                state_v_first=order,
                **_sizes(launch, sizes),
                **_options(launch),
            )
            for order in _orders(launch, state_v_first)
            for element in _possible_elements(launch, element_bytes)
        )

    return _Tiles("chunk_fwd_o", of)


def chunk_gated_delta_rule_fwd_h(
    *,
    block_t: Size = "BT",
    block_v: Size = "BV",
    key_dim: Size = "K",
    element_bytes: Size = "k",
    state_v_first: bool | str = "STATE_V_FIRST",
) -> Estimator:
    """Estimates flash-linear-attention's `chunk_gated_delta_rule_fwd_kernel_h_blockdim64`.

    If the launch lacks `key_dim`, `element_bytes` or `state_v_first`, the estimate uses the value that takes
    most. That is 256 keys, the kernel's maximum, and elements of up to four bytes.
    """
    sizes = {"block_t": block_t, "block_v": block_v}

    def of(launch: Launch, capability: Capability) -> int:
        keys = KEYS_MAX if _is_missing(launch, key_dim) else _size(launch, key_dim)
        k_blocks = -(-keys // KEYS_PER_BLOCK)
        return max(
            _native.estimate_chunk_gated_delta_rule_fwd_h(
                capability,
                k_blocks=k_blocks,
                element_bytes=element,
                state_v_first=order,
                **_sizes(launch, sizes),
                **_options(launch),
            )
            for order in _orders(launch, state_v_first)
            for element in _possible_elements(launch, element_bytes)
        )

    return _Tiles("chunk_gated_delta_rule_fwd_h", of)


KEYS_PER_BLOCK = 64
KEYS_MAX = 256
# Sizes of multiplied elements, unless a tensor says more.
ELEMENT_BYTES = [1, 2, 4]


@dataclass(frozen=True)
class _Tiles:
    """An estimate from tile sizes, by kernel name."""

    kernel: str
    of: Callable[[Launch, Capability], int] = field(repr=False)

    def estimate_bytes(self, launch: Launch) -> int:
        """The maximum over the possible kinds of GPU."""
        kinds = launch.capabilities or _native.known_compute_capabilities()
        return max(self.of(launch, capability) for capability in kinds)


def _options(launch: Launch) -> dict[str, int]:
    return {"num_stages": launch.config.num_stages, "num_warps": launch.config.num_warps}


def _sizes(launch: Launch, sizes: Mapping[str, Size]) -> dict[str, int]:
    return {name: _size(launch, size) for name, size in sizes.items()}


def _size(launch: Launch, size: Size) -> int:
    if not isinstance(size, str):
        return size
    parameters = launch.parameters
    if size not in parameters:
        raise KeyError(f"there is no parameter {size}; there are {', '.join(parameters)}")
    value = parameters[size]
    return operator.index(value.element_size() if hasattr(value, "element_size") else value)


def _elements(launch: Launch, sizes: Mapping[str, ElementSize]) -> dict[str, int]:
    """Element sizes as given; a missing one is that of the launch's widest tensor."""
    widest = _widest(launch)
    return {name: widest if size is None else _size(launch, size) for name, size in sizes.items()}


def _widest(launch: Launch) -> int:
    passed = [*launch.named_args.values(), *launch.options.values()]
    tensors = [value for value in passed if hasattr(value, "element_size") and not _is_index(value)]
    return max((operator.index(tensor.element_size()) for tensor in tensors), default=max(ELEMENT_BYTES))


def _is_index(tensor: Any) -> bool:
    """Whether it holds 64-bit integers, such as offsets, which are never multiplied."""
    is_whole = not getattr(getattr(tensor, "dtype", None), "is_floating_point", True)
    return is_whole and tensor.element_size() > max(ELEMENT_BYTES)


def _possible_elements(launch: Launch, size: Size) -> list[int]:
    """The possible sizes of an element: the known one, or all."""
    return ELEMENT_BYTES if _is_missing(launch, size) else [_size(launch, size)]


def _is_missing(launch: Launch, name: object) -> bool:
    return isinstance(name, str) and name not in launch.parameters


def _orders(launch: Launch, state_v_first: bool | str) -> list[bool]:
    if _is_missing(launch, state_v_first):
        return [False, True]
    value = launch.parameters[state_v_first] if isinstance(state_v_first, str) else state_v_first
    return [bool(value)]


def exact(
    kernel: Any,
    *,
    signature: Mapping[str, str] | None = None,
    constants: Mapping[str, Any] | None = None,
) -> Estimator:
    """Compiles each configuration and reads its exact size.

    `kernel` is the result of `triton.jit`, or a function that returns it: `exact(lambda: my_kernel)` names a
    kernel that is still being defined. It is compiled for the launch that the autotuner was called for,
    which later finds it in Triton's cache. That needs the GPU.

    `signature` maps the names of passed arguments to types ("*fp16", "i32"). With it the kernel is compiled
    without a launch, for the pruner's `device`, or for the GPU that Triton uses. Pointers and sizes then
    count as multiples of 16. `constants` are compile-time arguments outside of the configurations. Others
    come from the launch or the kernel's defaults, or are `None`. Raises ValueError for names that the kernel
    does not have.
    """
    estimator = _Exact(kernel, signature, dict(constants or {}))
    if hasattr(kernel, "warmup"):
        estimator.check_names()
    return estimator


# A size that the compiler refuses, too large for any GPU.
DOES_NOT_FIT_BYTES = sys.maxsize


@dataclass(frozen=True)
class _Exact:
    kernel: Any
    signature: Mapping[str, str] | None
    constants: Mapping[str, Any]

    def estimate_bytes(self, launch: Launch) -> int:
        kernel = _jit_function(self.kernel)
        try:
            if self.signature is None:
                compiled = _warmed_up(kernel, launch)
            else:
                compiled = _compiled(kernel, self.signature, self.constants, launch)
        except Exception as error:
            taken_bytes = _refused_bytes(error)
            if taken_bytes is None:
                raise
            return taken_bytes
        return operator.index(compiled.metadata.shared)

    def check_names(self) -> None:
        """Raises `ValueError` for names in the signature or the constants that the kernel does not have."""
        if self.signature is None:
            return
        names = list(_jit_function(self.kernel).arg_names)
        for what, given in (("signature", self.signature), ("constants", self.constants)):
            if unknown := [name for name in given if name not in names]:
                raise ValueError(
                    f"the kernel has no {', '.join(unknown)}, which {what} names; it has {', '.join(names)}"
                )


def _jit_function(kernel: Any) -> Any:
    """The kernel without its autotuner, which would prune again.

    Heuristics inside it stay, since they set arguments. Those outside have set theirs in the launch already.
    """
    found = kernel if hasattr(kernel, "warmup") or not callable(kernel) else kernel()
    at = found
    while hasattr(at, "warmup") and hasattr(at, "fn"):
        if hasattr(at, "configs"):
            found = at.fn
        at = at.fn
    if not hasattr(found, "warmup"):
        raise TypeError(f"{kernel!r} is no kernel of Triton's, and returns none")
    return found


def _innermost(kernel: Any) -> Any:
    """The result of `triton.jit`, without heuristics."""
    while not hasattr(kernel, "arg_names") or not hasattr(kernel, "params"):
        kernel = kernel.fn
    return kernel


def _warmed_up(kernel: Any, launch: Launch) -> Any:
    options = {name: value for name, value in launch.options.items() if name not in ("grid", "warmup")}
    return kernel.warmup(*launch.named_args.values(), grid=(1,), **options, **_all_kwargs(launch.config))


def _all_kwargs(config: Config) -> dict[str, Any]:
    """All settings of a configuration, with the compiler's options."""
    if hasattr(config, "all_kwargs"):
        everything: dict[str, Any] = config.all_kwargs()
        return everything
    return {**config.kwargs, "num_stages": config.num_stages, "num_warps": config.num_warps}


def _compiled(kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any], launch: Launch) -> Any:
    compiler = importlib.import_module("triton.compiler")
    backends = importlib.import_module("triton.backends.compiler")
    kernel = _innermost(kernel)
    names = list(kernel.arg_names)
    defaults = {name: parameter.default for name, parameter in zip(names, kernel.params, strict=True)}
    known = {name: value for name, value in defaults.items() if value is not inspect.Parameter.empty}
    values = {**known, **constants, **launch.named_args, **launch.options, **launch.config.kwargs}
    types = {name: signature.get(name, "constexpr") for name in names}
    fixed = {(at,): values.get(name) for at, name in enumerate(names) if types[name] == "constexpr"}
    aligned = [["tt.divisibility", 16]]
    wide = [at for at, name in enumerate(names) if types[name].startswith(("*", "i"))]
    attributes = {(at,): aligned for at in wide if not kernel.params[at].do_not_specialize}
    source = compiler.ASTSource(fn=kernel, signature=types, constexprs=fixed, attrs=attributes)
    if len(launch.capabilities) == 1:
        [(major, minor)] = launch.capabilities
        target = backends.GPUTarget("cuda", 10 * major + minor, THREADS_PER_WARP)
    else:
        target = importlib.import_module("triton.runtime").driver.active.get_current_target()
    options = {name: value for name, value in _all_kwargs(launch.config).items() if name not in names}
    return compiler.compile(source, target=target, options=options)


THREADS_PER_WARP = 32


def _refused_bytes(error: Exception) -> int | None:
    """The size for which a configuration was refused; `None` for another reason."""
    kind = type(error).__name__
    if kind == "OutOfResources" and getattr(error, "name", None) == "shared memory":
        return operator.index(error.required)  # type: ignore[attr-defined]
    is_too_large = kind == "PTXASError" and "uses too much shared data" in str(error)
    return DOES_NOT_FIT_BYTES if is_too_large else None


@dataclass(frozen=True)
class Target:
    """The GPU that kernels are compiled for."""

    name: str
    capabilities: Sequence[Capability]
    budget_bytes: int
    fallback: str | None = None
    """Where no GPU could be queried: the source of the budget, and the reason."""


def _target(device: Device) -> Target:
    kind = _kind(device)
    if kind is not None:
        return _of_kind(kind)
    ordinal = _native.cuda_ordinal(device)
    try:
        return _of_gpu(ordinal)
    except _native.PoorwillError as error:
        fallback = f"every GPU, since cuda:{ordinal} could not be asked: {error}"
        return Target("an unknown GPU", (), _native.SHARED_MEMORY_WITHOUT_OPT_IN_BYTES, fallback)


def _kind(device: object) -> Capability | None:
    """The kind of GPU that `device` names; None for a GPU of this machine."""
    if isinstance(device, str) and device.startswith("sm_"):
        if named := re.fullmatch(r"sm_([0-9]+)([0-9])[af]?", device):
            return int(named[1]), int(named[2])
        raise ValueError(f'{device!r} is no kind of GPU; one is written "sm_90"')
    if not isinstance(device, tuple):
        return None
    if len(device) == 2 and all(type(number) is int and number >= 0 for number in device):
        return device
    raise ValueError(f"{device!r} is no compute capability; one is two numbers, as in (9, 0)")


def _of_kind(capability: Capability) -> Target:
    kinds = _native.known_compute_capabilities()
    major, minor = capability
    budget_bytes = _native.shared_memory_of_capability(major, minor) if capability in kinds else None
    if budget_bytes is None:
        known = ", ".join(f"sm_{major}{minor}" for major, minor in kinds)
        raise ValueError(f"the shared memory of sm_{major}{minor} is not known; known are {known}")
    return Target(f"sm_{major}{minor}", [capability], budget_bytes)


@cache
def _of_gpu(ordinal: int) -> Target:
    """A GPU's own figures. Failed queries are repeated at the next call.

    Kinds of GPU with the same shared memory also use it alike, so the exact kind does not matter.
    """
    budget_bytes = _native.shared_memory_of_device(ordinal)
    kinds = _native.known_compute_capabilities()
    alike = [kind for kind in kinds if _native.shared_memory_of_capability(*kind) == budget_bytes]
    return Target(f"cuda:{ordinal}", alike, budget_bytes)
