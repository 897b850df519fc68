"""What torch_memory_saver's own examples use."""

from poorwill.torch._import import torch

__all__ = ["empty_cache", "get_and_print_gpu_memory", "get_device"]


def get_device() -> str:
    """The kind of device that examples allocate on."""
    return "cuda"


def empty_cache() -> None:
    """Releases PyTorch's cache."""
    torch.cuda.empty_cache()


def get_and_print_gpu_memory(message: str, gpu_id: int = 0) -> int:
    """Bytes in use on a GPU, by whichever process; prints them, too."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(gpu_id)
    used_bytes = int(total_bytes - free_bytes)
    print(f"GPU {gpu_id} memory: {used_bytes / (1 << 30):.2f} GB ({message})")
    return used_bytes
