//! A model that says what a file says: for those who write clients, and for tests of the server. All but the forward pass
//! is real.
//!
//! # The file
//!
//! JSON lines. A line with `output` is a turn of the assistant, written as the model would write it whole: thinking, if any,
//! between `<think>` and `</think>`, then the content and calls.
//!
//! ```text
//! {"output": "<think>\nA greeting.\n</think>\n\nHello!"}
//! {"when": "weather", "output": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"}
//! {"when": "fail", "output": "So far", "error": "the device was unplugged"}
//! {"tokens_per_second": 50, "prompt_tokens_per_second": 2000}
//! ```
//!
//! - `when`: the line answers prompts whose last turn before the answer contains this text; the first such line wins. That
//!   turn is the user's, or holds results of tools.
//! - Lines without `when` are the turns of a conversation in their order: the first answers its first question, the second
//!   its second (or the results of the tools that the first called), and after the last comes the first again.
//! - `error`: the device fails with this text behind the output.
//! - `tokens_per_second`, `prompt_tokens_per_second`: the pace of this line, or, on a line of their own, of all lines that
//!   say none. Without, there is no delay.
//!
//! What is said depends on the prompt alone, as a real model's greedy answer does: not on what was cached, nor on other
//! requests. The answer goes on from where the prompt leaves off: where the prompt opens a think block and the line has
//! none, the block is closed at once; where the prompt closes it, the line's is skipped. Sampling settings change nothing.
//! Under a constraint it says what of the line is allowed and skips the rest; a token with a bias of -100 is skipped, one
//! with a bias of 100 comes. Where nothing of the line is left the answer ends; if it must not end, the lowest allowed token
//! comes. A prompt without turns goes on with the first line without
//! `when`.

mod backend;
#[cfg(test)]
mod laws;
mod past;

use lily_engine::TextModel;
use serde_json::Value;

pub use backend::ScriptBackend;

/// The lines of a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Script {
    lines: Vec<Line>,
}

/// A turn of the assistant.
#[derive(Clone, Debug, Default, PartialEq)]
struct Line {
    when: Option<String>,
    output: String,
    error: Option<String>,
    pace: Pace,
}

/// Tokens per second; `None`: no delay.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Pace {
    decode: Option<f64>,
    prompt: Option<f64>,
}

/// What is wrong with a script.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct ScriptError {
    /// From 1; 0 for the file as a whole.
    pub line: usize,
    /// What is wrong there.
    pub problem: String,
}

impl Script {
    /// Reads a file.
    ///
    /// # Errors
    /// [`ScriptError`] with the line and what is wrong in it.
    pub fn parse(text: &str) -> Result<Script, ScriptError> {
        let mut lines = Vec::new();
        let mut common = Pace::default();
        for (index, text) in text.lines().enumerate().filter(|(_, text)| !text.trim().is_empty()) {
            let at = |problem| ScriptError { line: index + 1, problem };
            match read_line(text).map_err(at)? {
                (Some(line), pace) => lines.push(Line { pace, ..line }),
                (None, pace) => common = pace,
            }
        }
        if lines.is_empty() {
            return Err(ScriptError { line: 0, problem: "found no line with an output".to_owned() });
        }
        for line in &mut lines {
            line.pace.decode = line.pace.decode.or(common.decode);
            line.pace.prompt = line.pace.prompt.or(common.prompt);
        }
        Ok(Script { lines })
    }
}

/// A line, or only a pace.
fn read_line(text: &str) -> Result<(Option<Line>, Pace), String> {
    let value: Value = serde_json::from_str(text).map_err(|error| format!("not JSON: {error}"))?;
    let Value::Object(map) = value else { return Err("expected a JSON object".to_owned()) };
    let (mut line, mut pace) = (Line::default(), Pace::default());
    let (mut is_line, mut is_conditional) = (false, false);
    for (name, value) in &map {
        let string = || value.as_str().map(str::to_owned).ok_or(format!("{name}: expected a string"));
        let rate = || match value.as_f64() {
            Some(rate) if rate > 0.0 => Ok(Some(rate)),
            _ => Err(format!("{name}: found {value}, expected a number above 0")),
        };
        match name.as_str() {
            "output" => (line.output, is_line) = (string()?, true),
            "error" => (line.error, is_line) = (Some(string()?), true),
            "when" => (line.when, is_conditional) = (Some(string()?), true),
            "tokens_per_second" => pace.decode = rate()?,
            "prompt_tokens_per_second" => pace.prompt = rate()?,
            _ => {
                return Err(format!(
                    "unknown member {name:?}; known are output, when, error, tokens_per_second and prompt_tokens_per_second"
                ));
            }
        }
    }
    match (is_line, is_conditional) {
        (true, _) => Ok((Some(line), pace)),
        (false, false) if !map.is_empty() => Ok((None, pace)),
        _ => Err("expected an output".to_owned()),
    }
}

/// A script as tokens.
#[derive(Debug)]
struct Tokens {
    lines: Vec<LineTokens>,
    /// `<|im_start|>assistant` and a line break: where turns of the assistant begin.
    header: Vec<u32>,
    turn_start: Option<u32>,
    think: Option<u32>,
    think_end: Option<u32>,
    /// Ends the answer.
    stop: u32,
    text: std::sync::Arc<TextModel>,
}

#[derive(Debug)]
struct LineTokens {
    line: Line,
    /// The output as it stands.
    raw: Vec<u32>,
    /// See [`past::borders`].
    borders: Vec<usize>,
    /// What comes in an open think block, its end included unless the output leaves it open.
    thinking: Vec<u32>,
    /// Line breaks between the block and the content.
    gap: Vec<u32>,
    content: Vec<u32>,
}

