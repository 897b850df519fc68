"""Our offloaders in a vLLM with the patches of `contrib/upstream/vllm`.

`test_upstream_vllm.py` applies them, and runs this.
"""

from typing import Any

import pytest
from fake_vllm import offloaders
from fake_vllm.offloaders import LOADING, OFFLOADER, RUNNER, WORKER, Vllm

pytestmark = pytest.mark.parametrize("version", ["0.33.0"], indirect=True)
MADE: list[dict[str, Any]] = [{"cpu_offload_gb": 1}, {"offload_group_size": 1}]


@pytest.mark.parametrize("settings", MADE)
@pytest.mark.parametrize("is_late", [False, True])
def test_the_registry_has_ours_and_nothing_is_replaced(
    version: str, settings: dict[str, Any], is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POORWILL_OFFLOAD", "1")
    with offloaders.installed(version, is_late=is_late) as vllm:
        made = vllm.make(**settings)
        assert type(made).__module__.startswith("poorwill.vllm._offload_")
        # Of vLLM's offloaders nothing is there but what all of them have.
        assert type(made).__bases__ == (vllm.base.BaseOffloader,)
        assert made.hooks_forward is ("offload_group_size" in settings)
        theirs = [vllm.base.create_offloader, vllm.module(RUNNER).create_offloader]
        theirs += [vllm.module(LOADING).device_loading_context, vllm.module(WORKER).Worker.wake_up]
        assert not any("poorwill" in each.__module__ or hasattr(each, "__poorwill__") for each in theirs)


@pytest.mark.parametrize("settings", MADE)
def test_without_the_switch_they_are_vllms(version: str, settings: dict[str, Any]) -> None:
    with offloaders.installed(version) as vllm:
        assert type(vllm.make(**settings)).__module__.startswith(OFFLOADER)


def test_a_vllm_that_does_not_fit_is_refused(vllm: Vllm) -> None:
    version = vllm.module("vllm.version")
    version.__version__ = "0.99.0"
    for settings in MADE:
        with pytest.raises(Exception, match=r"vLLM 0\.99\.0.*unset POORWILL_OFFLOAD"):
            vllm.make(**settings)
