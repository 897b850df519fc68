//! How many requests a node has, on the head of each answer that it passes on to a router.

use http::{HeaderMap, HeaderName, HeaderValue};

/// Running and waiting requests to the model that answers. Engines cannot set it, and routers' clients do not see it.
static LOAD: HeaderName = HeaderName::from_static("x-poorwill-load");

pub(super) fn insert(headers: &mut HeaderMap, requests: u64) {
    headers.insert(&LOAD, HeaderValue::from(requests));
}

/// Takes it off. `None` also if it is no number.
pub(super) fn remove(headers: &mut HeaderMap) -> Option<u64> {
    headers.remove(&LOAD)?.to_str().ok()?.parse().ok()
}

#[test]
fn what_was_said_is_taken_off() {
    let mut headers = HeaderMap::new();
    assert_eq!(remove(&mut headers), None);
    insert(&mut headers, 7);
    assert_eq!(headers["x-poorwill-load"], "7");
    assert_eq!(remove(&mut headers), Some(7));
    assert!(headers.is_empty());
    for wrong in ["", "-1", "many"] {
        headers.insert(&LOAD, HeaderValue::from_static(wrong));
        assert_eq!((remove(&mut headers), headers.len()), (None, 0), "{wrong}");
    }
}
