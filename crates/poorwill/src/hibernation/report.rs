//! What hibernating and resuming took.

use serde::{Deserialize, Serialize};

/// A set that hibernates.
///
/// ```
/// use poorwill::hibernation::HibernateReport;
///
/// let line = r#"{"processes":[{"pid":12,"released_bytes":1039138816,"lock_ms":0.8,"checkpoint_ms":870.0}],
///     "host_bytes":1042284544,"total_ms":874.1}"#;
/// let report: HibernateReport = serde_json::from_str(line)?;
/// assert_eq!(report.processes[0].released_bytes, Some(991 << 20));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HibernateReport {
    /// Its processes, in the order of the request.
    pub processes: Vec<HibernatedProcess>,
    /// Host memory that the checkpoints were to take. `None` where the driver keeps no figure.
    pub host_bytes: Option<u64>,
    /// From the call to its end, in milliseconds.
    pub total_ms: f64,
}

/// A process of a set that hibernates.
///
/// ```
/// use poorwill::hibernation::HibernatedProcess;
///
/// let line = r#"{"pid":12,"released_bytes":null,"lock_ms":0.8,"checkpoint_ms":870.0}"#;
/// let process: HibernatedProcess = serde_json::from_str(line)?;
/// assert_eq!(process.released_bytes, None);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HibernatedProcess {
    /// The process.
    pub pid: u32,
    /// By how much what it holds on its devices has fallen. `None` where the driver keeps no figure.
    pub released_bytes: Option<u64>,
    /// Until its queued work was done.
    pub lock_ms: f64,
    /// Until it held nothing on its devices.
    pub checkpoint_ms: f64,
}

/// A set that runs again.
///
/// ```
/// use poorwill::hibernation::ResumeReport;
///
/// let line = r#"{"processes":[{"pid":12,"restore_ms":660.0,"unlock_ms":1.4}],"total_ms":662.0}"#;
/// let report: ResumeReport = serde_json::from_str(line)?;
/// assert_eq!(report.processes[0].pid, 12);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ResumeReport {
    /// Its processes, in the order of the request.
    pub processes: Vec<ResumedProcess>,
    /// From the call to its end, in milliseconds.
    pub total_ms: f64,
}

/// A process of a set that runs again.
///
/// ```
/// use poorwill::hibernation::ResumedProcess;
///
/// let process: ResumedProcess = serde_json::from_str(r#"{"pid":12,"restore_ms":660.0,"unlock_ms":1.4}"#)?;
/// assert!(process.unlock_ms < process.restore_ms);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ResumedProcess {
    /// The process.
    pub pid: u32,
    /// Until its memory was on its devices again.
    pub restore_ms: f64,
    /// Until its device calls went on.
    pub unlock_ms: f64,
}
