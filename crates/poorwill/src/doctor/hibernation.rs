//! Whether processes can be taken off their GPUs here.

use serde::Serialize;

/// Whether processes can hibernate on this computer. Each may have obstacles of its own besides.
///
/// ```
/// use poorwill::doctor::{Plan, examine};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// match examine(&Plan::default())?.hibernation {
///     Some(hibernation) if hibernation.reasons.is_empty() => println!("engines can hibernate"),
///     Some(hibernation) => println!("they cannot: {}", hibernation.reasons.join("; ")),
///     None => println!("no GPU was to be examined"),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct HibernationReport {
    /// Why none can, and what would help; empty if they can.
    pub reasons: Vec<String>,
    /// Which processes cannot, and what would help.
    pub limits: Vec<String>,
}

#[cfg(not(target_os = "linux"))]
impl HibernationReport {
    pub(super) fn examine() -> Self {
        Self { reasons: vec!["it needs Linux".to_owned()], limits: Vec::new() }
    }
}

#[cfg(target_os = "linux")]
impl HibernationReport {
    pub(super) fn examine() -> Self {
        use poorwill_driver::cuda::CudaCheckpointer;
        use poorwill_driver::nvml::Nvml;
        use poorwill_driver::system::System;

        let driver = CudaCheckpointer::open(None).err().map(|error| error.kind.to_string());
        let system = System::here();
        let mut report = Self::of(driver, system.ptrace_scope(), system.has_ptrace_capability());
        if let Err(reason) = Nvml::load() {
            report.limits.push(format!(
                "only with --without-space-check: {reason}; make libnvidia-ml.so.1 loadable (in a container \
                 NVIDIA_DRIVER_CAPABILITIES=utility)"
            ));
        }
        report
    }

    /// The driver's calls need the rights of a debugger, which the kernel may limit.
    fn of(driver: Option<String>, ptrace_scope: Option<u64>, may_trace: bool) -> Self {
        const SCOPE: &str = "/proc/sys/kernel/yama/ptrace_scope";
        let mut report = Self { reasons: driver.into_iter().collect(), limits: Vec::new() };
        match ptrace_scope.unwrap_or_default() {
            0 => {}
            1 | 2 if may_trace => {}
            1 => report.limits.push(format!(
                "only processes that the caller has started: {SCOPE} is 1; be root, have CAP_SYS_PTRACE, or write 0 there"
            )),
            2 => report.reasons.push(format!("{SCOPE} is 2: be root, have CAP_SYS_PTRACE, or write 0 there")),
            scope => report.reasons.push(format!("{SCOPE} is {scope}: start the system with a lower value")),
        }
        report
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_forbids_is_named_with_what_helps() {
        let report = |scope, may_trace| HibernationReport::of(None, scope, may_trace);
        for (scope, may_trace) in [(None, false), (Some(0), false), (Some(1), true), (Some(2), true)] {
            assert_eq!(report(scope, may_trace), HibernationReport { reasons: vec![], limits: vec![] });
        }
        let own = report(Some(1), false);
        assert!(own.reasons.is_empty() && own.limits[0].contains("CAP_SYS_PTRACE"), "{own:?}");
        assert!(report(Some(2), false).reasons[0].contains("write 0 there"));
        assert!(report(Some(3), true).reasons[0].contains("is 3"));
        let old = HibernationReport::of(Some("the driver is 550".into()), Some(2), false);
        assert_eq!((old.reasons.len(), old.reasons[0].as_str()), (2, "the driver is 550"));
    }
}
