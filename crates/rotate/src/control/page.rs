//! The page: one file that needs nothing else, and what keeps anything else out of it.

use axum::response::{IntoResponse, Response};
use http::header::{self, HeaderName};

const PAGE: &str = include_str!("page.html");

/// Nothing may be loaded or run but the style and the script that stand in the page, known by their SHA-256. A test
/// holds these against the page, and says what they have to be.
const POLICY: &str = concat!(
    "default-src 'none'; ",
    "style-src 'sha256-rCCCdJzLTbOIFilvnt7WcB6RNaYn1guDCzaltktgprM='; ",
    "script-src 'sha256-dE80xdtWwB6nS7dpMmt+pnKidXnld2qtTOstjnJz2hw='; ",
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; ",
    "require-trusted-types-for 'script'"
);

pub(super) async fn page() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (HeaderName::from_static("permissions-policy"), "camera=(), geolocation=(), microphone=()"),
    ];
    (headers, PAGE).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What stands between a tag and its end, of which there is one of each.
    fn inside(tag: &str) -> &'static str {
        let (open, close) = (format!("<{tag}>"), format!("</{tag}>"));
        assert_eq!((PAGE.matches(&open).count(), PAGE.matches(&close).count()), (1, 1), "{tag}");
        PAGE.split_once(&open).unwrap().1.split_once(&close).unwrap().0
    }

    #[test]
    fn the_policy_lets_this_style_and_this_script_run_and_no_other() {
        for tag in ["style", "script"] {
            assert_eq!(PAGE.matches(&format!("<{tag}")).count(), 1, "one {tag}, without attributes");
            let source = format!("{tag}-src 'sha256-{}';", base64(&sha256(inside(tag).as_bytes())));
            assert!(POLICY.contains(&source), "the page was changed; it has to be {source}");
        }
        assert!(POLICY.starts_with("default-src 'none';") && POLICY.contains("frame-ancestors 'none'"));
        assert!(!POLICY.contains("unsafe"), "{POLICY}");
    }

    #[test]
    fn the_page_needs_nothing_from_elsewhere_and_makes_no_markup_of_text() {
        for part in
            ["http:", "https:", "//cdn", "src=", "@import", "url(", " style=", " onclick=", "javascript:"]
        {
            assert!(!PAGE.contains(part), "{part}");
        }
        for way in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "Function(",
            "EventSource(",
        ] {
            assert!(!inside("script").contains(way), "{way}");
        }
        let links: Vec<&str> = PAGE.match_indices("href=").map(|(at, _)| &PAGE[at..at + 13]).collect();
        assert_eq!(links, ["href=\"data:,\""]);
    }

    #[test]
    fn every_part_that_the_script_looks_for_is_there_once() {
        let asked = inside("script").split("at(\"").skip(1).map(|rest| rest.split_once('"').unwrap().0);
        let mut count = 0;
        for id in asked {
            assert_eq!(PAGE.matches(&format!("id=\"{id}\"")).count(), 1, "{id}");
            count += 1;
        }
        assert!(count > 20, "{count}");
    }

    #[test]
    fn hashes_are_those_of_the_standard() {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hex(&sha256(b"abc")), abc);
        let long = "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0";
        assert_eq!(hex(&sha256(&vec![b'a'; 1_000_000])), long);
        assert_eq!(
            (base64(b"Man").as_str(), base64(b"Ma").as_str(), base64(b"M").as_str()),
            ("TWFu", "TWE=", "TQ==")
        );
    }

    /// FIPS 180-4. Its constants are the first bits behind the points of roots of primes.
    fn sha256(message: &[u8]) -> Vec<u8> {
        let primes: Vec<u32> = (2_u32..312).filter(|n| (2..*n).all(|d| n % d != 0)).collect();
        let k: Vec<u32> = primes.iter().map(|prime| root_bits(*prime, 3)).collect();
        assert_eq!(k.len(), 64);
        let mut state: Vec<u32> = primes[..8].iter().map(|prime| root_bits(*prime, 2)).collect();
        let mut padded = message.to_vec();
        padded.push(0x80);
        padded.resize((padded.len() + 8).next_multiple_of(64) - 8, 0);
        padded.extend((u64::try_from(message.len()).unwrap() * 8).to_be_bytes());
        for block in padded.chunks_exact(64) {
            let mut w: Vec<u32> =
                block.chunks_exact(4).map(|four| u32::from_be_bytes(four.try_into().unwrap())).collect();
            for i in 16..64 {
                let s0 = w[i - 15].rotate_right(7) ^ w[i - 15].rotate_right(18) ^ (w[i - 15] >> 3);
                let s1 = w[i - 2].rotate_right(17) ^ w[i - 2].rotate_right(19) ^ (w[i - 2] >> 10);
                w.push(w[i - 16].wrapping_add(s0).wrapping_add(w[i - 7]).wrapping_add(s1));
            }
            let mut v = state.clone();
            for i in 0..64 {
                let s1 = v[4].rotate_right(6) ^ v[4].rotate_right(11) ^ v[4].rotate_right(25);
                let choice = (v[4] & v[5]) ^ (!v[4] & v[6]);
                let one = v[7].wrapping_add(s1).wrapping_add(choice).wrapping_add(k[i]).wrapping_add(w[i]);
                let s0 = v[0].rotate_right(2) ^ v[0].rotate_right(13) ^ v[0].rotate_right(22);
                let two = s0.wrapping_add((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
                v.rotate_right(1);
                v[4] = v[4].wrapping_add(one);
                v[0] = one.wrapping_add(two);
            }
            state.iter_mut().zip(v).for_each(|(sum, more)| *sum = sum.wrapping_add(more));
        }
        state.iter().flat_map(|word| word.to_be_bytes()).collect()
    }

    /// The first 32 bits behind the point of a root of a prime: the largest `r` for which `r^n` is not above it.
    fn root_bits(prime: u32, n: u32) -> u32 {
        // Of `prime * 2^(32n)`, which for a cube is nearly all that 128 bits hold.
        let target = u128::from(prime) << (32 * n);
        let (mut low, mut high) = (0_u128, 1_u128 << 37);
        while high - low > 1 {
            let middle = low.midpoint(high);
            if middle.pow(n) <= target { low = middle } else { high = middle }
        }
        u32::try_from(low & 0xffff_ffff).unwrap()
    }

    fn base64(bytes: &[u8]) -> String {
        const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut text = String::new();
        for three in bytes.chunks(3) {
            let at = |index: usize| u32::from(three.get(index).copied().unwrap_or(0));
            let bits = at(0) << 16 | at(1) << 8 | at(2);
            for digit in 0..4 {
                let index = usize::try_from(bits >> (18 - 6 * digit) & 63).unwrap();
                text.push(if digit <= three.len() { char::from(DIGITS[index]) } else { '=' });
            }
        }
        text
    }
}
