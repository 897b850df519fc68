//! What the environment disables.

use std::env;
use std::ffi::OsString;

/// Set to `1` they disable page-locking: Poorwill's variable and vLLM's.
pub const DISABLE_PIN: [&str; 2] = ["POORWILL_DISABLE_PIN", "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY"];

/// vLLM's variable; `1` disables views.
pub const DISABLE_UVA: &str = "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA";

/// What is disabled, and by which variable.
///
/// ```
/// use poorwill::offload::Switches;
///
/// let switches = Switches::from_lookup(|name| (name == "POORWILL_DISABLE_PIN").then(|| "1".into()))?;
/// assert_eq!((switches.pin_off, switches.uva_off), (Some("POORWILL_DISABLE_PIN"), None));
/// # Ok::<(), poorwill::offload::InvalidSwitch>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Switches {
    /// Page-locking.
    pub pin_off: Option<&'static str>,
    /// Views: the device reading host memory in place.
    pub uva_off: Option<&'static str>,
}

/// A switch that is neither 0 nor 1.
///
/// ```
/// use poorwill::offload::Switches;
///
/// let error = Switches::from_lookup(|_| Some("maybe".into())).unwrap_err();
/// assert_eq!(error.value, "maybe");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name}={value:?} is neither 0 nor 1; correct or unset it")]
#[non_exhaustive]
pub struct InvalidSwitch {
    /// The variable.
    pub name: &'static str,
    /// Its value.
    pub value: OsString,
}

impl Switches {
    /// Reads the environment.
    ///
    /// # Errors
    /// The first value except `0`, `1` and empty.
    pub fn from_env() -> Result<Self, InvalidSwitch> {
        Self::from_lookup(|name| env::var_os(name))
    }

    /// Sets [`Self::pin_off`].
    #[must_use]
    pub const fn without_pins(mut self, variable: &'static str) -> Self {
        self.pin_off = Some(variable);
        self
    }

    /// Sets [`Self::uva_off`].
    #[must_use]
    pub const fn without_views(mut self, variable: &'static str) -> Self {
        self.uva_off = Some(variable);
        self
    }

    /// Reads the variables through `lookup`.
    ///
    /// # Errors
    /// As [`Switches::from_env`].
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self, InvalidSwitch> {
        let is_on = |name: &'static str| match lookup(name) {
            Some(value) if value == "1" => Ok(true),
            Some(value) if !value.is_empty() && value != "0" => Err(InvalidSwitch { name, value }),
            _ => Ok(false),
        };
        let mut pin_off = None;
        // Read all: a valid one hides no invalid one.
        for name in DISABLE_PIN {
            pin_off = is_on(name)?.then_some(name).filter(|_| pin_off.is_none()).or(pin_off);
        }
        let uva_off = is_on(DISABLE_UVA)?.then_some(DISABLE_UVA);
        Ok(Self { pin_off, uva_off })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(set: &[(&str, &str)]) -> Result<Switches, InvalidSwitch> {
        Switches::from_lookup(|name| {
            set.iter().find(|(set, _)| *set == name).map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn each_variable_turns_its_own_off() {
        let [ours, theirs] = DISABLE_PIN;
        let off = |pin_off, uva_off| Ok(Switches { pin_off, uva_off });
        assert_eq!(with(&[]), off(None, None));
        assert_eq!(with(&[(ours, "0"), (theirs, ""), (DISABLE_UVA, "0")]), off(None, None));
        assert_eq!(with(&[(ours, "1")]), off(Some(ours), None));
        assert_eq!(with(&[(theirs, "1")]), off(Some(theirs), None));
        assert_eq!(with(&[(ours, "1"), (theirs, "1")]), off(Some(ours), None));
        assert_eq!(with(&[(DISABLE_UVA, "1")]), off(None, Some(DISABLE_UVA)));
        assert_eq!(with(&[(theirs, "1"), (DISABLE_UVA, "1")]), off(Some(theirs), Some(DISABLE_UVA)));
    }

    #[test]
    fn a_switch_that_is_neither_is_named() {
        for name in [DISABLE_PIN[0], DISABLE_PIN[1], DISABLE_UVA] {
            for value in ["yes", "2", "true", " 1"] {
                let error = with(&[(name, value)]).unwrap_err();
                assert_eq!((error.name, error.value.to_str()), (name, Some(value)));
                assert!(error.to_string().contains(name) && error.to_string().contains("neither 0 nor 1"));
            }
        }
        assert_eq!(with(&[(DISABLE_PIN[0], "1"), (DISABLE_PIN[1], "on")]).unwrap_err().name, DISABLE_PIN[1]);
    }
}
