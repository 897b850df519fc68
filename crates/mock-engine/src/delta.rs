//! What is asked for, and what comes, token by token.

#[derive(Debug, Clone)]
pub(crate) struct GenerateRequest {
    /// One choice per prompt.
    pub(crate) prompts: Vec<String>,
    pub(crate) prompt_tokens: u64,
    /// `None`: until the text ends.
    pub(crate) max_tokens: Option<u32>,
    /// Whether to continue after the text's end.
    pub(crate) ignore_eos: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Finish {
    Stop,
    Length,
    Abort,
}

impl Finish {
    pub(crate) const ALL: [Self; 3] = [Self::Stop, Self::Length, Self::Abort];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
        }
    }
}

/// A token, an end, or both.
#[derive(Debug, Clone)]
pub(crate) struct Delta {
    pub(crate) choice: usize,
    /// `None` if a choice ends without another token.
    pub(crate) text: Option<String>,
    pub(crate) finish: Option<Finish>,
}
