//! Stop strings in text that comes in pieces.

use crate::error::{EngineError, Result};

/// Finds the first stop string in streamed text, wherever the pieces are cut.
///
/// The first is the one that is complete first; of several that end at the same byte, the longest. Text is let through
/// as soon as no stop string can begin in it any more, so what comes out does not depend on how the text was cut.
#[derive(Clone, Debug)]
pub struct StopStrings {
    stops: Vec<String>,
    /// Text that may be the beginning of a stop string.
    held: String,
}

/// What [`StopStrings::push`] lets through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Passed {
    /// Text that belongs to the answer.
    pub text: String,
    /// The stop string that was found; nothing after `text` belongs to the answer.
    pub stop: Option<String>,
}

impl StopStrings {
    /// Looks for any of `stops`.
    ///
    /// # Errors
    /// [`EngineError::BadRequest`] if one of them is empty: it would stop before the first token.
    pub fn new(stops: Vec<String>) -> Result<StopStrings> {
        if stops.iter().any(String::is_empty) {
            return Err(EngineError::bad_request("stop", "an empty string", "strings of at least one character"));
        }
        Ok(StopStrings { stops, held: String::new() })
    }

    /// Takes the next piece of text.
    pub fn push(&mut self, text: &str) -> Passed {
        self.held.push_str(text);
        // A stop string that the earlier pieces began begins in the held text, so only that has to be searched.
        let found = self.stops.iter().filter_map(|stop| self.held.find(stop).map(|at| (at + stop.len(), at, stop)));
        if let Some((_, start, stop)) = found.min() {
            let stop = Some(stop.clone());
            self.held.truncate(start);
            return Passed { text: std::mem::take(&mut self.held), stop };
        }
        let keep = self.stops.iter().map(|stop| longest_beginning(&self.held, stop)).max().unwrap_or(0);
        let tail = self.held.split_off(self.held.len() - keep);
        Passed { text: std::mem::replace(&mut self.held, tail), stop: None }
    }

    /// The text is over: what was held back belongs to it.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length of the longest end of `text` that is a beginning of `stop` and not all of it.
fn longest_beginning(text: &str, stop: &str) -> usize {
    let (text, stop) = (text.as_bytes(), stop.as_bytes());
    // A beginning of a string starts with a whole character, so the cut in `text` is at one, too.
    (1..stop.len().min(text.len() + 1)).rev().find(|&n| text.ends_with(&stop[..n])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition, on whole text: the answer and the stop string.
    fn cut(text: &str, stops: &[String]) -> (String, Option<String>) {
        for end in (1..=text.len()).filter(|&end| text.is_char_boundary(end)) {
            let longest =
                stops.iter().filter(|stop| text[..end].ends_with(stop.as_str())).max_by_key(|stop| stop.len());
            if let Some(stop) = longest {
                return (text[..end - stop.len()].to_owned(), Some(stop.clone()));
            }
        }
        (text.to_owned(), None)
    }

    fn stream<'a>(pieces: impl Iterator<Item = &'a str>, stops: &[String]) -> (String, Option<String>) {
        let mut strings = StopStrings::new(stops.to_vec()).unwrap();
        let mut answer = String::new();
        for piece in pieces {
            let passed = strings.push(piece);
            answer.push_str(&passed.text);
            if passed.stop.is_some() {
                return (answer, passed.stop);
            }
        }
        answer.push_str(&strings.finish());
        (answer, None)
    }

    #[test]
    fn the_cut_is_exactly_at_the_match() {
        let stops = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
        for (pieces, stop, answer) in [
            (vec!["alpha be", "ta ga", "mma delta"], stops(&["beta gamma"]), "alpha "),
            (vec!["the br", "own", " fox"], stops(&["own fox"]), "the br"),
            (vec!["hi\n", "User", ": x"], stops(&["\nUser:"]), "hi"),
            (vec!["aaa", "b"], stops(&["aab"]), "a"),
            (vec!["abc", "d"], stops(&["abcd", "bc"]), "a"),
            (vec!["whole"], stops(&["whole"]), ""),
            (vec!["naïve ☕", "☕!"], stops(&["☕☕"]), "naïve "),
        ] {
            let (found, which) = stream(pieces.into_iter(), &stop);
            assert_eq!(found, answer);
            assert!(which.is_some());
        }
        assert_eq!(stream(["beta ", "gam"].into_iter(), &stops(&["beta gamma"])), ("beta gam".to_owned(), None));
    }

    #[test]
    fn an_empty_stop_string_is_refused() {
        assert!(StopStrings::new(vec!["a".into(), String::new()]).unwrap_err().to_string().starts_with("stop: "));
    }

    #[test]
    fn text_that_cannot_begin_a_stop_string_is_not_held_back() {
        let mut strings = StopStrings::new(vec!["abc".into()]).unwrap();
        assert_eq!(strings.push("xyab").text, "xy");
        assert_eq!(strings.push("d").text, "abd");
    }

    proptest! {
        #[test]
        fn any_split_gives_the_text_up_to_the_first_match(
            pieces in prop::collection::vec("[aé☕]{0,3}", 0..12),
            stops in prop::collection::vec("[aé☕]{1,4}", 0..4),
        ) {
            let text = pieces.concat();
            prop_assert_eq!(stream(pieces.iter().map(String::as_str), &stops), cut(&text, &stops));
        }
    }
}
