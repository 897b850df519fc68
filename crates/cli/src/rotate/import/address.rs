//! Where a command says its port, in an option, an address, or a shell's script, so that another port can be said there.

/// Options whose value is a port, besides those that end in `port`.
const SHORT: [&str; 2] = ["-p", "-P"];
/// Options of container runtimes whose value is a port of this machine, and one of the container.
const PUBLISH: [&str; 2] = ["-p", "--publish"];
/// What stands for the port of the url in the new file.
const PORT: &str = "${PORT}";

/// A host and a port. Both names of the loopback address are one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Address {
    pub(super) host: String,
    pub(super) port: u16,
}

impl Address {
    pub(super) fn of_url(url: &str) -> Option<Self> {
        let (host, port) = url.strip_prefix("http://")?.rsplit_once(':')?;
        let host = if host == "localhost" { "127.0.0.1" } else { host };
        Some(Self { host: host.to_lowercase(), port: port.parse().ok()? })
    }
}

/// The port that an option says, such as `--listen-port 9999`, also within a script.
pub(super) fn said(command: &[String]) -> Option<u16> {
    let words: Vec<&str> = command.iter().flat_map(|word| word.split_whitespace()).map(unquoted).collect();
    let behind = |pair: &[&str]| is_port_option(pair[0]).then(|| pair[1].parse().ok()).flatten();
    let joined =
        |word: &&str| word.split_once('=').filter(|(option, _)| is_port_option(option))?.1.parse().ok();
    words.windows(2).find_map(behind).or_else(|| words.iter().find_map(joined))
}

/// Puts the url's port where this one is said, if it is.
pub(super) fn replace(command: &mut [String], port: u16) -> bool {
    let port = port.to_string();
    let found: Vec<Vec<(usize, bool)>> = (0..command.len())
        .map(|nth| {
            let before = nth.checked_sub(1).map_or("", |before| command[before].as_str());
            if nth == 0 { Vec::new() } else { said_at(&command[nth], before, &port) }
        })
        .collect();
    // What a container listens on inside stays as it is.
    let is_published = found.iter().flatten().any(|(_, is_published)| *is_published);
    let mut is_replaced = false;
    for (word, places) in command.iter_mut().zip(found) {
        for (at, _) in places.into_iter().rev().filter(|(_, published)| *published || !is_published) {
            word.replace_range(at..at + port.len(), PORT);
            is_replaced = true;
        }
    }
    if !is_replaced {
        // Some programs take it without an option.
        for word in command.iter_mut().skip(1).filter(|word| **word == port) {
            PORT.clone_into(word);
            is_replaced = true;
        }
    }
    is_replaced
}

/// Where a word says the port, and whether a container's is published there. `before` is the word before.
fn said_at(word: &str, before: &str, port: &str) -> Vec<(usize, bool)> {
    let is_apart = |c: Option<char>| !c.is_some_and(|c| c.is_ascii_alphanumeric() || c == '.' || c == '_');
    word.match_indices(port)
        .filter(|(at, _)| {
            let after = word[at + port.len()..].chars().next();
            is_apart(word[..*at].chars().next_back()) && is_apart(after)
        })
        .filter_map(|(at, _)| {
            let (head, tail) = (&word[..at], &word[at + port.len()..]);
            // The piece of a script that the port is in, and the one before.
            let start = head.rfind(|c: char| c.is_whitespace()).map_or(0, |blank| blank + 1);
            let piece = unquoted(&head[start..]);
            let option = match head[..start].split_whitespace().next_back() {
                Some(option) => option,
                None if start == 0 => before,
                None => "",
            };
            let is_publish = PUBLISH.contains(&option) || piece.starts_with("--publish=");
            if is_publish && tail.starts_with(':') {
                return Some((at, true));
            }
            // `9000:8080` is a port of the machine, and one of a container.
            let inner = piece.strip_suffix(':').map(|outer| outer.rsplit(':').next().unwrap_or(outer));
            let is_container =
                inner.is_some_and(|outer| !outer.is_empty() && outer.chars().all(|c| c.is_ascii_digit()));
            let is_address = piece.ends_with(':') && !is_container;
            let is_joined = piece.strip_suffix('=').is_some_and(|name| name.to_lowercase().ends_with("port"));
            (is_address || is_joined || piece.is_empty() && is_port_option(option)).then_some((at, false))
        })
        .collect()
}

