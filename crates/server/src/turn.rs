//! One turn of the model, in no API's words: what is asked for, what happens, how it ends.

use std::time::Duration;

use lily_engine::{EngineError, Sampling, TextError};
use lily_model::chat::{Chat, ChatError};
use serde_json::Value;

/// What a client asks for. What it does not say is the default of its field.
#[derive(Clone, Debug)]
pub struct TurnRequest {
    /// What the model reads.
    pub input: Input,
    /// Whether and which tool is to be called. Tools themselves stand in the [`Chat`].
    pub tool_choice: ToolChoice,
    /// Whether one answer may have several calls. Without, it ends behind the first.
    pub parallel_tool_calls: bool,
    /// What the content has to be.
    pub format: Format,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Texts that end the answer and are not part of it.
    pub stop: Vec<String>,
    /// Most tokens of the answer; `None`: what the context has room for.
    pub max_tokens: Option<usize>,
    /// Most tokens of the think block, which is closed then; `None`: no limit.
    pub max_thinking_tokens: Option<usize>,
    /// `Some(n)`: tokens with their log-probabilities and those of the `n` most likely.
    pub logprobs: Option<u32>,
    /// What requests of one conversation have in common, if the client says: they share what is cached.
    pub affinity: Option<String>,
}

impl TurnRequest {
    /// Asks for an answer to `input`, everything else as it is by default.
    pub fn new(input: Input) -> TurnRequest {
        TurnRequest {
            input,
            tool_choice: ToolChoice::Auto,
            parallel_tool_calls: true,
            format: Format::Text,
            sampling: Sampling::default(),
            stop: Vec::new(),
            max_tokens: None,
            max_thinking_tokens: None,
            logprobs: None,
            affinity: None,
        }
    }

    /// The same request, of this session unless it says another.
    #[must_use]
    pub fn of_session(self, session: Option<String>) -> TurnRequest {
        TurnRequest { affinity: self.affinity.or(session), ..self }
    }
}

/// What the model reads.
#[derive(Clone, Debug)]
pub enum Input {
    /// A conversation, rendered by the checkpoint's template.
    Chat(Chat),
    /// A prompt as it stands; control tokens in it count. All of the answer is content, tags of thinking and calls included.
    Text(String),
    /// Token ids; like [`Text`](Input::Text).
    Tokens(Vec<u32>),
}

/// Whether the model may, must or must not call a tool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// It decides.
    #[default]
    Auto,
    /// No call. The tools stay in the prompt, so that what is cached of it holds.
    None,
    /// Some call.
    Required,
    /// A call of this function.
    Function(String),
}

/// What the content has to be.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Format {
    /// Any text.
    #[default]
    Text,
    /// A JSON object.
    JsonObject,
    /// JSON of this schema.
    JsonSchema(Value),
}

/// What happens during a turn, in this order: [`Started`](TurnEvent::Started), progress, parts of the answer, the end.
#[derive(Clone, Debug, PartialEq)]
pub enum TurnEvent {
    /// The request was accepted: it is right, its prompt fits, and it has its place in the queue. Until then an error is
    /// the whole answer; after it, an answer has begun.
    Started {
        /// Tokens of the prompt.
        prompt_tokens: usize,
    },
    /// More of the prompt is read. Comes at least once a chunk. APIs tell their clients by it that work goes on, so it may
    /// come again later, where tokens give no text for long.
    Progress {
        /// Tokens read or found in the cache.
        done: usize,
        /// Tokens of the prompt.
        total: usize,
    },
    /// Text of the think block.
    Reasoning(String),
    /// Text of the answer.
    Content(String),
    /// A call begins.
    CallBegun {
        /// Counts the calls of the turn, from 0.
        index: usize,
        /// Unique among all calls, like `call_5f3a...` (24 hexadecimal digits).
        id: String,
        /// Name of the function.
        name: String,
    },
    /// A piece of the JSON of a call's arguments; together the pieces are one JSON object.
    Arguments {
        /// Which call.
        index: usize,
        /// The piece.
        json: String,
    },
    /// A call is over.
    CallEnded {
        /// Which call.
        index: usize,
        /// Whether the model closed it. A call that the end of the answer cut has arguments that are JSON and may lack
        /// what was to come.
        complete: bool,
    },
    /// A token of the answer, if [`TurnRequest::logprobs`] asks for it. Comes before the text that it completes.
    LogProb(TokenLogProb),
    /// The end; nothing comes after it.
    Finished(TurnEnd),
}

