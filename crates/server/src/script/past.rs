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

/// What the script has left to say.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Rest<'a> {
    /// Tokens, the next first.
    pub parts: [&'a [u32]; 2],
    /// What the device fails with behind them.
    pub error: Option<&'a str>,
}

impl Rest<'_> {
    /// The tokens in order.
    pub fn tokens(&self) -> impl Iterator<Item = u32> + '_ {
        self.parts.iter().flat_map(|part| part.iter().copied())
    }
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

    /// What is left to say of `line`.
    pub fn rest<'a>(&self, line: &'a LineTokens, script: &Tokens) -> Rest<'a> {
        let parts = match self.headers.last() {
            Some(start) => rest_of_turn(&self.ids[*start..], line, script),
            None => [rest_of_text(&self.ids, &line.raw), &[]],
        };
        Rest { parts, error: line.line.error.as_deref() }
    }
}

/// `turn`: the tokens behind the header.
fn rest_of_turn<'a>(turn: &[u32], line: &'a LineTokens, script: &Tokens) -> [&'a [u32]; 2] {
    let breaks = |ids: &[u32]| ids.iter().take_while(|id| is_line_break(**id, script)).count();
    if let Some(closed) = turn.iter().position(|id| Some(*id) == script.think_end) {
        let said = &turn[closed + 1..];
        let breaks = breaks(said);
        if breaks == said.len() {
            return [line.gap.get(breaks..).unwrap_or_default(), &line.content];
        }
        return [behind(&said[breaks..], &line.content), &[]];
    }
    match turn.split_first() {
        Some((first, said)) if Some(*first) == script.think => {
            // The prompt's line break; those that the line begins with are its own.
            let said = &said[breaks(said).min(1)..];
            [behind(said, &line.thinking), if line.ends_open(script) { &[] } else { &line.gap }]
        }
        _ => [behind(turn, &line.raw), &[]],
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

/// What of `script` is behind `said`. Without a constraint that is its next tokens; with one, `said` may lack some of them,
/// and have others.
fn behind<'a>(said: &[u32], script: &'a [u32]) -> &'a [u32] {
    let mut rest = script;
    for id in said {
        if let Some(at) = rest.iter().position(|other| other == id) {
            rest = &rest[at + 1..];
        }
    }
    rest
}

/// What of `script` is behind the longest beginning of it that `text` ends with.
fn rest_of_text<'a>(text: &[u32], script: &'a [u32]) -> &'a [u32] {
    let most = script.len().min(text.len());
    let said = (1..=most).rev().find(|n| text.ends_with(&script[..*n])).unwrap_or(0);
    &script[said..]
}
