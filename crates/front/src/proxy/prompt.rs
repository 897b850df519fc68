//! By which beginning of a prompt requests belong together, so that they go where an engine has it in its cache.
//!
//! The first turn of a chat has the key of its application, whose instructions are likely to be in a cache. A later turn
//! has the key of its chat, which has grown by then. Where the first message ends within a KiB, both are the same.
//!
//! Promise: all later turns of a chat have one key. It is a hash, so nothing of a prompt is kept.

use std::ops::Range;

use super::json::{self, PromptPlaces};
use crate::affinity::hash;

/// Most bytes that count of a prompt that no turn precedes.
const FIRST_MAX_BYTES: usize = 1 << 10;
/// Most bytes that are looked at.
const LATER_MAX_BYTES: usize = 64 << 10;

/// Of a body that was found to be JSON. `None` if it has no text.
pub(super) fn key(body: &[u8], places: PromptPlaces) -> Option<u64> {
    let says_it = |at: &usize| body.get(*at) == Some(&b'"') && body.get(at + 1) != Some(&b'"');
    let of_client = places.cache_key.filter(says_it);
    let span = match (of_client, places.prompt) {
        (Some(at), _) => at..json::skip_value(body, at)?.min(at + LATER_MAX_BYTES),
        (None, Some(at)) => beginning(body, at)?,
        (None, None) => return None,
    };
    let text = body.get(span)?;
    // Two quotes, or an empty list.
    (text.len() > 2).then(|| hash(text))
}

/// Up to the first message of a chat's user, which all its turns have. Other prompts count as they are.
fn beginning(body: &[u8], at: usize) -> Option<Range<usize>> {
    let short = at..body.len().min(at + FIRST_MAX_BYTES);
    let body = &body[..body.len().min(at + LATER_MAX_BYTES)];
    let whole = |range: Range<usize>| json::skip_value(body, at).map_or(range.end, |end| end.min(range.end));
    match body.get(at)? {
        b'"' => return Some(at..whole(short)),
        b'[' => {}
        _ => return None,
    }
    let mut from = at;
    loop {
        from = json::skip_blanks(body, from + 1);
        // A list of numbers or texts, or the end of one.
        if body.get(from) != Some(&b'{') {
            return Some(at..whole(short));
        }
        let Some(end) = json::skip_value(body, from) else { return Some(at..body.len()) };
        let next = json::skip_blanks(body, end);
        if is_of_user(&body[from..end]) {
            let is_first_turn = body.get(next) != Some(&b',');
            return Some(at..if is_first_turn { end.min(short.end) } else { end });
        }
        from = next;
    }
}

fn is_of_user(message: &[u8]) -> bool {
    json::value_at(message, "role").is_some_and(|at| message[at..].starts_with(b"\"user\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(body: &str) -> Option<u64> {
        super::key(body.as_bytes(), json::parse(body.as_bytes()).unwrap().prompt)
    }

    fn chat(system: &str, turns: &[&str]) -> String {
        let mut messages = vec![format!(r#"{{"role":"system","content":"{system}"}}"#)];
        for (nth, turn) in turns.iter().enumerate() {
            let role = if nth % 2 == 0 { "user" } else { "assistant" };
            messages.push(format!(r#"{{"role": "{role}","content":"{turn}"}}"#));
        }
        format!(r#"{{"model":"a","messages":[{}],"stream":true}}"#, messages.join(", "))
    }

    #[test]
    fn the_turns_of_a_chat_have_one_key() {
        let first = key(&chat("be brief", &["hello"]));
        assert!(first.is_some());
        assert_eq!(key(&chat("be brief", &["hello", "hi", "and?"])), first);
        assert_eq!(key(&chat("be brief", &["hello", "ho", "well"])), first);
        assert_ne!(key(&chat("be brief", &["hallo"])), first);
        assert_ne!(key(&chat("be long", &["hello"])), first);
    }

    #[test]
    fn chats_of_one_application_begin_at_one_place() {
        let long = "x".repeat(FIRST_MAX_BYTES);
        let first = key(&chat(&long, &["a"]));
        assert_eq!(key(&chat(&long, &["b"])), first);
        let later = key(&chat(&long, &["a", "b", "c"]));
        assert_ne!(later, first);
        assert_eq!(key(&chat(&long, &["a", "b", "c", "d", "e"])), later);
        assert_ne!(key(&chat(&long, &["b", "b", "c"])), later);
        let longer = "x".repeat(LATER_MAX_BYTES);
        assert_eq!(
            key(&chat(&longer, &["a"])),
            key(&chat(&longer, &["b", "c", "d"])),
            "no more is looked at"
        );
    }

    #[test]
    fn clients_may_say_what_belongs_together() {
        let of =
            |key: &str, text: &str| format!(r#"{{"prompt_cache_key":{key},"model":"a","input":{text}}}"#);
        let both = key(&of(r#""chat-1""#, r#""one""#));
        assert!(both.is_some());
        assert_eq!(key(&of(r#""chat-1""#, "[]")), both);
        assert_ne!(key(&of(r#""chat-2""#, r#""one""#)), both);
        for none in ["null", "7", "{}", r#""""#] {
            assert_eq!(key(&of(none, r#""one""#)), key(r#"{"model":"a","input":"one"}"#), "{none}");
        }
    }

    #[test]
    fn whatever_a_prompt_is_it_does_no_harm() {
        for none in
            [r#"{"model":"a"}"#, r#"{"model":"a","prompt":null}"#, r#"{"input":7}"#, r#"{"prompt":""}"#]
        {
            assert_eq!(key(none), None, "{none}");
        }
        for some in [
            r#"{"prompt":[1,2,3]}"#,
            r#"{"input":["a","b"]}"#,
            r#"{"messages":[{"role":"user"}]}"#,
            r#"{"messages":[{"content":[{"role":"user"}]},{"role":"\u0075ser"} , 7]}"#,
            r#"{"input" : [ { } ] }"#,
        ] {
            assert!(key(some).is_some(), "{some}");
            // It is JSON by now, but nothing is to fail without.
            for cut in 0..some.len() {
                let places = json::parse(some.as_bytes()).unwrap().prompt;
                let _any: Option<u64> = super::key(&some.as_bytes()[..cut], places);
            }
        }
    }
}
