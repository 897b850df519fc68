//! Whether backups are stored as codes.

/// Whether backups are stored as codes ([`crate::codec`]), extent by extent, where these save a tenth.
///
/// ```
/// use poorwill::backup::Compress;
///
/// assert_eq!("always".parse(), Ok(Compress::Always));
/// assert_eq!(Compress::default().to_string(), "auto");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Compress {
    /// On devices that encode faster than their link ([`DeviceInfo::fast_codec`](crate::DeviceInfo)).
    #[default]
    Auto,
    /// Never.
    Off,
    /// On every device whose granules have a code, by the processor where there is no kernel.
    Always,
}

/// A word that is none of `auto`, `off`, `always`.
///
/// ```
/// use poorwill::backup::Compress;
///
/// let error = "on".parse::<Compress>().unwrap_err();
/// assert_eq!(error.to_string(), "`on` is none of auto, off, always");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is none of auto, off, always")]
pub struct UnknownCompress(pub String);

impl std::str::FromStr for Compress {
    type Err = UnknownCompress;

    fn from_str(word: &str) -> Result<Self, UnknownCompress> {
        [Self::Auto, Self::Off, Self::Always]
            .into_iter()
            .find(|compress| compress.as_str() == word)
            .ok_or_else(|| UnknownCompress(word.to_owned()))
    }
}

impl std::fmt::Display for Compress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.as_str())
    }
}

impl Compress {
    fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Off => "off",
            Self::Always => "always",
        }
    }
}
