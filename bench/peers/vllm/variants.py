#!/usr/bin/env python3
"""State that a sleep could lose: the scales of an FP8 KV cache, a LoRA adapter, and the state of a hybrid
model.

    variants.py --mode poorwill fp8-kv
    variants.py --mode poorwill lora
    variants.py --mode cumem --swaps 10 hybrid

Each starts vLLM in this process, and sleeps and wakes at levels 1 and 2, as a whole and by tag. It compares
greedy tokens, and checks what each sleep releases by the driver's figure. The scales are set to what nothing
would be reset to. With `--swaps` another engine, whose KV cache takes what is free of the card, then
alternates with this one. Many requests are compared after that.

After level 2 a checkpoint is loaded again, or the weights are written from a copy. A hybrid model has no
checkpoint here, and vLLM 0.20 cannot load one again into a model with LoRA. Its layers are wrapped, which
renames their parameters (`gate_up_proj.weight` is `gate_up_proj.base_layer.weight` then), and
`reload_weights` fails over a name. That is tried last, since it leaves the model without its parameters. A
missing name of a wrapped parameter counts as vLLM's own failure. Poorwill still has to report that the engine
is not ready.

vLLM adds up LoRA's products in pieces, in whatever order those come, so that the same adapter does not always
give the same tokens. Here they come in one piece, as with `VLLM_BATCH_INVARIANT=1`, and the adapter's bytes
are compared, too.

Prints JSON lines; a variant that fails says how, and ends with exit code 1.
"""

import argparse
import hashlib
import json
import os
import re
import sys
from pathlib import Path

from common import (
    GIB,
    MODES,
    Ballast,
    adopt,
    conclude_in_a_folder,
    emit,
    environment,
    every_line_says,
    gib,
    install_entry_point,
    utilization,
)
from models import configuration, tensor_shapes, write_checkpoint
from reload import attempt, refusal
from sleep import ORDERS
from two_engines import START_S, Child

LAYERS = 4
KV_GIB = 1
STEPS: list[tuple[int, list[str] | None]] = [(1, None), (1, None), (2, None), *((1, tags) for tags in ORDERS)]
GIVEN_BACK = 0.9  # of weights and KV cache, the share that a sleep has to give back
REQUESTS = 30
OTHERS_GIB = 8  # of the card for the weights and the context of the other engine, and for the passes of both
RANK = 8
AGAIN = 3  # so often the reference has to come out the same
SCALES = {"_k_scale": 0.75, "_v_scale": 1.25}
ADAPTED = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")

HYBRID = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "block_auto_adjust_ff_dim": False,
    "block_dim": 2048,
    "block_ff_dim": 6144,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "eos_token_id": 2,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "layer_types": ["conv", "full_attention"] * (LAYERS // 2),
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
    "num_attention_heads": 16,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 32768,
}


def write_adapter(folder: Path) -> Path:
    """A LoRA adapter of random numbers for the checkpoint."""
    import torch
    from safetensors.torch import save_file

    path = folder / "adapter"
    path.mkdir()
    generator = torch.Generator().manual_seed(11)
    tensors = {}
    for name, shape in tensor_shapes(configuration("small", LAYERS)).items():
        module = name.removesuffix(".weight")
        if module.endswith(ADAPTED):
            sides = {"lora_A": (RANK, shape[1]), "lora_B": (shape[0], RANK)}
            for side, of in sides.items():
                tensor = torch.empty(of).uniform_(-0.05, 0.05, generator=generator)
                tensors[f"base_model.model.{module}.{side}.weight"] = tensor.to(torch.bfloat16)
    save_file(tensors, str(path / "adapter_model.safetensors"))
    described = {
        "base_model_name_or_path": "",
        "lora_alpha": 2 * RANK,
        "peft_type": "LORA",
        "r": RANK,
        "target_modules": sorted({module.split(".")[-1] for module in ADAPTED}),
        "task_type": "CAUSAL_LM",
    }
    (path / "adapter_config.json").write_text(json.dumps(described))
    return path


def scales(engine, values: dict[str, float] | None = None) -> dict[str, list[float]]:
    """The scales of the KV cache by layer, set to `values` before if there are some."""
    found: dict[str, list[float]] = {name: [] for name in SCALES}
    for module in engine.worker.model_runner.compilation_config.static_forward_context.values():
        for name in SCALES:
            if hasattr(module, name):
                if values is not None:
                    getattr(module, name).fill_(values[name])
                found[name].append(float(getattr(module, name)))
    return found


