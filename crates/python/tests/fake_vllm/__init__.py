"""vLLM's own code, run from its sources, over fakes of what lies below it.

`loader` runs modules with stubs around them; `engines`, `clients`, `workers` and `offloaders` assemble what
is tested.
"""

from vllm_sources.versions import played

from .engines import Vllm, make_config
from .worker import Worker

__all__ = ["VERSIONS", "Vllm", "Worker", "make_config"]

VERSIONS = played()
