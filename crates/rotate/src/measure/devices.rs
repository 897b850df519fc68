//! GPUs as NVML counts them: positions are NVML's, and nothing is taken of any GPU.

use std::sync::{Arc, Mutex, PoisonError};

use poorwill::gpus::Gpus;

use super::{Measured, Memory, Meter, on_a_thread};

/// Measures by NVML. Its library is loaded when something is measured for the first time; while there is none, each
/// measurement tries again, and says what is missing.
#[derive(Debug, Clone, Default)]
pub struct Devices {
    loaded: Arc<Mutex<Option<Gpus>>>,
}

impl Meter for Devices {
    fn measure<'a>(&'a self, gpus: &'a [crate::policy::Gpu]) -> Measured<'a> {
        let loaded = Arc::clone(&self.loaded);
        Box::pin(on_a_thread(gpus, move |gpu| {
            let mut loaded = loaded.lock().unwrap_or_else(PoisonError::into_inner);
            let known = match &mut *loaded {
                Some(known) => known,
                none => none.insert(Gpus::open().map_err(|error| {
                    format!(
                        "{error}; install NVIDIA's driver, or play GPUs with [memory] measure = \"processes\" and gpu = \
                         \"8GiB\""
                    )
                })?),
            };
            let memory = known.memory(gpu.0).map_err(|error| error.to_string())?;
            Ok(Memory { free_bytes: memory.free_bytes, total_bytes: memory.total_bytes })
        }))
    }
}
