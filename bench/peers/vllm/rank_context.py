#!/usr/bin/env python3
"""A process that holds of a GPU what any process has to: a context, with PyTorch and NCCL loaded.

Prints a line once it does, and ends with its input.
"""

import argparse
import json
import os
import sys


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--ordinal", type=int, default=0, help="which GPU, by CUDA's count")
    ordinal = arguments.parse_args().ordinal
    import torch

    torch.cuda.set_device(ordinal)
    torch.cuda.synchronize()
    print(json.dumps({"pid": os.getpid(), "nccl": list(torch.cuda.nccl.version())}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
