//! What is measured, and how: fixed, numbered, and printed with the numbers.

use std::time::Duration;

use sha2::{Digest as _, Sha256};

use crate::exit::Usage;

/// Raised whenever numbers before and after a change of this file cannot be compared.
pub const VERSION: u32 = 1;

/// Longest that one prefill may be expected to take.
pub const LONGEST_PREFILL: Duration = Duration::from_secs(300);
/// After this time on one context no further round of it begins.
pub const LONGEST_CONTEXT: Duration = Duration::from_secs(600);
/// Tokens that are prefilled before a synthetic state begins.
pub const PREFIX: usize = 64;
/// Tokens of the prefill that tells how long others will take.
pub const PROBE: usize = 256;
/// Seed of synthetic weights and states.
pub const SEED: u64 = 0;

/// The contract in words, which `cargo xtask report` quotes; each number of a run has a name in braces.
const WORDS: &str = include_str!("contract.txt");

/// The contract of a run.
pub fn text(vocab: usize, decode: usize, rounds: usize, sessions: usize) -> String {
    let mut text = format!("contract {VERSION}");
    for line in WORDS.lines() {
        text.push_str("\n  ");
        text.push_str(line);
    }
    let numbers = [("{vocab}", vocab), ("{decode}", decode), ("{rounds}", rounds), ("{sessions}", sessions)];
    numbers.into_iter().fold(text, |text, (name, number)| text.replace(name, &number.to_string()))
}

/// How far the prompts of sessions are apart: longer than any context.
const SESSION_STRIDE: usize = 1_000_003;

/// Token `i` of the prompt of a session.
pub fn prompt_id(session: usize, i: usize, vocab: usize) -> u32 {
    let spread = ((i + session * SESSION_STRIDE) as u64).wrapping_mul(2_654_435_761) & 0xFFFF_FFFF;
    (spread % vocab as u64) as u32
}

/// The first hexadecimal digits of the SHA-256 of the tokens, as little-endian words.
pub fn digest(tokens: &[u32]) -> String {
    let bytes: Vec<u8> = tokens.iter().flat_map(|id| id.to_le_bytes()).collect();
    Sha256::digest(bytes).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// Contexts in tokens: numbers and ranges by doubling, like `64,256..2048`; ascending, each once.
#[derive(Clone, Debug, PartialEq)]
pub struct Contexts(pub Vec<usize>);

impl std::str::FromStr for Contexts {
    type Err = Usage;

    fn from_str(text: &str) -> Result<Contexts, Usage> {
        let mut all = Vec::new();
        for part in text.split(',') {
            let number = |text: &str| match text.trim().parse::<usize>() {
                Ok(n) if n > 0 => Ok(n),
                _ => Err(Usage(format!("{part:?} is neither a number of tokens nor a range like 256..2048"))),
            };
            match part.split_once("..") {
                None => all.push(number(part)?),
                Some((from, to)) => {
                    let (from, to) = (number(from)?, number(to)?);
                    if from > to {
                        return Err(Usage(format!("{part:?} is empty: expected the smaller context first")));
                    }
                    all.extend(std::iter::successors(Some(from), |n| n.checked_mul(2)).take_while(|n| *n <= to));
                }
            }
        }
        all.sort_unstable();
        all.dedup();
        Ok(Contexts(all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_are_those_of_the_code() {
        let words = text(4096, 17, 3, 2);
        assert!(words.starts_with("contract 1\n  prompt ") && !words.contains(['{', '}']), "{words}");
        let stated = [
            format!("(i + s * {SESSION_STRIDE}) * 2654435761) mod 2^32) mod 4096"),
            "sessions   2;".into(),
            "decode     17 greedy steps".into(),
            format!("rounds     3; median (lowest to highest); none begins after {} s", LONGEST_CONTEXT.as_secs()),
            format!("would take over {} s, decode starts from {PREFIX} prefilled", LONGEST_PREFILL.as_secs()),
        ];
        for part in stated {
            assert!(words.contains(&part), "{part}");
        }
    }

    #[test]
    fn prompt_ids_are_those_of_the_formula_in_32_bits() {
        let ids = |vocab| (0..6).map(|i| prompt_id(0, i, vocab)).collect::<Vec<_>>();
        // 2654435761 * i below 2^32, by hand: 0, 2654435761, 1013904226, 3668339987, 2027808452, 387276917.
        assert_eq!(ids(1 << 32), [0, 2_654_435_761, 1_013_904_226, 3_668_339_987, 2_027_808_452, 387_276_917]);
        assert_eq!(ids(4096), [0, 2481, 866, 3347, 1732, 117]);
        assert!((0..1000).all(|i| (prompt_id(i % 3, i, 248_320) as usize) < 248_320));
    }

    #[test]
    fn digests_tell_tokens_and_their_order_apart() {
        // SHA-256 of no bytes begins with e3b0c442.
        assert_eq!(digest(&[]), "e3b0c44298fc1c14");
        assert_ne!(digest(&[1, 2]), digest(&[2, 1]));
        assert_ne!(digest(&[1]), digest(&[1, 0]));
    }

    #[test]
    fn contexts_are_numbers_and_doublings() {
        let parse = |text: &str| text.parse::<Contexts>().map(|c| c.0).map_err(|e| e.0);
        assert_eq!(parse("512, 64,512").unwrap(), [64, 512]);
        assert_eq!(parse("256..2048,100").unwrap(), [100, 256, 512, 1024, 2048]);
        assert_eq!(parse("256..1000").unwrap(), [256, 512]);
        for wrong in ["", "0", "x", "4..2", "1,,2", "3..", "-1"] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
