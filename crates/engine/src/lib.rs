//! From prompt ids to a streamed answer. The engine owns one [`Backend`](lily_backend::Backend) and knows no device, no
//! HTTP and no terminal.
//!
//! ```no_run
//! # fn backend(_: &lily_model::Checkpoint) -> Box<dyn lily_backend::Backend> { unimplemented!() }
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::sync::Arc;
//!
//! use lily_engine::{Engine, Event, GenerateRequest, TextModel};
//! use lily_model::Checkpoint;
//! use lily_model::chat::Chat;
//!
//! let checkpoint = Checkpoint::open("Qwen3.6-35B-A3B-4bit")?;
//! let text = Arc::new(TextModel::load(&checkpoint.source, &checkpoint.config)?);
//! let mut engine = Engine::new(backend(&checkpoint), text.clone());
//!
//! let messages = serde_json::json!([{"role": "user", "content": "What is a lily?"}]);
//! let chat = Chat { messages, add_generation_prompt: true, ..Chat::default() };
//! let prompt = text.prompt(&text.template.render_chat(&chat)?)?;
//! for event in engine.generate(&prompt, GenerateRequest::default())? {
//!     match event? {
//!         Event::PromptProgress { done, total } => eprintln!("{done} of {total} prompt tokens"),
//!         Event::Token(token) => print!("{}", token.text),
//!         Event::Finished(end) => eprintln!("{:?}, {:.1} tokens/s", end.reason, end.decode_tokens_per_second()),
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! What was fed for one prompt stays in a session of the prefix cache. A prompt that continues it costs only the rest; one that leaves
//! it goes back to a snapshot before the place where it does, in a copy if much would be lost. So a chat renders every turn
//! whole and hands it in. Sessions that find no place in memory go to the disk, if there is a folder for them.
//!
//! A server has many requests at a time: [`Engine::submit`] takes them, and each [`Engine::step`] advances all of them.
//!
//! What to draw where: [`Prompt::in_thinking`] starts a [`ReplyParser`], which tells reasoning, content and tool calls
//! apart in the text of the tokens. A [`CancelToken`] stops a generation from another thread within one step; it then finishes with
//! [`FinishReason::Cancelled`] and the session stays good. Dropping a [`Generation`] does the same.

#![warn(missing_docs)]

mod answer;
mod constraint;
mod engine;
mod error;
mod generation;
mod grammar;
mod job;
mod prefix_cache;
mod reply;
mod request;
mod sampler;
mod session;
mod sessions;
mod stop;
mod store;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod text;

pub use constraint::Constraint;
pub use engine::{Engine, EngineOptions, EngineStatus};
pub use error::{EngineError, Result};
pub use generation::{Event, FinishReason, Finished, Generation, Token};
pub use grammar::{Grammar, Grammars};
pub use lily_backend::{Caps, LogProbs, MemoryReport};
pub use lily_model::tokenizer::{Detokenizer, Tokenizer};
pub use reply::{Reply, ReplyEnd, ReplyEvent, ReplyParser, ToolCall};
pub use request::{CancelToken, GenerateRequest, MAX_LOGPROBS, RequestId};
pub use sampler::Sampling;
pub use sessions::{CacheCounts, SessionOptions};
pub use stop::{Passed, StopStrings};
pub use store::StoreOptions;
pub use text::{Prompt, TextError, TextModel};
