//! The settings: the devices, and what each reports.

use std::collections::HashSet;
use std::env;
use std::fmt::Display;
use std::str::FromStr;

use poorwill_core::ByteSize;

use crate::abi::Code;
use crate::device::{CARD, Capability, Device, INSTANCE, Process};

const DEVICES: &str = "POORWILL_FAKE_NVML_DEVICES";

pub(crate) fn from_environment() -> Result<Vec<Device>, String> {
    match env::var(DEVICES) {
        Ok(value) => devices(&value),
        Err(env::VarError::NotPresent) => Ok(Vec::new()),
        Err(error) => Err(format!("{DEVICES}: {error}")),
    }
}

fn devices(value: &str) -> Result<Vec<Device>, String> {
    let mut seen = HashSet::new();
    let items = value.split(',').map(str::trim).filter(|item| !item.is_empty());
    let devices = items.map(|item| {
        let refused = |reason| format!("{DEVICES}: `{item}`: {reason}");
        let device = device(item).map_err(refused)?;
        let is_new = seen.insert(device.uuid.to_ascii_lowercase());
        if is_new { Ok(device) } else { Err(refused("there is one with this UUID".into())) }
    });
    devices.collect()
}

/// `UUID:KEY=VALUE:KEY=VALUE…`.
fn device(item: &str) -> Result<Device, String> {
    let mut parts = item.split(':');
    let mut device = Device::new(uuid(parts.next().unwrap_or_default(), &[CARD, INSTANCE])?);
    let mut seen = HashSet::new();
    for part in parts {
        let (key, value) = part.split_once('=').ok_or_else(|| format!("`{part}`: write KEY=VALUE"))?;
        set(&mut device, key, value).map_err(|reason| format!("`{part}`: {reason}"))?;
        if key != "process" && !seen.insert(key) {
            return Err(format!("`{part}`: it was set before"));
        }
    }
    Ok(device)
}

fn set(device: &mut Device, key: &str, value: &str) -> Result<(), String> {
    match key {
        "total" => device.total_bytes = Some(size(value)?),
        "used" => device.used_bytes = size(value)?,
        "free" => device.free_bytes = Some(size(value)?),
        "memory_error" => match parse(value)? {
            0 => return Err("codes begin at 1".into()),
            code => device.memory_error = Some(Code(code)),
        },
        "process" => device.processes.push(process(value)?),
        "parent" if device.is_instance() => device.parent = Some(uuid(value, &[CARD])?),
        "parent" => return Err("only instances have one".into()),
        "mig_mode" => device.is_divided = Some(flag(value)?),
        "link_gen" => device.link.generation = Some(parse(value)?),
        "link_gen_max" => device.link.generation_max = Some(parse(value)?),
        "link_width" => device.link.width = Some(parse(value)?),
        "link_width_max" => device.link.width_max = Some(parse(value)?),
        "capability" => device.capability = capability(value)?,
        "name" => device.name = Some(value.to_owned()),
        _ => return Err(format!("there is no key `{key}`")),
    }
    Ok(())
}

/// `PID/SIZE` or `self/SIZE`.
fn process(text: &str) -> Result<Process, String> {
    let (pid, used) = text.split_once('/').ok_or("write PID/SIZE or self/SIZE")?;
    let pid = if pid == "self" { None } else { Some(parse(pid)?) };
    Ok(Process { pid, used_bytes: size(used)? })
}

/// A prefix, then 8, 4, 4, 4 and 12 hexadecimal digits.
fn uuid(text: &str, prefixes: &[&str]) -> Result<String, String> {
    let digits = prefixes.iter().find_map(|prefix| text.strip_prefix(prefix));
    let parts = digits.into_iter().flat_map(|digits| digits.split('-'));
    let lens =
        parts.map(|part| if part.bytes().all(|byte| byte.is_ascii_hexdigit()) { part.len() } else { 0 });
    if lens.eq([8, 4, 4, 4, 12]) {
        Ok(text.to_owned())
    } else {
        Err(format!("`{text}` is no UUID that begins with {}", prefixes.join(" or ")))
    }
}

