"""A vLLM plugin that replaces its allocator by a counting subclass.

It behaves the same, and counts what is mapped and where the time of a sleep goes."""

import time

# The allocator in place, once there is one, and the seconds by phase since they were asked for last.
counting = None
seconds: dict[str, float] = {}


def timed(name, function):
    def call(*args, **kwargs):
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start

    return call


def phases() -> dict[str, float]:
    """Seconds by phase since this was asked last."""
    taken = {name: round(took, 4) for name, took in seconds.items()}
    seconds.clear()
    return taken


def fill(allocator, tag: str) -> dict[str, int]:
    """How much of a tag's segments holds tensors."""
    entry = allocator.allocator_and_pools.get(tag)
    pools = [] if entry is None else [part[0] for part in entry] if isinstance(entry, list) else [entry[0]]
    segments = [segment for pool in pools for segment in pool.snapshot()]
    mapped = [segment for segment in segments if segment["address"] in allocator.pointer_to_data]
    return {
        "mapped_bytes": sum(segment["total_size"] for segment in mapped),
        "live_bytes": sum(segment["allocated_size"] for segment in mapped),
    }


def register() -> None:
    """What vLLM calls in each of its processes."""
    import vllm.device_allocator.cumem as cumem

    if not cumem.cumem_available or hasattr(cumem.CuMemAllocator, "peak_mapped_bytes"):
        return

    class CountingAllocator(cumem.CuMemAllocator):
        """vLLM's allocator, with an account."""

        peak_mapped_bytes = 0

        def __init__(self):
            global counting
            super().__init__()
            self.mapped_bytes = self.mallocs = self.frees = 0
            counting = self

        def _python_malloc_callback(self, allocation_handle):
            super()._python_malloc_callback(allocation_handle)
            self.mallocs += 1
            self.mapped_bytes += allocation_handle[1]
            self.peak_mapped_bytes = max(self.peak_mapped_bytes, self.mapped_bytes)

        def _python_free_callback(self, ptr):
            handle = super()._python_free_callback(ptr)
            self.frees += 1
            self.mapped_bytes -= handle[1]
            return handle

    cumem.CuMemAllocator = CountingAllocator
    cumem.create_and_map = timed("map", cumem.create_and_map)
    cumem.unmap_and_release = timed("unmap", cumem.unmap_and_release)
    cumem.libcudart.cudaMemcpy = timed("copy", cumem.libcudart.cudaMemcpy)
