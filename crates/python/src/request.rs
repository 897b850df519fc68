//! Arguments of `Arena`'s methods, converted to the library's requests.

use std::time::Duration;

use poorwill::backup::Compress;
use poorwill::lend::PeerCopies;
use poorwill::{
    Changes, DeviceRange, Dropped, Level, Links, SleepAction, SleepRequest, StoredAs, Tag, TagPolicy, Verify,
    WakeRequest,
};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyFloat, PyString};

use crate::device;
use crate::errors::{invalid, wrong_type};
use crate::sizes::whole_number;

const TAGS: &str = "tags are a str, or a sequence of them";

pub(crate) fn tag(name: &str) -> PyResult<Tag> {
    name.parse().map_err(invalid)
}

/// The sleep that a call's arguments ask for.
pub(crate) fn sleep(
    level: i64,
    tags: Option<&Bound<'_, PyAny>>,
    keep_awake: Option<&Bound<'_, PyAny>>,
) -> PyResult<SleepRequest> {
    let kept_awake = self::tags(keep_awake)?.unwrap_or_default();
    Ok(SleepRequest::all(self::level(level)?).choosing(self::tags(tags)?).keeping_awake(kept_awake))
}

/// None means all.
pub(crate) fn tags(tags: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Vec<Tag>>> {
    tags.map(named_tags).transpose()
}

pub(crate) fn named_tags(tags: &Bound<'_, PyAny>) -> PyResult<Vec<Tag>> {
    if let Ok(name) = tags.cast::<PyString>() {
        return Ok(vec![tag(&name.to_string())?]);
    }
    let Ok(names) = tags.try_iter() else { return Err(wrong_type(TAGS, tags)) };
    let one = |name: PyResult<Bound<'_, PyAny>>| {
        let name = name?;
        let text = name.cast::<PyString>().map_err(|_| wrong_type("a tag is a str", &name))?;
        tag(&text.to_string())
    };
    names.map(one).collect()
}

/// Pairs of an address and a length, of the argument `name`. None means none.
pub(crate) fn ranges(name: &str, pairs: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<DeviceRange>> {
    let Some(pairs) = pairs else { return Ok(Vec::new()) };
    let expected = format!("{name} is a sequence of pairs of an address and a length in bytes, each an int");
    let Ok(items) = pairs.try_iter() else { return Err(wrong_type(&expected, pairs)) };
    let one = |item: PyResult<Bound<'_, PyAny>>| {
        let item = item?;
        let wrong = |_| wrong_type(&expected, &item);
        let (addr, bytes): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item.extract().map_err(wrong)?;
        let number = |number: &Bound<'_, PyAny>| {
            let found = whole_number(number)?.ok_or_else(|| wrong_type(&expected, &item))?;
            found.map_err(|reason| invalid(format!("`{number}` is no address or length: {reason}")))
        };
        Ok(DeviceRange::new(number(&addr)?, number(&bytes)?))
    };
    items.map(one).collect()
}

pub(crate) fn level(level: i64) -> PyResult<Level> {
    match level {
        1 => Ok(Level::One),
        2 => Ok(Level::Two),
        _ => Err(invalid(format!("there is no level {level}; 1 keeps weights in host memory, 2 drops them"))),
    }
}

pub(crate) fn compress(word: &str) -> PyResult<Compress> {
    let known = [("auto", Compress::Auto), ("off", Compress::Off), ("always", Compress::Always)];
    one_of("compress", word, &known)
}

pub(crate) fn links(given: &Bound<'_, PyAny>) -> PyResult<Links> {
    if let Ok(are_used) = given.cast::<PyBool>() {
        return Ok(if are_used.is_true() { Links::Reachable } else { Links::Own });
    }
    let numbers = given.extract::<Vec<u32>>();
    numbers.map(Links::Only).map_err(|_| wrong_type("links are True, False, or numbers of GPUs", given))
}

pub(crate) fn peer_copies(given: &Bound<'_, PyAny>) -> PyResult<PeerCopies> {
    if let Ok(are_kept) = given.cast::<PyBool>() {
        return Ok(if are_kept.is_true() { PeerCopies::Reachable } else { PeerCopies::None });
    }
    let is_text = given.is_instance_of::<PyString>();
    let Some(devices) = given.try_iter().ok().filter(|_| !is_text) else {
        return Err(wrong_type("peer_copies are True, False, or a sequence of devices", given));
    };
    let specs = devices.map(|each| device::named(Some(&each?), given.py()));
    specs.collect::<PyResult<Vec<_>>>().map(PeerCopies::On)
}

