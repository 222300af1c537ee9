//! What a state was fed, and what the script says next: a function of these tokens alone, kept up token by token.

use super::{LineTokens, Tokens};

/// The tokens of a state.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Past {
    ids: Vec<u32>,
    /// Ends of the headers of the assistant's turns.
    headers: Vec<usize>,
    /// The line that answers the last of them, once it was looked up.
    line: Option<Option<usize>>,
    /// How far it was said, once that was asked for.
    place: Option<Place>,
}

/// How far a line was said.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    /// Behind the header.
    Start,
    /// Behind the prompt's `<think>`, whose line break may follow; those that the line begins with are its own.
    Opened,
    /// Before this token of a part, some of whose bytes were said.
    Within { part: Part, next: usize, said_bytes: usize },
    /// Behind `</think>` and so many tokens of line breaks.
    Closed { breaks: usize },
    /// There are no turns, and so many tokens are the longest beginning of the line that the text ends with.
    Text { said: usize },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Raw,
    Thinking,
    Content,
}

/// What a line has left to say.
#[derive(Clone, Debug, Default)]
pub(super) struct Rest<'a> {
    /// The end of a token that was said in part.
    pub spelled: Vec<u32>,
    pub tokens: &'a [u32],
    pub then: &'a [u32],
}

impl Rest<'_> {
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.spelled.iter().chain(self.tokens).chain(self.then).copied()
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
            (self.line, self.place) = (None, None);
        } else if let (Some(Some(line)), Some(place)) = (self.line, self.place) {
            self.place = Some(place.behind(id, &script.lines[line], script));
        }
    }

    /// A part of a prompt: nothing of it continues what was said, so that the place in the line is better looked for again if it
    /// is asked for than kept up by a search for each token.
    pub fn extend(&mut self, ids: &[u32], script: &Tokens) {
        self.place = None;
        for id in ids {
            self.push(*id, script);
        }
    }

    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The line that is being said. `None`: the script has none for this prompt.
    pub fn line<'a>(&mut self, script: &'a Tokens) -> Option<&'a LineTokens> {
        if self.line.is_none() {
            self.line = Some(self.find_line(script));
        }
        self.line.flatten().map(|line| &script.lines[line])
    }

    /// What is left to say of it.
    pub fn rest<'a>(&mut self, script: &'a Tokens) -> Rest<'a> {
        let Some(line) = self.line(script) else { return Rest::default() };
        let place = self.place.unwrap_or_else(|| self.find_place(line, script));
        self.place = Some(place);
        place.rest(line, script)
    }

    fn find_place(&self, line: &LineTokens, script: &Tokens) -> Place {
        let (start, place) = self.headers.last().map_or((0, Place::Text { said: 0 }), |start| (*start, Place::Start));
        self.ids[start..].iter().fold(place, |place, id| place.behind(*id, line, script))
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
}

impl Place {
    fn behind(self, id: u32, line: &LineTokens, script: &Tokens) -> Place {
        use Place::{Closed, Opened, Start, Text, Within};
        let closes = Some(id) == script.think_end;
        match self {
            Text { said } => Text { said: line.said_of_text(said, id) },
            Start | Opened | Within { part: Part::Raw | Part::Thinking, .. } if closes => Closed { breaks: 0 },
            Start if Some(id) == script.think => Opened,
            Start => line.behind(Part::Raw, 0, 0, id, script),
            Opened if is_line_break(id, script) => Within { part: Part::Thinking, next: 0, said_bytes: 0 },
            Opened => line.behind(Part::Thinking, 0, 0, id, script),
            Closed { breaks } if is_line_break(id, script) => Closed { breaks: breaks + 1 },
            Closed { .. } => line.behind(Part::Content, 0, 0, id, script),
            Within { part, next, said_bytes } => line.behind(part, next, said_bytes, id, script),
        }
    }

    fn rest<'a>(self, line: &'a LineTokens, script: &Tokens) -> Rest<'a> {
        let (part, next, said_bytes) = match self {
            Place::Closed { breaks } => {
                let tokens = line.gap.get(breaks..).unwrap_or_default();
                return Rest { tokens, then: &line.content, ..Rest::default() };
            }
            Place::Text { said } => (Part::Raw, said, 0),
            Place::Start => (Part::Raw, 0, 0),
            Place::Opened => (Part::Thinking, 0, 0),
            Place::Within { part, next, said_bytes } => (part, next, said_bytes),
        };
        let then: &[u32] = if part == Part::Thinking && !line.ends_open(script) { &line.gap } else { &[] };
        match &line.part(part)[next..] {
            [first, tokens @ ..] if said_bytes > 0 => {
                Rest { spelled: script.spell(&script.bytes_of(*first)[said_bytes..]), tokens, then }
            }
            tokens => Rest { tokens, then, ..Rest::default() },
        }
    }
}

impl LineTokens {
    fn part(&self, part: Part) -> &[u32] {
        match part {
            Part::Raw => &self.raw,
            Part::Thinking => &self.thinking,
            Part::Content => &self.content,
        }
    }

    /// Whether the output leaves its think block open.
    fn ends_open(&self, script: &Tokens) -> bool {
        self.thinking.last().copied() != script.think_end
    }

