"""An offloader with our host memory that the GPU reads: `--cpu-offload-gb`, `--offload-backend uva`.

Names, order and the budget's meaning are vLLM's, but the budget is enforced. A parameter that does not fit
stays on the GPU, and later smaller ones may still be taken. Where the GPU may not access host memory in
place, a module's forward copies the parameters in.
"""

import contextlib
import importlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from poorwill import offload
from poorwill.offload import OffloadedPart, OffloadReport
from poorwill.offload._plans import Selection
from poorwill.vllm import _offload, _offload_memory
from poorwill.vllm._offload_memory import gib, listed

_base: Any = importlib.import_module("vllm.model_executor.offloader.base")
_config: Any = importlib.import_module("vllm.config")
functional_call: Any = importlib.import_module("torch.func").functional_call
logger: Any = _offload_memory.logger()

MARK = "_vllm_is_uva_offloaded"
"""vLLM's mark of a parameter that the GPU reads in host memory."""
_OURS = "_poorwill_is_offloaded"

_LOWER = "lower --cpu-offload-gb"


@dataclass(frozen=True)
class _Selected(Selection):
    """vLLM's rule for names, without parameters that are not on the GPU."""

    elsewhere: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        return name not in self.elsewhere and super().has(name)


class _Kept(offload.UvaOffloader):
    """Parameters in host memory, copied in by a forward around the module's where needed."""

    def __init__(self, selected: _Selected, max_bytes: int, is_pinned: bool) -> None:
        super().__init__(max_bytes=max_bytes, pin=is_pinned)
        self._selection = selected

    def keep_for(self, device: Any) -> None:
        """Sets the device of the memory in advance; otherwise it is each parameter's."""
        self._device = _offload_memory.home(device)

    @property
    def has_home(self) -> bool:
        return self._device is not None

    @property
    def device(self) -> Any:
        """The device that reads it; None without parameters."""
        return self._moved[0].kept.device if self._moved else None

    def _hook(self, *_: Any) -> None:
        """No hooks: PyTorch's would break compilation."""


@dataclass(frozen=True)
class _Root:
    """A module that vLLM passed, and the prefix of its parameters' names."""

    module: "weakref.ref[Any]"
    name: str


