//! Thinking and answer told apart while the text streams.

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// A part of the output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Text of the think block, without its tags and the line breaks around it.
    Thinking(String),
    /// Text of the answer, without the line breaks before it.
    Answer(String),
}

/// Splits streamed output into thinking and answer, the same for every way the text is cut.
///
/// Only one think block is told apart, the one that the prompt left open or that the output begins with; tags
/// after it are text. The tags, the line breaks inside them and those after the closing tag belong to neither part,
/// as the chat template reads them back.
#[derive(Clone, Debug)]
pub struct ThinkSplitter {
    place: Place,
    held: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// No text yet that tells whether a think block opens.
    Start,
    /// In a think block, before its first text.
    Opened,
    /// In a think block.
    Thinking,
    /// After a think block, before the first text of the answer.
    Closed,
    /// In the answer.
    Answer,
}

impl ThinkSplitter {
    /// `in_thinking`: the prompt ends inside an open think block.
    pub fn new(in_thinking: bool) -> ThinkSplitter {
        ThinkSplitter { place: if in_thinking { Place::Opened } else { Place::Start }, held: String::new() }
    }

    /// Whether the text so far ends inside a think block.
    pub fn in_thinking(&self) -> bool {
        matches!(self.place, Place::Opened | Place::Thinking)
    }

    /// Takes the next piece of text and gives the parts that are certain; none of them is empty.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        while self.advance(&mut parts) {}
        parts
    }

    /// The text is over: gives what was held back.
    pub fn finish(&mut self) -> Option<Part> {
        let rest = std::mem::take(&mut self.held);
        match self.place {
            Place::Opened | Place::Thinking => part(Part::Thinking, rest.trim_end_matches('\n')),
            Place::Start | Place::Closed | Place::Answer => part(Part::Answer, &rest),
        }
    }

    /// Takes one step through the held text; `false` if more text is needed.
    fn advance(&mut self, parts: &mut Vec<Part>) -> bool {
        match self.place {
            Place::Start => {
                let begun = self.held.trim_start_matches('\n');
                if let Some(rest) = begun.strip_prefix(OPEN) {
                    self.held = rest.to_owned();
                    self.place = Place::Opened;
                } else if OPEN.starts_with(begun) {
                    return false;
                } else {
                    self.place = Place::Answer;
                }
                true
            }
            Place::Opened | Place::Closed => {
                let line_breaks = self.held.len() - self.held.trim_start_matches('\n').len();
                self.held.drain(..line_breaks);
                if self.held.is_empty() {
                    return false;
                }
                self.place = if self.place == Place::Opened { Place::Thinking } else { Place::Answer };
                true
            }
            Place::Thinking => match self.held.find(CLOSE) {
                Some(at) => {
                    parts.extend(part(Part::Thinking, self.held[..at].trim_end_matches('\n')));
                    self.held.drain(..at + CLOSE.len());
                    self.place = Place::Closed;
                    true
                }
                None => {
                    // The closing tag may have begun, and the line breaks before it are not thinking.
                    let tag = (1..CLOSE.len()).rev().find(|&n| self.held.ends_with(&CLOSE[..n])).unwrap_or(0);
                    let certain = self.held[..self.held.len() - tag].trim_end_matches('\n').len();
                    let tail = self.held.split_off(certain);
                    parts.extend(part(Part::Thinking, &self.held));
                    self.held = tail;
                    false
                }
            },
            Place::Answer => {
                parts.extend(part(Part::Answer, &self.held));
                self.held.clear();
                false
            }
        }
    }
}

fn part(kind: fn(String) -> Part, text: &str) -> Option<Part> {
    (!text.is_empty()).then(|| kind(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Thinking and answer of the pieces, each put together.
    fn split<'a>(in_thinking: bool, pieces: impl IntoIterator<Item = &'a str>) -> (String, String) {
        let mut splitter = ThinkSplitter::new(in_thinking);
        let (mut thinking, mut answer) = (String::new(), String::new());
        let mut take = |part| match part {
            Part::Thinking(text) => {
                assert!(answer.is_empty(), "thinking after the answer");
                thinking.push_str(&text);
            }
            Part::Answer(text) => answer.push_str(&text),
        };
        for piece in pieces {
            splitter.push(piece).into_iter().for_each(&mut take);
        }
        splitter.finish().into_iter().for_each(&mut take);
        (thinking, answer)
    }

    /// The definition, on whole text.
    fn whole(in_thinking: bool, text: &str) -> (String, String) {
        let block = if in_thinking { Some(text) } else { text.trim_start_matches('\n').strip_prefix(OPEN) };
        let Some(block) = block else { return (String::new(), text.to_owned()) };
        // Line breaks before the tag are dropped first: they may be followed by the closing tag at once.
        let block = block.trim_start_matches('\n');
        let (thinking, answer) = block.split_once(CLOSE).unwrap_or((block, ""));
        (thinking.trim_end_matches('\n').to_owned(), answer.trim_start_matches('\n').to_owned())
    }

    #[test]
    fn every_two_cuts_give_the_same_parts() {
        for (in_thinking, text, thinking, answer) in [
            (true, "I add.\n\nYes.\n</think>\n\n2 + 2 = 4\n", "I add.\n\nYes.", "2 + 2 = 4\n"),
            (true, "\n</think>\n\nhi", "", "hi"),
            (true, "</think>hi", "", "hi"),
            (true, "never closed </thin", "never closed </thin", ""),
            (true, "a </thinking> b</think>c", "a </thinking> b", "c"),
            (false, "<think>\nhm\n</think>\n\nyes", "hm", "yes"),
            (false, "plain <think>text</think>", "", "plain <think>text</think>"),
            (false, "\n\n<thin ice", "", "\n\n<thin ice"),
            (false, "</think>", "", "</think>"),
            (true, "x</think>y</think>z", "x", "y</think>z"),
            (false, "", "", ""),
        ] {
            for i in 0..=text.len() {
                for j in i..=text.len() {
                    let parts = split(in_thinking, [&text[..i], &text[i..j], &text[j..]]);
                    assert_eq!(parts, (thinking.to_owned(), answer.to_owned()), "{text:?} cut at {i} and {j}");
                }
            }
        }
    }

    #[test]
    fn text_is_not_held_back_without_need() {
        let mut splitter = ThinkSplitter::new(true);
        assert_eq!(splitter.push("so"), [Part::Thinking("so".into())]);
        assert_eq!(splitter.push(" it</"), [Part::Thinking(" it".into())]);
        assert_eq!(splitter.push("think>\n"), []);
        assert!(!splitter.in_thinking());
        assert_eq!(splitter.push("yes\n"), [Part::Answer("yes\n".into())]);
    }

    proptest! {
        #[test]
        fn any_split_gives_the_parts_of_the_whole(
            in_thinking: bool,
            pieces in prop::collection::vec("(<think>|</think>|</thi|<|\n|é|nk>){0,3}", 0..8),
        ) {
            let text = pieces.concat();
            prop_assert_eq!(split(in_thinking, pieces.iter().map(String::as_str)), whole(in_thinking, &text));
        }
    }
}
