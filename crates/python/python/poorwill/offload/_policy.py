"""What the environment allows: page-locked memory and device views."""

from dataclasses import dataclass

from poorwill import _native
from poorwill._native import PoorwillError


@dataclass(frozen=True)
class Policy:
    """What the environment's switches allow; unset ones allow everything."""

    pin: bool
    """Whether memory may be page-locked."""
    pin_because: str | None
    """The variable that forbids it, or None."""
    uva: bool
    """Whether a device may read host memory in place."""
    uva_because: str | None
    """The variable that forbids it, or None."""

    def require_views(self, nbytes: int) -> None:
        """Raises PoorwillError where a device may not read host memory in place."""
        if not self.uva:
            raise PoorwillError(
                f"cannot make a device view of {nbytes} bytes of host memory: {self.uva_because}=1 is set; "
                "leave it away, or have poorwill.offload.offload(tensor).stage_in() copy them to the device"
            )


def policy() -> Policy:
    """What the environment allows now.

    Raises PoorwillError for a switch that is neither 0 nor 1.
    """
    return Policy(**_native.offload_policy())
