//! Tokens of a .metal file, as far as the token pass needs to tell them apart.

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Word,
    Number,
    Text,
    /// One character; `[[` is two of them.
    Punct,
    /// A preprocessor line, whole.
    Directive,
}

/// A token and where it stands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Token<'a> {
    pub(crate) kind: Kind,
    pub(crate) text: &'a str,
    /// Byte offset in the source.
    pub(crate) start: usize,
    /// Number of its line, as `#line` directives have it.
    pub(crate) line: usize,
}

impl Token<'_> {
    pub(crate) fn is(&self, text: &str) -> bool {
        self.text == text && self.kind != Kind::Text
    }

    pub(crate) fn end(&self) -> usize {
        self.start + self.text.len()
    }
}

/// Splits a source into tokens; comments and blanks fall away.
pub(crate) fn tokens(source: &str) -> Vec<Token<'_>> {
    let bytes = source.as_bytes();
    let (mut tokens, mut at, mut line, mut line_is_blank) = (Vec::new(), 0, 1, true);
    while at < bytes.len() {
        let start = at;
        let rest = &source[at..];
        let word = |c: u8| c.is_ascii_alphanumeric() || c == b'_';
        let length_while = |keep: &dyn Fn(u8) -> bool| rest.bytes().take_while(|c| keep(*c)).count();
        let (kind, length) = match bytes[at] {
            b'\n' => {
                (line, line_is_blank, at) = (line + 1, true, at + 1);
                continue;
            }
            c if c.is_ascii_whitespace() => {
                at += 1;
                continue;
            }
            b'/' if rest.starts_with("//") => {
                at += length_while(&|c| c != b'\n');
                continue;
            }
            b'/' if rest.starts_with("/*") => {
                let length = rest.find("*/").map_or(rest.len(), |end| end + 2);
                line += rest[..length].matches('\n').count();
                at += length;
                continue;
            }
            b'#' if line_is_blank => (Kind::Directive, directive_length(rest)),
            b'"' => (Kind::Text, text_length(rest)),
            c if c.is_ascii_digit() => (Kind::Number, length_while(&|c| word(c) || c == b'.')),
            c if word(c) => (Kind::Word, length_while(&word)),
            _ => (Kind::Punct, rest.chars().next().map_or(1, char::len_utf8)),
        };
        let text = &source[start..start + length];
        tokens.push(Token { kind, text, start, line });
        line += text.matches('\n').count();
        line_is_blank = false;
        if kind == Kind::Directive
            && let Some(number) =
                text.strip_prefix("#line").and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        {
            // The number is that of the next line.
            line = usize::saturating_sub(number, 1);
        }
        at += length;
    }
    tokens
}

/// Up to the end of its line, and of those that a backslash joins to it.
fn directive_length(rest: &str) -> usize {
    let mut length = 0;
    for line in rest.split_inclusive('\n') {
        length += line.trim_end_matches('\n').len();
        if !line.trim_end().ends_with('\\') {
            break;
        }
        length += 1;
    }
    length.min(rest.len())
}

fn text_length(rest: &str) -> usize {
    let mut escaped = false;
    for (i, c) in rest.char_indices().skip(1) {
        match c {
            '"' if !escaped => return i + 1,
            _ => escaped = c == '\\' && !escaped,
        }
    }
    rest.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_fall_away_and_lines_count_as_directives_say() {
        let source = "// a\nfoo /* b\n */ [[x(1.5f)]]\n#line 7 \"k.metal\"\n  bar \"a\\\"b\" \\\n#define X \\\n 2\nend";
        let found: Vec<(&str, usize)> = tokens(source).iter().map(|t| (t.text, t.line)).collect();
        let expected = [
            ("foo", 2),
            ("[", 3),
            ("[", 3),
            ("x", 3),
            ("(", 3),
            ("1.5f", 3),
            (")", 3),
            ("]", 3),
            ("]", 3),
            ("#line 7 \"k.metal\"", 4),
            ("bar", 7),
            ("\"a\\\"b\"", 7),
            ("\\", 7),
            ("#define X \\\n 2", 8),
            ("end", 10),
        ];
        assert_eq!(found, expected);
    }
}