    /// Where a part is behind the token `id`. Without a constraint that is its next token. With one, what was said may have only
    /// the texts of the line that were allowed, in tokens of its own, and others between them: then it is the next place where
    /// the text is that of `id`, if there is one.
    fn behind(&self, part: Part, next: usize, said_bytes: usize, id: u32, script: &Tokens) -> Place {
        let tokens = self.part(part);
        if said_bytes == 0 && tokens.get(next) == Some(&id) {
            return Place::Within { part, next: next + 1, said_bytes: 0 };
        }
        let piece = script.bytes_of(id);
        let text: Vec<u8> = tokens[next..].iter().flat_map(|id| script.bytes_of(*id)).copied().collect();
        let start = said_bytes.min(text.len());
        let found = text[start..].windows(piece.len().max(1)).position(|window| window == piece);
        let Some(at) = found else { return Place::Within { part, next, said_bytes } };
        let (mut next, mut said_bytes) = (next, start + at + piece.len());
        while let Some(bytes) = tokens.get(next).map(|id| script.bytes_of(*id).len()).filter(|n| *n <= said_bytes) {
            said_bytes -= bytes;
            next += 1;
        }
        Place::Within { part, next, said_bytes }
    }

    /// How many tokens of the line are its longest beginning that a text ends with: of a text that ended with `said` of them and
    /// goes on with `id`.
    fn said_of_text(&self, mut said: usize, id: u32) -> usize {
        while self.raw.get(said) != Some(&id) {
            if said == 0 {
                return 0;
            }
            said = self.borders[said - 1];
        }
        said + 1
    }
}

/// For each beginning of `line`, how long the longest beginning of it is that it ends with and is not all of it: what is left of a match
/// that fails (Knuth, Morris and Pratt).
pub(super) fn borders(line: &[u32]) -> Vec<usize> {
    let mut borders = vec![0; line.len()];
    let mut border = 0;
    for end in 1..line.len() {
        while border > 0 && line[border] != line[end] {
            border = borders[border - 1];
        }
        border += usize::from(line[border] == line[end]);
        borders[end] = border;
    }
    borders
}

fn is_line_break(id: u32, script: &Tokens) -> bool {
    script.text.tokenizer.token_bytes(id).is_some_and(|bytes| bytes.iter().all(|byte| *byte == b'\n'))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::script::Script;
    use crate::testing::text_model;

    /// What is left to say, read off all tokens at once: the definition.
    fn rest_of(past: &Past, line: &LineTokens, script: &Tokens) -> Vec<u32> {
        let breaks = |ids: &[u32]| ids.iter().take_while(|id| is_line_break(**id, script)).count();
        let Some(start) = past.headers.last() else {
            let said = (0..=line.raw.len()).rev().find(|n| past.ids.ends_with(&line.raw[..*n])).unwrap();
            return line.raw[said..].to_vec();
        };
        let turn = &past.ids[*start..];
        if let Some(closed) = turn.iter().position(|id| Some(*id) == script.think_end) {
            let said = &turn[closed + 1..];
            let breaks = breaks(said);
            if breaks == said.len() {
                return [line.gap.get(breaks..).unwrap_or_default(), &line.content].concat();
            }
            return behind(&said[breaks..], &line.content, script);
        }
        match turn.split_first() {
            Some((first, said)) if Some(*first) == script.think => {
                let rest = behind(&said[breaks(said).min(1)..], &line.thinking, script);
                if line.ends_open(script) { rest } else { [rest, line.gap.clone()].concat() }
            }
            _ => behind(turn, &line.raw, script),
        }
    }

    /// What of `line` is behind `said`, by its text.
    fn behind(said: &[u32], line: &[u32], script: &Tokens) -> Vec<u32> {
        let (mut next, mut bytes) = (0, 0);
        for id in said {
            if bytes == 0 && line.get(next) == Some(id) {
                next += 1;
                continue;
            }
            let text: Vec<u8> = line[next..].iter().flat_map(|id| script.bytes_of(*id)).copied().collect();
            let piece = script.bytes_of(*id);
            if let Some(at) = (bytes..text.len()).find(|at| !piece.is_empty() && text[*at..].starts_with(piece)) {
                bytes = at + piece.len();
                while next < line.len() && script.bytes_of(line[next]).len() <= bytes {
                    bytes -= script.bytes_of(line[next]).len();
                    next += 1;
                }
            }
        }
        match &line[next..] {
            [first, rest @ ..] if bytes > 0 => [&script.spell(&script.bytes_of(*first)[bytes..]), rest].concat(),
            rest => rest.to_vec(),
        }
    }

    proptest! {
        #[test]
        fn what_is_left_is_known_token_by_token(
            line in prop::sample::select(vec![
                "<think>\nA fox, a fox.\n</think>\n\nA fox sang, and a fox sang.",
                "a fox a fox a fox b",
                "<think>\nI wonder",
                "why</think>so so",
            ]),
            pieces in prop::collection::vec(prop::sample::select(vec![
                "<|im_start|>assistant\n", "<think>", "</think>", "\n", "\n\n", "A fox", " a fox", " a", " sang", "a", "x", "o", ".", "I",
            ]), 0..12),
        ) {
            let text = text_model();
            let script = Tokens::new(Script::parse(&json!({"output": line}).to_string()).unwrap(), text.clone()).unwrap();
            let mut past = Past::default();
            for id in pieces.iter().flat_map(|piece| text.tokenizer.encode_stock(piece).unwrap()) {
                past.push(id, &script);
                let found: Vec<u32> = past.rest(&script).iter().collect();
                prop_assert_eq!(found, rest_of(&past, &script.lines[0], &script), "{:?}", pieces);
            }
        }
    }
}
