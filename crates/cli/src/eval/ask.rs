//! Prompts in, whole answers out: greedy, one after the other.

use std::sync::Arc;

use lily_engine::{Engine, Event, FinishReason, GenerateRequest, Prompt, Reply, ReplyParser, Sampling, TextModel};
use lily_model::Checkpoint;
use lily_model::chat::Chat;
use serde_json::Value;

use crate::args::ModelArgs;
use crate::devices;

/// A loaded model that answers.
pub struct Asker {
    pub text: Arc<TextModel>,
    engine: Engine,
}

/// A whole answer.
pub struct Answer {
    pub reply: Reply,
    /// Whether the model ended it.
    pub stopped: bool,
}

impl Asker {
    /// Loads the chosen backend.
    pub fn load(args: &ModelArgs, checkpoint: &Arc<Checkpoint>) -> anyhow::Result<Asker> {
        let text = Arc::new(TextModel::load(&checkpoint.source, &checkpoint.config)?);
        let engine = Engine::new(devices::load(args, Arc::clone(checkpoint))?, Arc::clone(&text));
        Ok(Asker { text, engine })
    }

    /// The device in words.
    pub fn device(&self) -> String {
        self.engine.caps().name.clone()
    }

    /// The prompt of a conversation.
    pub fn prompt(&self, messages: &Value, tools: &Value, thinking: bool) -> anyhow::Result<Prompt> {
        let chat = Chat {
            messages: messages.clone(),
            tools: tools.clone(),
            enable_thinking: Some(thinking),
            add_generation_prompt: true,
            ..Chat::default()
        };
        Ok(self.text.prompt(&self.text.template.render_chat(&chat)?)?)
    }

    /// Always the most likely token, at most so many of them. `tools` are those of the prompt.
    pub fn answer(&mut self, prompt: &Prompt, tools: &Value, max_tokens: usize) -> anyhow::Result<Answer> {
        // What the checkpoint's own settings would add is said, too.
        let sampling = Sampling {
            repetition_penalty: Some(1.0),
            presence_penalty: Some(0.0),
            frequency_penalty: Some(0.0),
            ..Sampling::greedy()
        };
        let request = GenerateRequest { sampling, max_tokens: Some(max_tokens), ..GenerateRequest::default() };
        let (mut output, mut stopped) = (String::new(), false);
        for event in self.engine.generate(prompt, request)? {
            match event? {
                Event::PromptProgress { .. } => {}
                Event::Token(token) => output.push_str(&token.text),
                Event::Finished(end) => stopped = matches!(end.reason, FinishReason::StopToken(_)),
            }
        }
        Ok(Answer { reply: ReplyParser::parse(prompt.in_thinking, tools, &output), stopped })
    }
}
