//! Records of turns for bug reports: what the model read and what it wrote.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use lily_engine::{Prompt, Token};
use serde_json::{Value, json};

use crate::ids;
use crate::turn::{TurnEnd, TurnError, TurnRequest};

/// A record in the making.
pub(crate) struct Trace {
    file: PathBuf,
    request: Value,
    ids: Vec<u32>,
    text: String,
}

impl Trace {
    pub(crate) fn new(folder: &Path, turn: &TurnRequest, prompt: &Prompt) -> Trace {
        let seconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Trace {
            file: folder.join(format!("{seconds}-{}.json", ids::new("turn_"))),
            request: json!({
                "prompt_ids": prompt.ids,
                "in_thinking": prompt.in_thinking,
                "sampling": format!("{:?}", turn.sampling),
                "stop": turn.stop,
                "max_tokens": turn.max_tokens,
                "format": format!("{:?}", turn.format),
                "tool_choice": format!("{:?}", turn.tool_choice),
            }),
            ids: Vec::new(),
            text: String::new(),
        }
    }

    pub(crate) fn token(&mut self, token: &Token) {
        self.ids.push(token.id);
        self.text.push_str(&token.text);
    }

    /// Writes the record on a thread that may block.
    pub(crate) fn write(mut self, end: &Result<&TurnEnd, &TurnError>) {
        self.request["output_ids"] = json!(self.ids);
        self.request["output"] = json!(self.text);
        match end {
            Ok(end) => {
                self.request["end"] = json!(format!("{:?}", end.reason));
                self.request["seed"] = json!(end.seed);
                self.request["cached_tokens"] = json!(end.usage.cached_tokens);
            }
            Err(error) => self.request["error"] = json!(error.to_string()),
        }
        tokio::task::spawn_blocking(move || {
            if let Err(error) = std::fs::write(&self.file, format!("{:#}\n", self.request)) {
                tracing::warn!(%error, file = %self.file.display(), "a record could not be written");
            }
        });
    }
}
