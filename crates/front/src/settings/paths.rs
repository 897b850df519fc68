//! The paths of engines that clients may call.
//!
//! Promises:
//!
//! - Only listed paths are reached: the usual ones, and those of the configuration.
//! - Paths by which engines are administrated are never among them, however a list or a request writes them. An engine
//!   that sleeps, or loads other weights, on a client's word would break the promises of rotation. A list of known ones
//!   is enough. Each path or prefix is opened by name, here or by an operator, and a prefix opens none of these.

/// What clients of OpenAI, Anthropic, Cohere, Jina, llama.cpp and Ollama call for text and vectors. Those that end in a
/// slash are prefixes.
const TEXT: &[&str] = &[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/responses/",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/rerank",
    "/v1/reranking",
    "/v1/score",
    "/v1/classify",
    "/v1/pooling",
    "/v1/moderations",
    // Cohere.
    "/v1/chat",
    "/v1/embed",
    "/v2/chat",
    "/v2/embed",
    "/v2/rerank",
    // llama.cpp.
    "/infill",
    "/completion",
    "/completions",
    "/chat/completions",
    "/embedding",
    "/embeddings",
    "/rerank",
    "/reranking",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    // Ollama.
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
    "/api/show",
];

/// What clients of OpenAI and Stable Diffusion call for images and audio. Engines may store what these make.
const MEDIA: &[&str] = &[
    "/v1/audio/",
    "/v1/images/",
    // Stable Diffusion.
    "/sdapi/v1/txt2img",
    "/sdapi/v1/img2img",
    "/sdapi/v1/extra-single-image",
    "/sdapi/v1/extra-batch-images",
    "/sdapi/v1/png-info",
];

/// Those that are read, with `?model=NAME`.
const READ: &[&str] = &[
    "/props",
    "/v1/audio/",
    // Stable Diffusion.
    "/sdapi/v1/sd-models",
    "/sdapi/v1/sd-vae",
    "/sdapi/v1/samplers",
    "/sdapi/v1/schedulers",
    "/sdapi/v1/upscalers",
    "/sdapi/v1/loras",
    "/sdapi/v1/embeddings",
    "/sdapi/v1/progress",
];

/// Those that are only read. A `POST` changes an engine for all its clients.
const ONLY_READ: &[&str] = &["/props", "/lora-adapters"];

/// By which engines, and this service, are administrated. Those that end in a slash or a hyphen are prefixes.
const ADMINISTRATION: &[&str] = &[
    "/rotate/",
    "/engines/",
    // vLLM.
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/pause",
    "/resume",
    "/is_paused",
    "/abort_requests",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/get_world_size",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/start_profile",
    "/stop_profile",
    "/server_info",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    // SGLang.
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/flush_cache",
    "/clear_hicache_storage_backend",
    "/hicache/",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/update_weights_from_ipc",
    "/update_weight_version",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/init_weights_send_group_for_remote_instance",
    "/send_weights_to_remote_instance",
    "/get_weights_by_name",
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/load_lora_adapter_from_tensors",
    "/pause_generation",
    "/continue_generation",
    "/abort_request",
    "/set_internal_state",
    "/configure_logging",
    "/freeze_gc",
    "/slow_down",
    "/start_expert_distribution_record",
    "/stop_expert_distribution_record",
    "/dump_expert_distribution_record",
    // llama.cpp.
    "/slots",
    "/slots/",
    "/models/load",
    "/models/unload",
    // Ollama.
    "/api/pull",
    "/api/push",
    "/api/create",
    "/api/copy",
    "/api/delete",
    "/api/blobs/",
    // Stable Diffusion.
    "/sdapi/v1/options",
    "/sdapi/v1/checkpoint",
    "/sdapi/v1/lock-checkpoint",
    "/sdapi/v1/unload-",
    "/sdapi/v1/reload-",
    "/sdapi/v1/refresh-",
    "/sdapi/v1/interrupt",
    "/sdapi/v1/skip",
    "/sdapi/v1/create/",
    "/sdapi/v1/train/",
    "/sdapi/v1/preprocess",
    "/sdapi/v1/shutdown",
    "/sdapi/v1/server-",
    // Triton.
    "/v2/repository/",
    "/v2/logging",
    "/v2/systemsharedmemory/",
];

/// Whether clients may send a `POST` there.
pub(crate) fn is_open(path: &str, own: &[String]) -> bool {
    (is_text(path) || is_in(path, MEDIA) || is_own(path, own))
        && !is_administration(path)
        && !is_in(path, ONLY_READ)
}

/// Whether clients may read there what no body asks for.
pub(crate) fn is_readable(path: &str, own: &[String]) -> bool {
    (is_in(path, READ) || is_own(path, own)) && !is_administration(path)
}

/// Whether every front opens it, for text or vectors. What it does may be done twice.
pub(crate) fn is_text(path: &str) -> bool {
    is_in(path, TEXT)
}

