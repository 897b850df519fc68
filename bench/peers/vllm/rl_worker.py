"""How weights get from a trainer's process into vLLM's workers, as in verl and OpenRLHF.

The worker extensions that write them, and the sender.

Both pass memory of the GPU between processes: verl a buffer that is filled again and again, OpenRLHF every
tensor by itself. PyTorch and ZeroMQ are imported in the functions, for the script itself does without a GPU.
"""

from collections.abc import Iterator
from typing import Any

ALIGNED_BYTES = 16
SILENT_MS = 60_000  # how long the other end may take
DEVICE_ARGUMENT = 6  # of what PyTorch rebuilds a tensor from: the ordinal that it had in the other process


def buckets(sizes: dict[str, int], bucket_bytes: int) -> list[dict[str, int | None]]:
    """Which tensors go together, and their offsets in the buffer. A tensor larger than the buffer goes alone,
    and not through it.
    """
    whole: list[dict[str, int | None]] = []
    bucket: dict[str, int | None] = {}
    end = 0
    for name, size in sizes.items():
        begin = -(-end // ALIGNED_BYTES) * ALIGNED_BYTES
        if bucket and begin + size > bucket_bytes:
            whole.append(bucket)
            bucket, begin = {}, 0
        if size > bucket_bytes:
            whole.append({name: None})
            end = 0
            continue
        bucket[name], end = begin, begin + size
    return [*whole, bucket] if bucket else whole


def _socket(kind: str) -> Any:
    import zmq

    socket = zmq.Context.instance().socket(getattr(zmq, kind))
    socket.RCVTIMEO = socket.SNDTIMEO = SILENT_MS
    socket.LINGER = 0
    return socket


def _rebuilt(handle: Any, ordinal: int) -> Any:
    """A tensor of another process's."""
    function, arguments = handle
    arguments = list(arguments)
    arguments[DEVICE_ARGUMENT] = ordinal
    return function(*arguments)


def send(address: str, weights: list[tuple[str, Any]], bucket_bytes: int) -> None:
    """Passes weights on to `Verl.update_weights_from_ipc`, bucket by bucket; returns when all are written."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    of_name = dict(weights)
    plan = buckets({name: tensor.nbytes for name, tensor in weights}, bucket_bytes)
    with _socket("REQ") as socket:
        socket.bind(address)

        def ask(message: Any) -> None:
            socket.send_pyobj(message)
            socket.recv()

        buffer = torch.empty(bucket_bytes, dtype=torch.uint8, device="cuda")
        ask(reduce_tensor(buffer))
        for bucket in plan:
            entries = []
            for name, begin in bucket.items():
                tensor = of_name[name]
                place: Any = begin
                if begin is None:
                    place = reduce_tensor(tensor)
                else:
                    raw = buffer[begin : begin + tensor.nbytes]
                    raw.view(tensor.dtype).view(tensor.shape).copy_(tensor)
                entries.append((name, tensor.shape, tensor.dtype, place))
            torch.cuda.synchronize()
            ask({"entries": entries, "is_last": bucket is plan[-1]})


def _received(address: str, ordinal: int) -> Iterator[list[tuple[str, Any]]]:
    """What comes from `send`; a bucket is gone when the next one is asked for."""
    import torch

    with _socket("REP") as socket:
        socket.connect(address)
        buffer = _rebuilt(socket.recv_pyobj(), ordinal)
        socket.send(b"")
        is_last = False
        while not is_last:
            message = socket.recv_pyobj()
            weights = []
            for name, shape, dtype, place in message["entries"]:
                if isinstance(place, int):
                    raw = buffer[place : place + shape.numel() * dtype.itemsize]
                    weights.append((name, raw.view(dtype).view(shape)))
                else:
                    weights.append((name, _rebuilt(place, ordinal)))
            yield weights
            torch.cuda.synchronize()
            del weights
            is_last = message["is_last"]
            socket.send(b"")


class Verl:
    """What verl 0.9 adds to the worker."""

    model_runner: Any
    device: Any

    def update_weights_from_ipc(
        self, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False, address: str = ""
    ) -> None:
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        model, config = self.model_runner.model, self.model_runner.vllm_config.model_config
        for weights in _received(address, self.device.index):
            model.load_weights(weights)
        process_weights_after_loading(model, config, self.device)


class OpenRlhf:
    """What OpenRLHF 0.11 adds to the worker."""

    model_runner: Any
    device: Any

    def update_weight_cuda_ipc(
        self, name: str, dtype: Any, shape: Any, ipc_handles: Any = None, empty_cache: bool = False
    ) -> None:
        import torch

        weight = _rebuilt(ipc_handles[str(self.device.index)], self.device.index)
        self.model_runner.model.load_weights(weights=[(name, weight)])
        torch.cuda.synchronize()
