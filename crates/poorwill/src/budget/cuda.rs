//! Whom to ask about a GPU's memory.

use poorwill_core::budget::{Answer, Fact, SourceName};
use poorwill_driver::CudaDevice;
use poorwill_driver::cuda::CudaMemory;

/// What everyone says about the memory of a GPU that is open.
pub(crate) fn facts_of(device: &CudaDevice) -> Vec<Fact> {
    let mut facts = Vec::new();
    match device.memory_as_told() {
        Ok(CudaMemory::Known { free_bytes, total_bytes }) => {
            facts.push(Fact::bytes(SourceName::CudaTotal, total_bytes));
            facts.push(Fact::bytes(SourceName::CudaFree, free_bytes));
        }
        Ok(CudaMemory::OverLimit { words }) => {
            facts.push(Fact::none(SourceName::CudaTotal, words.clone()));
            facts.push(Fact::new(SourceName::CudaFree, Answer::OverLimit(words)));
        }
        Err(_) => {}
    }
    facts
}
