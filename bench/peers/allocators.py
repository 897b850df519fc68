"""One face for every allocator under test: pool(), sleep(), drop(), wake()."""

import subprocess
import sys
from contextlib import nullcontext


class Torch:
    """PyTorch's default pool: the reference for loading; it cannot sleep."""

    def pool(self):
        return nullcontext()


class CuMem:
    """vLLM's CuMemAllocator."""

    def __init__(self):
        from vllm.device_allocator.cumem import CuMemAllocator

        self._allocator = CuMemAllocator.get_instance()

    def pool(self):
        return self._allocator.use_memory_pool(tag="weights")

    def sleep(self):
        self._allocator.sleep(offload_tags=("weights",))

    def drop(self):
        self._allocator.sleep(offload_tags=())

    def wake(self):
        self._allocator.wake_up()


class MemorySaver:
    """torch_memory_saver with host backups, kept across cycles or not."""

    def __init__(self, retain: bool):
        from torch_memory_saver import torch_memory_saver

        torch_memory_saver.hook_mode = "torch"
        torch_memory_saver.retain_cpu_backup = retain
        self._saver = torch_memory_saver

    def pool(self):
        return self._saver.region(tag="weights", enable_cpu_backup=True)

    def sleep(self):
        self._saver.pause("weights")

    def wake(self):
        self._saver.resume("weights")


class Poorwill:
    """This project's Python package."""

    def __init__(self, **options):
        import poorwill

        self._poorwill = poorwill
        if options:
            poorwill.arena(**options)
        self.linked_gib = 0.0

    def pool(self):
        return self._poorwill.pool(tag="weights")

    def sleep(self):
        self._poorwill.sleep(level=1)

    def drop(self):
        self._poorwill.sleep(level=2)

    def wake(self):
        report = self._poorwill.wake()
        # Over another GPU's link, or from its memory.
        self.linked_gib = (report.linked_bytes + report.peer_bytes) / (1 << 30)
        if report.undefined_tags:
            # The weights are not loaded again here; without this the next sleep is refused.
            self._poorwill.mark_restored(report.undefined_tags)


class PoorwillLending(Poorwill):
    """The same, but sleeps lend to a broker."""

    def __init__(self):
        super().__init__()
        self._poorwill.arena(lend=True)

    def take(self, gib: float):
        """Others need so much of what is lent."""
        import torch

        device = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        words = ["poorwill", "broker", "--give-up", f"{gib}GiB", "--device", device]
        subprocess.run([sys.executable, "-m", *words], check=True, stdout=subprocess.DEVNULL)


class PoorwillPeers(Poorwill):
    """The same, with copies in other GPUs' memory; nothing stays on the own one."""

    def __init__(self):
        super().__init__(lend=True, peer_copies=True)

    def sleep(self):
        self._poorwill.sleep(level=1, lend=False)


MAKE = {
    "none": Torch,
    "cumem": CuMem,
    "tms": lambda: MemorySaver(retain=False),
    "tms-retain": lambda: MemorySaver(retain=True),
    "poorwill": Poorwill,
    "poorwill-lending": PoorwillLending,
    "poorwill-links": lambda: Poorwill(links=True),
    "poorwill-peers": PoorwillPeers,
    "poorwill-raw": lambda: Poorwill(compress="off"),
    "poorwill-raw-links": lambda: Poorwill(compress="off", links=True),
}
