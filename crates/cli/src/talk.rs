//! One conversation with the engine, shared by `run` and `chat`: loading, streaming an answer, Ctrl-C.

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use lily_engine::{
    CancelToken, Engine, Event, FinishReason, Finished, GenerateRequest, Prompt, Reply, ReplyEvent, ReplyParser,
    Sampling, TextModel,
};
use serde_json::{Value, json};

use crate::args::{ModelArgs, SamplingArgs};
use crate::output::{Dimmed, bytes, grouped, progress};
use crate::{checkpoint, devices};

/// A loaded model, for one conversation.
pub struct Talk {
    /// Tokenizer, template and defaults of the checkpoint.
    pub text: Arc<TextModel>,
    engine: Engine,
    cancel: CancelSlot,
}

/// A finished answer.
pub struct Answer {
    /// What it says.
    pub reply: Reply,
    /// Why it ended, and the counts.
    pub finished: Finished,
}

impl Talk {
    /// Loads the checkpoint and the backend that the arguments choose, and takes over Ctrl-C.
    pub fn open(args: &ModelArgs) -> anyhow::Result<Talk> {
        let checkpoint = Arc::new(checkpoint::open(args.model.as_deref())?);
        let text = Arc::new(TextModel::load(&checkpoint.source, &checkpoint.config)?);
        let engine = Engine::new(devices::load(args, checkpoint)?, Arc::clone(&text));
        Ok(Talk { text, engine, cancel: CancelSlot::install()? })
    }

    /// Streams an answer: reasoning to stderr, dimmed on a terminal, content to stdout, calls of `tools` (a list, or
    /// null) at its end as one JSON object per line.
    pub fn answer(&mut self, prompt: &Prompt, sampling: &SamplingArgs, tools: &Value) -> anyhow::Result<Answer> {
        let request = GenerateRequest {
            sampling: settings(sampling),
            stop: sampling.stop.clone(),
            max_tokens: sampling.max_tokens,
            cancel: self.cancel.arm(),
            ..GenerateRequest::default()
        };
        let mut printer = Printer::new(prompt.in_thinking, tools);
        let progress = progress("reading the prompt", "tokens");
        let mut finished = None;
        for event in self.engine.generate(prompt, request)? {
            match event? {
                Event::PromptProgress { done, total } => {
                    progress.set_length(total as u64);
                    progress.set_position(done as u64);
                }
                Event::Token(token) => {
                    progress.finish_and_clear();
                    printer.push(&token.text)?;
                }
                Event::Finished(end) => finished = Some(end),
            }
        }
        progress.finish_and_clear();
        self.cancel.disarm();
        let reply = printer.finish()?;
        let finished = finished.ok_or_else(|| anyhow::anyhow!("the engine ended an answer without saying why"))?;
        Ok(Answer { reply, finished })
    }

    /// The counts of an answer in one line for stderr.
    pub fn stats(&self, end: &Finished) -> String {
        let cached = match end.cached_tokens {
            0 => String::new(),
            n => format!(" ({} reused)", grouped(n)),
        };
        format!(
            "prompt {} tokens{cached}, {:.1} tok/s | answer {} tokens, {:.1} tok/s{} | memory {} | {}",
            grouped(end.prompt_tokens),
            end.prefill_tokens_per_second(),
            grouped(end.generated_tokens),
            end.decode_tokens_per_second(),
            ending(&end.reason),
            bytes(devices::resident_memory()),
            self.engine.caps().name,
        )
    }
}

/// Endings other than the model's own.
fn ending(reason: &FinishReason) -> &'static str {
    match reason {
        FinishReason::Length => ", cut at --max-tokens",
        FinishReason::ContextFull => ", cut: the context is full (--ctx)",
        FinishReason::Cancelled => ", interrupted",
        _ => "",
    }
}

fn settings(args: &SamplingArgs) -> Sampling {
    Sampling {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        repetition_penalty: args.repetition_penalty,
        presence_penalty: args.presence_penalty,
        frequency_penalty: args.frequency_penalty,
        logit_bias: (!args.logit_bias.is_empty()).then(|| args.logit_bias.clone()),
        seed: args.seed,
    }
}

/// Streams an answer and keeps it.
struct Printer {
    parser: ReplyParser,
    dimmed: Dimmed<std::io::Stderr>,
    reply: Reply,
}

impl Printer {
    fn new(in_thinking: bool, tools: &Value) -> Printer {
        Printer {
            parser: ReplyParser::new(in_thinking, tools),
            dimmed: Dimmed::new(std::io::stderr()),
            reply: Reply::default(),
        }
    }

    fn push(&mut self, text: &str) -> std::io::Result<()> {
        let events = self.parser.push(text);
        self.print(events)
    }

    fn print(&mut self, events: Vec<ReplyEvent>) -> std::io::Result<()> {
        for event in &events {
            match event {
                ReplyEvent::Reasoning(text) => self.dimmed.write(text)?,
                ReplyEvent::Content(text) => {
                    self.dimmed.finish()?;
                    let mut stdout = std::io::stdout().lock();
                    stdout.write_all(text.as_bytes())?;
                    stdout.flush()?;
                }
                _ => (),
            }
        }
        self.reply.extend(events);
        Ok(())
    }

    fn finish(mut self) -> anyhow::Result<Reply> {
        let (events, _) = self.parser.finish();
        self.print(events)?;
        self.dimmed.finish()?;
        let mut stdout = std::io::stdout().lock();
        let content = &self.reply.content;
        if !content.is_empty() && !content.ends_with('\n') {
            writeln!(stdout)?;
        }
        for call in &self.reply.calls {
            let cut = if call.complete { "" } else { ",\"complete\":false" };
            writeln!(stdout, "{{\"name\":{},\"arguments\":{}{cut}}}", json!(call.name), call.arguments)?;
        }
        Ok(self.reply)
    }
}

/// Where Ctrl-C finds the answer that it stops. Pressed while none runs, or twice, it ends the program.
struct CancelSlot {
    token: Arc<Mutex<Option<CancelToken>>>,
    presses: Arc<AtomicUsize>,
}

impl CancelSlot {
    fn install() -> anyhow::Result<CancelSlot> {
        let slot = CancelSlot { token: Arc::default(), presses: Arc::default() };
        let (token, presses) = (Arc::clone(&slot.token), Arc::clone(&slot.presses));
        ctrlc::set_handler(move || {
            let token = token.lock().unwrap_or_else(PoisonError::into_inner);
            match &*token {
                Some(token) if presses.fetch_add(1, Ordering::Relaxed) == 0 => token.cancel(),
                _ => std::process::exit(130),
            }
        })?;
        Ok(slot)
    }

    fn arm(&self) -> CancelToken {
        let token = CancelToken::default();
        self.presses.store(0, Ordering::Relaxed);
        *self.token.lock().unwrap_or_else(PoisonError::into_inner) = Some(token.clone());
        token
    }

    fn disarm(&self) {
        *self.token.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
