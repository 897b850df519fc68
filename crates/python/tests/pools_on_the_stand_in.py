"""Has pytest run over the stand-ins for PyTorch and NVIDIA's driver: `-p pools_on_the_stand_in`."""

import fake_torch

fake_torch.install(fake_torch.Driver())
