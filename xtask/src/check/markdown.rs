//! Links and shell commands in Markdown text.

/// Targets of links to files of the repository, without their fragment.
pub fn relative_links(text: &str) -> Vec<String> {
    let prose = text.lines().filter(|line| !is_code(line));
    let targets = prose.flat_map(|line| line.split("](").skip(1)).filter_map(|rest| rest.split(')').next());
    let files = targets.filter(|target| !target.contains("://") && !target.starts_with(['#', '<']));
    files.filter_map(|target| target.split('#').next()).map(str::to_owned).collect()
}

/// Subcommands that a text shows.
#[derive(Debug, Default, PartialEq)]
pub struct Commands {
    /// Of the binary, as `lily NAME` or `cargo run ... -- NAME`.
    pub lily: Vec<String>,
    /// Of `cargo xtask`.
    pub xtask: Vec<String>,
}

/// The subcommands in indented code and in code spans.
pub fn commands(text: &str) -> Commands {
    let mut commands = Commands::default();
    for line in text.lines() {
        let spans: Vec<&str> = if is_code(line) { vec![line] } else { line.split('`').skip(1).step_by(2).collect() };
        for words in spans.iter().map(|span| span.split_whitespace().collect::<Vec<_>>()) {
            let (list, name) = match words[..] {
                ["lily", name, ..] => (&mut commands.lily, Some(name)),
                ["cargo", "xtask", name, ..] => (&mut commands.xtask, Some(name)),
                ["cargo", "run", ..] => (&mut commands.lily, words.iter().skip_while(|w| **w != "--").nth(1).copied()),
                _ => continue,
            };
            let is_name = |name: &&str| !name.is_empty() && name.chars().all(|c| c.is_ascii_lowercase() || c == '-');
            list.extend(name.filter(is_name).filter(|name| !name.starts_with('-')).map(str::to_owned));
        }
    }
    commands
}

fn is_code(line: &str) -> bool {
    line.starts_with("    ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_to_files_are_found_and_others_are_not() {
        let text =
            "See [a](docs/a.md), [b](b.md#part) and [web](https://example.org/x).\n    code [c](c.md)\n[d](#here)";
        assert_eq!(relative_links(text), ["docs/a.md", "b.md"]);
    }

    #[test]
    fn subcommands_are_found_in_code_only() {
        let text = "lily is fast. `lily run [PROMPT]`, `lily --model DIR`, run `cargo xtask goldens`.\n\
                    \n    cargo run --release -- chat --ctx 4096\n    cargo xtask check\n    cargo run\n";
        let commands = commands(text);
        assert_eq!(commands.lily, ["run", "chat"]);
        assert_eq!(commands.xtask, ["goldens", "check"]);
    }
}