impl Tokens {
    fn new(script: Script, text: std::sync::Arc<TextModel>) -> Result<Tokens, ScriptError> {
        let tokenizer = &text.tokenizer;
        let encode = |part: &str| {
            tokenizer.encode_stock(part).map_err(|error| ScriptError { line: 0, problem: error.to_string() })
        };
        let lines = script.lines.into_iter().map(|line| {
            let (thinking, gap, content) = split(&line.output);
            let raw = encode(&line.output)?;
            Ok(LineTokens {
                borders: past::borders(&raw),
                raw,
                thinking: encode(&thinking)?,
                gap: encode(gap)?,
                content: encode(content)?,
                line,
            })
        });
        let lines = lines.collect::<Result<_, ScriptError>>()?;
        let known = |token: &str| tokenizer.token_id(token.as_bytes());
        let no_stop = || ScriptError { line: 0, problem: "the tokenizer has no stop token".to_owned() };
        let stop = known("<|im_end|>").or_else(|| text.stop_tokens.first().copied()).ok_or_else(no_stop)?;
        Ok(Tokens {
            lines,
            header: encode("<|im_start|>assistant\n")?,
            turn_start: known("<|im_start|>"),
            think: known("<think>"),
            think_end: known("</think>"),
            stop,
            text,
        })
    }
}

impl Tokens {
    fn bytes_of(&self, id: u32) -> &[u8] {
        self.text.tokenizer.token_bytes(id).unwrap_or_default()
    }

    /// Bytes in tokens, each the longest that fits.
    fn spell(&self, mut bytes: &[u8]) -> Vec<u32> {
        let mut ids = Vec::new();
        while !bytes.is_empty() {
            let longest = (1..=bytes.len()).rev().find_map(|n| Some((n, self.text.tokenizer.token_id(&bytes[..n])?)));
            // Each byte has a token, or the tokenizer would not have been read.
            let Some((length, id)) = longest else { break };
            ids.push(id);
            bytes = &bytes[length..];
        }
        ids
    }

    /// Bytes of all tokens.
    fn bytes(&self) -> usize {
        let tokens = |line: &LineTokens| line.raw.len() + line.thinking.len() + line.gap.len() + line.content.len();
        (self.header.len() + self.lines.iter().map(tokens).sum::<usize>()) * size_of::<u32>()
    }
}

/// An output as what comes in a think block that is open, what separates, and the content.
fn split(output: &str) -> (String, &str, &str) {
    const OPEN: &str = "<think>";
    const CLOSE: &str = "</think>";
    let inner = output.strip_prefix(OPEN).map(|rest| rest.strip_prefix('\n').unwrap_or(rest));
    let (thinking, rest) = match (inner, inner.unwrap_or(output).split_once(CLOSE)) {
        (_, Some((thinking, rest))) => (format!("{thinking}{CLOSE}"), rest),
        (Some(unclosed), None) => return (unclosed.to_owned(), "", ""),
        // As the template writes an empty block.
        (None, None) => (format!("\n{CLOSE}"), output),
    };
    let content = rest.trim_start_matches('\n');
    let gap = &rest[..rest.len() - content.len()];
    (thinking, if inner.is_none() && !output.contains(CLOSE) { "\n\n" } else { gap }, content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_line_by_line() {
        let text = "{\"output\": \"a\"}\n\n{\"when\": \"x\", \"output\": \"b\", \"tokens_per_second\": 5}\n\
                    {\"tokens_per_second\": 7, \"prompt_tokens_per_second\": 9}\n{\"error\": \"gone\"}\n";
        let script = Script::parse(text).unwrap();
        let line = |output: &str, decode| Line {
            output: output.into(),
            pace: Pace { decode: Some(decode), prompt: Some(9.0) },
            ..Line::default()
        };
        let expected = [
            line("a", 7.0),
            Line { when: Some("x".into()), ..line("b", 5.0) },
            Line { error: Some("gone".into()), ..line("", 7.0) },
        ];
        assert_eq!(script.lines, expected);
    }

    #[test]
    fn a_wrong_line_is_named() {
        for (text, message) in [
            ("", "line 0: found no line with an output"),
            ("{\"output\": \"a\"}\n{\"output\": 1}", "line 2: output: expected a string"),
            ("\n{\"outptu\": \"a\"}", "line 2: unknown member \"outptu\""),
            ("[]", "line 1: expected a JSON object"),
            ("{", "line 1: not JSON"),
            ("{}", "line 1: expected an output"),
            ("{\"when\": \"x\"}", "line 1: expected an output"),
            ("{\"output\": \"a\", \"tokens_per_second\": 0}", "line 1: tokens_per_second: found 0"),
        ] {
            let error = Script::parse(text).unwrap_err().to_string();
            assert!(error.starts_with(message), "{error}");
        }
    }

    #[test]
    fn an_output_is_taken_apart_at_its_think_block() {
        let owned = |thinking: &str, gap, content| (thinking.to_owned(), gap, content);
        assert_eq!(split("<think>\nwhy\n</think>\n\nso"), owned("why\n</think>", "\n\n", "so"));
        assert_eq!(split("why</think>so"), owned("why</think>", "", "so"));
        assert_eq!(split("so"), owned("\n</think>", "\n\n", "so"));
        assert_eq!(split("<think>why"), owned("why", "", ""));
        assert_eq!(split("<think>\n\n</think>\n\nso"), owned("\n</think>", "\n\n", "so"));
        assert_eq!(split(""), owned("\n</think>", "\n\n", ""));
    }
}
