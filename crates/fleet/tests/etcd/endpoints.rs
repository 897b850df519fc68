//! Endpoints that cannot be used, and servers that are no etcd.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::time::Duration;

use poorwill_fleet::etcd::{Etcd, EtcdError, Limits};

use super::support::LONG_TTL;

/// An HTTP server that answers everything so.
fn server(answer: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            // What is left unread would break the connection. A call's body ends so.
            let (mut asked, mut part) = (Vec::new(), [0; 4096]);
            while !asked.ends_with(b"}") {
                match stream.read(&mut part) {
                    Ok(read) if read > 0 => asked.extend_from_slice(&part[..read]),
                    _ => break,
                }
            }
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    url
}

async fn fails(url: &str) -> EtcdError {
    let limits = Limits { connect: LONG_TTL, call: LONG_TTL, hedge: LONG_TTL };
    Etcd::new(&[url.to_owned()], limits).unwrap().read("/a").await.unwrap_err()
}

#[tokio::test]
async fn what_is_no_etcd_is_refused_in_words() {
    let gone = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", gone.local_addr().unwrap());
    drop(gone);
    let error = fails(&url).await;
    assert!(error.is_unreachable());
    let error = error.to_string();
    assert!(error.starts_with("no etcd answers /v3/kv/range: "), "{error}");
    assert!(error.contains(&url) && error.contains("refused") && error.contains("see that one"), "{error}");

    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", silent.local_addr().unwrap());
    let limits = Limits { call: Duration::from_millis(50), ..Limits::default() };
    let error = Etcd::new(&[url], limits).unwrap().read("/a").await.unwrap_err();
    assert!(error.is_unreachable() && error.to_string().contains("is silent for 50ms"), "{error}");

    for (answer, part) in [
        ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "`hello`"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "``"),
        ("HTTP/1.1 404 Not Found\r\nContent-Length: 18\r\n\r\n404 page not found", "status 404 Not Found"),
        ("HTTP/1.1 302 Found\r\nLocation: /login\r\nContent-Length: 0\r\n\r\n", "status 302 Found"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{\"kvs\":[{}, 1]}", "{\"kvs\":[{}, 1]}"),
    ] {
        let error = fails(&server(answer)).await;
        assert!(matches!(error, EtcdError::Answer { .. }), "{answer}: {error:?}");
        let error = error.to_string();
        assert!(error.contains(part) && error.contains("it has to be etcd 3.4 or newer"), "{error}");
    }
    // So does an etcd with users refuse a client's certificate.
    let answer = "HTTP/1.1 400 Bad Request\r\nContent-Length: 95\r\n\r\nCommonName of client sending a request against \
                  gateway will be ignored and not used as expected";
    let error = fails(&server(answer)).await;
    assert!(matches!(error, EtcdError::CommonName { .. }), "{error:?}");
    assert!(error.to_string().contains("no client certificate with a common name"), "{error}");
    let error = fails(&server("SSH-2.0-OpenSSH_9.2\r\n")).await.to_string();
    assert!(error.contains("http://127.0.0.1:"), "{error}");
    let error = fails(&server("HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{\"kvs\"")).await;
    assert!(error.is_unreachable(), "{error}");
}

#[test]
fn endpoints_that_cannot_be_used_are_refused_in_words() {
    let new = |urls: &[&str]| {
        let urls: Vec<String> = urls.iter().map(|url| (*url).to_owned()).collect();
        Etcd::new(&urls, Limits::default()).unwrap_err().to_string()
    };
    assert!(new(&[]).contains("name at least one member, such as http://127.0.0.1:2379"));
    let error = new(&["http://127.0.0.1:2379", "https://10.0.0.1:2379"]);
    assert!(error.contains("`https://10.0.0.1:2379`: it is https://, so name the CA"), "{error}");
    for odd in ["10.0.0.1:2379", "http://10.0.0.1:2379/v3", "ftp://10.0.0.1", "", "http://", "/"] {
        let error = new(&[odd]);
        assert!(error.starts_with(&format!("etcd's endpoint `{odd}`: ")), "{error}");
    }
}