fn capability(text: &str) -> Result<Capability, String> {
    let (major, minor) = text.split_once('.').ok_or("write MAJOR.MINOR")?;
    Ok(Capability { major: parse(major)?, minor: parse(minor)? })
}

fn flag(text: &str) -> Result<bool, String> {
    match text {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err("write 0 or 1".into()),
    }
}

fn size(text: &str) -> Result<u64, String> {
    parse::<ByteSize>(text).map(|size| size.0)
}

fn parse<T: FromStr<Err: Display>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error| format!("`{text}`: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::Memory;
    use crate::device::Link;

    const GPU: &str = "GPU-706f6f72-7769-6c6c-4000-800000000000";
    const MIG: &str = "MIG-706F6F72-7769-6C6C-4000-800000000001";

    #[test]
    fn valid_settings_are_parsed() {
        assert_eq!(devices(""), Ok(vec![]));
        let value = format!(
            " {GPU}:total=24GiB:used=1k:process=self/7:process=12/8:link_gen=4:link_width_max=16:name=A B, \
             {MIG}:parent={GPU}:memory_error=4:capability=9.0:mig_mode=0 "
        );
        let card = Device {
            total_bytes: Some(24 << 30),
            used_bytes: 1024,
            processes: vec![Process { pid: None, used_bytes: 7 }, Process { pid: Some(12), used_bytes: 8 }],
            link: Link { generation: Some(4), width_max: Some(16), ..Link::default() },
            name: Some("A B".into()),
            ..Device::new(GPU.into())
        };
        let instance = Device {
            parent: Some(GPU.into()),
            memory_error: Some(Code(4)),
            capability: Capability { major: 9, minor: 0 },
            is_divided: Some(false),
            ..Device::new(MIG.into())
        };
        assert_eq!(devices(&value), Ok(vec![card, instance]));
    }

    #[test]
    fn figures_come_out_as_they_are_set() {
        let memory = |settings: &str| device(&format!("{GPU}{settings}")).map(|device| device.memory(0));
        let as_memory =
            |total_bytes, free_bytes, used_bytes| Ok(Ok(Memory { total_bytes, free_bytes, used_bytes }));
        assert_eq!(memory(":total=10:used=4"), as_memory(10, 6, 4));
        assert_eq!(memory(":total=10:used=11"), as_memory(10, u64::MAX, 11));
        assert_eq!(memory(":total=10:used=4:free=99"), as_memory(10, 99, 4));
        assert_eq!(memory(":used=4"), Ok(Err(Code::NOT_SUPPORTED)));
        assert_eq!(memory(":total=10:memory_error=4"), Ok(Err(Code(4))));
    }

    #[test]
    fn malformed_settings_are_refused() {
        let card = |settings: &str| format!("{GPU}:{settings}");
        let digits = GPU.trim_start_matches(CARD);
        for value in [
            digits.to_owned(),
            format!("TPU-{digits}"),
            "GPU-706f6f72-7769-6c6c-4000-80000000000".into(),
            "GPU-706f6f72-7769-6c6c-4000-80000000000x".into(),
            "GPU-706f6f72-7769-6c6c-4000-800000000000-".into(),
            format!("{GPU},{}", GPU.to_ascii_uppercase()),
            card(""),
            card("total"),
            card("total=much"),
            card("total=1:total=1"),
            card("free=-1"),
            card("memory_error=0"),
            card("memory_error=x"),
            card("process=self"),
            card("process=me/1"),
            card("mig_mode=2"),
            card("link_gen=four"),
            card("capability=9"),
            card("colour=red"),
            card(&format!("parent={GPU}")),
            format!("{MIG}:parent={MIG}"),
        ] {
            let reason = devices(&value).expect_err(&value);
            assert!(reason.starts_with(DEVICES), "{value}: {reason}");
        }
    }
}