def products_in_one_piece() -> None:
    """Has LoRA's products added up in one order; has to come before the first of them."""
    from vllm.lora.ops.triton_ops import utils

    # Some versions have it in every module that asks.
    package = utils.__name__.rpartition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{package}.") and hasattr(module, "is_batch_invariant"):
            module.is_batch_invariant = True


def adapters(engine) -> dict[str, str]:
    """Digests of what the layers hold of adapters."""
    import torch

    found = {}
    for name, module in engine.model.named_modules():
        for side in ("lora_a_stacked", "lora_b_stacked"):
            for at, tensor in enumerate(getattr(module, side, ())):
                raw = tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy()
                found[f"{name}.{side}.{at}"] = hashlib.blake2b(raw.tobytes(), digest_size=8).hexdigest()
    return found


def slept(engine, level: int, kv_bytes: int) -> dict:
    """Puts the engine to sleep, and says what it has given back by the driver's figure."""
    from engine import timed, used_memory, weight_bytes

    covered = weight_bytes(engine.model) + kv_bytes
    awake = used_memory()
    seconds = timed(engine.llm.sleep, level=level)
    asleep = used_memory()
    return {
        "level": level,
        "sleep_s": round(seconds, 4),
        "used_awake_gib": gib(awake),
        "used_asleep_gib": gib(asleep),
        "gave_back": awake - asleep >= GIVEN_BACK * covered,
    }


def woken(engine, tags: list[str] | None) -> dict:
    """Wakes the engine, tag by tag if there are some."""
    from engine import timed

    named = [[tag] for tag in tags] if tags else [None]
    return {"tags": tags, "wake_s": [round(timed(engine.llm.wake_up, tags=one), 4) for one in named]}


def swapped(engine, mode: str, swaps: int) -> dict:
    """Takes turns with another engine, which has the card while this one sleeps; then compares requests."""
    from engine import generated

    prompts = [[(11 * row + 17 * place) % 30000 + 10 for place in range(24)] for row in range(REQUESTS)]
    reference = generated(engine.llm, prompts)
    steady = generated(engine.llm, prompts) == reference
    with Ballast() as card:
        engine.llm.sleep(level=1)
        free = card.free()
        share = utilization(free, card.total(), free / GIB, 0.95)
        kv_gib = max(1.0, free / GIB - OTHERS_GIB)
        words = f"--mode {mode} --kind small --kv-gib {kv_gib:.1f} --utilization {share}"
        other = Child("other", words.split())
        try:
            other.answer(START_S)
            other_equal = []
            for _ in range(swaps):
                other.ask("sleep")
                engine.llm.wake_up()
                engine.llm.sleep(level=1)
                other.ask("wake")
                other_equal.append(other.ask("check")["tokens_equal"])
            other.ask("sleep")
            engine.llm.wake_up()
            made = generated(engine.llm, prompts)
            equal = sum(own == known for own, known in zip(made, reference, strict=True))
        finally:
            other.end()
    well = steady and equal == REQUESTS and all(other_equal)
    return {
        "swaps": swaps,
        "other_kv_gib": kv_gib,
        "other_tokens_equal": sum(other_equal),
        "requests": REQUESTS,
        "requests_equal": equal,
        "steady": steady,
        "ok": well,
    }


def is_wrapped(name: str, parameters: list[str]) -> bool:
    """Whether a parameter is there, but under the name that it has in a layer with LoRA."""
    module, _, leaf = name.rpartition(".")
    renamed = f"{module}.base_layer.{leaf}"
    # A part of the model loads without the part's name.
    return any(f".{parameter}".endswith(f".{renamed}") for parameter in parameters)


