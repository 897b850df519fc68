//! An allocator with its settings, and its text: `pytorch:max_split_size_mb:20`.

use std::fmt;
use std::str::FromStr;

const MIB: u64 = 1 << 20;
/// The least that PyTorch takes.
const SPLIT_MIN_MIB: u64 = 20;
const PARTS: u32 = 1000;

/// Which allocator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AllocatorKind {
    /// PyTorch's caching allocator.
    PyTorch,
    /// The same in a memory pool of vLLM's sleep mode, which fails where memory lacks: nothing goes back then. What is
    /// free as a whole does once the weights are loaded.
    Cumem,
    /// The same in a pool of `torch_memory_saver`: nothing goes back.
    TorchMemorySaver,
    /// Poorwill's pool itself.
    Poorwill,
}

impl AllocatorKind {
    const ALL: [(Self, &'static str); 4] = [
        (Self::PyTorch, "pytorch"),
        (Self::Cumem, "cumem"),
        (Self::TorchMemorySaver, "torch_memory_saver"),
        (Self::Poorwill, "poorwill"),
    ];

    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(kind, _)| *kind == self).map_or("", |(_, name)| name)
    }
}

/// An allocator with its settings.
///
/// ```
/// use poorwill_replay::Setup;
///
/// let setup: Setup = "pytorch:max_split_size_mb:20,garbage_collection_threshold:0.8".parse()?;
/// assert_eq!(setup.to_string(), "pytorch:max_split_size_mb:20,garbage_collection_threshold:0.8");
/// let error = "cumem:expandable_segments:True".parse::<Setup>().unwrap_err();
/// assert_eq!(error.to_string(), "`cumem:expandable_segments:True`: pools have no expandable segments");
/// # Ok::<(), poorwill_replay::ParseSetupError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Setup {
    kind: AllocatorKind,
    max_split_mib: Option<u64>,
    is_expandable: bool,
    /// In thousandths of the card.
    collect_at: Option<u32>,
}

impl Setup {
    /// Those that are compared without a wish.
    pub const ALL: [&'static str; 6] = [
        "pytorch",
        "pytorch:max_split_size_mb:20",
        "pytorch:expandable_segments:True",
        "cumem",
        "cumem:max_split_size_mb:20",
        "poorwill",
    ];

    /// Without settings.
    #[must_use]
    pub const fn of(kind: AllocatorKind) -> Self {
        Self { kind, max_split_mib: None, is_expandable: false, collect_at: None }
    }

    /// Which allocator.
    #[must_use]
    pub const fn kind(&self) -> AllocatorKind {
        self.kind
    }

    /// What selects it, for a shell: variables of the environment, and options of engines.
    #[must_use]
    pub fn typed(&self) -> String {
        let text = self.to_string();
        let settings = text.split_once(':').map_or("", |(_, settings)| settings);
        let conf =
            if settings.is_empty() { String::new() } else { format!("PYTORCH_ALLOC_CONF={settings} ") };
        match self.kind {
            AllocatorKind::PyTorch if settings.is_empty() => "unset PYTORCH_ALLOC_CONF".to_owned(),
            AllocatorKind::PyTorch if self.collect_at.is_some() => {
                format!("{conf}# and torch.cuda.set_per_process_memory_fraction(1.0) in the program")
            }
            AllocatorKind::PyTorch => conf.trim_end().to_owned(),
            AllocatorKind::Cumem => format!("{conf}vllm serve MODEL --enable-sleep-mode"),
            AllocatorKind::TorchMemorySaver => {
                format!("{conf}python -m sglang.launch_server --model-path MODEL --enable-memory-saver")
            }
            AllocatorKind::Poorwill => {
                "POORWILL_SLEEP_MODE=1 vllm serve MODEL --enable-sleep-mode".to_owned()
            }
        }
    }

    /// Blocks of this size or more are never split.
    pub(super) fn max_split_bytes(&self) -> u64 {
        self.max_split_mib.map_or(u64::MAX, |mib| mib.saturating_mul(MIB))
    }

    pub(super) const fn is_expandable(&self) -> bool {
        self.is_expandable
    }

    /// Whether it collects beyond a part of the card.
    pub(crate) const fn collects(&self) -> bool {
        self.collect_at.is_some()
    }

    /// Of this many bytes.
    pub(super) fn collect_at(&self, usable_bytes: u64) -> Option<u64> {
        self.collect_at.map(|parts| usable_bytes / u64::from(PARTS) * u64::from(parts))
    }

    /// PyTorch's own text of its settings, as in `PYTORCH_ALLOC_CONF`. What the model does not know is returned beside it.
    ///
    /// # Errors
    /// If a value cannot be.
    pub fn of_pytorch(text: &str) -> Result<(Self, Vec<String>), ParseSetupError> {
        let mut unknown = Vec::new();
        let mut setup = Self::of(AllocatorKind::PyTorch);
        for setting in settings(text) {
            match setup.take_in(setting) {
                Err(Why::Unknown) => unknown.push(setting.to_owned()),
                outcome => outcome.map_err(|why| ParseSetupError { text: text.to_owned(), why })?,
            }
        }
        Ok((setup, unknown))
    }