/// Whether the configuration opens it.
pub(crate) fn is_own(path: &str, own: &[String]) -> bool {
    own.iter().any(|one| matches(path, one)) && !is_administration(path)
}

/// Whether an answer there is a stream of events, if it is a stream. Others are lines of JSON.
pub(crate) fn streams_events(path: &str) -> bool {
    !path.starts_with("/api/") && path != "/v1/chat"
}

/// As an engine may read it.
pub(crate) fn is_administration(path: &str) -> bool {
    // What cannot be decoded is closed.
    let Some(path) = decoded(path) else { return true };
    let path = path.to_ascii_lowercase();
    let path = path.trim_end_matches('/');
    let is_it = |one: &str| match one.strip_suffix('/') {
        Some(folder) => path == folder || path.starts_with(one),
        None => path == one || one.ends_with('-') && path.starts_with(one),
    };
    ADMINISTRATION.iter().copied().any(is_it)
}

/// What is wrong with a path of the configuration, if anything. Requests are compared with it as they are written.
pub(crate) fn mistake(path: &str) -> Option<&'static str> {
    let is_plain = |byte: u8| byte.is_ascii_graphic() && !b"?#%\\".contains(&byte);
    let rest = path.strip_prefix('/').unwrap_or_default();
    let mut segments = rest.strip_suffix('/').unwrap_or(rest).split('/');
    let is_path = rest.bytes().all(is_plain) && segments.all(|segment| !matches!(segment, "" | "." | ".."));
    if !is_path {
        return Some("say a path such as \"/v1/tokenize\", or a prefix such as \"/v1/audio/\"");
    }
    if matches!(rest, "v1/" | "v2/") {
        return Some("that would open more than clients need; name what is below it");
    }
    let is_closed = is_administration(path);
    is_closed.then_some("engines are administrated there, not used; leave it out, or set `passthrough`")
}

fn is_in(path: &str, listed: &[&str]) -> bool {
    listed.iter().any(|one| matches(path, one))
}

fn matches(path: &str, one: &str) -> bool {
    if one.ends_with('/') { path.starts_with(one) } else { path == one }
}

/// Percent-decodes.
pub(crate) fn decoded(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(part.get(..2)?, 16).ok()?);
        bytes.extend_from_slice(part.get(2..)?.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However a path is written, and whatever a prefix opens.
    #[test]
    fn administration_stays_closed() {
        let own: Vec<String> = ADMINISTRATION.iter().chain(ONLY_READ).map(ToString::to_string).collect();
        let own: Vec<String> = own.into_iter().chain(["/api/", "/sdapi/"].map(str::to_owned)).collect();
        for path in ADMINISTRATION.iter().copied() {
            assert!(mistake(path).is_some(), "{path}");
            let below = format!("{path}x");
            let first = path.find(|c: char| c.is_ascii_lowercase()).unwrap();
            let letter = path.as_bytes()[first];
            let encoded = format!("{}%{letter:02x}{}", &path[..first], &path[first + 1..]);
            let mut spellings = vec![path.to_owned(), path.to_ascii_uppercase(), encoded];
            spellings.extend(path.ends_with(['/', '-']).then_some(below));
            for spelling in spellings {
                assert!(
                    !is_open(&spelling, &own) && !is_readable(&spelling, &own) && !is_own(&spelling, &own),
                    "{spelling}"
                );
            }
        }
        for path in ONLY_READ.iter().copied() {
            assert!(!is_open(path, &own) && is_readable(path, &own), "{path}");
        }
    }

    #[test]
    fn names_in_paths_may_be_encoded() {
        assert_eq!(decoded("a%2Fb c").as_deref(), Some("a/b c"));
        assert_eq!(decoded("a%2"), None);
        assert_eq!(decoded("%ff"), None);
    }

    #[test]
    fn what_clients_call_is_open() {
        for path in TEXT.iter().chain(MEDIA).copied() {
            assert!(is_open(path, &[]) && !is_administration(path), "{path}");
            assert_ne!(is_text(path), MEDIA.contains(&path), "{path}");
        }
        for path in READ.iter().copied() {
            assert!(is_readable(path, &[]), "{path}");
            assert_eq!(is_open(path, &[]), MEDIA.contains(&path), "{path}");
        }
        assert!(!is_readable("/v1/chat/completions", &[]));
        for closed in ["/", "/metrics", "/v1/models", "/v1", "/generate", "/sdapi/v1/x", "/infill/x"] {
            assert!(!is_open(closed, &[]) && !is_readable(closed, &[]), "{closed}");
        }
        let own = ["/generate".to_owned(), "/ner/".to_owned()];
        for path in ["/generate", "/ner/find"] {
            assert!(is_open(path, &own) && is_readable(path, &own) && mistake(path).is_none(), "{path}");
        }
    }
}