class UvaOffloader(_offload.stood_for("uva", "UVAOffloader")):  # type: ignore[misc]
    """Moves parameters of the modules that vLLM passes, within the budget."""

    is_poorwills = True
    supports_tower_offload = True

    def __init__(self, cpu_offload_max_bytes: int, cpu_offload_params: set[str] | None = None) -> None:
        _offload.refuse_unfit()
        allowed = offload.policy()
        self.cpu_offload_max_bytes = cpu_offload_max_bytes
        self.cpu_offload_bytes = 0
        self.cpu_offload_params = cpu_offload_params or set()
        self.pin_memory: bool = allowed.pin and bool(_base.should_pin_memory())
        # vLLM reads in place whatever it can lock.
        self.uva_offloading: bool = allowed.uva and self.pin_memory
        self._selected = _Selected(Selection.of(sorted(self.cpu_offload_params)).patterns)
        self._kept = _Kept(self._selected, self.cpu_offload_max_bytes, self.pin_memory)
        self._roots: list[_Root] = []
        self._roots_of: weakref.WeakKeyDictionary[Any, list[_Root]] = weakref.WeakKeyDictionary()
        self._with_forward: weakref.WeakSet[Any] = weakref.WeakSet()
        # Tensors on the GPU that are not plain, with the reason.
        self._unfit: dict[str, str] = {}
        self._names: list[str] = []
        if not self.cpu_offload_max_bytes:
            logger.warning(
                "Nothing is offloaded: --offload-backend uva has a budget of 0 bytes; give it one by "
                "--cpu-offload-gb"
            )

    @property
    def host_bytes(self) -> int:
        """Host memory that it has."""
        return self._kept.used_bytes

    @property
    def hooks_forward(self) -> bool:
        """Whether layers work only if their `forward` is called."""
        return bool(self.cpu_offload_max_bytes) and not self.uva_offloading

    # Building the model

    def wrap_modules(self, modules_generator: Any, prefix: str = "") -> list[Any]:
        """Offloads the selected part of each module before vLLM builds the next one."""
        return [self._wrapped(module, prefix) for module in modules_generator]

    def _wrapped(self, module: Any, prefix: str) -> Any:
        # Only vLLM's rule sees the prefix; the number distinguishes modules, and no module has such a name.
        name = f"#{len(self._roots)}.{prefix}".rstrip(".")
        named = dict(module.named_parameters(prefix=name, remove_duplicate=False))
        if not named or not self.cpu_offload_max_bytes:
            return module
        self._names += [full.partition(".")[2] for full in named]
        homes = [each.device for each in named.values() if each.device.type in _offload_memory.DEVICES]
        if homes and not self._kept.has_home:
            self._kept.keep_for(homes[0])
            _offload_memory.keep_to_budget(self, homes[0])
        root = _Root(weakref.ref(module), name)
        self._roots.append(root)
        for inner in module.modules():
            self._roots_of.setdefault(inner, []).append(root)
        self._offload(root)
        return module

    def _offload(self, root: _Root) -> None:
        module = root.module()
        if module is None:
            return
        self._leave_out(root, module)
        with _offload_memory.explaining("offloading weights by --cpu-offload-gb", _LOWER):
            report = self._kept.offload(module, name=root.name)
        self._note(root, module, report)

    def _leave_out(self, root: _Root, module: Any) -> None:
        """Finds what cannot be offloaded now: on the CPU, without memory yet, or no plain tensor."""
        for name, parameter in module.named_parameters(prefix=root.name, remove_duplicate=False):
            self._unfit.pop(name, None)
            is_left = False
            if parameter.device.type not in _offload_memory.DEVICES:
                is_left = not _is_ours(parameter)
            elif because := _offload_memory.unfit(parameter):
                is_left, self._unfit[name] = True, because
            (self._selected.elsewhere.add if is_left else self._selected.elsewhere.discard)(name)

    def _note(self, root: _Root, module: Any, report: OffloadReport) -> None:
        """Marks the parameters of a module with their location."""
        self.cpu_offload_bytes = self._kept.used_bytes
        ours = {name for part in (*report.taken, *report.already) for name in part.names}
        for name, parameter in module.named_parameters(prefix=root.name, remove_duplicate=False):
            if name in ours:
                _mark(parameter, self.uva_offloading)
            elif _is_ours(parameter):
                _unmark(parameter)
        if self.uva_offloading or module in self._with_forward:
            return
        if any(map(_is_ours, module.parameters())):
            self._put_forward_around(module)
            self._with_forward.add(module)

    def _put_forward_around(self, module: Any) -> None:
        """Has the module run with copies on the GPU of what rests on the CPU."""
        inner, device = module.forward, self._kept.device

        def forward(*args: Any, **kwargs: Any) -> Any:
            module.forward = inner
            # What is on the GPU stays there.
            on_device = {
                name: each.to(device, non_blocking=True) for name, each in module.state_dict().items()
            }
            # Tied ones have a copy each.
            output = functional_call(module, on_device, args=args, kwargs=kwargs, tie_weights=False)
            module.forward = forward
            return output

        module.forward = forward

    # Loading the weights

    @contextlib.contextmanager
    def loading(self, module: Any, target_device: Any) -> Iterator[None]:
        """Around a change of a module's parameters on the device.

        Those of ours that were replaced are offloaded again afterwards, in exactly the memory that they need
        now.
        """
        rests = self._taken_from_vllm(module, target_device)
        if rests is None:
            yield
            return
        yield
        while rests:
            _put_back(*rests.pop())
        for root in dict.fromkeys(
            root for inner in module.modules() for root in self._roots_of.get(inner, ())
        ):
            self._offload(root)

    def _taken_from_vllm(self, module: Any, target_device: Any) -> list[tuple[Any, Any]] | None:
        """Hides our parameters, which vLLM would move to PyTorch's memory if it sees a mark or the CPU.

        Returns what was moved, and from where; None without any of ours. Memory that is read in place is not
        kept.
        """
        ours = [each for each in module.parameters() if _is_ours(each)]
        for parameter in ours:
            _unmark(parameter)
        if self.uva_offloading or not ours:
            return [] if ours else None
        rests = [(parameter, parameter.data) for parameter in ours]
        for parameter in ours:
            parameter.data = parameter.data.to(target_device)
        return rests

    def post_init(self) -> None:
        """After the model is loaded: offloads what was replaced meanwhile, or names it."""
        left: tuple[OffloadedPart, ...] = ()
        if self._roots and _are_experts_moved():
            # Expert balancing across GPUs has recorded their addresses.
            logger.debug("no parameter is moved any more, since --enable-eplb is on")
        elif self._roots:
            for root in self._roots:
                if (module := root.module()) is not None:
                    self._leave_out(root, module)
            with _offload_memory.explaining("offloading replaced weights by --cpu-offload-gb", _LOWER):
                report = self._kept.again()
            for root in self._roots:
                if (module := root.module()) is not None:
                    self._note(root, module, report)
            left = report.left
        self._warn_of_replaced(left)
        self._tell(left)

    def _warn_of_replaced(self, left: tuple[OffloadedPart, ...]) -> None:
        names = set(self._kept.replaced())
        sizes: dict[str, int] = {}
        for root in self._roots:
            module = root.module()
            for name, parameter in () if module is None else module.named_parameters(prefix=root.name):
                if name in names:
                    _unmark(parameter)
                    sizes[name] = parameter.numel() * parameter.element_size()
        if not sizes:
            return
        why = "they do not fit into what --cpu-offload-gb has left" if left else "--enable-eplb is on"
        logger.warning(
            "%d parameters that were offloaded have been replaced while the weights were processed, and are "
            "in GPU memory now, %s of it, since %s: %s",
            *(len(sizes), gib(sum(sizes.values())), why),
            listed([f"{name} ({size} B)" for name, size in sizes.items()]),
        )

    def _tell(self, left: tuple[OffloadedPart, ...]) -> None:
        unmatched = self._selected.unmatched(self._names)
        if unmatched and self._names:
            logger.warning(
                "--cpu-offload-params: no parameter is called %s, so nothing is offloaded for %s; there "
                "are %s",
                *(", ".join(unmatched), "it" if len(unmatched) == 1 else "them"),
                listed(list(dict.fromkeys(self._names))),
            )
        if self._unfit:
            logger.warning(
                "%d parameters that were meant cannot be offloaded and stay on the GPU: %s",
                *(len(self._unfit), listed([f"{name} ({why})" for name, why in self._unfit.items()], 3)),
            )
        if self.cpu_offload_max_bytes:
            logger.info(
                "Weights in Poorwill's host memory: %s of the %s that --cpu-offload-gb allows, %s; %s that "
                "were meant too stay on the GPU",
                *(gib(self.host_bytes), gib(self.cpu_offload_max_bytes)),
                _offload_memory.kind(self.pin_memory, self.uva_offloading),
                gib(sum(part.nbytes for part in left)),
            )

    # While the engine runs

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Around a rewrite of weights: parameters are host memory already."""
        return contextlib.nullcontext()

    def refill(self) -> None:
        """After a sleep: host memory did not sleep."""


def _put_back(parameter: Any, rest: Any) -> None:
    """Puts it back where it was, if it still fits."""
    if _is_alike(parameter.data, rest):
        rest.copy_(parameter.data)
        parameter.data = rest


def _mark(parameter: Any, is_read_in_place: bool) -> None:
    setattr(parameter, _OURS, True)
    if is_read_in_place:
        setattr(parameter, MARK, True)


def _unmark(parameter: Any) -> None:
    for name in (_OURS, MARK):
        parameter.__dict__.pop(name, None)


def _is_ours(parameter: Any) -> bool:
    return bool(getattr(parameter, _OURS, False))


def _is_alike(one: Any, other: Any) -> bool:
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def _are_experts_moved() -> bool:
    config = _config.get_current_vllm_config_or_none()
    return bool(config is not None and getattr(config.parallel_config, "enable_eplb", False))
