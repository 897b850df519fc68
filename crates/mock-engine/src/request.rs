//! Bodies of requests to the OpenAI paths, checked and reduced to a [`GenerateRequest`].
//!
//! Sampling parameters change nothing: the text is deterministic.

use http::StatusCode;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::delta::GenerateRequest;
use crate::failure::Failure;

/// Maximum of prompt and generated text together, in tokens.
pub(crate) const MODEL_LEN_MAX: u64 = 32_768;

/// Maximum tokens of a completion that states none: OpenAI's default.
const COMPLETION_TOKENS: u32 = 16;

pub(crate) fn parsed<T: DeserializeOwned>(body: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(body).map_err(|error| Failure::bad(format!("the body cannot be read: {error}")))
}

#[derive(Debug, Deserialize)]
pub(crate) struct Common {
    model: Option<String>,
    #[serde(default)]
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    n: Option<u32>,
    ignore_eos: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

impl Common {
    pub(crate) fn is_streamed(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    /// Whether a stream ends with the usage.
    pub(crate) fn includes_usage(&self) -> bool {
        self.stream_options.as_ref().and_then(|options| options.include_usage).unwrap_or(false)
    }

    /// Refuses what this engine does not support.
    pub(crate) fn check(&self, model: &str) -> Result<(), Failure> {
        if let Some(other) = self.model.as_deref().filter(|other| *other != model) {
            let reason = format!("The model `{other}` does not exist.");
            return Err(Failure::new(StatusCode::NOT_FOUND, reason).about("model"));
        }
        match self.n {
            None | Some(1) => Ok(()),
            Some(n) => {
                Err(Failure::bad(format!("n is {n}: a mock engine gives one choice for a prompt")).about("n"))
            }
        }
    }

    fn generate_request(
        &self,
        prompts: Vec<String>,
        prompt_tokens: u64,
        max_tokens: Option<u32>,
    ) -> Result<GenerateRequest, Failure> {
        let ignore_eos = self.ignore_eos.unwrap_or(false);
        if max_tokens == Some(0) {
            return Err(Failure::bad("max_tokens must be at least 1, got 0.").about("max_tokens"));
        }
        let tokens_left = MODEL_LEN_MAX.saturating_sub(prompt_tokens);
        let new_tokens = u64::from(max_tokens.unwrap_or(1));
        if new_tokens > tokens_left {
            let reason = format!(
                "This model's maximum context length is {MODEL_LEN_MAX} tokens: the prompt has {prompt_tokens}, and \
                 {new_tokens} more were requested. Request fewer."
            );
            return Err(Failure::bad(reason).about("max_tokens"));
        }
        let tokens_left = u32::try_from(tokens_left).unwrap_or(u32::MAX);
        let max_tokens = if ignore_eos { max_tokens.or(Some(tokens_left)) } else { max_tokens };
        Ok(GenerateRequest { prompts, prompt_tokens, max_tokens, ignore_eos })
    }
}

/// One or several texts, or their tokens.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum Texts {
    One(String),
    Some(Vec<String>),
    Tokens(Vec<u32>),
    SomeTokens(Vec<Vec<u32>>),
}

impl Texts {
    /// The texts, and their tokens in all.
    pub(crate) fn read(&self, param: &'static str) -> Result<(Vec<String>, u64), Failure> {
        let of_tokens = |tokens: &Vec<u32>| format!("{tokens:?}");
        let count = |len: usize| u64::try_from(len).unwrap_or(u64::MAX);
        let (texts, tokens) = match self {
            Self::One(text) => (vec![text.clone()], words(text)),
            Self::Some(texts) => (texts.clone(), texts.iter().map(|text| words(text)).sum()),
            Self::Tokens(tokens) => (vec![of_tokens(tokens)], count(tokens.len())),
            Self::SomeTokens(all) => {
                (all.iter().map(of_tokens).collect(), all.iter().map(|tokens| count(tokens.len())).sum())
            }
        };
        if texts.is_empty() || tokens == 0 {
            return Err(Failure::bad(format!("{param} must not be empty")).about(param));
        }
        Ok((texts, tokens))
    }
}

/// Tokens of a text: its words, and at least one unless it is empty.
fn words(text: &str) -> u64 {
    let words = u64::try_from(text.split_whitespace().count()).unwrap_or(u64::MAX);
    words.max(u64::from(!text.is_empty()))
}

/// `/v1/completions`.
#[derive(Debug, Deserialize)]
pub(crate) struct Completion {
    #[serde(flatten)]
    pub(crate) common: Common,
    prompt: Texts,
    max_tokens: Option<u32>,
}

impl Completion {
    pub(crate) fn generate_request(&self) -> Result<GenerateRequest, Failure> {
        let (prompts, tokens) = self.prompt.read("prompt")?;
        self.common.generate_request(prompts, tokens, Some(self.max_tokens.unwrap_or(COMPLETION_TOKENS)))
    }
}

#[derive(Debug, Deserialize)]
struct Message {
    #[serde(default)]
    role: String,
    content: Option<Content>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<ContentPart>),
}

