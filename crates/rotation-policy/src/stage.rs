//! Stages as other modules, JSON and metrics name them. Only these methods turn a stage into text.

use std::fmt;

use serde::{Serialize, Serializer};

/// What a model is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StageName {
    /// Not probed yet, or not since its quarantine.
    Unknown,
    /// No engine runs.
    Cold,
    /// Asleep, by its own report and by measurement.
    Asleep,
    /// Asleep, and its processes are off their GPUs.
    Hibernating,
    /// Awake and verified: requests are admitted.
    Ready,
    /// Running requests end, and no more are admitted.
    Draining,
    /// Ignored after failures.
    Quarantined,
    /// Asking the engine for its state.
    Probing,
    /// Waiting until its known need is measured free.
    FindingMemory,
    /// Its processes are put back on their GPUs.
    Resuming,
    /// Waking.
    Waking,
    /// Starting.
    Starting,
    /// Asking the engine whether it is awake.
    Confirming,
    /// Generating the canary's answer.
    Canary,
    /// Measuring what it took.
    Measuring,
    /// Measuring what is free before its sleep.
    MeasuringBeforeSleep,
    /// The engine goes to sleep.
    FallingAsleep,
    /// Measuring what its sleep released.
    ReleasingMemory,
    /// Its processes are taken off their GPUs.
    GoingIntoHibernation,
    /// Stopping its processes.
    Stopping,
}

impl StageName {
    /// Every stage, in the order of the documentation.
    pub const ALL: [Self; 20] = [
        Self::Unknown,
        Self::Cold,
        Self::Asleep,
        Self::Hibernating,
        Self::Probing,
        Self::FindingMemory,
        Self::Resuming,
        Self::Waking,
        Self::Starting,
        Self::Confirming,
        Self::Canary,
        Self::Measuring,
        Self::Ready,
        Self::Draining,
        Self::MeasuringBeforeSleep,
        Self::FallingAsleep,
        Self::ReleasingMemory,
        Self::GoingIntoHibernation,
        Self::Stopping,
        Self::Quarantined,
    ];

    /// Whether its engine may hold what it needs awake.
    #[must_use]
    pub const fn holds_memory(self) -> bool {
        match self {
            Self::Waking | Self::Starting | Self::Confirming | Self::Canary | Self::Measuring => true,
            Self::Ready | Self::Draining | Self::MeasuringBeforeSleep | Self::FallingAsleep => true,
            Self::Stopping => true,
            Self::Unknown | Self::Cold | Self::Asleep | Self::Hibernating | Self::Quarantined => false,
            Self::Probing | Self::FindingMemory | Self::Resuming => false,
            Self::ReleasingMemory | Self::GoingIntoHibernation => false,
        }
    }

    /// Its text in JSON and metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Cold => "cold",
            Self::Asleep => "asleep",
            Self::Hibernating => "hibernating",
            Self::Ready => "ready",
            Self::Draining => "draining",
            Self::Quarantined => "quarantined",
            Self::Probing => "probing",
            Self::FindingMemory => "finding memory",
            Self::Resuming => "resuming",
            Self::Waking => "waking",
            Self::Starting => "starting",
            Self::Confirming => "confirming",
            Self::Canary => "canary",
            Self::Measuring => "measuring",
            Self::MeasuringBeforeSleep => "measuring before sleep",
            Self::FallingAsleep => "falling asleep",
            Self::ReleasingMemory => "releasing memory",
            Self::GoingIntoHibernation => "going into hibernation",
            Self::Stopping => "stopping",
        }
    }
}

impl fmt::Display for StageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl Serialize for StageName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}
