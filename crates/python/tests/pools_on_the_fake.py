"""Has pytest run over fakes of PyTorch and NVIDIA's driver: `-p pools_on_the_fake`."""

import os

import fake_torch

# How this PyTorch differs from 2.11 (`DeviceAllocator`).
DIFFERENCES = os.environ.get("POORWILL_TEST_PYTORCH", "").split()

fake_torch.install(fake_torch.Driver(), **dict.fromkeys(DIFFERENCES, True))
