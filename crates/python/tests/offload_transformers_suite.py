"""Models of transformers with their weights in host memory, on the host device and on a GPU.

Outputs equal those of the resident model, bit for bit, also of graphs over prefetched layers after a sleep
and a wake.
"""

import copy
import gc
import itertools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import poorwill
import pytest
from offload_models import DEVICES, is_nothing_held, place
from poorwill.offload import PrefetchOffloader, UvaOffloader

torch: Any = import_module("torch")
transformers: Any = import_module("transformers")

SIZES = {  # of which the largest model is within what `offload_models` may hold
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
}
NAMES = map("offloaded-{}".format, itertools.count())


def dense() -> Any:
    """Its embeddings are its head, too."""
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config)


def experts() -> Any:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {"dense": dense, "experts": experts}


def made(kind: str, device: str) -> Any:
    torch.manual_seed(0)
    return MODELS[kind]().to(torch.bfloat16).eval().requires_grad_(False).to(place(device))


def outputs(model: Any, device: str) -> tuple[Any, Any]:
    prompt = torch.arange(1, 33, device=place(device)).reshape(1, -1)
    with torch.inference_mode():
        logits = model(prompt).logits.clone()
        tokens = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, use_cache=True
        )
    return logits.cpu(), tokens.cpu()


def all_in_place(model: Any, device: str) -> Any:
    offloader = UvaOffloader(max_bytes="1GiB", device=device)
    assert not offloader.offload(model).left
    return offloader


def some_in_place(model: Any, device: str) -> Any:
    """As an engine does it: layer by layer, by names, within a budget that ends in the middle."""
    layers = model.model.layers
    of_one = sum(each.nbytes for name, each in layers[0].named_parameters() if "mlp." in f".{name}")
    offloader = UvaOffloader(max_bytes=of_one * 5 + 1, parameters=("mlp",), device=device)
    reports = [offloader.offload(layer, name=f"model.layers.{at}") for at, layer in enumerate(layers)]
    assert sum(part.nbytes for report in reports for part in report.taken) == of_one * 5
    return offloader


def ahead(model: Any, device: str) -> Any:
    return PrefetchOffloader(model.model.layers, ahead=2, within=model, device=device)


OFFLOADS: dict[str, Callable[[Any, str], Any]] = {
    "all in place": all_in_place,
    "some in place": some_in_place,
    "ahead": ahead,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("offload", OFFLOADS)
def test_outputs_are_those_of_the_resident_model(offload: str, kind: str, device: str) -> None:
    model = made(kind, device)
    logits, tokens = outputs(model, device)
    offloader = OFFLOADS[offload](model, device)
    for _ in range(3):
        again, same_tokens = outputs(model, device)
        assert torch.equal(again, logits)
        assert torch.equal(same_tokens, tokens)
    if kind == "dense":
        assert model.lm_head.weight is model.model.embed_tokens.weight
    del model, offloader
    gc.collect()
    assert is_nothing_held(device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_checkpoint_is_loaded_into_offloaded_weights(device: str) -> None:
    model, other = made("dense", device), made("dense", device)
    for parameter in other.parameters():
        parameter.mul_(1.25)
    state = copy.deepcopy(other.state_dict())
    expected = outputs(other, device)
    offloader = all_in_place(model, device)
    model.load_state_dict(state)
    for found, wanted in zip(outputs(model, device), expected, strict=True):
        assert torch.equal(found, wanted)
    offloader.check()


@pytest.mark.gpu
@pytest.mark.parametrize("layers_ahead", [0, 2, 5])
def test_graphs_over_prefetched_layers_right_after_a_sleep_and_a_wake(layers_ahead: int) -> None:
    device = "cuda:0"
    arena = poorwill.arena(device, next(NAMES), limit="4GiB")
    with arena.pool("weights"):
        model = made("dense", device)
        resident = outputs(model, device)
        offloader = PrefetchOffloader(model.model.layers, ahead=layers_ahead, within=model, device=device)
    prompts = [torch.arange(first, first + 32, device=device).reshape(1, -1) for first in (1, 100, 500)]
    with torch.inference_mode():
        expected = [model(prompt, use_cache=False).logits.clone() for prompt in prompts]
        still = prompts[0].clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(still, use_cache=False)
        torch.cuda.current_stream().wait_stream(side)
        offloader.settle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(still, use_cache=False).logits
        for cycle in range(5):
            arena.sleep()
            arena.wake(verify="all")
            for prompt, wanted in zip(prompts, expected, strict=True):
                still.copy_(prompt)
                graph.replay()
                assert torch.equal(out, wanted), cycle
        for found, wanted in zip(outputs(model, device), resident, strict=True):
            assert torch.equal(found, wanted)
    del graph, out
    offloader.close(on="host")
    del model, offloader
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    arena.close()
