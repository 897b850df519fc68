"""llama.cpp's own server with a tiny llama of random weights, made at the start: nothing is downloaded.

`--held-mib` is memory that it holds from the start on, `--grows-mib` what it takes once it has answered its
first request, as engines do whose caches grow with use.
"""

import argparse
import os
import tempfile
import threading
import time
import urllib.error
import urllib.request

import gguf
import numpy
import xllamacpp

WIDTH = 64
LAYERS = 2
HEADS = 4
CONTEXT = 4096
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


def write_model(path: str, seed: int) -> None:
    """Writes a model whose tokens are bytes."""
    random = numpy.random.default_rng(seed)

    def weights(*shape: int) -> numpy.ndarray:
        return (random.standard_normal(shape) * 0.08).astype(numpy.float32)

    special = [
        ("<unk>", gguf.TokenType.UNKNOWN),
        ("<s>", gguf.TokenType.CONTROL),
        ("</s>", gguf.TokenType.CONTROL),
    ]
    tokens = [*special, *((f"<0x{byte:02X}>", gguf.TokenType.BYTE) for byte in range(256))]
    # Bytes alone would leave the tokenizer without any word.
    tokens += [(letter, gguf.TokenType.NORMAL) for letter in ["\u2581", *map(chr, range(33, 127))]]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([name for name, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_token_scores([-float(number) for number in range(len(tokens))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT)
    writer.add_tensor("token_embd.weight", weights(len(tokens), WIDTH))
    writer.add_tensor("output.weight", weights(len(tokens), WIDTH))
    writer.add_tensor("output_norm.weight", numpy.ones(WIDTH, numpy.float32))
    shapes = {
        **dict.fromkeys(["attn_q", "attn_k", "attn_v", "attn_output"], (WIDTH, WIDTH)),
        **dict.fromkeys(["ffn_gate", "ffn_up"], (2 * WIDTH, WIDTH)),
        "ffn_down": (WIDTH, 2 * WIDTH),
    }
    for layer in range(LAYERS):
        for norm in ["attn_norm", "ffn_norm"]:
            writer.add_tensor(f"blk.{layer}.{norm}.weight", numpy.ones(WIDTH, numpy.float32))
        for name, shape in shapes.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", weights(*shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def held(mib: int) -> bytearray:
    """Memory whose pages are all there."""
    return bytearray(os.urandom(4096)) * (mib * 256)


def has_answered(port: int) -> bool:
    """Whether the server has made a token."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
    except (urllib.error.URLError, OSError):
        return False
    made = [line.split()[-1] for line in lines if line.startswith("llamacpp:tokens_predicted_total ")]
    return any(float(count) > 0 for count in made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--embedding", action="store_true")
    parser.add_argument("--held-mib", type=int, default=0)
    parser.add_argument("--grows-mib", type=int, default=0)
    arguments = parser.parse_args()
    memory = [held(arguments.held_mib)]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.gguf")
        write_model(path, arguments.seed)
        settings = xllamacpp.CommonParams()
        settings.model.path = path
        settings.model_alias = {arguments.name}
        settings.hostnames = ["127.0.0.1"]
        settings.port = arguments.port
        settings.n_ctx = CONTEXT
        settings.n_parallel = 4
        settings.n_gpu_layers = 0
        settings.cpuparams.n_threads = 1
        settings.cache_ram_mib = 16
        settings.endpoint_metrics = True
        if arguments.embedding:
            settings.embedding = True
            settings.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
        server = xllamacpp.Server(settings)
    print("listening at", server.listening_address, flush=True)
    if arguments.grows_mib:
        while not has_answered(arguments.port):
            time.sleep(0.2)
        memory.append(held(arguments.grows_mib))
    threading.Event().wait()


if __name__ == "__main__":
    main()
