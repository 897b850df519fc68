//! What a device simulates instead of a whole GPU.
//!
//! Memory that others use, or that a limit excludes, is refused to the caller. Figures set directly (`total`,
//! `info_total`, `info_free`) are only reported.

use std::ffi::c_int;

use crate::abi::{CallResult, Code};
use crate::text::{number, size};

/// The simulation of one device; by default a whole GPU of compute capability 8.0 without other users.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Simulation {
    /// The limit of a limiter library.
    hami_bytes: Option<u64>,
    /// The limit of this client of the Multi-Process Service.
    mps_bytes: Option<u64>,
    /// Memory in use by others: on the card, or in the slice.
    used_bytes: u64,
    is_integrated: bool,
    /// Profile of the MIG instance.
    mig: Option<String>,
    /// Devices whose memory it can access; `None` for all.
    reaches: Option<Vec<usize>>,
    capability: Capability,
    shared_bytes: Option<c_int>,
    total_bytes: Option<u64>,
    info_total_bytes: Option<u64>,
    info_free_bytes: Option<u64>,
    info_code: Option<Code>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Setting {
    pub(crate) device: usize,
    pub(crate) key: String,
    pub(crate) value: String,
}

/// A GPU's compute capability, ordered by age.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Capability {
    pub(crate) major: c_int,
    pub(crate) minor: c_int,
}

impl Default for Simulation {
    fn default() -> Self {
        Self {
            hami_bytes: None,
            mps_bytes: None,
            used_bytes: 0,
            is_integrated: false,
            mig: None,
            reaches: None,
            capability: Capability { major: 8, minor: 0 },
            shared_bytes: None,
            total_bytes: None,
            info_total_bytes: None,
            info_free_bytes: None,
            info_code: None,
        }
    }
}

/// Memory of the device without the simulation, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemoryUse {
    pub(crate) capacity_bytes: u64,
    /// Of this process.
    pub(crate) held_bytes: u64,
}

impl Simulation {
    pub(crate) fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        match key {
            "hami" => self.hami_bytes = Some(size(value)?),
            "mps" => self.mps_bytes = Some(size(value)?),
            "used" => self.used_bytes = size(value)?,
            "integrated" => self.is_integrated = flag(value)?,
            "mig" if value.is_empty() => return Err("write a profile, as in 1g.10gb".into()),
            "mig" => self.mig = Some(value.to_owned()),
            "reaches" => self.reaches = Some(ordinals(value)?),
            "capability" => self.capability = capability(value)?,
            "shared" => self.shared_bytes = Some(integer(size(value)?)?),
            "total" => self.total_bytes = Some(size(value)?),
            "info_total" => self.info_total_bytes = Some(size(value)?),
            "info_free" => self.info_free_bytes = Some(size(value)?),
            "info_code" => match integer(number(value)?)? {
                0 => return Err("codes begin at 1".into()),
                code => self.info_code = Some(Code(code)),
            },
            _ => return Err(format!("there is no key `{key}` to simulate")),
        }
        Ok(())
    }

    pub(crate) fn is_integrated(&self) -> bool {
        self.is_integrated
    }

    /// Profile of the MIG instance.
    pub(crate) fn mig(&self) -> Option<&str> {
        self.mig.as_deref()
    }

    pub(crate) fn capability(&self) -> Capability {
        self.capability
    }

    pub(crate) fn reaches(&self, other: usize) -> bool {
        self.mig.is_none() && self.reaches.as_ref().is_none_or(|reached| reached.contains(&other))
    }

    /// How much more can be created.
    pub(crate) fn available_bytes(&self, memory: MemoryUse) -> u64 {
        let all_use = self.used_bytes.saturating_add(memory.held_bytes);
        // The Multi-Process Service counts its client's memory only, the others everything.
        let limits = [
            Some(memory.capacity_bytes.saturating_sub(all_use)),
            self.hami_bytes.map(|limit| limit.saturating_sub(all_use)),
            self.mps_bytes.map(|limit| limit.saturating_sub(memory.held_bytes)),
        ];
        limits.into_iter().flatten().min().unwrap_or(0)
    }

    /// The result of `cuDeviceTotalMem`.
    pub(crate) fn total_bytes(&self, capacity_bytes: u64) -> u64 {
        let reported = if self.hami_bytes.is_some() { 0 } else { capacity_bytes };
        self.total_bytes.unwrap_or(reported)
    }

    /// Total and free memory, as by `cuMemGetInfo`.
    pub(crate) fn info(&self, memory: MemoryUse) -> CallResult<(u64, u64)> {
        if let Some(code) = self.info_code {
            return Err(code);
        }
        let all_use = self.used_bytes.saturating_add(memory.held_bytes);
        if self.hami_bytes.is_some_and(|limit| all_use > limit) {
            return Err(Code::INVALID_VALUE);
        }
        let total = self.hami_bytes.map_or(memory.capacity_bytes, |limit| limit.min(memory.capacity_bytes));
        let free = self.available_bytes(memory);
        Ok((self.info_total_bytes.unwrap_or(total), self.info_free_bytes.unwrap_or(free)))
    }

    /// Opt-in shared memory per block, in bytes.
    pub(crate) fn shared_bytes(&self) -> c_int {
        let kib = match (self.capability.major, self.capability.minor) {
            (7, 0) => 96,
            (7, 5) => 64,
            (8, 0 | 7) => 163,
            (8, 6 | 8 | 9) | (12, 0 | 1) => 99,
            (9 | 11, 0) | (10, 0 | 3) => 227,
            _ => 48,
        };
        self.shared_bytes.unwrap_or(kib << 10)
    }

    /// The driver's part of each block's shared memory, in bytes.
    pub(crate) fn reserved_shared_bytes(&self) -> c_int {
        if self.capability.major >= 8 { 1024 } else { 0 }
    }
}

