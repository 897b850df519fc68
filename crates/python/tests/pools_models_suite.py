"""Models in pools, on a GPU: outputs are the same, bit for bit, before and after cycles of sleep and wake."""

import gc
import itertools
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import poorwill
import pytest

pytestmark = pytest.mark.gpu
torch: Any = import_module("torch")
transformers: Any = import_module("transformers")

CYCLES = 10
NAMES = map("model-{}".format, itertools.count())


@pytest.fixture
def arena() -> Iterator[poorwill.Arena]:
    arena = poorwill.arena("cuda:0", next(NAMES), limit="8GiB")
    yield arena
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    arena.close()


def model(attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=4096,
        max_position_embeddings=512,
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def test_a_generation_is_the_same_after_ten_cycles(arena: poorwill.Arena) -> None:
    with arena.pool("weights"):
        llama = model().to("cuda").eval()
    places = [parameter.data_ptr() for parameter in llama.parameters()]
    prompt = torch.arange(1, 33, device="cuda").reshape(1, -1)

    def generate() -> Any:
        with torch.inference_mode():
            logits = llama(prompt).logits.clone()
            tokens = llama.generate(prompt, max_new_tokens=24, do_sample=False, use_cache=True)
        return logits, tokens

    logits, tokens = generate()
    for cycle in range(CYCLES):
        slept = arena.sleep()
        assert slept.released_bytes > 0
        arena.wake(verify="all")
        again, same_tokens = generate()
        assert torch.equal(again, logits), cycle
        assert torch.equal(same_tokens, tokens), cycle
    assert [parameter.data_ptr() for parameter in llama.parameters()] == places


def test_training_goes_on_as_if_nothing_had_been(arena: poorwill.Arena) -> None:
    def train(cycles: bool) -> list[Any]:
        with arena.pool("weights"):
            # Others add gradients up in no fixed order.
            llama = model("eager").to("cuda").train()
        with arena.pool("optimizer"):
            optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-3)
            tokens = torch.arange(256, device="cuda").reshape(4, 64)
        losses = []
        for _ in range(CYCLES):
            with arena.pool("optimizer"):
                loss = llama(tokens, labels=tokens).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach().cpu())
            if cycles:
                arena.sleep()
                arena.wake()
        return losses

    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        expected, found = train(cycles=False), train(cycles=True)
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert float(expected[-1]) < float(expected[0])