    fn take_in(&mut self, setting: &str) -> Result<(), Why> {
        let (name, value) = setting.split_once(':').ok_or(Why::Unknown)?;
        match name.trim() {
            "max_split_size_mb" => {
                let mib = value.trim().parse().ok().filter(|mib| *mib >= SPLIT_MIN_MIB).ok_or(Why::Split)?;
                // PyTorch's own word for none.
                self.max_split_mib = (mib < u64::MAX / MIB).then_some(mib);
            }
            "expandable_segments" => {
                self.is_expandable = match value.trim() {
                    "True" | "true" => true,
                    "False" | "false" => false,
                    _ => return Err(Why::Expandable),
                };
            }
            "garbage_collection_threshold" => {
                let part: f64 = value.trim().parse().map_err(|_| Why::Collect)?;
                if !(0.001..=0.999).contains(&part) {
                    return Err(Why::Collect);
                }
                #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is below one")]
                let parts = (part * f64::from(PARTS)).round() as u32;
                self.collect_at = Some(parts);
            }
            _ => return Err(Why::Unknown),
        }
        Ok(())
    }
}

/// Each `name:value`. Lists in brackets stay together.
fn settings(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0_usize;
    let parts = text.split(move |letter| {
        match letter {
            '[' => depth += 1,
            ']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        letter == ',' && depth == 0
    });
    parts.map(str::trim).filter(|part| !part.is_empty())
}

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.name())?;
        let mut separator = ':';
        let mut write = |name: &str, value: &dyn fmt::Display| {
            let written = write!(f, "{separator}{name}:{value}");
            separator = ',';
            written
        };
        if let Some(mib) = self.max_split_mib {
            write("max_split_size_mb", &mib)?;
        }
        if self.is_expandable {
            write("expandable_segments", &"True")?;
        }
        if let Some(parts) = self.collect_at {
            write("garbage_collection_threshold", &(f64::from(parts) / f64::from(PARTS)))?;
        }
        Ok(())
    }
}

/// A text that is no setup.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}`: {why}")]
pub struct ParseSetupError {
    text: String,
    why: Why,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
enum Why {
    #[error("no allocator is called so; there are pytorch, cumem, torch_memory_saver and poorwill")]
    Kind,
    #[error(
        "no setting is called so; there are max_split_size_mb, expandable_segments and garbage_collection_threshold"
    )]
    Unknown,
    #[error("max_split_size_mb is a number of MiB, 20 or more")]
    Split,
    #[error("expandable_segments is True or False")]
    Expandable,
    #[error("garbage_collection_threshold is a part of the card from 0.001 to 0.999")]
    Collect,
    #[error("pools have no expandable segments")]
    Pool,
    #[error("a pool is not collected from")]
    PoolCollects,
    #[error("Poorwill's pool has no settings")]
    Poorwill,
}

impl FromStr for Setup {
    type Err = ParseSetupError;

    fn from_str(text: &str) -> Result<Self, ParseSetupError> {
        let failed = |why| ParseSetupError { text: text.to_owned(), why };
        let (name, rest) = text.split_once(':').unwrap_or((text, ""));
        let kind = AllocatorKind::ALL.iter().find(|(_, known)| *known == name.trim()).map(|(kind, _)| *kind);
        let mut setup = Self::of(kind.ok_or_else(|| failed(Why::Kind))?);
        for setting in settings(rest) {
            setup.take_in(setting).map_err(failed)?;
        }
        let is_plain = setup == Self::of(setup.kind);
        match setup.kind {
            AllocatorKind::Poorwill if !is_plain => Err(failed(Why::Poorwill)),
            AllocatorKind::Cumem | AllocatorKind::TorchMemorySaver if setup.is_expandable => {
                Err(failed(Why::Pool))
            }
            AllocatorKind::Cumem | AllocatorKind::TorchMemorySaver if setup.collect_at.is_some() => {
                Err(failed(Why::PoolCollects))
            }
            _ => Ok(setup),
        }
    }
}

#[test]
fn texts_come_back() {
    for text in Setup::ALL
        .into_iter()
        .chain(["torch_memory_saver:max_split_size_mb:128", "pytorch:garbage_collection_threshold:0.8"])
    {
        assert_eq!(text.parse::<Setup>().unwrap().to_string(), text);
    }
    for (text, why) in [
        ("malloc", Why::Kind),
        ("pytorch:max_split_size_mb:19", Why::Split),
        ("pytorch:max_split_size_mb", Why::Unknown),
        ("pytorch:expandable_segments:1", Why::Expandable),
        ("pytorch:garbage_collection_threshold:1.5", Why::Collect),
        ("pytorch:backend:native", Why::Unknown),
        ("cumem:garbage_collection_threshold:0.5", Why::PoolCollects),
        ("poorwill:max_split_size_mb:20", Why::Poorwill),
    ] {
        assert_eq!(text.parse::<Setup>(), Err(ParseSetupError { text: text.to_owned(), why }));
    }
}

/// Prose is a comment of the shell.
#[test]
fn what_is_to_be_typed_is_a_line_of_a_shell() {
    let typed = |text: &str| text.parse::<Setup>().unwrap().typed();
    assert_eq!(
        typed("pytorch:garbage_collection_threshold:0.8"),
        "PYTORCH_ALLOC_CONF=garbage_collection_threshold:0.8 # and \
         torch.cuda.set_per_process_memory_fraction(1.0) in the program"
    );
    assert_eq!(typed("pytorch:max_split_size_mb:20"), "PYTORCH_ALLOC_CONF=max_split_size_mb:20");
}

#[test]
fn settings_that_the_model_does_not_know_are_named() {
    let text = "max_split_size_mb:17592186044415, roundup_power2_divisions:[256:1,512:2,>:4], backend:native";
    let (setup, unknown) = Setup::of_pytorch(text).unwrap();
    assert_eq!(setup, Setup::of(AllocatorKind::PyTorch));
    assert_eq!(unknown, ["roundup_power2_divisions:[256:1,512:2,>:4]", "backend:native"]);
}
