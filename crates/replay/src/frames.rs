//! Which frames of a stack say who asked for memory.

/// Recorders, allocators, and what makes an empty tensor: they are in every stack.
const PLUMBING: [&str; 9] = [
    "torch::unwind::",
    "CapturedTraceback",
    "gather_with_cpp",
    "CachingAllocator",
    "CUDAAllocator",
    "at::detail::empty_",
    "at::native::empty_",
    "c10::StorageImpl",
    "c10::intrusive_ptr",
];

/// Whether a frame is of the recorder or of the allocator.
pub(crate) fn is_plumbing(frame: &str) -> bool {
    PLUMBING.iter().any(|part| frame.contains(part))
}

/// Whether a frame is an operation of a backward pass, as `torch::autograd::generated::BmmBackward0::apply(...)`.
pub(crate) fn is_backward(frame: &str) -> bool {
    frame.contains("::apply") && (frame.contains("Backward") || frame.contains("autograd::AccumulateGrad"))
}

fn is_python(frame: &str) -> bool {
    frame.contains(".py:") || frame.starts_with('<')
}

fn is_foreign(frame: &str) -> bool {
    const STARTS: [&str; 5] = ["??", "<frozen ", "torch/", "einops/", "<eval_with_key>"];
    const PARTS: [&str; 7] = ["/torch/", "/einops/", "c10::", "at::", "torch::", "std::", ".so:"];
    STARTS.iter().any(|start| frame.starts_with(start)) || PARTS.iter().any(|part| frame.contains(part))
}

/// The frame that matters: the innermost of the program in Python, else the operation of the backward pass. Without
/// these it is the innermost of neither PyTorch, recorder nor allocator.
pub(crate) fn own_at(stack: &[String]) -> Option<usize> {
    let first = |is: &dyn Fn(&str) -> bool| stack.iter().position(|frame| is(frame));
    first(&|frame| is_python(frame) && !is_foreign(frame))
        .or_else(|| first(&is_backward))
        .or_else(|| first(&|frame| !is_foreign(frame)))
        .or_else(|| first(&|frame| !is_plumbing(frame)))
        .or_else(|| (!stack.is_empty()).then_some(0))
}

/// That frame, and those of the program that called it.
pub(crate) fn of_program(stack: &[String]) -> Vec<String> {
    let Some(own) = own_at(stack) else { return Vec::new() };
    let callers = stack[own + 1..].iter().map(|frame| &**frame);
    let callers = callers.filter(|frame| is_python(&stack[own]) && !is_foreign(frame));
    std::iter::once(&*stack[own]).chain(callers).map(brief).collect()
}

/// A frame without the namespaces and arguments of C++.
fn brief(frame: &str) -> String {
    if is_python(frame) || !frame.contains("::") {
        return frame.to_owned();
    }
    let frame = frame.replace("(anonymous namespace)::", "").replace("torch::autograd::generated::", "");
    frame.split('(').next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_frame_is_the_innermost_of_the_program() {
        let apply = "torch::autograd::generated::BmmBackward0::apply(std::vector<at::Tensor>&&)";
        for (frames, expected) in [
            (&["??:0 c10::alloc", "/v/site-packages/torch/nn/m.py:3 to", "/v/vllm/moe.py:9 load"][..], 2),
            (&["torch/nn/m.py:3 to", "<frozen runpy>:1 run", "<string>:1 <module>"], 2),
            (&["/v/site-packages/torch/nn/m.py:3 to", "??:0 main"], 0),
            (&["/x/attorch.py:3 to"], 0),
            (&["einops/einops.py:3 rearrange", "work/m.py:4 forward"], 1),
            (&["torch::unwind::unwind()", "at::_ops::bmm::call(at::Tensor const&)", apply, "clone3"], 2),
            (&["torch::unwind::unwind()", "at::detail::empty_cuda()", "at::_ops::bmm::call()"], 2),
            (&["torch::unwind::unwind()", "c10::cuda::CUDACachingAllocator::malloc()"], 0),
            (&["weights, int4"], 0),
        ] {
            let stack: Vec<String> = frames.iter().map(|frame| (*frame).to_owned()).collect();
            assert_eq!(own_at(&stack), Some(expected), "{frames:?}");
        }
        assert_eq!(own_at(&[]), None);
        assert_eq!(brief(apply), "BmmBackward0::apply");
        assert_eq!(brief("torch::cuda::(anonymous namespace)::gather()"), "torch::cuda::gather");
    }

    #[test]
    fn callers_are_the_programs_own() {
        let stack =
            ["torch/m.py:3 empty", "w/m.py:4 f", "torch/nn/modules/module.py:9 _call_impl", "w/m.py:8 g"];
        let stack = stack.map(str::to_owned);
        assert_eq!(of_program(&stack), ["w/m.py:4 f", "w/m.py:8 g"]);
    }
}
