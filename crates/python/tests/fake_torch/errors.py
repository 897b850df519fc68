"""What PyTorch raises."""


class OutOfMemoryError(RuntimeError):
    """`torch.OutOfMemoryError`."""


class InternalAssert(RuntimeError):
    """PyTorch's own check of itself failed; in a destructor that ends the process."""


def check(holds: bool, what: str) -> None:
    """`TORCH_INTERNAL_ASSERT`."""
    if not holds:
        raise InternalAssert(f"INTERNAL ASSERT FAILED: {what}")
