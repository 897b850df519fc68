//! PCI addresses, and the width and speed of a GPU's link.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use super::System;

/// Transfer rate of each PCI Express generation at width 1, in tenths of a gigatransfer per second.
const GENERATIONS: [u64; 6] = [25, 50, 80, 160, 320, 640];

const WIDTH_MAX: u64 = 32;

/// Address of a PCI device. Prints as in `/sys`: `0000:4e:00.0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

/// The error for text that is no PCI address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidPciAddress {
    /// The given text.
    pub text: String,
}

/// The link of a device. `None` where unknown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct PciLink {
    /// Width in use now.
    pub width: Option<u32>,
    /// Maximum width.
    pub width_max: Option<u32>,
    /// Generation of PCI Express now; idle GPUs reduce it.
    pub generation: Option<u32>,
    /// Maximum generation.
    pub generation_max: Option<u32>,
}

impl PciLink {
    /// Fills in missing values from `other`.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            width: self.width.or(other.width),
            width_max: self.width_max.or(other.width_max),
            generation: self.generation.or(other.generation),
            generation_max: self.generation_max.or(other.generation_max),
        }
    }
}

impl System {
    /// The NUMA node nearest to the device.
    #[must_use]
    pub fn numa_node(&self, address: PciAddress) -> Option<u32> {
        // -1 means none.
        self.attribute(address, "numa_node")?.parse().ok()
    }

    /// The link of the device.
    #[must_use]
    pub fn pci_link(&self, address: PciAddress) -> PciLink {
        let width = |name| link_width(&self.attribute(address, name)?);
        let generation = |name| generation(&self.attribute(address, name)?);
        PciLink {
            width: width("current_link_width"),
            width_max: width("max_link_width"),
            generation: generation("current_link_speed"),
            generation_max: generation("max_link_speed"),
        }
    }

    fn attribute(&self, address: PciAddress, name: &str) -> Option<String> {
        self.text(format!("/sys/bus/pci/devices/{address}/{name}"))
    }
}

/// Links that are down or unknown report impossible widths.
fn link_width(text: &str) -> Option<u32> {
    let link_width: u64 = text.parse().ok()?;
    (1..=WIDTH_MAX).contains(&link_width).then(|| u32::try_from(link_width).ok())?
}

/// Parses a speed like `16.0 GT/s PCIe`.
fn generation(speed: &str) -> Option<u32> {
    let (number, rest) = speed.split_once(' ')?;
    if !rest.starts_with("GT/s") {
        return None;
    }
    let (whole, tenths) = number.split_once('.').unwrap_or((number, "0"));
    let digit: u64 = if tenths.len() == 1 { tenths.parse().ok()? } else { return None };
    let tenths = whole.parse::<u64>().ok()?.checked_mul(10)?.checked_add(digit)?;
    let nth = GENERATIONS.iter().position(|speed| *speed == tenths)?;
    u32::try_from(nth + 1).ok()
}

impl FromStr for PciAddress {
    type Err = InvalidPciAddress;

    /// Reads `0000:4E:00.0` in any case, with a domain of up to eight digits, as NVIDIA writes it. The
    /// function is optional.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).ok_or_else(|| InvalidPciAddress { text: text.to_owned() })
    }
}

fn parse(text: &str) -> Option<PciAddress> {
    let (domain, rest) = text.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (device, function) = rest.split_once('.').unwrap_or((rest, "0"));
    let digits = |part: &str, most: usize| {
        let is_number = (1..=most).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_number.then(|| u32::from_str_radix(part, 16).ok())?
    };
    let byte = |part: &str, most: usize| u8::try_from(digits(part, most)?).ok();
    let address = PciAddress {
        domain: digits(domain, 8)?,
        bus: byte(bus, 2)?,
        device: byte(device, 2)?,
        function: byte(function, 1)?,
    };
    (address.device < 32 && address.function < 8).then_some(address)
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function}")
    }
}

impl fmt::Display for InvalidPciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is no address on the PCI bus; it looks like 0000:4e:00.0", self.text)
    }
}

impl std::error::Error for InvalidPciAddress {}

#[cfg(test)]
mod tests {
    use super::super::Fake;
    use super::*;

    #[test]
    fn addresses_however_they_are_written() {
        for (text, plain) in [
            ("0000:4e:00.0", "0000:4e:00.0"),
            ("0000:4E:00.0", "0000:4e:00.0"),
            ("00000000:4E:1F.7", "0000:4e:1f.7"),
            ("00010000:01:00.0", "10000:01:00.0"),
            ("0000:4e:00", "0000:4e:00.0"),
        ] {
            let address: PciAddress = text.parse().unwrap();
            assert_eq!(address.to_string(), plain);
            assert_eq!(plain.parse(), Ok(address));
        }
        for text in [
            "",
            ":",
            "::",
            "4e:00.0",
            "0000:4e:00.",
            "0000:4e:00.8",
            "0000:4e:20.0",
            "0000:+4:00.0",
            "x:4e:00.0",
            "000000000:4e:00.0",
            "0000:4e:00.0 ",
            "0000:4e:00.0/x",
            "../../../etc:00:00.0",
            "0000:04e:00.0",
        ] {
            let error = text.parse::<PciAddress>().unwrap_err();
            assert_eq!(error.text, text);
            assert!(error.to_string().contains("0000:4e:00.0"));
        }
    }

    #[test]
    fn generations() {
        for (speed, expected) in [
            ("2.5 GT/s PCIe", Some(1)),
            ("5.0 GT/s PCIe", Some(2)),
            ("5 GT/s", Some(2)),
            ("8.0 GT/s PCIe", Some(3)),
            ("16.0 GT/s PCIe", Some(4)),
            ("32.0 GT/s PCIe", Some(5)),
            ("64.0 GT/s PCIe", Some(6)),
            ("12.0 GT/s PCIe", None),
            ("16.05 GT/s PCIe", None),
            ("16.0 MB/s", None),
            ("Unknown speed", None),
            ("Unknown", None),
            ("18446744073709551615 GT/s", None),
            ("", None),
        ] {
            assert_eq!(generation(speed), expected, "{speed}");
        }
    }

    #[test]
    fn a_gpu() {
        let fake = Fake::new();
        let gpu: PciAddress = "00000000:4E:00.0".parse().unwrap();
        let put =
            |name: &str, text: &str| fake.put(&format!("/sys/bus/pci/devices/0000:4e:00.0/{name}"), text);
        put("numa_node", "1\n");
        put("current_link_width", "8\n");
        put("max_link_width", "16\n");
        put("current_link_speed", "2.5 GT/s PCIe\n");
        put("max_link_speed", "32.0 GT/s PCIe\n");
        let system = fake.system();
        let link =
            PciLink { width: Some(8), width_max: Some(16), generation: Some(1), generation_max: Some(5) };
        assert_eq!((system.numa_node(gpu), system.pci_link(gpu)), (Some(1), link));

        put("numa_node", "-1\n");
        put("current_link_width", "63\n");
        put("max_link_width", "0\n");
        put("current_link_speed", "Unknown\n");
        let down = system.pci_link(gpu);
        assert_eq!(system.numa_node(gpu), None);
        assert_eq!(down, PciLink { generation_max: Some(5), ..PciLink::default() });
        assert_eq!(down.or(link), link);
        assert_eq!(link.or(down), link);
    }
}