pub(crate) fn wake(
    tags: Option<&Bound<'_, PyAny>>,
    verify: Option<&str>,
    accept_losses: bool,
    timeout: Option<&Bound<'_, PyAny>>,
) -> PyResult<WakeRequest> {
    let known = [("sample", Verify::Sample), ("all", Verify::All)];
    let verify = verify.map(|verify| one_of("verify", verify, &known)).transpose()?;
    let request = WakeRequest::all().choosing(self::tags(tags)?).verifying(verify);
    let request = if accept_losses { request.accepting_losses() } else { request };
    Ok(match timeout {
        None => request,
        Some(timeout) => request.within(self::timeout(timeout)?),
    })
}

pub(crate) fn timeout(seconds: &Bound<'_, PyAny>) -> PyResult<Duration> {
    let known = match whole_number(seconds)? {
        Some(_) => true,
        None => seconds.is_instance_of::<PyFloat>(),
    };
    if !known {
        return Err(wrong_type("a timeout is a number of seconds", seconds));
    }
    let given: f64 = seconds.extract()?;
    if given.is_nan() || given < 0.0 {
        return Err(invalid(format!("`{given}` is no timeout: it is a number of seconds from 0 on")));
    }
    // Longer than a `Duration` can hold: without bound.
    Ok(Duration::try_from_secs_f64(given).unwrap_or(Duration::MAX))
}

/// Arguments of `Arena.declare`.
#[derive(Debug)]
pub(crate) struct Declaration {
    /// None if nothing was given about it.
    pub(crate) policy: Option<TagPolicy>,
    pub(crate) changes: Option<Changes>,
    pub(crate) stored_as: Option<StoredAs>,
}

impl Declaration {
    pub(crate) fn of(
        tag: &Tag,
        level1: Option<&str>,
        level2: Option<&str>,
        dropped: Option<&str>,
        changes: Option<&str>,
        backups: Option<&str>,
    ) -> PyResult<Self> {
        let action = |name, text: Option<&str>| {
            let known = [("backup", SleepAction::Backup), ("drop", SleepAction::Drop)];
            text.map(|text| one_of(name, text, &known)).transpose()
        };
        let (level1, level2) = (action("level1", level1)?, action("level2", level2)?);
        let known = [("zeros", Dropped::Zeros), ("undefined", Dropped::Undefined)];
        let dropped = dropped.map(|text| one_of("dropped", text, &known)).transpose()?;
        let known = [
            ("compared", Changes::Compared),
            ("immutable", Changes::Immutable),
            ("volatile", Changes::Volatile),
        ];
        let changes = changes.map(|text| one_of("changes", text, &known)).transpose()?;
        let known = [("compact", StoredAs::Compact), ("viewable", StoredAs::Viewable)];
        let stored_as = backups.map(|text| one_of("backups", text, &known)).transpose()?;
        let says_policy = level1.is_some() || level2.is_some() || dropped.is_some();
        if !says_policy && changes.is_none() && stored_as.is_none() {
            let wanted = "say at least one of level1, level2, dropped, changes and backups";
            return Err(invalid(format!("nothing is declared of `{tag}`; {wanted}")));
        }
        let built_in = TagPolicy::built_in(tag);
        let (level_1, level_2) = (level1.unwrap_or(built_in.level_1), level2.unwrap_or(built_in.level_2));
        let policy = TagPolicy::new(level_1, level_2, dropped.unwrap_or(built_in.dropped));
        Ok(Self { policy: says_policy.then_some(policy), changes, stored_as })
    }
}

fn one_of<T: Copy>(what: &str, text: &str, known: &[(&str, T)]) -> PyResult<T> {
    if let Some((_, value)) = known.iter().find(|(name, _)| *name == text) {
        return Ok(*value);
    }
    let names: Vec<String> = known.iter().map(|(name, _)| format!("\"{name}\"")).collect();
    let names = names.join(" or ");
    Err(invalid(format!("`{}` is no value of {what}; it is {names}", text.escape_debug())))
}
