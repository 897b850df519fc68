//! The first measurement of each GPU, so that the log says early which GPUs have no figures of their own.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::{Meter, MeterError};
use poorwill_rotation_policy::Gpu;

const WAIT_MAX: Duration = Duration::from_secs(5);

#[derive(Debug, PartialEq, Eq)]
enum Finding {
    Failed(MeterError),
    Slow(Gpu),
    /// It is measured, with something to know of it.
    Remarked(Gpu, String),
}

/// Warns of GPUs without figures. A model of such a GPU cannot wake, which its first request would find out.
pub(crate) async fn warn_of_unmeasured(meter: Arc<dyn Meter>, gpus: BTreeSet<Gpu>) {
    for finding in measure_each(&*meter, gpus).await {
        match finding {
            Finding::Failed(error) => tracing::warn!(
                gpu = error.gpu.0,
                error = error.to_string(),
                "cannot measure free memory of this GPU, so none of its models can wake; once it can be \
                 measured, they wake without a restart"
            ),
            Finding::Remarked(gpu, remark) => tracing::warn!(gpu = gpu.0, "{remark}"),
            Finding::Slow(gpu) => tracing::warn!(
                gpu = gpu.0,
                "no measurement of this GPU in {} s; its models wake once there is one; if they do not, check \
                 that nvidia-smi answers",
                WAIT_MAX.as_secs()
            ),
        }
    }
}

/// Ends at the first GPU that is slow, since the others may wait for it.
async fn measure_each(meter: &dyn Meter, gpus: BTreeSet<Gpu>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for gpu in gpus {
        let asked = async {
            meter.measure(&[gpu]).await?;
            Ok(meter.remark(gpu).await)
        };
        match tokio::time::timeout(WAIT_MAX, asked).await {
            Ok(Ok(remark)) => findings.extend(remark.map(|remark| Finding::Remarked(gpu, remark))),
            Ok(Err(error)) => findings.push(Finding::Failed(error)),
            Err(_) => {
                findings.push(Finding::Slow(gpu));
                break;
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use std::future;

    use super::*;
    use crate::measure::{Measured, Remark};

    /// GPU 0 is measured, GPU 1 fails, GPU 2 has a remark, and all others never answer.
    #[derive(Debug)]
    struct Scripted;

    fn failure() -> MeterError {
        MeterError { gpu: Gpu(1), reason: "no library".to_owned() }
    }

    impl Meter for Scripted {
        fn measure<'a>(&'a self, gpus: &'a [Gpu]) -> Measured<'a> {
            Box::pin(async {
                match gpus {
                    [Gpu(0 | 2)] => Ok(Vec::new()),
                    [Gpu(1)] => Err(failure()),
                    _ => future::pending().await,
                }
            })
        }

        fn remark(&self, gpu: Gpu) -> Remark<'_> {
            Box::pin(future::ready((gpu == Gpu(2)).then(|| "odd".to_owned())))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_gpu_is_not_blamed_for_others() {
        let found = measure_each(&Scripted, (0..5).map(Gpu).collect()).await;
        let remarked = Finding::Remarked(Gpu(2), "odd".to_owned());
        assert_eq!(found, [Finding::Failed(failure()), remarked, Finding::Slow(Gpu(3))]);
        assert_eq!(measure_each(&Scripted, [Gpu(0)].into()).await, []);
    }
}
