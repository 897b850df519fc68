//! Limits on this process's share of a GPU, from environment variables.
//!
//! These are hints, not proof: what enforces them may be missing. An unreadable limit is reported with its
//! text, never skipped. Texts are escaped and truncated for terminals.
//!
//! - **HAMi** loads a library in front of the driver's. It reads `CUDA_DEVICE_MEMORY_LIMIT_0`, …, and
//!   `CUDA_DEVICE_MEMORY_LIMIT` for other GPUs.
//! - **MPS**, NVIDIA's service for sharing a GPU, reads `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT`. Its daemon may
//!   have a lower limit, which no client can query, though CUDA's free memory shows it.
//! - **MIG** instances are named in `CUDA_VISIBLE_DEVICES` and `NVIDIA_VISIBLE_DEVICES`.

use std::ffi::OsString;

use poorwill_core::ByteSize;

use super::System;

/// Looks a variable up, as [`std::env::var_os`] does.
pub type Lookup<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// HAMi's limit: of one GPU with the suffix `_<ordinal>`, of the others without.
const HAMI_LIMIT: &str = "CUDA_DEVICE_MEMORY_LIMIT";

const HAMI_LIBRARY: &str = "libvgpu.so";

const MPS_LIMIT: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";

/// Where an MPS daemon listens.
const MPS_FOLDER: &str = "CUDA_MPS_PIPE_DIRECTORY";

const MPS_FOLDER_DEFAULT: &str = "/tmp/nvidia-mps";

/// Variables of the driver and of the container toolkit.
const VISIBLE: [&str; 2] = ["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"];

/// A limit on a GPU's memory, from an environment variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnvLimit {
    /// Its name.
    pub variable: String,
    /// The part of its value on this GPU, for people: escaped, and at most 128 characters.
    pub text: String,
    /// The limit; `None` for "no limit". The error says why it is unreadable, for people.
    pub bytes: Result<Option<u64>, String>,
}

/// The names under which the environment may mention a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuName<'a> {
    /// Its number among the GPUs that this process sees.
    pub ordinal: u32,
    /// Its UUID, without the prefix up to the first hyphen.
    pub uuid: &'a str,
}

/// A MIG instance that a variable names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigHint {
    /// The variable.
    pub variable: String,
    /// The instance, as in `MIG-b57ef65c-…`, or `MIG-GPU-8932f937-…/1/0` from older drivers.
    pub instance: String,
}

/// HAMi's limit for the GPU with this number, read as HAMi reads it. An empty or zero limit of the GPU defers
/// to the general one.
#[must_use]
pub fn hami_limit(lookup: Lookup<'_>, ordinal: u32) -> Option<EnvLimit> {
    let own = hami_limit_in(lookup, format!("{HAMI_LIMIT}_{ordinal}"));
    let is_left_open = own.as_ref().is_none_or(|limit| limit.bytes == Ok(None));
    let general = is_left_open.then(|| hami_limit_in(lookup, HAMI_LIMIT.into())).flatten();
    general.or(own)
}

/// MPS's limit for this GPU: the lowest of those that name its number or the start of its UUID. Malformed
/// text is reported for every GPU.
#[must_use]
pub fn mps_limit(lookup: Lookup<'_>, gpu: GpuName<'_>) -> Option<EnvLimit> {
    let text = variable(lookup, MPS_LIMIT)?;
    let limit = |text: &str, bytes| EnvLimit { variable: MPS_LIMIT.into(), text: shown(text), bytes };
    let mut least: Option<EnvLimit> = None;
    for pair in text.split(',').map(str::trim) {
        let named = pair.split_once('=').map(|(device, value)| (device.trim(), value.trim()));
        let Some((device, value)) = named.filter(|(device, _)| is_device(device)) else {
            let reason = format!("`{}` is no list of limits; it looks like 0=1G,1=512M", shown(&text));
            return Some(limit(&text, Err(reason)));
        };
        if !names(device, gpu) {
            continue;
        }
        let found = limit(pair, mps_bytes(value).map(Some));
        if found.bytes.is_err() {
            return Some(found);
        }
        if least.as_ref().is_none_or(|least| found.bytes < least.bytes) {
            least = Some(found);
        }
    }
    least
}

/// MIG instances that the environment shows this process.
#[must_use]
pub fn mig_hints(lookup: Lookup<'_>) -> Vec<MigHint> {
    let instances = |name: &str| {
        let text = variable(lookup, name).unwrap_or_default();
        let instances = text.split(',').map(str::trim).filter(|device| starts_with(device, "MIG-"));
        let hint = |instance: &str| MigHint { variable: name.into(), instance: instance.into() };
        instances.map(hint).collect::<Vec<_>>()
    };
    VISIBLE.into_iter().flat_map(instances).collect()
}