/// A token with its log-probability.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogProb {
    /// The token's bytes; `text` may have replacement characters where they are no whole characters.
    pub token: TokenText,
    /// Natural logarithm of its probability, from the raw logits.
    pub logprob: f32,
    /// The most likely tokens with theirs, the likeliest first.
    pub top: Vec<(TokenText, f32)>,
    /// Whether the token belongs to the content; tokens of thinking and calls do not.
    pub in_content: bool,
}

/// A token as text and as bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenText {
    /// For reading.
    pub text: String,
    /// Exactly.
    pub bytes: Vec<u8>,
}

/// How a turn ended.
#[derive(Clone, Debug, PartialEq)]
pub struct TurnEnd {
    /// Why.
    pub reason: TurnReason,
    /// What was used.
    pub usage: Usage,
    /// Seed of the draws.
    pub seed: u64,
    /// From the arrival to the first token.
    pub to_first_token: Duration,
    /// From the first token to the last.
    pub decode: Duration,
}

/// Why a turn ended. A cut answer says so even if it has calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TurnReason {
    /// The model ended its answer.
    Stop,
    /// The answer reached this stop string.
    StopString(String),
    /// The answer has as many tokens as it may, or the context is full.
    Length,
    /// The model called tools and waits for their results.
    ToolCalls,
}

/// Tokens of a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Of the prompt.
    pub prompt_tokens: usize,
    /// Of these, not computed because an earlier request had them.
    pub cached_tokens: usize,
    /// Sampled.
    pub completion_tokens: usize,
    /// Of these, in the think block.
    pub reasoning_tokens: usize,
}

/// Why a turn was refused or failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TurnError {
    /// The request is wrong; the message says what to change.
    #[error("{message}")]
    Invalid {
        /// The field, as the API spells it, if one is to blame.
        field: Option<String>,
        /// For the person who sends it.
        message: String,
    },
    /// The prompt does not fit.
    // Clients that shorten a conversation by themselves look for these words.
    #[error(
        "prompt is too long: {prompt_tokens} tokens > {context_tokens} maximum, and the answer needs room, too; shorten \
         the conversation or start the server with a longer context"
    )]
    PromptTooLong {
        /// Length of the prompt.
        prompt_tokens: usize,
        /// Room for prompt and answer.
        context_tokens: usize,
    },
    /// Too many requests wait.
    #[error("too many requests wait for the model; try again in {} s", retry_after.as_secs())]
    Busy {
        /// When to try again.
        retry_after: Duration,
    },
    /// The server is being stopped or drained.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// It took longer than the request or the server allows.
    #[error("{0}")]
    TimedOut(String),
    /// The device or the server failed.
    #[error("{0}")]
    Failed(String),
}

impl TurnError {
    /// A field that holds what it may not.
    pub fn invalid(
        field: impl Into<String>,
        found: impl std::fmt::Display,
        expected: impl std::fmt::Display,
    ) -> TurnError {
        let field = field.into();
        TurnError::Invalid { message: format!("{field}: found {found}, expected {expected}"), field: Some(field) }
    }
}

impl From<ChatError> for TurnError {
    fn from(error: ChatError) -> TurnError {
        let message = error.to_string();
        let field = match error {
            ChatError::Input { field, .. } => field,
            _ => "messages".to_owned(),
        };
        TurnError::Invalid { field: Some(field), message }
    }
}

impl From<TextError> for TurnError {
    fn from(error: TextError) -> TurnError {
        match error {
            TextError::Chat(error) => error.into(),
            error => TurnError::Invalid { field: None, message: error.to_string() },
        }
    }
}

impl From<EngineError> for TurnError {
    fn from(error: EngineError) -> TurnError {
        match error {
            EngineError::BadRequest { field, .. } => {
                TurnError::Invalid { field: Some(field.to_owned()), message: error.to_string() }
            }
            EngineError::PromptTooLong { prompt_tokens, context_tokens } => {
                TurnError::PromptTooLong { prompt_tokens, context_tokens }
            }
            error => TurnError::Failed(error.to_string()),
        }
    }
}
