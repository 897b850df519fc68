"""The scripts' models: folders with random weights or only a configuration."""

import json
from pathlib import Path

KINDS = ["dense", "moe", "mxfp4", "small"]
BASE_ELEMENTS = 1 << 24  # random numbers that a checkpoint is made of

QWEN = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 151936,
}
SHAPES = {
    "dense": {  # 8.2 billion parameters, 15.3 GiB
        **QWEN,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
    },
    "small": {  # of which checkpoints are written: 0.09 GiB a layer, and 0.25 GiB beside them
        **QWEN,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_hidden_layers": 4,
        "num_key_value_heads": 8,
        "vocab_size": 32768,
    },
    "moe": {  # 16 billion parameters, 30 GiB
        **QWEN,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 25,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    },
    "mxfp4": {  # 21 billion parameters, 13 GiB
        **QWEN,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "bos_token_id": 199998,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "vocab_size": 201088,
    },
}


def configuration(kind: str, layers: int = 0) -> dict:
    """What config.json says of a kind of model; without a number of layers with the kind's own."""
    settings = dict(SHAPES[kind])
    settings["num_hidden_layers"] = count = layers or settings["num_hidden_layers"]
    if kind == "mxfp4":
        kinds = ["sliding_attention", "full_attention"]
        settings["layer_types"] = [kinds[layer % 2] for layer in range(count)]
    else:
        settings["max_window_layers"] = count
    return settings


def write_model(folder: Path, kind: str, layers: int = 0) -> Path:
    """A folder that vLLM makes up the weights of (`load_format="dummy"`)."""
    path = folder / f"model-{kind}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(configuration(kind, layers)))
    return path


def tensor_shapes(settings: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Qwen3 checkpoint with its shape; of a mixture of experts, too."""
    hidden, inner, head = settings["hidden_size"], settings["intermediate_size"], settings["head_dim"]
    multiplied = {"mlp": inner}
    if experts := settings.get("num_experts", 0):
        multiplied = {f"mlp.experts.{expert}": settings["moe_intermediate_size"] for expert in range(experts)}
    queries, keys = settings["num_attention_heads"] * head, settings["num_key_value_heads"] * head
    vocabulary = settings["vocab_size"]
    tensors = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(settings["num_hidden_layers"]):
        within = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "post_attention_layernorm": (hidden,),
        }
        for name, inner in multiplied.items():
            within |= {
                f"{name}.gate_proj": (inner, hidden),
                f"{name}.up_proj": (inner, hidden),
                f"{name}.down_proj": (hidden, inner),
            }
        if experts:
            within["mlp.gate"] = (experts, hidden)
        tensors |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in within.items()}
    return {**tensors, "model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def elements(shape: tuple[int, ...]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count


def layers_for(gib: float) -> int:
    """How many layers a checkpoint of about this size has."""
    first = sum(elements(shape) for shape in tensor_shapes(configuration("small", 1)).values())
    second = sum(elements(shape) for shape in tensor_shapes(configuration("small", 2)).values())
    each = second - first
    return max(1, round(((gib * (1 << 30)) / 2 - (first - each)) / each))


def shard_of(name: str) -> str:
    """The file of a checkpoint that a tensor is in: each layer has one."""
    parts = name.split(".")
    return f"layer-{int(parts[2]):03}.safetensors" if parts[1] == "layers" else "outer.safetensors"


def bound(name: str, shape: tuple[int, ...]) -> float:
    """The largest magnitude of random weights that leaves activations about as large as they were."""
    return 1.0 if "embed" in name else (3.0 / shape[-1]) ** 0.5


def write_tokenizer(path: Path, vocabulary: int) -> None:
    """A word for each token, so that any text can be asked with, and each token is seen in an answer."""
    words = {f"w{token}": token for token in range(vocabulary)}
    tokenizer = {
        "version": "1.0",
        **dict.fromkeys(["truncation", "padding", "normalizer", "post_processor", "decoder"]),
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "model_max_length": 2048}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def write_checkpoint(folder: Path, layers: int, seed: int = 7) -> Path:
    """A folder with a checkpoint of random numbers, every tensor another; needs PyTorch, but no GPU."""
    import torch
    from safetensors.torch import save_file

    settings = configuration("small", layers)
    path = folder / "checkpoint"
    path.mkdir(parents=True, exist_ok=True)
    base = torch.empty(BASE_ELEMENTS).uniform_(-1, 1, generator=torch.Generator().manual_seed(seed))
    base = torch.cat([base, base]).to(torch.bfloat16)
    shards: dict[str, dict] = {}
    for index, (name, shape) in enumerate(tensor_shapes(settings).items()):
        count = elements(shape)
        if len(shape) == 1:
            tensor = torch.ones(shape, dtype=torch.bfloat16)
        else:
            first = index * 7919 * 31 % BASE_ELEMENTS
            whole = base[first : first + BASE_ELEMENTS].repeat(-(-count // BASE_ELEMENTS))
            tensor = (whole[:count] * bound(name, shape)).reshape(shape).contiguous()
        shards.setdefault(shard_of(name), {})[name] = tensor
    for file, tensors in shards.items():
        save_file(tensors, str(path / file), metadata={"format": "pt"})
    index = {name: file for file, tensors in shards.items() for name in tensors}
    size = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors.values())
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": index})
    )
    write_tokenizer(path, settings["vocab_size"])
    (path / "config.json").write_text(json.dumps(settings))
    return path
