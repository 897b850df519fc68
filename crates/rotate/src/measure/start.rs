//! The first measurement of each GPU, so that the log says early which GPUs have no figures.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::{Meter, MeterError};
use poorwill_rotation_policy::Gpu;

const WAIT_MAX: Duration = Duration::from_secs(5);

#[derive(Debug, PartialEq, Eq)]
enum Unmeasured {
    Failed(MeterError),
    Slow(Gpu),
}

/// Warns of GPUs without figures. A model of such a GPU cannot wake, which its first request would find out.
pub(crate) async fn warn_of_unmeasured(meter: Arc<dyn Meter>, gpus: BTreeSet<Gpu>) {
    for unmeasured in measure_each(&*meter, gpus).await {
        match unmeasured {
            Unmeasured::Failed(error) => tracing::warn!(
                gpu = error.gpu.0,
                error = error.to_string(),
                "cannot measure free memory of this GPU, so none of its models can wake; once it can be \
                 measured, they wake without a restart"
            ),
            Unmeasured::Slow(gpu) => tracing::warn!(
                gpu = gpu.0,
                "no measurement of this GPU in {} s; its models wake once there is one; if they do not, check \
                 that nvidia-smi answers",
                WAIT_MAX.as_secs()
            ),
        }
    }
}

/// Ends at the first GPU that is slow, since the others may wait for it.
async fn measure_each(meter: &dyn Meter, gpus: BTreeSet<Gpu>) -> Vec<Unmeasured> {
    let mut unmeasured = Vec::new();
    for gpu in gpus {
        match tokio::time::timeout(WAIT_MAX, meter.measure(&[gpu])).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => unmeasured.push(Unmeasured::Failed(error)),
            Err(_) => {
                unmeasured.push(Unmeasured::Slow(gpu));
                break;
            }
        }
    }
    unmeasured
}

#[cfg(test)]
mod tests {
    use std::future;

    use super::*;
    use crate::measure::Measured;

    /// GPU 0 is measured, GPU 1 fails, and all others never answer.
    #[derive(Debug)]
    struct Scripted;

    fn failure() -> MeterError {
        MeterError { gpu: Gpu(1), reason: "no library".to_owned() }
    }

    impl Meter for Scripted {
        fn measure<'a>(&'a self, gpus: &'a [Gpu]) -> Measured<'a> {
            Box::pin(async {
                match gpus {
                    [Gpu(0)] => Ok(Vec::new()),
                    [Gpu(1)] => Err(failure()),
                    _ => future::pending().await,
                }
            })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_gpu_is_not_blamed_for_others() {
        let unmeasured = measure_each(&Scripted, (0..5).map(Gpu).collect()).await;
        assert_eq!(unmeasured, [Unmeasured::Failed(failure()), Unmeasured::Slow(Gpu(2))]);
        assert_eq!(measure_each(&Scripted, [Gpu(0)].into()).await, []);
    }
}
