"""Which memory of a rank other processes map, by what vLLM's objects show."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from poorwill.vllm import _peers
from poorwill.vllm._peers import Shared, problem

PACKAGE = "vllm.distributed.device_communicators"
SIZES = {0x1000: 8 << 20, 0x2000: 9 << 20}


class Tensor:
    """As much of a tensor as has an address."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.nbytes, self._address = nbytes, address

    def data_ptr(self) -> int:
        return self._address


class AgRsAll2AllManager:
    """vLLM's default, which has no memory of its own."""


class DeepEPLLAll2AllManager:
    """One that has."""


def custom_all_reduce(**more: Any) -> Any:
    return SimpleNamespace(
        **{
            "disabled": False,
            "rank": 1,
            "meta_ptrs": [0x7000, 0x1000],
            "buffer_ptrs": [0x8000, 0x2000],
            "_capture_registered": False,
            **more,
        }
    )


def group(world_size: int = 2, **communicators: Any) -> Any:
    device = SimpleNamespace(**communicators) if communicators else None
    return SimpleNamespace(unique_name="tp:0", world_size=world_size, device_communicator=device)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """vLLM's groups; `find` asks no driver."""
    groups: dict[str, Any] = {}
    parallel = ModuleType("vllm.distributed.parallel_state")
    parallel.__dict__["_groups"] = groups
    for module in (ModuleType("vllm"), ModuleType("vllm.distributed"), parallel):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(_peers, "_allocation_bytes", SIZES.get)
    return groups


def found(groups: dict[str, Any], *given: Any) -> list[Shared]:
    groups.update({str(number): lambda each=each: each for number, each in enumerate(given)})
    return _peers.find()


def test_ranks_without_peers_share_nothing(vllm: dict[str, Any]) -> None:
    ungrouped = SimpleNamespace(unique_name="pp:0", world_size=1)
    off = group(ca_comm=custom_all_reduce(disabled=True), symm_mem_comm=None, all2all_manager=None)
    managed = group(ca_comm=None, all2all_manager=AgRsAll2AllManager())
    assert found(vllm, ungrouped, group(), off, managed) == []


def test_custom_all_reduce_shares_two_buffers(vllm: dict[str, Any]) -> None:
    assert found(vllm, group(ca_comm=custom_all_reduce())) == [
        Shared("tp:0, custom all-reduce, signals", 8 << 20, (0x1000,)),
        Shared("tp:0, custom all-reduce, buffer", 9 << 20, (0x2000,)),
    ]


def test_across_nodes_it_shares_them_by_symmetric_memory(vllm: dict[str, Any]) -> None:
    reduce = custom_all_reduce(
        meta_ptrs=[0x1000] * 2,
        buffer_ptrs=[0x2000] * 2,
        mnnvl_buffer=Tensor(0x3000, 77),
        mnnvl_multimem_rs_buffer=None,
    )
    assert found(vllm, group(ca_comm=reduce)) == [
        Shared("tp:0, custom all-reduce, mnnvl_buffer", 77, (0x3000,))
    ]


def test_captured_inputs_count_unless_vllm_leaves_them_unregistered(vllm: dict[str, Any]) -> None:
    # Older versions register them always.
    older = custom_all_reduce()
    del older._capture_registered
    *_, inputs = found(vllm, group(ca_comm=older))
    assert inputs.as_dict() == {"name": "tp:0, custom all-reduce, inputs in captured graphs", "bytes": None}


def test_symmetric_memory_and_expert_parallelism_are_named(
    vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    flashinfer = ModuleType(f"{PACKAGE}.flashinfer_all_reduce")
    flashinfer.__dict__.update(_fi_ar_workspace=object(), _fi_ar_quant_workspace=None)
    allocator = ModuleType(f"{PACKAGE}.pynccl_allocator")
    segments = [{"address": 0x5000, "total_size": 30}, {"address": 0x6000, "total_size": 12}]
    allocator.__dict__["_mem_pool"] = SimpleNamespace(snapshot=lambda: segments)
    for module in (flashinfer, allocator):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    shared = found(
        vllm,
        group(
            ca_comm=None,
            symm_mem_comm=SimpleNamespace(buffer=Tensor(0x4000, 64)),
            fi_pcie_ipc_ar_comm=SimpleNamespace(workspace=object()),
            all2all_manager=DeepEPLLAll2AllManager(),
        ),
    )
    assert shared == [
        Shared("tp:0, symmetric memory all-reduce", 64, (0x4000,)),
        Shared("tp:0, FlashInfer's PCIe all-reduce", None),
        Shared("tp:0, DeepEPLLAll2AllManager", None),
        Shared("FlashInfer's all-reduce, _fi_ar_workspace", None),
        Shared("NCCL's symmetric memory", 42, (0x5000, 0x6000)),
    ]


def test_only_memory_that_sleeps_is_a_problem() -> None:
    shared = [Shared("one", 8, (0x1000,)), Shared("two", None), Shared("three", 8, (0x2000, 0x3000))]
    assert problem(shared, []) is None
    assert problem(shared, [(0x1001, 0x2000), (0x3001, 0x9000)]) is None
    assert problem(shared, [(0x0, 0x1001), (0x3000, 0x3001)]) == (
        "other processes map memory that would sleep (one, three): they would keep its pages, and use them "
        "after the wake"
    )


def test_without_a_driver_sizes_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_peers, "_driver", lambda: None)
    assert _peers._allocation_bytes(0x1000) is None
    monkeypatch.setattr(_peers, "_driver", lambda: SimpleNamespace(cuMemGetAddressRange_v2=_answer))
    assert _peers._allocation_bytes(0x1000) == 4096
    assert _peers._allocation_bytes(0x9000) is None


def _answer(base: Any, size: Any, address: int) -> int:
    if address != 0x1000:
        return 1
    base._obj.value, size._obj.value = 0x1000, 4096
    return 0
