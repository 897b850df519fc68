"""Where blocks of the KV cache lie in a rank's memory.

A block's bytes are strided in views that each layer has of the cache. Which dimension counts the blocks is
vLLM's to say (`_generations`), never guessed from a size. Where a view is of no known form, the answer is
None: a sleep that keeps blocks then keeps the whole cache.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poorwill.vllm import _generations

__all__ = ["Run", "places", "runs_of"]

Run = Sequence[int]
"""The number of the first of some blocks that follow each other, and how many there are."""

Range = tuple[int, int]
"""An address and bytes."""


def runs_of(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """Runs of blocks in ascending order."""
    runs: list[tuple[int, int]] = []
    for block in sorted(set(blocks)):
        if runs and sum(runs[-1]) == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs


def places(
    vllm: _generations.Generation,
    kv_cache_config: Any,
    layers: Mapping[str, Any],
    runs: Sequence[Run],
    granule_bytes: int = 1,
) -> list[Range] | None:
    """Ranges of whole granules with all bytes of some blocks, merged; None where one layer's are not known.

    `layers` is vLLM's forward context, by the layers' names.
    """
    lattices: set[_Lattice] = set()
    blocks = int(kv_cache_config.num_blocks)
    for tensor in kv_cache_config.kv_cache_tensors:
        for name in vllm.layers_of(tensor):
            found = _of_layer(vllm, tensor, layers.get(name), blocks)
            if not found:
                return None
            lattices |= found
    runs, ranges = sorted((first, count) for first, count in runs), list[Range]()
    # Layers are alike but for where they begin.
    alike: dict[tuple[int, int, int], list[Range]] = {}
    for lattice in _joined(lattices):
        begin = lattice.first % granule_bytes
        shape = (lattice.step, lattice.nbytes, begin)
        if shape not in alike:
            own = _Lattice(lattice.step, begin, lattice.nbytes).ranges(runs)
            alike[shape] = _merged(_rounded(own, granule_bytes))
        shift = lattice.first - begin
        ranges += [(start + shift, nbytes) for start, nbytes in alike[shape]]
    return _merged(ranges)


@dataclass(frozen=True, order=True)
class _Lattice:
    """Some bytes of each block, all blocks at the same distance."""

    step: int
    """From block to block."""
    first: int
    """Of block 0."""
    nbytes: int

    def ranges(self, runs: Sequence[Run]) -> Iterator[Range]:
        for first, count in runs:
            start = self.first + first * self.step
            if self.nbytes >= self.step:
                yield start, (count - 1) * self.step + self.nbytes
            else:
                yield from ((start + number * self.step, self.nbytes) for number in range(count))


def _of_layer(vllm: _generations.Generation, tensor: Any, layer: Any, blocks: int) -> set[_Lattice] | None:
    views = getattr(layer, "kv_cache", None)
    if views is None:
        return None
    step = vllm.block_step(tensor)
    try:
        # A layer with state in place of keys has a view of each of its kinds, block by block.
        is_state = isinstance(views, (list, tuple))
        dimension = 0 if is_state else vllm.block_dimension(layer)
        found = [_of_view(view, dimension, blocks, step) for view in (views if is_state else [views])]
    except Exception:
        # A backend that has no such shape.
        return None
    if not found or any(each is None for each in found):
        return None
    return {lattice for each in found if each is not None for lattice in each}


def _of_view(view: Any, dimension: int, blocks: int, step: int | None) -> list[_Lattice] | None:
    """`step` is that of a layout whose blocks may have other layers' bytes between them."""
    size = int(view.element_size())
    extents, strides = tuple(view.shape), tuple(stride * size for stride in view.stride())
    own, count = strides[dimension], extents[dimension]
    if own <= 0 or count < blocks:
        return None
    # A backend may take a block in several pieces.
    pieces = count // blocks if step is None else count - (blocks - 1) * (step // own)
    if step is None:
        is_known = count % blocks == 0
    else:
        is_known = step % own == 0 and 1 <= pieces <= step // own
    starts, span = [int(view.data_ptr())], size
    for number, (extent, stride) in enumerate(zip(extents, strides, strict=True)):
        if number == dimension or extent == 1:
            continue
        if stride > own:
            starts = [start + at * stride for start in starts for at in range(extent)]
        else:
            is_known = is_known and 0 < stride < own
            span += (extent - 1) * stride
    if not is_known or span > own:
        return None
    # Padding within a block belongs to it.
    nbytes = own * pieces if step is None else own * (pieces - 1) + span
    return [_Lattice(own * pieces if step is None else step, start, nbytes) for start in starts]


def _joined(lattices: Iterable[_Lattice]) -> list[_Lattice]:
    """The same bytes, with those in one that follow each other in each block."""
    joined: list[_Lattice] = []
    for lattice in sorted(lattices):
        last = joined[-1] if joined else None
        if last is not None and last.step == lattice.step and lattice.first <= last.first + last.nbytes:
            end = max(last.first + last.nbytes, lattice.first + lattice.nbytes)
            joined[-1] = _Lattice(last.step, last.first, end - last.first)
        else:
            joined.append(lattice)
    return joined


def _rounded(ranges: Iterable[Range], granule_bytes: int) -> Iterator[Range]:
    """Ascending ranges to whole granules, without those that end in a granule of one before."""
    done = 0
    for start, nbytes in ranges:
        first, end = (
            start // granule_bytes * granule_bytes,
            -(-(start + nbytes) // granule_bytes) * granule_bytes,
        )
        if end > done:
            yield first, end - first
        done = max(done, end)


def _merged(ranges: Iterable[Range]) -> list[Range]:
    merged: list[Range] = []
    for start, nbytes in sorted(ranges):
        if merged and start <= sum(merged[-1]):
            first, before = merged[-1]
            merged[-1] = (first, max(before, start + nbytes - first))
        else:
            merged.append((start, nbytes))
    return merged