impl Content {
    fn text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Parts(parts) => parts.iter().map(|part| part.text.as_str()).collect(),
        }
    }
}

#[derive(Debug, Deserialize)]
struct ContentPart {
    #[serde(default)]
    text: String,
}

/// All messages as one text, and its tokens: its words, and a few per message.
fn read(messages: &[Message]) -> (String, u64) {
    const TOKENS_OF_ROLE: u64 = 3;
    let mut prompt = String::new();
    let mut tokens = 0;
    for message in messages {
        let text = message.content.as_ref().map(Content::text).unwrap_or_default();
        tokens += TOKENS_OF_ROLE + words(&text);
        prompt.push_str(&format!("<|{}|>{text}", message.role));
    }
    (prompt, tokens)
}

/// `/v1/chat/completions`.
#[derive(Debug, Deserialize)]
pub(crate) struct Chat {
    #[serde(flatten)]
    pub(crate) common: Common,
    messages: Vec<Message>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
}

impl Chat {
    pub(crate) fn generate_request(&self) -> Result<GenerateRequest, Failure> {
        if self.messages.is_empty() {
            return Err(Failure::bad("messages must not be empty").about("messages"));
        }
        if self.messages.iter().any(|message| message.role.is_empty()) {
            return Err(Failure::bad("each message needs a role").about("messages"));
        }
        let (prompt, tokens) = read(&self.messages);
        self.common.generate_request(vec![prompt], tokens, self.max_completion_tokens.or(self.max_tokens))
    }
}

/// `/v1/responses`.
#[derive(Debug, Deserialize)]
pub(crate) struct Respond {
    #[serde(flatten)]
    pub(crate) common: Common,
    instructions: Option<String>,
    input: Input,
    max_output_tokens: Option<u32>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Input {
    Text(String),
    Items(Vec<Message>),
}

impl Respond {
    pub(crate) fn generate_request(&self) -> Result<GenerateRequest, Failure> {
        let message = |role: &str, text: &str| Message {
            role: role.to_owned(),
            content: Some(Content::Text(text.to_owned())),
        };
        let system: Vec<Message> = self.instructions.iter().map(|text| message("system", text)).collect();
        let (before, tokens_before) = read(&system);
        let (prompt, tokens) = match &self.input {
            Input::Text(text) if text.is_empty() => (String::new(), 0),
            Input::Text(text) => read(&[message("user", text)]),
            Input::Items(items) => read(items),
        };
        if tokens == 0 {
            return Err(Failure::bad("input must not be empty").about("input"));
        }
        self.common.generate_request(vec![before + &prompt], tokens_before + tokens, self.max_output_tokens)
    }
}

/// `/v1/messages`.
#[derive(Debug, Deserialize)]
pub(crate) struct Talk {
    #[serde(flatten)]
    pub(crate) common: Common,
    system: Option<Content>,
    messages: Vec<Message>,
    max_tokens: u32,
}

impl Talk {
    pub(crate) fn generate_request(&self) -> Result<GenerateRequest, Failure> {
        if self.messages.is_empty() {
            return Err(Failure::bad("messages must not be empty").about("messages"));
        }
        let text = self.system.as_ref().map(Content::text).filter(|text| !text.is_empty());
        let system =
            text.map(|text| Message { role: "system".to_owned(), content: Some(Content::Text(text)) });
        let (before, tokens_before) = system.map(|system| read(&[system])).unwrap_or_default();
        let (prompt, tokens) = read(&self.messages);
        self.common.generate_request(vec![before + &prompt], tokens_before + tokens, Some(self.max_tokens))
    }
}

/// `/v1/rerank`.
#[derive(Debug, Deserialize)]
pub(crate) struct Rank {
    #[serde(flatten)]
    pub(crate) common: Common,
    pub(crate) query: String,
    documents: Vec<Document>,
    pub(crate) top_n: Option<usize>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Document {
    Text(String),
    Table { text: String },
}

impl Rank {
    /// The documents, and the tokens of all pairs with the query.
    pub(crate) fn read(&self) -> Result<(Vec<String>, u64), Failure> {
        let text = |document: &Document| match document {
            Document::Text(text) | Document::Table { text } => text.clone(),
        };
        let documents: Vec<String> = self.documents.iter().map(text).collect();
        if documents.is_empty() || self.query.is_empty() {
            return Err(Failure::bad("query and documents must not be empty").about("documents"));
        }
        let tokens = documents.iter().map(|document| words(&self.query) + words(document)).sum();
        Ok((documents, tokens))
    }
}

/// `/v1/embeddings`.
#[derive(Debug, Deserialize)]
pub(crate) struct Embed {
    #[serde(flatten)]
    pub(crate) common: Common,
    pub(crate) input: Texts,
    #[serde(default)]
    pub(crate) encoding_format: Encoding,
}

/// How an embedding is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Encoding {
    /// As a list of numbers.
    #[default]
    Float,
    /// As base64 of its numbers: 32 bits each, little endian.
    Base64,
}
