//! Text that remembers which of its bytes are data.
//!
//! A template engine knows only plain strings, so the origin of text travels inside the string: data is written
//! between an opening and a closing mark, two private-use characters that occur nowhere in the template or its
//! input. Joining strings keeps the marks in place; whatever looks into a string or cuts one reads it through
//! [`Marks::read`] and writes the pieces back with [`Traced::slice`].

use std::collections::HashSet;
use std::ops::Range;

/// Plane 15 of Unicode is private use from end to end, so no text has a fixed meaning for these characters.
const PRIVATE: std::ops::RangeInclusive<char> = '\u{F0000}'..='\u{FFFFD}';

/// The private characters of one rendering.
#[derive(Debug, Clone, Copy)]
pub(super) struct Marks {
    open: char,
    close: char,
    /// The whole text of a message that is cut out again after rendering.
    pub(super) placeholder: char,
}

/// The private characters that some text uses itself.
#[derive(Debug, Default)]
pub(super) struct Taken(HashSet<char>);

impl Taken {
    pub(super) fn note(&mut self, text: &str) {
        // The first byte of every character of planes 12 to 15.
        if text.as_bytes().contains(&0xF3) {
            self.0.extend(text.chars().filter(|c| PRIVATE.contains(c)));
        }
    }

    /// Three private characters that are free. `None` if the text uses all 65,534.
    pub(super) fn free_marks(&self) -> Option<Marks> {
        let mut free = PRIVATE.filter(|c| !self.0.contains(c));
        Some(Marks { open: free.next()?, close: free.next()?, placeholder: free.next()? })
    }
}

/// Plain text and the byte ranges of it that are data: ascending, not empty, not touching each other.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Traced {
    pub(super) text: String,
    pub(super) data: Vec<Range<usize>>,
}

impl Marks {
    /// `text` as data.
    pub(super) fn wrap(self, text: &str) -> String {
        if text.is_empty() {
            return String::new();
        }
        format!("{}{text}{}", self.open, self.close)
    }

    /// Whether `text` is the placeholder, which is never wrapped.
    pub(super) fn is_placeholder(self, text: &str) -> bool {
        text.strip_prefix(self.placeholder) == Some("")
    }

    /// `text` without any marks.
    pub(super) fn strip(self, text: &str) -> String {
        text.replace([self.open, self.close], "")
    }

    /// Takes the marks out of `marked`. `None` if they do not come in pairs: somebody cut between them.
    pub(super) fn read(self, marked: &str) -> Option<Traced> {
        let mut traced = Traced::default();
        let mut opened = None;
        let mut copied = 0;
        for (at, mark) in marked.match_indices([self.open, self.close]) {
            traced.text.push_str(&marked[copied..at]);
            copied = at + mark.len();
            match (opened, mark.starts_with(self.open)) {
                (None, true) => opened = Some(traced.text.len()),
                (Some(start), false) => {
                    traced.push(start..traced.text.len());
                    opened = None;
                }
                _ => return None,
            }
        }
        traced.text.push_str(&marked[copied..]);
        opened.is_none().then_some(traced)
    }
}

impl Traced {
    fn push(&mut self, range: Range<usize>) {
        match self.data.last_mut() {
            _ if range.is_empty() => {}
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.data.push(range),
        }
    }

    /// The bytes of `range`, marked again.
    pub(super) fn slice(&self, range: Range<usize>, marks: Marks) -> String {
        let mut out = String::with_capacity(range.len());
        let mut at = range.start;
        let first = self.data.partition_point(|data| data.end <= range.start);
        for data in self.data[first..].iter().take_while(|data| data.start < range.end) {
            let data = data.start.max(range.start)..data.end.min(range.end);
            out.push_str(&self.text[at..data.start]);
            out.push_str(&marks.wrap(&self.text[data.clone()]));
            at = data.end;
        }
        out.push_str(&self.text[at..range.end]);
        out
    }

    /// Takes the bytes of `range` out.
    pub(super) fn remove(&mut self, range: Range<usize>) {
        self.text.replace_range(range.clone(), "");
        let moved = |at: usize| at.min(range.start) + at.saturating_sub(range.end);
        let data = std::mem::take(&mut self.data);
        for Range { start, end } in data {
            self.push(moved(start)..moved(end));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marks() -> Marks {
        Taken::default().free_marks().unwrap()
    }

    #[test]
    fn marks_avoid_characters_of_the_text() {
        let mut taken = Taken::default();
        taken.note("a\u{F0000}b\u{F0002}");
        let marks = taken.free_marks().unwrap();
        assert_eq!((marks.open, marks.close, marks.placeholder), ('\u{F0001}', '\u{F0003}', '\u{F0004}'));
    }

    #[test]
    fn read_undoes_wrap_and_joins_neighbours() {
        let m = marks();
        let marked = format!("a{}{}{}c", m.wrap("b"), m.wrap(""), m.wrap("é"));
        assert_eq!(m.read(&marked).unwrap(), Traced { text: "abéc".into(), data: std::iter::once(1..4).collect() });
        assert_eq!(m.strip(&marked), "abéc");
    }

    #[test]
    fn a_cut_between_marks_is_noticed() {
        let m = marks();
        let marked = m.wrap("text");
        let middle = m.open.len_utf8() + 2;
        assert!(m.read(&marked[..middle]).is_none());
        assert!(m.read(&marked[middle..]).is_none());
    }

    #[test]
    fn slices_keep_the_origin_of_every_byte() {
        let m = marks();
        let traced = m.read(&format!("ab{}ef{}", m.wrap("cd"), m.wrap("gh"))).unwrap();
        let n = traced.text.len();
        let is_data = |t: &Traced, at: usize| t.data.iter().any(|d| d.contains(&at));
        for start in 0..=n {
            for end in start..=n {
                let piece = m.read(&traced.slice(start..end, m)).unwrap();
                assert_eq!(piece.text, traced.text[start..end]);
                assert!((start..end).all(|at| is_data(&piece, at - start) == is_data(&traced, at)));
            }
        }
    }

    #[test]
    fn remove_moves_what_follows() {
        let mut traced = Traced { text: "0123456789".into(), data: vec![0..1, 2..3, 4..6, 8..9] };
        traced.remove(3..8);
        assert_eq!(traced, Traced { text: "01289".into(), data: vec![0..1, 2..4] });
    }
}
