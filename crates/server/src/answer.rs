//! A whole answer, for requests that do not stream.

use crate::turn::{TokenLogProb, TurnEnd, TurnError, TurnEvent};
use crate::turns::Running;

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Text of the think block.
    Reasoning(String),
    /// Text of the answer.
    Content(String),
    /// A call.
    Call(Call),
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Unique among all calls.
    pub id: String,
    /// Name of the function.
    pub name: String,
    /// The JSON of an object.
    pub arguments: String,
    /// Whether the model closed it.
    pub complete: bool,
}

/// All that happened in a turn.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Texts and calls in their order; no two texts of one kind in a row.
    pub parts: Vec<Part>,
    /// If they were asked for.
    pub logprobs: Vec<TokenLogProb>,
    /// How it ended.
    pub end: TurnEnd,
}

impl Answer {
    /// Waits for the end of a turn.
    ///
    /// # Errors
    /// The turn's.
    pub async fn collect(mut running: Running) -> Result<Answer, TurnError> {
        let mut parts = Vec::new();
        let mut logprobs = Vec::new();
        while let Some(event) = running.next().await {
            match event? {
                TurnEvent::Started { .. } | TurnEvent::Progress { .. } => {}
                TurnEvent::Reasoning(text) => match parts.last_mut() {
                    Some(Part::Reasoning(before)) => before.push_str(&text),
                    _ => parts.push(Part::Reasoning(text)),
                },
                TurnEvent::Content(text) => match parts.last_mut() {
                    Some(Part::Content(before)) => before.push_str(&text),
                    _ => parts.push(Part::Content(text)),
                },
                TurnEvent::CallBegun { id, name, .. } => {
                    parts.push(Part::Call(Call { id, name, arguments: String::new(), complete: false }));
                }
                TurnEvent::Arguments { json, .. } => {
                    if let Some(Part::Call(call)) = parts.last_mut() {
                        call.arguments.push_str(&json);
                    }
                }
                TurnEvent::CallEnded { complete, .. } => {
                    if let Some(Part::Call(call)) = parts.last_mut() {
                        call.complete = complete;
                    }
                }
                TurnEvent::LogProb(logprob) => logprobs.push(logprob),
                TurnEvent::Finished(end) => return Ok(Answer { parts, logprobs, end }),
            }
        }
        Err(TurnError::Failed("the answer has no end".to_owned()))
    }

    /// All text of thinking.
    pub fn reasoning(&self) -> String {
        self.parts
            .iter()
            .filter_map(|part| if let Part::Reasoning(text) = part { Some(&**text) } else { None })
            .collect()
    }

    /// All text of the answer.
    pub fn content(&self) -> String {
        self.parts.iter().filter_map(|part| if let Part::Content(text) = part { Some(&**text) } else { None }).collect()
    }

    /// The calls.
    pub fn calls(&self) -> impl Iterator<Item = &Call> {
        self.parts.iter().filter_map(|part| if let Part::Call(call) = part { Some(call) } else { None })
    }
}