impl System {
    /// Whether the loader's settings load HAMi's library into processes like this one.
    #[must_use]
    pub fn has_hami(&self, lookup: Lookup<'_>) -> bool {
        let preloaded = [variable(lookup, "LD_PRELOAD"), self.text("/etc/ld.so.preload")];
        preloaded.iter().flatten().any(|libraries| {
            // A `#` begins a comment in the file; no path in the variable has one.
            let paths = libraries.lines().flat_map(|line| line.split('#').take(1));
            let mut paths = paths.flat_map(|paths| paths.split([' ', '\t', ':']));
            paths.any(|path| path.rsplit('/').next().is_some_and(|name| name.starts_with(HAMI_LIBRARY)))
        })
    }

    /// Whether an MPS daemon seems to serve this process: its control pipe exists, though a dead daemon may
    /// have left it.
    #[must_use]
    pub fn has_mps(&self, lookup: Lookup<'_>) -> bool {
        let folder = variable(lookup, MPS_FOLDER).unwrap_or_else(|| MPS_FOLDER_DEFAULT.into());
        self.path(folder).join("control").exists()
    }
}

fn hami_limit_in(lookup: Lookup<'_>, name: String) -> Option<EnvLimit> {
    let text = variable(lookup, &name)?;
    Some(EnvLimit { variable: name, text: shown(&text), bytes: hami_bytes(&text) })
}

/// HAMi itself reads `8GiB` as eight bytes, which is never intended.
fn hami_bytes(text: &str) -> Result<Option<u64>, String> {
    let digits = text.trim_end_matches(|letter: char| "kKmMgG".contains(letter));
    // HAMi reads a leading zero as octal.
    let is_plain =
        is_number(digits) && (digits == "0" || !digits.starts_with('0')) && text.len() - digits.len() < 2;
    let size = if is_plain { text.parse().ok() } else { None };
    let ByteSize(bytes) = size.ok_or_else(|| {
        let text = shown(text);
        format!("`{text}` is no limit to HAMi; it is a whole number with k, m or g, or of bytes, like 24576m")
    })?;
    Ok((bytes > 0).then_some(bytes))
}

/// Powers of 1024. Measured: with limits of `1G`, `2G` and `4G`, CUDA reports 2^30, 2^31 and 2^32 bytes free,
/// less 24 MB each.
fn mps_bytes(text: &str) -> Result<u64, String> {
    let refuse =
        || format!("`{}` is no limit to MPS; it is a whole number with M or G, like 512M", shown(text));
    let split = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let scale = match unit.to_ascii_uppercase().as_str() {
        "M" | "MB" => 1 << 20,
        "G" | "GB" => 1 << 30,
        _ => return Err(refuse()),
    };
    let bytes = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(scale));
    bytes.filter(|bytes| *bytes > 0).ok_or_else(refuse)
}

fn is_device(text: &str) -> bool {
    is_number(text) || ["GPU-", "MIG-"].into_iter().any(|kind| starts_with(text, kind))
}

