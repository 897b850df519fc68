//! An envelope, unless nothing says how much memory there is.

use poorwill_core::budget::{Budget, Envelope, Source};

/// No source reports a device's memory: give the budget in bytes.
///
/// ```
/// use poorwill::Device;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// match Device::open(&"host".parse()?)?.envelope(None) {
///     Ok((budget, _)) => println!("{:?} bytes", budget.budget_bytes),
///     Err(unknown) => println!("{unknown}"), // With what each source reported.
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "how much memory {device} has is not known: {}; say how much may be used in bytes, like --budget 20GiB",
    reasons(sources)
)]
#[non_exhaustive]
pub struct UnknownBudget {
    /// The device.
    pub device: String,
    /// The queried sources, with their reasons.
    pub sources: Vec<Source>,
}

fn reasons(sources: &[Source]) -> String {
    let reported = sources.iter().filter(|source| !source.name.is_about_free());
    let reported =
        reported.map(|source| format!("{}: {}", source.name, source.note.as_deref().unwrap_or("no figure")));
    let reported: Vec<String> = reported.collect();
    if reported.is_empty() { "no source reports it".into() } else { reported.join(", ") }
}

/// The envelope of a budget.
///
/// # Errors
/// When no source reports a total.
pub fn envelope(device: &str, budget: Budget) -> Result<(Budget, Envelope), UnknownBudget> {
    match Envelope::of(&budget) {
        Some(envelope) => Ok((budget, envelope)),
        None => Err(UnknownBudget { device: device.to_owned(), sources: budget.sources }),
    }
}
