//! From sampled tokens to the tokens of the answer, with text that is safe to show.

use std::collections::VecDeque;

use lily_backend::SampledToken;
use lily_model::tokenizer::{Detokenizer, Tokenizer};

use crate::error::Result;
use crate::generation::Token;
use crate::stop::StopStrings;

/// Holds a token back as long as its text may belong to a stop string or ends within a character, so that the texts of
/// the tokens that come out, put together, are the answer.
pub(crate) struct Answer {
    detokenizer: Detokenizer,
    stops: StopStrings,
    held: VecDeque<Token>,
    /// How many of the held tokens, from the last, end within a character.
    unfinished: usize,
    /// Bytes of the held tokens' text that no stop string can claim any more.
    passed_bytes: usize,
}

impl Answer {
    pub(crate) fn new(tokenizer: &Tokenizer, stops: Vec<String>) -> Result<Answer> {
        Ok(Answer {
            detokenizer: Detokenizer::new(tokenizer, true),
            stops: StopStrings::new(stops)?,
            held: VecDeque::new(),
            unfinished: 0,
            passed_bytes: 0,
        })
    }

    /// Takes the next token; gives the stop string that it completes. Then the answer is over.
    pub(crate) fn push(&mut self, token: SampledToken) -> Option<String> {
        let text = self.detokenizer.push(token.id);
        let passed = self.stops.push(&text);
        self.passed_bytes += passed.text.len();
        self.held.push_back(Token { id: token.id, text, logprobs: token.logprobs });
        self.unfinished = if self.detokenizer.pending().is_empty() { 0 } else { self.unfinished + 1 };
        if passed.stop.is_some() {
            self.cut();
        }
        passed.stop
    }

    /// The tokens are over: what was held back can come out. Gives the stop string that the last bytes complete.
    pub(crate) fn finish(&mut self) -> Option<String> {
        let tail = self.detokenizer.flush();
        if let Some(last) = self.held.back_mut() {
            last.text.push_str(&tail);
        }
        let passed = self.stops.push(&tail);
        self.passed_bytes += passed.text.len() + self.stops.finish().len();
        self.cut();
        passed.stop
    }

    /// The next token of the answer that is certain.
    pub(crate) fn pop(&mut self) -> Option<Token> {
        if self.held.len() <= self.unfinished || self.held.front()?.text.len() > self.passed_bytes {
            return None;
        }
        let token = self.held.pop_front()?;
        self.passed_bytes -= token.text.len();
        Some(token)
    }

    /// Ends the held tokens where the passed text ends. A token that only its first part belongs to keeps that.
    fn cut(&mut self) {
        self.unfinished = 0;
        let mut left = self.passed_bytes;
        let mut over = false;
        self.held.retain_mut(|token| {
            if over {
                return false;
            }
            over = token.text.len() > left;
            if over {
                token.text.truncate(left);
                return left > 0;
            }
            left -= token.text.len();
            true
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::byte_tokenizer;
    use proptest::prelude::*;

    fn sampled(id: u32) -> SampledToken {
        SampledToken { id, logprobs: None }
    }

    /// The ids, texts and stop string that come out for tokens of single bytes.
    fn answer(bytes: &[u8], stops: &[&str]) -> (Vec<u32>, String, Option<String>) {
        let mut answer = Answer::new(&byte_tokenizer(), stops.iter().map(|s| (*s).to_owned()).collect()).unwrap();
        let mut tokens = Vec::new();
        let mut stop = None;
        for &byte in bytes {
            stop = answer.push(sampled(byte.into()));
            tokens.extend(std::iter::from_fn(|| answer.pop()));
            if stop.is_some() {
                break;
            }
        }
        if stop.is_none() {
            stop = answer.finish();
            tokens.extend(std::iter::from_fn(|| answer.pop()));
        }
        (tokens.iter().map(|t| t.id).collect(), tokens.into_iter().map(|t| t.text).collect(), stop)
    }

    #[test]
    fn half_a_character_is_held_back_with_its_tokens() {
        let mut answer = Answer::new(&byte_tokenizer(), Vec::new()).unwrap();
        let bytes = "🌷".as_bytes();
        for &byte in &bytes[..3] {
            assert_eq!(answer.push(sampled(byte.into())), None);
            assert_eq!(answer.pop(), None);
        }
        assert_eq!(answer.push(sampled(bytes[3].into())), None);
        let texts: Vec<String> = std::iter::from_fn(|| answer.pop()).map(|token| token.text).collect();
        assert_eq!(texts, ["", "", "", "🌷"]);
    }

    #[test]
    fn an_end_within_a_character_shows_as_replacement() {
        assert_eq!(answer(b"ab\xF0\x9F", &[]), (vec![97, 98, 0xF0, 0x9F], "ab\u{FFFD}".to_owned(), None));
    }

    #[test]
    fn tokens_of_the_stop_string_are_not_in_the_answer() {
        assert_eq!(
            answer(b"one END two", &["END"]),
            (b"one ".map(u32::from).to_vec(), "one ".to_owned(), Some("END".into()))
        );
        assert_eq!(answer(b"one EN", &["END"]).1, "one EN");
    }

    #[test]
    fn a_token_that_begins_before_the_stop_string_keeps_its_first_part() {
        let tokenizer = byte_tokenizer();
        let think = tokenizer.token_id(b"<think>").unwrap();
        let mut answer = Answer::new(&tokenizer, vec!["nk>".into()]).unwrap();
        assert_eq!(answer.push(sampled(think)), Some("nk>".into()));
        assert_eq!(answer.pop(), Some(Token { id: think, text: "<thi".into(), logprobs: None }));
        assert_eq!(answer.pop(), None);
    }

    proptest! {
        #[test]
        fn the_texts_of_the_tokens_are_the_answer(
            bytes in prop::collection::vec(prop::sample::select(b"ab\xC3\xA9\xF0\x9F\x8C\xB7".to_vec()), 0..20),
            stops in prop::collection::vec(prop::sample::select(vec!["ab", "b\u{e9}", "🌷a", "\u{FFFD}a", "aa"]), 0..3),
        ) {
            let (ids, text, stop) = answer(&bytes, &stops);
            let mut whole = StopStrings::new(stops.iter().map(|s| (*s).to_owned()).collect()).unwrap();
            let passed = whole.push(&String::from_utf8_lossy(&bytes));
            let expected = passed.text + &if passed.stop.is_none() { whole.finish() } else { String::new() };
            prop_assert_eq!((&text, &stop), (&expected, &passed.stop));
            prop_assert!(bytes.iter().map(|&byte| u32::from(byte)).collect::<Vec<_>>().starts_with(&ids));
            prop_assert!(stop.is_some() || ids.len() == bytes.len());
        }
    }
}