fn names(device: &str, gpu: GpuName<'_>) -> bool {
    match device.split_once('-') {
        None => device.parse() == Ok(gpu.ordinal),
        Some((_, uuid)) => !uuid.is_empty() && starts_with(gpu.uuid, uuid),
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Ignores case.
fn starts_with(text: &str, start: &str) -> bool {
    text.get(..start.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(start))
}

/// An empty variable counts as unset, as for its readers.
fn variable(lookup: Lookup<'_>, name: &str) -> Option<String> {
    let text = lookup(name)?.to_string_lossy().trim().to_owned();
    (!text.is_empty()).then_some(text)
}

const SHOWN_MAX: usize = 128;

fn shown(text: &str) -> String {
    let mut shown = String::new();
    for c in text.chars().take(SHOWN_MAX) {
        if matches!(c, '\'' | '"') { shown.push(c) } else { shown.extend(c.escape_debug()) }
    }
    shown.chars().take(SHOWN_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::super::Fake;
    use super::*;

    const GPU: GpuName<'_> = GpuName { ordinal: 1, uuid: "8932f937-d72c-4106-c12f-20bd9faed9f6" };

    fn environment(variables: &[(&str, &str)]) -> impl Fn(&str) -> Option<OsString> {
        move |name| variables.iter().find(|(variable, _)| *variable == name).map(|(_, text)| text.into())
    }

    #[test]
    fn limits_of_hami() {
        for (text, bytes) in [
            ("24576m", Some(24 << 30)),
            ("3g", Some(3 << 30)),
            ("3G", Some(3 << 30)),
            ("1024k", Some(1 << 20)),
            ("1048576", Some(1 << 20)),
            (" 7M ", Some(7 << 20)),
            ("0", None),
            ("0m", None),
        ] {
            let limit = hami_limit(&environment(&[("CUDA_DEVICE_MEMORY_LIMIT_1", text)]), 1).unwrap();
            assert_eq!(limit.bytes, Ok(bytes), "{text}");
            assert_eq!(limit.text, text.trim());
        }
        for text in
            ["8GiB", "8gb", "1.5g", "-1", "m", "3gg", "3 g", "010", "0x10", "x", "18446744073709551615g"]
        {
            let limit = hami_limit(&environment(&[("CUDA_DEVICE_MEMORY_LIMIT", text)]), 1).unwrap();
            let reason = limit.bytes.unwrap_err();
            assert!(reason.contains(text) && reason.contains("24576m"), "{reason}");
            assert_eq!((limit.variable.as_str(), limit.text.as_str()), ("CUDA_DEVICE_MEMORY_LIMIT", text));
        }
    }

    #[test]
    fn a_gpus_own_limit_goes_before_that_for_all() {
        let (own, general) = ("CUDA_DEVICE_MEMORY_LIMIT_1", "CUDA_DEVICE_MEMORY_LIMIT");
        for (variables, expected) in [
            (&[][..], None),
            (&[(general, "")], None),
            (&[("CUDA_DEVICE_MEMORY_LIMIT_0", "1g")], None),
            (&[(general, "2g")], Some((general, Ok(Some(2 << 30))))),
            (&[(own, "1g"), (general, "2g")], Some((own, Ok(Some(1 << 30))))),
            (&[(own, "0"), (general, "2g")], Some((general, Ok(Some(2 << 30))))),
            (&[(own, ""), (general, "2g")], Some((general, Ok(Some(2 << 30))))),
            (&[(own, "0")], Some((own, Ok(None)))),
            (&[(own, "0"), (general, "0")], Some((general, Ok(None)))),
            (&[(own, "x"), (general, "2g")], Some((own, Err(())))),
            (&[(own, "1g"), (general, "x")], Some((own, Ok(Some(1 << 30))))),
        ] {
            let found = hami_limit(&environment(variables), 1);
            let found = found
                .as_ref()
                .map(|limit| (limit.variable.as_str(), limit.bytes.as_ref().copied().map_err(|_| ())));
            assert_eq!(found, expected, "{variables:?}");
        }
    }

    #[test]
    fn limits_of_mps() {
        for (text, expected) in [
            ("0=1G,1=512MB", Some(("1=512MB", Some(512 << 20)))),
            ("1=3G", Some(("1=3G", Some(3 << 30)))),
            (" 0 = 1G , 1 = 2gb ", Some(("1 = 2gb", Some(2 << 30)))),
            ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6=900M", Some(("", Some(900 << 20)))),
            ("GPU-8932F9=1M", Some(("GPU-8932F9=1M", Some(1 << 20)))),
            ("1=3G,GPU-8932f937=1G,1=2G", Some(("GPU-8932f937=1G", Some(1 << 30)))),
            ("0=1G", None),
            ("11=1G", None),
            ("GPU-99=1G,0=x", None),
            ("", None),
            ("1=", Some(("1=", None))),
            ("1=512", Some(("1=512", None))),
            ("1=512K", Some(("1=512K", None))),
            ("1=0G", Some(("1=0G", None))),
            ("1=1.5G", Some(("1=1.5G", None))),
            ("1=-1G", Some(("1=-1G", None))),
            ("1=1G,1=x", Some(("1=x", None))),
            ("1=18446744073709551615G", Some(("1=18446744073709551615G", None))),
            ("1G", Some(("1G", None))),
            ("0=1G,", Some(("0=1G,", None))),
            ("''0=1G''", Some(("''0=1G''", None))),
            ("all=1G", Some(("all=1G", None))),
        ] {
            let found = mps_limit(&environment(&[(MPS_LIMIT, text)]), GPU);
            let words = found.as_ref().map(|limit| limit.text.as_str());
            let bytes = found.as_ref().map(|limit| limit.bytes.clone().ok().flatten());
            assert_eq!(bytes, expected.map(|(_, bytes)| bytes), "{text}");
            assert!(
                expected.is_none_or(|(part, _)| words.is_some_and(|words| words.contains(part))),
                "{text}"
            );
            assert!(
                found
                    .is_none_or(|limit| limit.bytes.is_ok_and(|bytes| bytes.is_some()) || expected.is_some())
            );
        }
    }

    #[test]
    fn texts_are_escaped_and_truncated() {
        let value = |start: &str| format!("{start}{}", "x".repeat(3000 - start.len()));
        let (red, long) = (value("\x1b[31m"), value("1"));
        let (list_red, list_long) = (value("1=\x1b[31m"), value("1="));
        for text in ["\x1b[31m", "\x1b[31m\n1g", "1=\x1b[31m", &red, &long, &list_red, &list_long] {
            let limits = [
                hami_limit(&environment(&[(HAMI_LIMIT, text)]), 1),
                hami_limit(&environment(&[("CUDA_DEVICE_MEMORY_LIMIT_1", text)]), 1),
                mps_limit(&environment(&[(MPS_LIMIT, text)]), GPU),
            ];
            for limit in limits.map(Option::unwrap) {
                let reason = limit.bytes.unwrap_err();
                assert!(limit.text.chars().count() <= 128, "{}", limit.text);
                assert!(reason.chars().count() <= 256, "{reason}");
                for reported in [limit.text, reason] {
                    assert!(!reported.contains(char::is_control), "{reported}");
                    assert_eq!(reported.contains("\\u{1b}[31m"), text.contains('\x1b'), "{reported}");
                }
            }
        }
        // A readable limit is escaped and truncated alike.
        let long = format!("{}1g", "0".repeat(3000));
        let limit = mps_limit(&environment(&[(MPS_LIMIT, &format!("1={long}"))]), GPU).unwrap();
        assert_eq!((limit.bytes, limit.text.len()), (Ok(Some(1 << 30)), 128));
        assert_eq!(shown("\'1=\u{202e}\u{9b}2G\"\t"), "\'1=\\u{202e}\\u{9b}2G\"\\t");
        assert_eq!(shown(&"\0".repeat(3000)).len(), 128);
    }

    #[test]
    fn libraries_in_front_of_the_drivers() {
        let has = |preload: &str, file: Option<&str>| {
            let fake = Fake::new();
            if let Some(text) = file {
                fake.put("/etc/ld.so.preload", text);
            }
            fake.system().has_hami(&environment(&[("LD_PRELOAD", preload)]))
        };
        assert!(has("/usr/local/vgpu/libvgpu.so", None));
        assert!(has("libfoo.so:/x/libvgpu.so.1 libbar.so", None));
        assert!(has("", Some("# HAMi\n/usr/lib/a.so /usr/local/vgpu/libvgpu.so\n")));
        assert!(!has("", None));
        assert!(!has("/usr/local/libvgpu.so/libother.so:/x/notlibvgpu.so", Some("/x/y.so # libvgpu.so\n")));
    }

    #[test]
    fn daemons_of_mps() {
        let fake = Fake::new();
        let default = environment(&[]);
        let elsewhere = environment(&[("CUDA_MPS_PIPE_DIRECTORY", "/run/mps")]);
        let empty = environment(&[("CUDA_MPS_PIPE_DIRECTORY", "")]);
        assert!(!fake.system().has_mps(&default) && !fake.system().has_mps(&elsewhere));
        fake.put("/run/mps/control", "");
        assert!(!fake.system().has_mps(&default) && fake.system().has_mps(&elsewhere));
        fake.put("/tmp/nvidia-mps/control", "");
        assert!(fake.system().has_mps(&default) && fake.system().has_mps(&empty));
    }

    #[test]
    fn instances_that_are_shown() {
        let shown = environment(&[
            ("CUDA_VISIBLE_DEVICES", "0, MIG-b57ef65c-1111,GPU-1234,mig-GPU-8932f937-2222/1/0,MIG"),
            ("NVIDIA_VISIBLE_DEVICES", "all"),
        ]);
        let hints = mig_hints(&shown);
        let hints: Vec<_> =
            hints.iter().map(|hint| (hint.variable.as_str(), hint.instance.as_str())).collect();
        let variable = "CUDA_VISIBLE_DEVICES";
        assert_eq!(hints, [(variable, "MIG-b57ef65c-1111"), (variable, "mig-GPU-8932f937-2222/1/0")]);
        assert_eq!(mig_hints(&environment(&[])), []);
    }
}