fn is_port_option(option: &str) -> bool {
    SHORT.contains(&option) || option.starts_with('-') && option.to_lowercase().ends_with("port")
}

fn unquoted(word: &str) -> &str {
    word.trim_matches(['"', '\''])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        shlex::split(line).unwrap()
    }

    #[test]
    fn a_port_is_replaced_wherever_a_command_says_it() {
        for (line, replaced) in [
            ("serve --port 9000 -m x", "serve --port ${PORT} -m x"),
            ("serve --port=9000", "serve --port=${PORT}"),
            ("serve -p 9000", "serve -p ${PORT}"),
            ("serve --listen 0.0.0.0:9000", "serve --listen 0.0.0.0:${PORT}"),
            ("serve --server-port 9000", "serve --server-port ${PORT}"),
            ("python -m http.server 9000", "python -m http.server ${PORT}"),
            ("bash -c 'exec serve -m a --port 9000'", "bash -c|exec serve -m a --port ${PORT}"),
            ("sh -c 'PORT=9000 serve --port=9000; true'", "sh -c|PORT=${PORT} serve --port=${PORT}; true"),
            ("sh -c 'serve --port \"9000\" &'", "sh -c|serve --port \"${PORT}\" &"),
            ("docker run -p 9000:8080 i --port 8080", "docker run -p ${PORT}:8080 i --port 8080"),
            ("docker run -p 9000:9000 i --port 9000", "docker run -p ${PORT}:9000 i --port 9000"),
            ("docker run -p 127.0.0.1:9000:80 i", "docker run -p 127.0.0.1:${PORT}:80 i"),
            ("docker run --publish=9000:80 i", "docker run --publish=${PORT}:80 i"),
            ("bash -c 'podman run -p 9000:80 i'", "bash -c|podman run -p ${PORT}:80 i"),
            ("docker run --network host i --port 9000", "docker run --network host i --port ${PORT}"),
        ] {
            let mut command = words(line);
            assert!(replace(&mut command, 9000), "{line}");
            let (last, rest) = command.split_last().unwrap();
            let shown = if last.contains(' ') { rest.join(" ") + "|" + last } else { command.join(" ") };
            assert_eq!(shown, replaced, "{line}");
        }
    }

    #[test]
    fn other_numbers_stay() {
        for line in [
            "serve -m model-9000.gguf --ctx 90001",
            "docker run -p 80:9000 i",
            "9000 x",
            "docker start box",
            "bash -c 'serve -c 9000'",
            "sh -c 'sleep 1; serve v1.9000'",
        ] {
            let mut command = words(line);
            assert!(!replace(&mut command, 9000), "{line}: {command:?}");
            assert_eq!(command, words(line));
        }
    }

    #[test]
    fn options_say_a_port_also_in_scripts() {
        for (line, port) in [
            ("serve --listen-port 9999", Some(9999)),
            ("bash -c 'exec serve --port \"9999\"'", Some(9999)),
            ("serve --port=9999", Some(9999)),
            ("serve --important 9999x", None),
        ] {
            assert_eq!(said(&words(line)), port, "{line}");
        }
    }

    #[test]
    fn addresses_are_hosts_and_ports() {
        let of = |url| Address::of_url(url).unwrap();
        assert_eq!(of("http://localhost:80"), of("http://127.0.0.1:80"));
        assert_ne!(of("http://host-a:80"), of("http://host-b:80"));
        assert_ne!(of("http://host-a:80"), of("http://host-a:81"));
    }
}
