#!/usr/bin/env python3
"""Record what PyTorch's caching allocator asks of poorwill's allocator, as crates/python/tests/calls has it.

Needs a GPU, PyTorch and the package. Each line of the output is a call. `a` has the size and the number of
the stream, `f` the number of the call that got the segment. Times are not kept.
"""

import argparse
import ctypes
import random
import sys

import poorwill
import torch
from poorwill import _native

ALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


class Recorder:
    """Stands between PyTorch and the allocator of a tag."""

    def __init__(self, addresses):
        self.lines, self.segments, self.streams = [], {}, {}
        self.alloc, self.free = ALLOC(addresses[0]), FREE(addresses[1])
        self.functions = ALLOC(self.on_alloc), FREE(self.on_free)

    def on_alloc(self, size, device, stream):
        segment = self.alloc(size, device, stream)
        number = self.streams.setdefault(stream, len(self.streams))
        if segment:
            self.segments[segment, size] = len(self.lines)
        self.lines.append(f"a {size} {number}" if segment else f"r {size} {number}")
        return segment

    def on_free(self, segment, size, device, stream):
        self.lines.append(f"f {self.segments.pop((segment, size))}")
        self.free(segment, size, device, stream)

    def addresses(self):
        return tuple(ctypes.cast(function, ctypes.c_void_p).value for function in self.functions)


def churn(name):
    from churn import Meter, dense, moe

    return {"moe": moe, "dense": dense}[name](Meter(), random.Random(0))


def train():
    """Steps of a small model, on two streams."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=8, vocab_size=8192
    )
    llama = transformers.LlamaForCausalLM(config).to("cuda")
    optimizer = torch.optim.AdamW(llama.parameters())
    tokens = torch.arange(512, device="cuda").reshape(4, 128)
    side = torch.cuda.Stream()
    for _ in range(4):
        llama(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            logits = llama(tokens).logits
            logits.record_stream(torch.cuda.current_stream())
        torch.cuda.current_stream().wait_stream(side)
    return llama, optimizer


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("what", choices=["moe", "dense", "train"])
    what = arguments.parse_args().what

    make = _native.torch_allocator
    recorders = {}

    def recorded(arena, tag):
        addresses = make(arena, tag)
        recorder = recorders.setdefault(addresses[0], Recorder(addresses))
        return recorder.addresses()

    _native.torch_allocator = recorded
    with poorwill.pool():
        kept = train() if what == "train" else churn(what)
    del kept
    torch.cuda.synchronize()
    poorwill.trim()
    (recorder,) = recorders.values()
    sys.stdout.write(f"# torch {torch.__version__}: {what}\n" + "\n".join(recorder.lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
