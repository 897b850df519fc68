"""Triton's compiler for NVIDIA's GPUs, up to the point where shared memory has been laid out.

This calls what lies under `triton.compile` and is written for Triton 3.6. The full compiler gives the same
figure and takes thirty times as long; past this point it also refuses what does not fit.
"""

from typing import Any

import triton
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptx_version_from_options
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

ALIGNED = [["tt.divisibility", 16]]
THREADS_PER_WARP = 32


def shared_bytes(
    function: "triton.JITFunction[Any]",
    types: dict[str, str],
    constants: dict[str, Any],
    capability: int,
    num_stages: int,
    num_warps: int,
) -> int:
    """The shared memory of `function` on a GPU of compute capability `capability`, given as 90 for 9.0.

    `types` are those of the arguments that are passed; what is neither there nor among the constants is
    `None`. Pointers and sizes are taken to be multiples of 16, as they nearly always are.
    """
    names = list(function.arg_names)
    passed = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(
        fn=function,
        signature=passed,
        constexprs={
            (at,): constants.get(name) for at, name in enumerate(names) if passed[name] == "constexpr"
        },
        attrs={
            (at,): ALIGNED for at, name in enumerate(names) if is_aligned(function.params[at], passed[name])
        },
    )
    target = GPUTarget("cuda", capability, THREADS_PER_WARP)
    backend = make_backend(target)
    options = backend.parse_options({"num_stages": num_stages, "num_warps": num_warps})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    module = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    metadata: dict[str, Any] = {}
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, metadata)
    return lay_out(module, context, capability, get_ptx_version_from_options(options, capability))


def is_aligned(parameter: Any, kind: str) -> bool:
    return kind.startswith("*") or (kind.startswith("i") and not parameter.do_not_specialize)


def lay_out(module: Any, context: Any, capability: int, ptx_version: int) -> int:
    """Run the passes with which Triton begins its way to LLVM, up to the one that places shared memory."""
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, ptx_version)
    manager.run(module, "lay_out")
    placed: int = module.get_int_attr("ttg.shared")
    return placed
