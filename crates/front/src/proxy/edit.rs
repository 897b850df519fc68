//! A JSON body as its engine gets it: with the engine's name of the model, and with the configured parameters.
//!
//! Everything else stays byte for byte, and is not copied. A body that stays whole is not searched.

use bytes::Bytes;
use serde_json::Value;

use super::json::{members, name_span};
use crate::backend::Route;
use crate::settings::Parameters;

/// The segments of a body that [`parse`](super::json::parse) accepted, and in which the model is called `asked`.
pub(super) fn edited(body: Bytes, asked: &str, route: &Route) -> Option<Vec<Bytes>> {
    let is_renamed = asked != route.served_as;
    let name = is_renamed.then(|| Bytes::from(Value::from(route.served_as.as_str()).to_string()));
    if !route.parameters.is_empty() {
        return with_parameters(&body, name.as_ref(), &route.parameters);
    }
    let Some(name) = name else { return Some(vec![body]) };
    let span = name_span(&body)?;
    Some(vec![body.slice(..span.start), name, body.slice(span.end..)])
}

/// Configured fields come first. The client's own of the same names are left out, however often they are there.
fn with_parameters(body: &Bytes, name: Option<&Bytes>, parameters: &Parameters) -> Option<Vec<Bytes>> {
    let inside = body.iter().position(|byte| *byte == b'{')? + 1;
    let fields = text_of(parameters);
    let mut comma: &'static [u8] = if fields.is_empty() { b"" } else { b"," };
    let mut segments = vec![body.slice(..inside), fields.into()];
    // Where the members begin that stay together, and where the last one ends.
    let (mut kept, mut end) = (None, inside);
    for member in members(body) {
        if member.has_key(body, |key| parameters.replaces(key)) {
            segments.extend(kept.take().map(|begin| body.slice(begin..end)));
        } else {
            let begin = kept.unwrap_or_else(|| {
                segments.push(Bytes::from_static(comma));
                comma = b",";
                if end == inside { inside } else { member.start() }
            });
            kept = Some(begin);
            if let Some(name) = name.filter(|_| member.has_key(body, |key| key == "model")) {
                segments.extend([body.slice(begin..member.value.start), name.clone()]);
                kept = Some(member.value.end);
            }
        }
        end = member.value.end;
    }
    segments.push(body.slice(kept.unwrap_or(end)..));
    Some(segments)
}

/// Without braces.
fn text_of(parameters: &Parameters) -> String {
    let field = |(field, value): (&String, &Value)| format!("{}:{value}", Value::from(field.as_str()));
    parameters.set.iter().map(field).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Map, json};

    use super::super::json::parse;
    use super::*;
    use crate::backend::ModelNumber;

    fn route(served_as: &str, set: Value, strip: &[&str]) -> Route {
        let Value::Object(set) = set else { panic!("{set} is no object") };
        Route {
            affinity: crate::affinity::Affinity::default(),
            model: ModelNumber(0),
            name: "a".to_owned(),
            url: String::new(),
            served_as: served_as.to_owned(),
            parameters: Arc::new(Parameters { set, strip: strip.iter().map(ToString::to_string).collect() }),
            in_flight: None,
            first_byte_max: None,
        }
    }

    fn sent(body: &str, route: &Route) -> String {
        let asked = parse(body.as_bytes()).unwrap().name.unwrap();
        let segments = edited(Bytes::copy_from_slice(body.as_bytes()), &asked, route).unwrap();
        String::from_utf8(segments.concat()).unwrap()
    }

    #[test]
    fn only_what_is_configured_changes() {
        let set = json!({"t": 0.5, "x": {"y": [1, null]}});
        for (body, served_as, set, strip, wanted) in [
            (" { \"model\" : \"a\" } ", "a", json!({}), &[][..], " { \"model\" : \"a\" } "),
            (" { \"model\" : \"a\" } ", "a", json!({}), &["t"], " { \"model\" : \"a\" } "),
            (
                " { \"model\" : \"a\" } ",
                "a",
                set.clone(),
                &[],
                " {\"t\":0.5,\"x\":{\"y\":[1,null]}, \"model\" : \"a\" } ",
            ),
            (r#"{"model":"a"}"#, "b\"", json!({"t": 1}), &[], r#"{"t":1,"model":"b\""}"#),
            (r#"{"t": 1 , "model":"a", "t":2 }"#, "b", json!({}), &["t"], r#"{"model":"b" }"#),
            (r#"{"t":1,"u":2,"model":"a"}"#, "a", json!({}), &["t", "u"], r#"{"model":"a"}"#),
            (
                r#"{"a":1, "t":1,"model":"a" ,"b":{"t":2},"u":[],"c":3}"#,
                "b",
                json!({"t": "x"}),
                &["u"],
                r#"{"t":"x","a":1,"model":"b" ,"b":{"t":2},"c":3}"#,
            ),
            // However it is written.
            (r#"{"\u0074":"}","model":"a"}"#, "a", json!({"t": true}), &[], r#"{"t":true,"model":"a"}"#),
            (r#"{"mod\u0065l":"a","t":","}"#, "b", json!({}), &["t"], r#"{"mod\u0065l":"b"}"#),
        ] {
            assert_eq!(sent(body, &route(served_as, set, strip)), wanted, "{body}");
        }
    }

    #[test]
    fn any_body_has_its_fields_and_the_configured_ones() {
        let mut random = fastrand::Rng::with_seed(7);
        let values = [json!(1), json!("}, \"t\":\\"), json!({"t": [{}]}), json!([[], "]"]), json!(null)];
        let keys = ["a", "t", "u\"", "\u{e4}", ""];
        let fields = |random: &mut fastrand::Rng| -> Map<String, Value> {
            let all = keys.iter().filter(|_| random.bool()).collect::<Vec<_>>();
            all.into_iter()
                .map(|key| ((*key).to_owned(), values[random.usize(..values.len())].clone()))
                .collect()
        };
        for _ in 0..2000 {
            let (own, set) = (fields(&mut random), fields(&mut random));
            let strip: Vec<&str> = keys.into_iter().filter(|_| random.u8(..4) == 0).collect();
            let mut members: Vec<String> =
                own.iter().map(|(key, value)| format!("{}:{value}", json!(key))).collect();
            members.insert(random.usize(..=members.len()), r#""model":"a""#.to_owned());
            let body = format!("{{{}}}", members.join(if random.bool() { "," } else { " ,\n" }));
            let mut wanted = own;
            wanted.retain(|key, _| !strip.contains(&key.as_str()));
            wanted.extend(set.clone());
            let name = if random.bool() { "a" } else { "b" };
            wanted.insert("model".to_owned(), name.into());
            let sent = sent(&body, &route(name, Value::Object(set), &strip));
            assert_eq!(
                serde_json::from_str::<Value>(&sent).unwrap(),
                Value::Object(wanted),
                "{body}: {sent}"
            );
        }
    }
}
