//! Bodies reach engines byte for byte, however they are written.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::setup::{Setup, answer, post, run};

/// Spellings of a model's name in JSON.
const SMALL: [&str; 3] = [r#""small""#, r#""sm\u0061ll""#, r#""\u0073\u006d\u0061\u006c\u006c""#];
/// The name in the engine.
const NAMED: &str = r#""org/one""#;
/// And of the key.
const MODEL: [&str; 3] = [r#""model""#, r#""mod\u0065l""#, r#""\u006dodel""#];

fn blanks() -> impl Strategy<Value = String> {
    "[ \t\r\n]{0,3}"
}

/// A string as JSON writes it.
fn text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        "[a-zA-Z0-9 {}\\[\\],:/]{0,4}",
        Just(r#"\""#.to_owned()),
        Just(r"\\".to_owned()),
        Just(r"\n\/\b".to_owned()),
        Just(r"\ud83d\ude00".to_owned()),
        Just(r"\ud800".to_owned()),
        Just("\u{1f600}\u{e4}\u{7f}".to_owned()),
        Just(r#"\"model\":\"two\""#.to_owned()),
    ];
    prop::collection::vec(piece, 0..5).prop_map(|pieces| format!("\"{}\"", pieces.concat()))
}

/// A key other than the model's. Every parser accepts it, so it has no lone surrogate.
fn key() -> impl Strategy<Value = String> {
    const ODD: &[&str] = &[
        r#""Model""#,
        r#""model ""#,
        r#""mode""#,
        r#""models""#,
        r#""""#,
        r#""mod\\u0065l""#,
        r#""\"model\"""#,
    ];
    prop_oneof![3 => prop::sample::select(ODD).prop_map(str::to_owned), 1 => "\"[a-z]{1,3}x\""]
}

fn value() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        text(),
        prop::sample::select(
            &["null", "true", "false", "0", "-0.0e-7", "1E400", "123456789012345678901234567890"][..]
        )
        .prop_map(str::to_owned),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        let entry = (
            prop_oneof![key(), prop::sample::select(&MODEL[..]).prop_map(str::to_owned)],
            blanks(),
            inner.clone(),
        );
        let entry = entry.prop_map(|(key, blanks, value)| format!("{blanks}{key}{blanks}:{blanks}{value}"));
        prop_oneof![
            (prop::collection::vec(inner, 0..4), blanks()).prop_map(|(all, blanks)| {
                format!("[{blanks}{}{blanks}]", all.join(&format!("{blanks},{blanks}")))
            }),
            (prop::collection::vec(entry, 0..4), blanks())
                .prop_map(|(all, blanks)| format!("{{{blanks}{}}}", all.join(&format!("{blanks},")))),
        ]
    })
}

/// The text before the name, the name as written, and the text after; and whether it occurs once.
fn document() -> impl Strategy<Value = (String, &'static str, String, bool)> {
    let entries = || prop::collection::vec((blanks(), key(), blanks(), value(), blanks()), 0..4);
    let twice = prop::bool::weighted(0.1);
    let name =
        (prop::sample::select(&MODEL[..]), prop::sample::select(&SMALL[..]), blanks(), blanks(), blanks());
    (entries(), name, entries(), twice, blanks()).prop_map(
        |(before, (key, name, one, two, three), after, twice, four)| {
            let written = |(one, key, two, value, three): (String, String, String, String, String)| {
                format!("{one}{key}{two}:{three}{value}{two}")
            };
            let before: String = before.into_iter().map(|entry| written(entry) + ",").collect();
            let mut after: String = after.into_iter().map(|entry| format!(",{}", written(entry))).collect();
            if twice {
                after += &format!(",{key}:{name}");
            }
            (
                format!("{four}{{{before}{one}{key}{two}:{three}"),
                name,
                format!("{two}{after}{one}}}{four}"),
                !twice,
            )
        },
    )
}

#[test]
fn only_the_name_is_replaced() {
    let config =
        Config { cases: 400, failure_persistence: None, fork: false, timeout: 0, ..Config::default() };
    let mut runner = TestRunner::new(config);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let setup = runtime.block_on(Setup::new(""));
    let tried = runner.run(&document(), |(before, name, after, is_once)| {
        let body = format!("{before}{name}{after}");
        runtime.block_on(async {
            let mut client = setup.asking(&body).await;
            if !is_once {
                let (head, said) = client.json().await;
                prop_assert_eq!((head.status(), &said["error"]["param"]), (400, &"model".into()));
                return Ok(());
            }
            let mut engine = tokio::select! {
                engine = setup.engine() => engine,
                (_, said) = client.message() => {
                    return Err(TestCaseError::fail(format!("refused: {}", String::from_utf8_lossy(&said))));
                }
            };
            let (_, got) = engine.message().await;
            prop_assert_eq!(String::from_utf8(got).unwrap(), format!("{before}{NAMED}{after}"));
            // An answer, byte for byte as well.
            let said = answer(&body).replacen("\r\n", "\r\nConnection: close\r\n", 1);
            engine.send(said).await;
            prop_assert_eq!(String::from_utf8(client.message().await.1).unwrap(), body);
            Ok(())
        })
    });
    tried.unwrap();
}

#[test]
fn a_huge_body_arrives_whole() {
    run(async {
        let setup = Setup::new("").await;
        for model in ["org/one", "small"] {
            let text = "abcdefghijklmnopqrstuvwxyz".repeat((24 << 20) / 26);
            let body = format!("{{\"text\":\"{text}\",\"model\":\"{model}\",\"more\":\"{text}\"}}");
            let mut client = setup.client().await;
            // Over the limit: refused by its head.
            client.send(post(&body).split_at(400).0).await;
            assert_eq!(client.message().await.0.status(), 413);
            let body = format!("{{\"text\":\"{text}\",\"model\":\"{model}\",\"more\":1}}");
            let mut client = setup.client().await;
            let asked = post(&body);
            let sending = tokio::spawn(async move {
                client.send(asked).await;
                client
            });
            let mut engine = setup.engine().await;
            let (_, got) = engine.message().await;
            assert!(got == body.replace("small", "org/one").as_bytes(), "other bytes");
            engine.send(answer("{}").replacen("\r\n", "\r\nConnection: close\r\n", 1)).await;
            assert_eq!(sending.await.unwrap().message().await.0.status(), 200);
        }
    });
}
