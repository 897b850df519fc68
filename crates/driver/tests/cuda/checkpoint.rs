//! The contract of checkpointers over the fake library, and on GPUs.

use poorwill_testkit::checkpoint::{CudaSetup, targets};
use poorwill_testkit::device::Kind;

fn open() -> Option<CudaSetup> {
    let is_gpu = matches!(Kind::of_this_run(), Kind::Cuda(_));
    let devices =
        [0, 1].map(|number| format!("GPU-{}:total=16GiB", poorwill_fake_libcuda::uuid_text(number)));
    let devices = devices.join(",");
    CudaSetup::open((!is_gpu).then(|| (poorwill_fake_nvml::path(), &*devices)))
}

poorwill_testkit::checkpoint_contract!(open, targets::cuda);