def checkpoint_again(engine, reference: list) -> dict:
    """The result of `reload_weights` with LoRA after level 2.

    It works, or fails as vLLM itself does and the engine stays not ready.
    """
    engine.llm.sleep(level=2)
    engine.llm.wake_up()
    parameters = [name for name, _ in engine.model.named_parameters()]
    tried = attempt(lambda: engine.llm.collective_rpc("reload_weights"))
    if not tried["refused"]:
        equal = engine.tokens() == reference
        return {"loaded": True, "tokens_equal": equal, "ok": equal}
    missed = re.findall(r"'([^']+)'", tried["error"])
    record = {
        "loaded": False,
        "error": tried["error"],
        "vllm_misses_a_wrapped_parameter": any(is_wrapped(name, parameters) for name in missed),
    }
    good = record["vllm_misses_a_wrapped_parameter"]
    if engine.mode == "poorwill":
        record["undefined"] = engine.status()["undefined"]
        record["afterwards"] = seen = refusal(engine, reference)
        good = good and record["undefined"] == ["weights"] and seen["refused"] and seen["poorwill_error"]
    return {**record, "ok": good}


def exercise(engine, options: argparse.Namespace, lora) -> bool:
    """Goes through all steps; whether each went as it has to."""
    from engine import copied, write_back

    plain = engine.tokens()
    if lora is not None:
        generate = engine.llm.generate
        engine.llm.generate = lambda *args, **named: generate(*args, lora_request=lora, **named)
    before = scales(engine, SCALES) if lora is None else {}
    reference = engine.tokens()
    weights = {} if options.variant == "fp8-kv" else copied(engine.model)
    held = adapters(engine)
    # Tokens that differ without a sleep say nothing of one.
    good = all(engine.tokens() == reference for _ in range(AGAIN))
    emit("reference", tokens=reference, differs_from_plain=reference != plain, steady=good, scales=before)
    for cycle, (level, tags) in enumerate(STEPS, 1):
        record = {**slept(engine, level, int(KV_GIB * GIB)), **woken(engine, tags)}
        if level == 2 and weights:
            write_back(engine.model, weights)
        elif level == 2:
            engine.llm.collective_rpc("reload_weights")
            # Loading the weights again computes scales again.
            scales(engine, SCALES)
        checks = {
            "tokens_equal": engine.tokens() == reference,
            "scales_equal": lora is not None or scales(engine) == before,
            "adapters_equal": adapters(engine) == held,
        }
        well = record["gave_back"] and all(checks.values())
        good = good and well
        step = f"level {level}{', by tag' if tags else ''}"
        emit("step", step=step, cycle=cycle, **record, **checks, ok=well)
    if options.swaps:
        record = swapped(engine, options.mode, options.swaps)
        good = good and record["ok"]
        emit("step", step="swaps", **record)
    if lora is not None:
        record = checkpoint_again(engine, reference)
        good = good and record["ok"]
        emit("checkpoint_again", **record)
    return good


def run(options: argparse.Namespace, folder: Path) -> bool:
    import engine as engines

    if options.mode == "cumem":
        install_entry_point(folder / "plugin")
    loads = options.variant != "hybrid"
    if loads:
        path = write_checkpoint(folder, LAYERS)
    else:
        path = folder / "model-hybrid"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(HYBRID))
    chosen = engines.settings(
        path,
        mode=options.mode,
        load_format="auto" if loads else "dummy",
        kv_gib=KV_GIB,
        utilization=0.5,
    )
    lora = None
    if options.variant == "lora":
        from vllm.lora.request import LoRARequest

        lora = LoRARequest("adapter", 1, str(write_adapter(folder)))
        products_in_one_piece()
        chosen |= {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1}
    else:
        chosen["kv_cache_dtype"] = "fp8"
    engine = engines.start(options.mode, chosen)
    if not loads:
        engines.fill_weights(engine.model)
    return exercise(engine, options, lora)


def parsed(given: list[str] | None = None) -> argparse.Namespace:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("variant", choices=["fp8-kv", "lora", "hybrid"])
    arguments.add_argument("--mode", choices=[mode for mode in MODES if mode != "none"], required=True)
    arguments.add_argument("--swaps", type=int, default=0, help="turns with another engine on the card")
    options = arguments.parse_args(given)
    if options.swaps < 0:
        arguments.error(f"--swaps is {options.swaps}; it is 0 or more")
    return options


def main() -> None:
    options = parsed()
    adopt(environment(options.mode, dict(os.environ), VLLM_ENABLE_V1_MULTIPROCESSING="0"))
    every_line_says(mode=options.mode, label=options.variant)
    conclude_in_a_folder(lambda folder: run(options, folder))


if __name__ == "__main__":
    main()
