//! What a state was fed, and what the script says next: a function of these tokens alone.

use super::{LineTokens, Tokens};

/// The tokens of a state.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Past {
    ids: Vec<u32>,
    /// Ends of the headers of the assistant's turns.
    headers: Vec<usize>,
    /// The line that answers the last of them, once it was looked up.
    line: Option<Option<usize>>,
}

/// What the script has left to say: the end of a token that was said in part, and tokens.
#[derive(Clone, Copy, Debug, Default)]
struct Rest<'a> {
    tokens: &'a [u32],
    /// Bytes of the first token that were said already.
    said_bytes: usize,
    then: &'a [u32],
}

impl Past {
    pub fn of(ids: Vec<u32>, script: &Tokens) -> Past {
        let mut past = Past::default();
        for id in ids {
            past.push(id, script);
        }
        past
    }

    pub fn push(&mut self, id: u32, script: &Tokens) {
        self.ids.push(id);
        if self.ids.ends_with(&script.header) {
            self.headers.push(self.ids.len());
            self.line = None;
        }
    }

    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The line that is being said. `None`: the script has none for this prompt.
    pub fn line<'a>(&mut self, script: &'a Tokens) -> Option<&'a LineTokens> {
        let line = match self.line {
            Some(line) => line,
            None => {
                let line = self.find_line(script);
                self.line = Some(line);
                line
            }
        };
        line.map(|index| &script.lines[index])
    }

    fn find_line(&self, script: &Tokens) -> Option<usize> {
        let plain: Vec<usize> = (0..script.lines.len()).filter(|i| script.lines[*i].line.when.is_none()).collect();
        let Some(header) = self.headers.last() else { return plain.first().copied() };
        if plain.len() < script.lines.len() {
            let turn = self.turn_before(header - script.header.len(), script);
            let says = |line: &LineTokens| line.line.when.as_ref().is_some_and(|when| turn.contains(when));
            if let Some(line) = script.lines.iter().position(says) {
                return Some(line);
            }
        }
        plain.get((self.headers.len() - 1) % plain.len().max(1)).copied()
    }

    /// The text of the turn that ends before `end`.
    fn turn_before(&self, end: usize, script: &Tokens) -> String {
        let start = self.ids[..end].iter().rposition(|id| Some(*id) == script.turn_start).unwrap_or(0);
        script.text.tokenizer.decode(&self.ids[start..end], true)
    }

    /// The tokens that are left to say of `line`.
    pub fn rest(&self, line: &LineTokens, script: &Tokens) -> Vec<u32> {
        let rest = match self.headers.last() {
            Some(start) => rest_of_turn(&self.ids[*start..], line, script),
            None => Rest { tokens: rest_of_text(&self.ids, &line.raw), ..Rest::default() },
        };
        let mut ids = Vec::with_capacity(rest.tokens.len() + rest.then.len());
        let mut tokens = rest.tokens;
        if rest.said_bytes > 0
            && let Some((first, others)) = tokens.split_first()
        {
            ids.extend(script.spell(&script.bytes_of(*first)[rest.said_bytes..]));
            tokens = others;
        }
        ids.extend(tokens.iter().chain(rest.then));
        ids
    }
}

/// `turn`: the tokens behind the header.
fn rest_of_turn<'a>(turn: &[u32], line: &'a LineTokens, script: &Tokens) -> Rest<'a> {
    let breaks = |ids: &[u32]| ids.iter().take_while(|id| is_line_break(**id, script)).count();
    if let Some(closed) = turn.iter().position(|id| Some(*id) == script.think_end) {
        let said = &turn[closed + 1..];
        let breaks = breaks(said);
        if breaks == said.len() {
            let tokens = line.gap.get(breaks..).unwrap_or_default();
            return Rest { tokens, then: &line.content, ..Rest::default() };
        }
        return behind(&said[breaks..], &line.content, script);
    }
    match turn.split_first() {
        Some((first, said)) if Some(*first) == script.think => {
            // The prompt's line break; those that the line begins with are its own.
            let said = &said[breaks(said).min(1)..];
            Rest { then: if line.ends_open(script) { &[] } else { &line.gap }, ..behind(said, &line.thinking, script) }
        }
        _ => behind(turn, &line.raw, script),
    }
}

impl LineTokens {
    /// Whether the output leaves its think block open.
    fn ends_open(&self, script: &Tokens) -> bool {
        self.thinking.last().copied() != script.think_end
    }
}

fn is_line_break(id: u32, script: &Tokens) -> bool {
    script.text.tokenizer.token_bytes(id).is_some_and(|bytes| bytes.iter().all(|byte| *byte == b'\n'))
}

/// What of `line` is behind `said`. Without a constraint that is its next tokens. With one, `said` may have only the texts
/// of the line that were allowed, in tokens of its own, and others between them.
fn behind<'a>(said: &[u32], line: &'a [u32], script: &Tokens) -> Rest<'a> {
    let mut rest = Rest { tokens: line, ..Rest::default() };
    for id in said {
        match rest.tokens.split_first() {
            Some((first, others)) if first == id && rest.said_bytes == 0 => rest.tokens = others,
            _ => rest.skip_to(script.bytes_of(*id), script),
        }
    }
    rest
}

impl Rest<'_> {
    /// Goes behind the next place where the text is `piece`, if there is one.
    fn skip_to(&mut self, piece: &[u8], script: &Tokens) {
        if piece.is_empty() {
            return;
        }
        let text: Vec<u8> = self.tokens.iter().flat_map(|id| script.bytes_of(*id)).copied().collect();
        let start = self.said_bytes.min(text.len());
        let Some(at) = text[start..].windows(piece.len()).position(|window| window == piece) else { return };
        let mut end = start + at + piece.len();
        while let Some((first, others)) = self.tokens.split_first() {
            let bytes = script.bytes_of(*first).len();
            if end < bytes {
                break;
            }
            end -= bytes;
            self.tokens = others;
        }
        self.said_bytes = end;
    }
}

/// What of `script` is behind the longest beginning of it that `text` ends with.
fn rest_of_text<'a>(text: &[u32], script: &'a [u32]) -> &'a [u32] {
    let most = script.len().min(text.len());
    let said = (1..=most).rev().find(|n| text.ends_with(&script[..*n])).unwrap_or(0);
    &script[said..]
}