/// `DEVICE:KEY=VALUE`.
pub(crate) fn setting(item: &str) -> Result<Setting, String> {
    let parts = item.split_once(':').and_then(|(device, rest)| Some((device, rest.split_once('=')?)));
    let (device, (key, value)) = parts.ok_or("write DEVICE:KEY=VALUE")?;
    let device = usize::try_from(number(device)?).map_err(|error| error.to_string())?;
    Ok(Setting { device, key: key.to_owned(), value: value.to_owned() })
}

fn ordinals(text: &str) -> Result<Vec<usize>, String> {
    let ordinal = |text| usize::try_from(number(text)?).map_err(|error| error.to_string());
    if text == "none" { Ok(Vec::new()) } else { text.split('+').map(ordinal).collect() }
}

fn flag(text: &str) -> Result<bool, String> {
    match text {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err("write 0 or 1".into()),
    }
}

fn capability(text: &str) -> Result<Capability, String> {
    let (major, minor) = text.split_once('.').ok_or("write MAJOR.MINOR")?;
    Ok(Capability { major: integer(number(major)?)?, minor: integer(number(minor)?)? })
}

fn integer(value: u64) -> Result<c_int, String> {
    c_int::try_from(value).map_err(|error| format!("{value}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn simulating(settings: &[(&str, &str)]) -> Simulation {
        let mut simulation = Simulation::default();
        for (key, value) in settings {
            simulation.set(key, value).unwrap_or_else(|reason| panic!("{key}={value}: {reason}"));
        }
        simulation
    }

    fn held(held_bytes: u64) -> MemoryUse {
        MemoryUse { capacity_bytes: 10 * GIB, held_bytes }
    }

    #[test]
    fn a_whole_gpu_reports_its_memory() {
        let simulation = Simulation::default();
        assert_eq!(simulation.info(held(3 * GIB)), Ok((10 * GIB, 7 * GIB)));
        assert_eq!(
            (simulation.available_bytes(held(3 * GIB)), simulation.total_bytes(10 * GIB)),
            (7 * GIB, 10 * GIB)
        );
    }

    #[test]
    fn a_limiter_hides_the_rest_of_the_card() {
        let simulation = simulating(&[("hami", "4GiB"), ("used", "1GiB")]);
        assert_eq!(simulation.info(held(GIB)), Ok((4 * GIB, 2 * GIB)));
        assert_eq!(simulation.info(held(3 * GIB)), Ok((4 * GIB, 0)));
        assert_eq!(simulation.info(held(3 * GIB + 1)), Err(Code::INVALID_VALUE));
        assert_eq!((simulation.available_bytes(held(4 * GIB)), simulation.total_bytes(10 * GIB)), (0, 0));
        let wide = simulating(&[("hami", "99GiB"), ("used", "11GiB")]);
        assert_eq!(wide.info(held(0)), Ok((10 * GIB, 0)), "a limit beyond the card");
    }

    #[test]
    fn a_client_of_the_service_sees_the_whole_card_and_less_of_it_free() {
        let simulation = simulating(&[("mps", "4GiB")]);
        assert_eq!(simulation.info(held(GIB)), Ok((10 * GIB, 3 * GIB)));
        assert_eq!(simulation.total_bytes(10 * GIB), 10 * GIB);
        let crowded = simulating(&[("mps", "4GiB"), ("used", "8GiB")]);
        assert_eq!(crowded.info(held(GIB)), Ok((10 * GIB, GIB)), "the neighbours hold the rest");
        assert_eq!(simulating(&[("mps", "99GiB")]).info(held(GIB)), Ok((10 * GIB, 9 * GIB)));
    }

    #[test]
    fn figures_can_be_false() {
        let simulation = simulating(&[("total", "0"), ("info_total", "99GiB"), ("info_free", "100GiB")]);
        assert_eq!(simulation.info(held(GIB)), Ok((99 * GIB, 100 * GIB)));
        assert_eq!((simulation.available_bytes(held(GIB)), simulation.total_bytes(10 * GIB)), (9 * GIB, 0));
        assert_eq!(simulating(&[("info_code", "801")]).info(held(0)), Err(Code::NOT_SUPPORTED));
    }

    #[test]
    fn shared_memory_depends_on_the_generation() {
        for (capability, kib, reserved) in [
            ("7.0", 96, 0),
            ("7.5", 64, 0),
            ("8.0", 163, 1024),
            ("8.6", 99, 1024),
            ("8.7", 163, 1024),
            ("8.9", 99, 1024),
            ("9.0", 227, 1024),
            ("10.3", 227, 1024),
            ("11.0", 227, 1024),
            ("12.1", 99, 1024),
            ("6.1", 48, 0),
            ("13.0", 48, 1024),
        ] {
            let simulation = simulating(&[("capability", capability)]);
            let reported = (simulation.shared_bytes(), simulation.reserved_shared_bytes());
            assert_eq!(reported, (kib << 10, reserved), "{capability}");
        }
        assert_eq!(simulating(&[("capability", "9.0"), ("shared", "101376")]).shared_bytes(), 101_376);
    }

    #[test]
    fn malformed_settings_are_refused() {
        for item in ["", "0", "0:hami", "hami=1GiB", "x:hami=1GiB", "-1:hami=1GiB", ":hami=1GiB"] {
            assert!(setting(item).is_err(), "{item}");
        }
        let expected = Setting { device: 1, key: "mig".to_owned(), value: "1g.10gb".to_owned() };
        assert_eq!(setting("1:mig=1g.10gb"), Ok(expected));
        for (key, value) in [
            ("hami", "much"),
            ("mps", ""),
            ("used", "-1"),
            ("integrated", "yes"),
            ("mig", ""),
            ("capability", "8"),
            ("capability", "8.x"),
            ("shared", "4GiB"),
            ("info_code", "0"),
            ("info_code", "4294967296"),
            ("hammy", "1GiB"),
            ("", ""),
        ] {
            assert!(Simulation::default().set(key, value).is_err(), "{key}={value}");
        }
    }
}
